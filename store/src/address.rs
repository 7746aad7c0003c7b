//! Addresses of stores.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;

use super::{Error, Result};

/// The address at which a store is served. Shown and parsed as `tcp://host:port` or `unix://name`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// `host:port`, with an IPv6 host in brackets. A server that is given port 0 takes a free one;
    /// on `[::]` it serves IPv4 as well.
    Tcp(String),
    /// A name in Linux's abstract namespace of unix sockets: no file, so nothing is left behind.
    Unix(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(host_and_port) => write!(f, "tcp://{host_and_port}"),
            Address::Unix(name) => write!(f, "unix://{name}"),
        }
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Address> {
        if let Some(name) = text.strip_prefix("unix://").filter(|name| !name.is_empty()) {
            return Ok(Address::Unix(name.to_string()));
        }
        text.strip_prefix("tcp://")
            .filter(|rest| split(rest).is_some())
            .map(|rest| Address::Tcp(rest.to_string()))
            .ok_or_else(|| Error::Address { text: text.to_string() })
    }
}

/// Finds all the addresses of a `host:port`.
pub fn resolve(host_and_port: &str) -> io::Result<Vec<SocketAddr>> {
    let Some(host_and_port) = split(host_and_port) else {
        let reason = "give HOST:PORT, an IPv6 host in brackets";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    };
    let addresses: Vec<SocketAddr> = host_and_port.to_socket_addrs()?.collect();
    if addresses.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the host has no address"));
    }
    Ok(addresses)
}

/// Splits a `host:port` in two, without brackets.
fn split(host_and_port: &str) -> Option<(&str, u16)> {
    let (host, port) = host_and_port.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').filter(|host| host.contains(':'))?,
        None => Some(host).filter(|host| !host.is_empty() && !host.contains([':', ']']))?,
    };
    Some((host, port.parse().ok()?))
}
