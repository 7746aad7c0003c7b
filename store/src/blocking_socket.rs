//! A client's socket, which blocks, and the exchange of frames over it.

use std::io::{self, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::protocol::MAX_REPLY;

/// A connected, blocking socket.
pub trait BlockingSocket: Read + Write + Send {
    /// Bounds every later read and write.
    fn set_timeout(&self, timeout: Duration) -> io::Result<()>;
}

impl BlockingSocket for TcpStream {
    fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

impl BlockingSocket for UnixStream {
    fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

/// Sends a frame and reads the one that answers it (without its length).
pub fn exchange<S: Read + Write + ?Sized>(socket: &mut S, frame: &[u8]) -> io::Result<Vec<u8>> {
    socket.write_all(frame)?;
    // One read is enough for most replies.
    let mut socket = BufReader::with_capacity(512, socket);
    let mut length = [0; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_REPLY {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the reply is too long to be one"));
    }
    let mut reply = vec![0; length];
    socket.read_exact(&mut reply)?;
    Ok(reply)
}

/// Says what has ended a round trip, for errors.
pub fn describe(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the server closed the connection".to_string(),
        _ if is_timeout(error) => "the server does not answer".to_string(),
        _ => error.to_string(),
    }
}

/// Whether a read or a write has taken longer than it may.
pub fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
