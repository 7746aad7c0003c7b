//! The socket that clients connect to.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;

use mio::event::Source;
use mio::net::UnixListener;
use mio::{Interest, Registry, Token};
use rustix::net::listen;
use rustix::net::sockopt::set_tcp_nodelay;

use super::address::resolve;
use super::{Address, belongs_to_us};

/// The kernel makes it the most that the machine allows.
const LONGEST_QUEUE: i32 = i32::MAX;

/// A listening socket.
pub enum Listener {
    Tcp(mio::net::TcpListener),
    Unix(UnixListener),
}

/// A connected, non-blocking socket.
pub trait Socket: Read + Write + Source + Send {}
impl<T: Read + Write + Source + Send> Socket for T {}

impl Listener {
    /// Opens a listener; returns it with the address that it got.
    pub fn bind(address: &Address) -> io::Result<(Listener, Address)> {
        match address {
            Address::Tcp(host_and_port) => {
                let listener = TcpListener::bind(&resolve(host_and_port)?[..])?;
                // Again, for the longest queue of connections not yet accepted: the standard
                // library's is 128.
                listen(&listener, LONGEST_QUEUE)?;
                listener.set_nonblocking(true)?;
                // The sockets that it accepts inherit this.
                set_tcp_nodelay(&listener, true)?;
                let host =
                    host_and_port.rsplit_once(':').map_or(host_and_port.as_str(), |(host, _)| host);
                let address = Address::Tcp(format!("{host}:{}", listener.local_addr()?.port()));
                Ok((Listener::Tcp(mio::net::TcpListener::from_std(listener)), address))
            }
            Address::Unix(name) => {
                let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
                listen(&listener, LONGEST_QUEUE)?;
                Ok((Listener::Unix(listener), address.clone()))
            }
        }
    }

    /// Adds the socket to a poll, under `token`.
    pub fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        match self {
            Listener::Tcp(listener) => registry.register(listener, token, Interest::READABLE),
            Listener::Unix(listener) => registry.register(listener, token, Interest::READABLE),
        }
    }

    /// Accepts a connection; `PermissionDenied` where another user's process has connected.
    pub fn accept(&self) -> io::Result<Box<dyn Socket>> {
        match self {
            Listener::Tcp(listener) => Ok(Box::new(listener.accept()?.0)),
            Listener::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                if !belongs_to_us(&stream)? {
                    return Err(ErrorKind::PermissionDenied.into());
                }
                Ok(Box::new(stream))
            }
        }
    }
}
