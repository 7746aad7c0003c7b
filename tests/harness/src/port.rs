//! Ports for the servers that a test starts.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::io::Result;
use rustix::net::sockopt::{set_ipv6_v6only, set_socket_reuseaddr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};

/// A port that nobody serves. It is this process's until the process ends: the kernel gives it to
/// nobody who asks for any port, and [`is_free_port`] to no other test. A server that sets
/// SO_REUSEADDR before it binds, as all do, can listen at it.
pub fn free_port() -> u16 {
    reserve(0).expect("there is a free port")
}

/// Whether nobody serves `port`, and no other test has it. It is this process's then, as a
/// [`free_port`] is.
pub fn is_free_port(port: u16) -> bool {
    reserve(port).is_ok()
}

/// Binds a socket to `port`, or to any if it is 0, and never listens. Nobody has the port then. The
/// socket sets SO_REUSEADDR only after: from then on the kernel lets a server bind beside it that
/// has set SO_REUSEADDR too. A socket that asks for any port, or connects, gets another.
fn reserve(port: u16) -> Result<u16> {
    let socket = bound((Ipv6Addr::UNSPECIFIED, port).into())
        .or_else(|_| bound((Ipv4Addr::UNSPECIFIED, port).into()))?;
    let address = SocketAddr::try_from(getsockname(&socket)?)?;
    // Open, so bound, until the process ends.
    std::mem::forget(socket);
    Ok(address.port())
}

fn bound(address: SocketAddr) -> Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if address.is_ipv6() {
        // Of IPv4 too.
        set_ipv6_v6only(&socket, false)?;
    }
    bind(&socket, &address)?;
    set_socket_reuseaddr(&socket, true)?;
    Ok(socket)
}
