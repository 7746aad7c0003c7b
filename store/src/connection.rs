//! One connection: what has come and is not used yet, what is to be sent, and who serves it.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice};
use std::sync::Arc;
use std::time::Instant;

use super::listener::Socket;
use super::service::ServiceId;

/// Replies that are not longer together become one.
const SMALL: usize = 4 << 10;
/// So many replies are handed to the socket at once.
const SLICES: usize = 64;

/// A connection of a client: its socket, its service, and the bytes under way.
pub struct Connection {
    pub socket: Box<dyn Socket>,
    /// The service of the connection, once it is admitted.
    pub service: Option<ServiceId>,
    /// The bytes of a request that is not complete.
    pub input: Vec<u8>,
    /// Whether there is a request in it that has had no turn yet.
    pub is_backlog: bool,
    /// The bytes that the socket has not taken yet, how many bytes it has taken of the first, and
    /// how many are left.
    output: VecDeque<Arc<Vec<u8>>>,
    written: usize,
    unsent: usize,
    /// The time for which something about it has been noted.
    pub timer: Option<Instant>,
}

impl Connection {
    /// Makes a connection without a service.
    pub fn new(socket: Box<dyn Socket>) -> Connection {
        let output = VecDeque::new();
        Connection {
            socket,
            service: None,
            input: Vec::new(),
            is_backlog: false,
            output,
            written: 0,
            unsent: 0,
            timer: None,
        }
    }

    /// Returns how many bytes the socket has not taken yet.
    pub fn unsent(&self) -> usize {
        self.unsent
    }

    /// Reads once; returns how many bytes that gave, `None` if there is no more for now.
    ///
    /// # Errors
    /// The connection is at its end.
    pub fn receive(&mut self, scratch: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match self.socket.read(scratch) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    self.input.extend_from_slice(&scratch[..count]);
                    return Ok(Some(count));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Adds a reply to the bytes to be sent. Small ones become one.
    pub fn enqueue(&mut self, reply: Arc<Vec<u8>>) {
        self.unsent += reply.len();
        match self.output.back_mut().and_then(Arc::get_mut) {
            Some(last) if last.len() + reply.len() <= SMALL => last.extend_from_slice(&reply),
            _ => self.output.push_back(reply),
        }
    }

    /// Sends as much as the socket takes.
    pub fn flush(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            let mut slices: Vec<_> =
                self.output.iter().take(SLICES).map(|reply| IoSlice::new(reply)).collect();
            slices[0] = IoSlice::new(&self.output[0][self.written..]);
            match self.socket.write_vectored(&slices) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.written += count;
                    self.unsent -= count;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            while let Some(length) = self
                .output
                .front()
                .map(|reply| reply.len())
                .filter(|length| *length <= self.written)
            {
                self.written -= length;
                self.output.pop_front();
            }
        }
        Ok(())
    }
}
