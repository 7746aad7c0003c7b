//! How a client comes to its connection: attempts to connect, and the hello.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::time::{Duration, Instant};

use super::address::resolve;
use super::blocking_socket::{BlockingSocket, exchange};
use super::patience::{Impatient, PATIENCE_CHECK, Patience, left_until};
use super::proof::prove;
use super::protocol::{MAX_TIMEOUT, Reply, Request, VERSION};
use super::session::Connection;
use super::{Address, belongs_to_us};

/// The longest time of an attempt to connect, which cannot ask.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(2);

/// The outcome of an attempt to reach a store.
pub enum Reached {
    /// The store, or one to which the address sends its clients.
    Store(Connection),
    /// What is wrong, for good.
    Denied(String),
    /// Nobody serves the store where the address sends its clients, if anywhere.
    NotYet(io::Error),
}

/// Makes one attempt to reach the store at `address`, or to which that address sends its clients.
///
/// # Errors
/// There is no connection to `address` itself.
pub fn reach(address: &Address, token: &str, patience: &Patience) -> io::Result<Reached> {
    let elsewhere = match open(address, token, patience)? {
        Opened::Store(socket) => return Ok(Reached::Store(Connection::new(socket, false)?)),
        Opened::Denied(reason) => return Ok(Reached::Denied(reason)),
        Opened::Elsewhere(address) => address,
    };
    let Ok(there) = elsewhere.parse() else {
        let reason = "it does not know yet who serves the store now";
        return Ok(Reached::NotYet(io::Error::new(io::ErrorKind::WouldBlock, reason)));
    };
    Ok(match open(&there, token, patience) {
        Ok(Opened::Store(socket)) => Reached::Store(Connection::new(socket, true)?),
        Ok(Opened::Denied(_) | Opened::Elsewhere(_)) => {
            let reason = format!("{there} does not serve the store now");
            Reached::NotYet(io::Error::new(io::ErrorKind::ConnectionRefused, reason))
        }
        Err(error) => Reached::NotYet(error),
    })
}

/// What answers at an address.
enum Opened {
    Store(Box<dyn BlockingSocket>),
    Denied(String),
    /// It names this address, which is empty if it knows none.
    Elsewhere(String),
}

/// Makes one attempt to connect and say hello.
fn open(address: &Address, token: &str, patience: &Patience) -> io::Result<Opened> {
    let mut socket: Box<dyn BlockingSocket> = match address {
        Address::Tcp(host_and_port) => Box::new(connect_tcp(host_and_port, patience.deadline)?),
        Address::Unix(name) => {
            // Mio's connect does not block where the server's backlog is full, and so cannot hang.
            let stream = mio::net::UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?)?;
            if !belongs_to_us(&stream)? {
                let reason = "another user serves it; remove that process, or choose another name";
                return Ok(Opened::Denied(reason.to_string()));
            }
            let stream = UnixStream::from(OwnedFd::from(stream));
            stream.set_nonblocking(false)?;
            Box::new(stream)
        }
    };
    let (limit, unasked) = (MAX_TIMEOUT, PATIENCE_CHECK);
    let mut impatient = Impatient { socket: socket.as_mut(), patience, limit, unasked };
    let mut frame = exchange(&mut impatient, &Request::Hello { version: VERSION }.encode())?;
    if let Some(Reply::Challenge(nonce)) = Reply::decode(&frame) {
        let proof = prove(token, &nonce);
        frame = exchange(&mut impatient, &Request::Proof { proof: &proof }.encode())?;
    }
    Ok(match Reply::decode(&frame) {
        Some(Reply::Done) => Opened::Store(socket),
        Some(Reply::Elsewhere(address)) => Opened::Elsewhere(address.to_string()),
        Some(Reply::Refused(reason)) => Opened::Denied(reason.to_string()),
        _ => Opened::Denied("what answers there is no store; check host and port".to_string()),
    })
}

fn connect_tcp(host_and_port: &str, deadline: Instant) -> io::Result<TcpStream> {
    connect_any(&resolve(host_and_port)?, deadline)
}

fn connect_any(addresses: &[SocketAddr], deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::TimedOut);
    for (i, address) in addresses.iter().enumerate() {
        // One that never answers must leave time for the others, and for a look at whether to go on.
        let share = left_until(deadline)? / (addresses.len() - i) as u32;
        let share = share.min(LONGEST_ATTEMPT);
        match TcpStream::connect_timeout(address, share) {
            // While nobody listens on a port that the kernel also hands out, a socket can get
            // connected to itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                last = io::ErrorKind::ConnectionRefused.into()
            }
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Whether a failure to connect may be over at the next attempt: the server has not started, or is
/// overrun.
pub fn may_pass(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::*;
    matches!(
        kind,
        ConnectionRefused
            | ConnectionReset
            | ConnectionAborted
            | BrokenPipe
            | UnexpectedEof
            | HostUnreachable
            | NetworkUnreachable
            | WouldBlock
            | TimedOut
            | Interrupted
    )
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn all_addresses_of_a_host_are_tried() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let serves = listener.local_addr().unwrap();
        let refuses = TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let stream = connect_any(&[refuses, serves], deadline).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), serves);
        assert_eq!(
            connect_any(&[refuses], deadline).unwrap_err().kind(),
            io::ErrorKind::ConnectionRefused
        );
    }

    #[test]
    fn an_address_that_never_answers_leaves_time_for_the_others() {
        // A queue of no length that is full: further connections are neither taken nor refused.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&silent, 0).unwrap();
        let silences = silent.local_addr().unwrap();
        let _full = TcpStream::connect(silences).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let serves = listener.local_addr().unwrap();
        let stream =
            connect_any(&[silences, serves], Instant::now() + Duration::from_secs(4)).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), serves);
    }
}
