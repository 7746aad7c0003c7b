//! Connecting to another process, without blocking: the endpoint's thread goes on with all dials in
//! turn.

use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::control::{Sockets, reason, watch};
use super::socket_name::{SocketKind, SocketName};
use crate::transport::DisconnectReason;
use crate::transport::acceptor::introduce;

/// The time of one attempt, and of attempts without an answer before the other is out of reach.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const UNANSWERED_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval between looks whether the other's connection has come.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The answer to who connects: this connection is used.
pub const ACCEPTED: u8 = 1;
/// The answer to who connects: another connection is used.
pub const OTHER: u8 = 2;

/// A connection that is being made.
pub struct Dial {
    pub rank: usize,
    address: SocketAddr,
    begin: Instant,
    attempts: u64,
    phase: DialPhase,
}

enum DialPhase {
    /// Until the next attempt.
    Pause(Instant),
    /// Both sockets, and since when.
    Connecting([Half; 2], Instant),
    /// Both are connected. A process that is stopped answers when it goes on.
    Answer { data: TcpStream, control: TcpStream },
}

struct Half {
    stream: TcpStream,
    name: String,
    is_introduced: bool,
}

impl Half {
    /// Says who this is as soon as the socket is connected; whether that is done.
    fn introduce(&mut self, token: &str, address: SocketAddr) -> io::Result<bool> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error);
        }
        match self.stream.peer_addr() {
            Ok(_) if self.is_introduced => {}
            Ok(_) => {
                introduce(&mut self.stream, token, address, &self.name)?;
                self.is_introduced = true;
            }
            Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
            Err(error) => return Err(error),
        }
        Ok(self.is_introduced)
    }
}

impl Dial {
    /// Begins to connect to a rank.
    pub fn new(rank: usize, address: SocketAddr) -> Self {
        let begin = Instant::now();
        Self { rank, address, begin, attempts: 0, phase: DialPhase::Pause(begin) }
    }

    /// Returns the sockets to wait for.
    pub fn sockets(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        match &self.phase {
            DialPhase::Pause(_) => Vec::new(),
            DialPhase::Connecting(halves, _) => halves
                .iter()
                .filter(|half| !half.is_introduced)
                .map(|half| (half.stream.as_fd(), PollFlags::OUT))
                .collect(),
            DialPhase::Answer { control, .. } => vec![(control.as_fd(), PollFlags::IN)],
        }
    }

    /// Returns when to go on in any case.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            DialPhase::Pause(until) => Some(*until),
            DialPhase::Connecting(_, since) => Some(*since + CONNECT_TIMEOUT),
            DialPhase::Answer { .. } => None,
        }
    }

    /// Goes on as far as that is possible now; `own` is this rank.
    pub fn advance(
        &mut self,
        own: usize,
        token: &str,
    ) -> Option<Result<Sockets, DisconnectReason>> {
        match self.step(own, token) {
            Ok(sockets) => sockets.map(Ok),
            Err(error)
                if error.kind() == io::ErrorKind::TimedOut
                    && self.begin.elapsed() < UNANSWERED_TIMEOUT =>
            {
                self.phase = DialPhase::Pause(Instant::now());
                None
            }
            Err(error) => Some(Err(self.reason(&error))),
        }
    }

    /// Begins to connect a socket of the running attempt of this rank, `own`.
    fn connect(&self, kind: SocketKind, own: usize) -> io::Result<Half> {
        let stream = mio::net::TcpStream::connect(self.address)?.into();
        let name = SocketName { kind, rank: own, attempt: self.attempts };
        Ok(Half { stream, name: name.encode(), is_introduced: false })
    }

    fn step(&mut self, own: usize, token: &str) -> io::Result<Option<Sockets>> {
        loop {
            let now = Instant::now();
            self.phase = match std::mem::replace(&mut self.phase, DialPhase::Pause(now)) {
                DialPhase::Pause(until) if now < until => {
                    self.phase = DialPhase::Pause(until);
                    return Ok(None);
                }
                DialPhase::Pause(_) => {
                    self.attempts += 1;
                    let data = self.connect(SocketKind::Data, own)?;
                    let control = self.connect(SocketKind::Control, own)?;
                    DialPhase::Connecting([data, control], now)
                }
                DialPhase::Connecting(mut halves, since) => {
                    let mut is_through = true;
                    for half in &mut halves {
                        is_through &= half.introduce(token, self.address)?;
                    }
                    if !is_through {
                        if since.elapsed() >= CONNECT_TIMEOUT {
                            let text = "connection timed out";
                            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                        }
                        self.phase = DialPhase::Connecting(halves, since);
                        return Ok(None);
                    }
                    let [data, control] = halves.map(|half| half.stream);
                    watch(&control)?;
                    DialPhase::Answer { data, control }
                }
                DialPhase::Answer { data, mut control } => {
                    let mut answer = [0];
                    match control.read(&mut answer) {
                        Ok(1..) if answer[0] == ACCEPTED => {
                            return Sockets::new(data, control).map(Some);
                        }
                        Ok(1..) => DialPhase::Pause(now + RETRY_INTERVAL),
                        Ok(0) => return Err(io::ErrorKind::ConnectionReset.into()),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            self.phase = DialPhase::Answer { data, control };
                            return Ok(None);
                        }
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                            DialPhase::Answer { data, control }
                        }
                        Err(error) => return Err(error),
                    }
                }
            };
        }
    }

    fn reason(&self, error: &io::Error) -> DisconnectReason {
        match error.kind() {
            io::ErrorKind::TimedOut => DisconnectReason::OutOfReach(error.to_string()),
            // It listens until it ends.
            io::ErrorKind::ConnectionRefused => DisconnectReason::Refused(format!(
                "{} refuses the connection: the process has ended, or a firewall lies between",
                self.address
            )),
            _ => reason(error),
        }
    }
}
