//! One client, as the server sees it.

use std::io::{self, ErrorKind};
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::listener::Socket;

pub struct Connection {
    pub socket: Box<dyn Socket>,
    /// The beginning of a request.
    input: Vec<u8>,
    /// The reply, until the socket has taken all of it, and what it has taken.
    output: Option<Arc<Vec<u8>>>,
    written: usize,
    pub waiting: Option<Waiting>,
    pub will: Option<Will>,
    /// Since when it has said nothing, less the time for which it was the server that was late.
    pub silent_since: Instant,
    /// The time for which the server has noted [`Connection::due`].
    pub alarm: Option<Instant>,
}

/// A get or wait that is not answered yet.
pub struct Waiting {
    pub keys: Vec<String>,
    /// The first key that is missing, and the only one that is watched. Keys are never removed, so those before it stay.
    pub next: usize,
    pub deadline: Instant,
    pub wants_value: bool,
}

/// What to post when a client is gone, or has been silent for so long.
pub struct Will {
    pub message: Vec<u8>,
    pub silence: Duration,
}

impl Connection {
    pub fn new(socket: Box<dyn Socket>, now: Instant) -> Connection {
        Connection {
            socket,
            input: Vec::new(),
            output: None,
            written: 0,
            waiting: None,
            will: None,
            silent_since: now,
            alarm: None,
        }
    }

    /// When something must be done about this client if it says nothing.
    pub fn due(&self) -> Option<Instant> {
        let wait = self.waiting.as_ref().map(|waiting| waiting.deadline);
        let silence = self.will.as_ref().map(|will| self.silent_since + will.silence);
        [wait, silence].into_iter().flatten().min()
    }

    /// The next request, a frame with its length in front, of at most `limit` bytes, `None` if there is no more to read for now.
    ///
    /// A short read ends it, as the next bytes are another event. The end of the stream is not, so where that is known to
    /// have come, it reads `to_end`.
    ///
    /// # Errors
    /// The connection is at its end, or of no more use.
    pub fn receive(&mut self, scratch: &mut [u8], limit: usize, to_end: bool) -> io::Result<Option<Vec<u8>>> {
        loop {
            let count = match self.socket.read(scratch) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            // A client that sends before it has the last reply is none of ours.
            if self.waiting.is_some() || self.output.is_some() {
                return Err(ErrorKind::InvalidData.into());
            }
            self.silent_since = Instant::now();
            self.input.extend_from_slice(&scratch[..count]);
            if let Some((length, rest)) = self.input.split_first_chunk() {
                let length = u32::from_le_bytes(*length) as usize;
                if length > limit || rest.len() > length {
                    return Err(ErrorKind::InvalidData.into());
                }
                if rest.len() == length {
                    return Ok(Some(mem::take(&mut self.input)));
                }
            }
            if count < scratch.len() && !to_end {
                return Ok(None);
            }
        }
    }

    /// Sends a reply, or as much of it as the socket takes.
    pub fn send(&mut self, reply: Arc<Vec<u8>>) -> io::Result<()> {
        self.output = Some(reply);
        self.flush()
    }

    /// Sends what the socket takes of the reply that is under way.
    pub fn flush(&mut self) -> io::Result<()> {
        let Some(output) = &self.output else { return Ok(()) };
        while self.written < output.len() {
            match self.socket.write(&output[self.written..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.output = None;
        self.written = 0;
        Ok(())
    }
}
