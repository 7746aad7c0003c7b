//! The health check of torchelastic, at TORCHELASTIC_HEALTH_CHECK_PORT: whoever asks there by HTTP
//! is answered 200 as long as the event loop runs.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::net;

const VARIABLE: &str = "TORCHELASTIC_HEALTH_CHECK_PORT";

/// So many may ask at once; others wait for their turn.
const MAX_REQUESTS: usize = 16;

/// Bytes of a request.
const MAX_REQUEST_BYTES: usize = 8192;

/// How long a request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

const ANSWER: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n";

/// See the head of this file.
pub struct Health {
    listener: TcpListener,
    requests: Vec<Request>,
}

struct Request {
    stream: TcpStream,
    bytes: Vec<u8>,
    deadline: Instant,
}

impl Health {
    /// None where it is not asked for. The error is for the user: the job goes on without.
    pub fn start() -> Result<Option<Health>, String> {
        let Some(value) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) else {
            return Ok(None);
        };
        let told =
            |error: &str| format!("no health check: {VARIABLE} is '{}': {error}", value.display());
        let port =
            value.to_str().and_then(|value| value.trim().parse().ok()).filter(|port| *port > 0u16);
        let port = port.ok_or_else(|| told("it must be a port from 1 to 65535"))?;
        let listen = || -> std::io::Result<TcpListener> {
            let listener = TcpListener::bind((net::any(), port))?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        let listener = listen().map_err(|error| told(&error.to_string()))?;
        Ok(Some(Health { listener, requests: Vec::new() }))
    }

    /// Readable when there is something to do.
    pub fn watch(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let listener = Some(self.listener.as_fd()).filter(|_| self.requests.len() < MAX_REQUESTS);
        listener.into_iter().chain(self.requests.iter().map(|request| request.stream.as_fd()))
    }

    /// When [`Health::serve`] is to be called in any case.
    pub fn deadline(&self) -> Option<Instant> {
        self.requests.iter().map(|request| request.deadline).min()
    }

    /// Answers those who have asked.
    pub fn serve(&mut self, now: Instant) {
        while self.requests.len() < MAX_REQUESTS {
            let Ok((stream, _)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_ok() {
                self.requests.push(Request {
                    stream,
                    bytes: Vec::new(),
                    deadline: now + REQUEST_TIMEOUT,
                });
            }
        }
        self.requests.retain_mut(|request| request.go_on() && now < request.deadline);
    }
}

impl Request {
    /// False if it is done with.
    fn go_on(&mut self) -> bool {
        let mut bytes = [0; 1024];
        match self.stream.read(&mut bytes) {
            Ok(count @ 1..) => self.bytes.extend_from_slice(&bytes[..count]),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            _ => return false,
        }
        let is_whole = self.bytes.windows(4).any(|end| end == b"\r\n\r\n");
        if is_whole {
            // So few bytes always have room; whoever has gone misses them.
            let _ = self.stream.write_all(ANSWER);
        }
        !is_whole && self.bytes.len() < MAX_REQUEST_BYTES
    }
}
