//! Addresses and ports of this machine.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};

/// This machine's name.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A TCP port that is free on all addresses of this machine.
pub fn free_port() -> io::Result<u16> {
    let listener =
        TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
    Ok(listener.local_addr()?.port())
}

/// All addresses of this machine, IPv6 and IPv4 where there is IPv6.
pub fn any() -> IpAddr {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)) {
        Ok(_) => Ipv6Addr::UNSPECIFIED.into(),
        Err(_) => Ipv4Addr::UNSPECIFIED.into(),
    }
}

/// `host:port`, with an IPv6 host in brackets.
pub fn join(host: &str, port: u16) -> String {
    match host.parse::<Ipv6Addr>() {
        Ok(address) => format!("[{address}]:{port}"),
        Err(_) => format!("{host}:{port}"),
    }
}

/// Whether `host` is this machine.
pub fn is_local(host: &str) -> bool {
    let addresses = (host, 0).to_socket_addrs().map(Iterator::collect::<Vec<_>>).unwrap_or_default();
    addresses.iter().any(|address| UdpSocket::bind(address).is_ok())
}

/// The address from which this machine reaches `host`.
pub fn towards(host: &str, port: u16) -> io::Result<String> {
    let mut error = io::Error::other(format!("{host} has no address"));
    for address in (host, port).to_socket_addrs()? {
        match source(address) {
            Ok(own) => return Ok(own.to_string()),
            Err(other) => error = other,
        }
    }
    Err(error)
}

/// Connecting a UDP socket sends nothing: it only finds the way.
fn source(address: SocketAddr) -> io::Result<IpAddr> {
    let unspecified: IpAddr =
        if address.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((unspecified, 0))?;
    socket.connect(address)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ports() {
        assert_eq!(join("node0", 1), "node0:1");
        assert_eq!(join("fd00::1", 1), "[fd00::1]:1");
        assert!(is_local("127.0.0.1") && is_local("localhost"));
        assert!(!is_local("192.0.2.1") && !is_local("no such host"));
        assert_eq!(towards("127.0.0.1", 9).unwrap(), "127.0.0.1");
    }
}
