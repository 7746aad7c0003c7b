//! This host in the network: its name, its addresses, and secrets for its ports.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs, UdpSocket};

use rustix::rand::{GetRandomFlags, getrandom};

/// Returns this host's name.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns the address from which this host reaches `peer`, a host with any port. A datagram socket
/// knows it without sending anything.
///
/// # Errors
/// `peer` has no address, or there is no route to any of its addresses.
pub fn local_address_for(peer: impl ToSocketAddrs) -> io::Result<IpAddr> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in peer.to_socket_addrs()? {
        let any: IpAddr = if address.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let local = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(address)?;
            Ok(socket.local_addr()?.ip())
        });
        match local {
            Ok(local) => return Ok(local),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Returns 128 random bits, in hexadecimal digits.
///
/// # Errors
/// The kernel gives no random numbers.
pub fn secret() -> io::Result<String> {
    let mut bytes = [0; 16];
    // So few bytes are never given in part.
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}
