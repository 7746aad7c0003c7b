//! torchelastic's health check: answers any HTTP request at TORCHELASTIC_HEALTH_CHECK_PORT with 200
//! as long as the event loop runs.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::net;

const VARIABLE: &str = "TORCHELASTIC_HEALTH_CHECK_PORT";

/// The most requests at a time; others wait in the backlog.
const MAX_REQUESTS: usize = 16;

/// Bytes of a request.
const MAX_REQUEST_BYTES: usize = 8192;

/// The longest time of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

const ANSWER: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nConnection: \
      close\r\n\r\nok\n";

/// torchelastic's health check: answers HTTP requests as long as the event loop runs.
pub struct Health {
    listener: TcpListener,
    requests: Vec<HttpRequest>,
}

struct HttpRequest {
    stream: TcpStream,
    bytes: Vec<u8>,
    deadline: Instant,
}

impl Health {
    /// Starts the health check; None if it is not enabled. The error is for the user: the job runs
    /// without it.
    pub fn start() -> Result<Option<Health>, String> {
        let Some(value) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) else {
            return Ok(None);
        };
        let port = value.to_str().and_then(|value| value.trim().parse().ok());
        let listening = match port.filter(|port| *port > 0) {
            Some(port) => listen(port).map_err(|error| error.to_string()),
            None => Err("it must be a port from 1 to 65535".into()),
        };
        match listening {
            Ok(listener) => Ok(Some(Health { listener, requests: Vec::new() })),
            Err(error) => {
                Err(format!("no health check: {VARIABLE} is '{}': {error}", value.display()))
            }
        }
    }

    /// Returns what is readable when [`Health::serve`] has something to do.
    pub fn watch(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let listener = Some(self.listener.as_fd()).filter(|_| self.requests.len() < MAX_REQUESTS);
        listener.into_iter().chain(self.requests.iter().map(|request| request.stream.as_fd()))
    }

    /// Returns when to call [`Health::serve`] at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        self.requests.iter().map(|request| request.deadline).min()
    }

    /// Accepts, reads and answers requests.
    pub fn serve(&mut self, now: Instant) {
        while self.requests.len() < MAX_REQUESTS {
            let Ok((stream, _)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_ok() {
                self.requests.push(HttpRequest {
                    stream,
                    bytes: Vec::new(),
                    deadline: now + REQUEST_TIMEOUT,
                });
            }
        }
        self.requests.retain_mut(|request| request.progress() && now < request.deadline);
    }
}

fn listen(port: u16) -> io::Result<TcpListener> {
    let listener = TcpListener::bind((net::any(), port))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

impl HttpRequest {
    /// Reads, and answers a complete request; false once the request is done.
    fn progress(&mut self) -> bool {
        let mut bytes = [0; 1024];
        match self.stream.read(&mut bytes) {
            Ok(count @ 1..) => self.bytes.extend_from_slice(&bytes[..count]),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            _ => return false,
        }
        let is_whole = self.bytes.windows(4).any(|end| end == b"\r\n\r\n");
        if is_whole {
            // So few bytes always fit into the socket's buffer.
            let _ = self.stream.write_all(ANSWER);
        }
        !is_whole && self.bytes.len() < MAX_REQUEST_BYTES
    }
}
