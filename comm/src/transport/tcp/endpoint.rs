//! This process' end of all its connections, and the thread that serves it.
//!
//! The thread accepts connections at any time while the process lives, and reads the notices of other
//! processes. So to connect never waits for the other's program, and a process that is gone refuses at
//! once. A connection is made when a channel first needs it (leaders of nodes begin to connect when
//! their group is made). If both processes connect at once, the
//! connection of the lower rank stays.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{eventfd, EventfdFlags, PollFd, PollFlags, Timespec};

use super::control::{reason, watch, GroupId, Sockets};
use super::pair::{Pair, State};
use crate::transport::acceptor::{connect, Acceptor};
use crate::transport::DisconnectReason;

/// One attempt to connect, and how long attempts go unanswered before the other is out of reach.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const UNANSWERED_TIMEOUT: Duration = Duration::from_secs(10);
/// When to look again whether the other's connection has come, and whether there are file descriptors
/// again.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// How often a process that ends looks whether the others know.
const CLOSE_INTERVAL: Duration = Duration::from_millis(1);
/// How long the thread sleeps at most while somebody has not said who it is.
const PENDING_INTERVAL: Duration = Duration::from_secs(1);

/// The answer to who connects: this connection is used, or another one is.
const ACCEPTED: u8 = 1;
const OTHER: u8 = 2;

pub struct Endpoint {
    rank: usize,
    token: String,
    address: SocketAddr,
    /// Of all ranks.
    pub addresses: OnceLock<Vec<SocketAddr>>,
    /// By rank.
    pairs: Vec<Mutex<Pair>>,
    /// Those that this rank is in.
    groups: Mutex<HashSet<GroupId, fnv::FnvBuildHasher>>,
    attempts: AtomicU64,
    is_closed: AtomicBool,
    /// Readable when the thread has something to do.
    bell: OwnedFd,
}

/// One of the two sockets of a connection that comes in, with the number of the attempt.
#[derive(Default)]
struct Halves {
    attempt: String,
    data: Option<TcpStream>,
    control: Option<TcpStream>,
}

impl Endpoint {
    /// Begins to listen at `address`, and starts the thread.
    pub fn open(
        rank: usize,
        size: usize,
        address: IpAddr,
        token: &str,
    ) -> io::Result<(Arc<Self>, JoinHandle<()>)> {
        let acceptor = Acceptor::open(address, token)?;
        let endpoint = Arc::new(Self {
            rank,
            token: token.into(),
            address: acceptor.address(),
            addresses: OnceLock::new(),
            pairs: (0..size).map(|_| Mutex::default()).collect(),
            groups: Mutex::default(),
            attempts: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            bell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        });
        let served = Arc::clone(&endpoint);
        let thread = thread::Builder::new().name("flow-endpoint".into());
        let thread = thread.spawn(move || served.serve(acceptor))?;
        Ok((endpoint, thread))
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn pair(&self, rank: usize) -> MutexGuard<'_, Pair> {
        self.pairs[rank].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn groups(&self) -> MutexGuard<'_, HashSet<GroupId, fnv::FnvBuildHasher>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn join_group(&self, group: GroupId) {
        self.groups().insert(group);
    }

    /// Closes all channels of a group. Who opens one later learns that this rank is not in the group.
    pub fn leave_group(&self, group: GroupId) {
        self.groups().remove(&group);
        for rank in 0..self.pairs.len() {
            let mut pair = self.pair(rank);
            pair.leave(group);
            if pair.has_orphan() || pair.has_notices() {
                self.ring();
            }
        }
    }

    /// Ends all connections, and has the thread end. Waits for a moment first, so that the others
    /// learn how this process has left its channels: else it would seem to have died.
    pub fn close(&self) {
        let begin = Instant::now();
        let owes_ends = || (0..self.pairs.len()).any(|rank| self.pair(rank).owes_ends());
        while owes_ends() && begin.elapsed() < CONNECT_TIMEOUT {
            thread::sleep(CLOSE_INTERVAL);
        }
        let drain = || (0..self.pairs.len()).filter(|&rank| self.pair(rank).drain()).count() > 0;
        while drain() && begin.elapsed() < CONNECT_TIMEOUT {
            thread::sleep(CLOSE_INTERVAL);
        }
        self.is_closed.store(true, Ordering::SeqCst);
        self.ring();
        for rank in 0..self.pairs.len() {
            self.pair(rank).down(DisconnectReason::Ended);
        }
    }

    /// Has the thread look at what is to be done.
    pub fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Connects to a rank, unless that has begun, without waiting for it.
    pub fn connect(self: &Arc<Self>, rank: usize, pair: &mut Pair) {
        if !matches!(pair.state, State::Unconnected) {
            return;
        }
        pair.state = State::Connecting;
        let endpoint = Arc::clone(self);
        let thread = thread::Builder::new().name("flow-connect".into());
        if let Err(error) = thread.spawn(move || endpoint.connect_now(rank)) {
            pair.down(DisconnectReason::OutOfReach(format!("no thread to connect: {error}")));
        }
    }

    fn connect_now(&self, rank: usize) {
        let begin = Instant::now();
        while !self.is_closed() && matches!(self.pair(rank).state, State::Connecting) {
            let down = match self.try_connect(rank) {
                Ok(Some(sockets)) => {
                    let mut pair = self.pair(rank);
                    if matches!(pair.state, State::Connecting) {
                        pair.connected(sockets);
                    }
                    self.ring();
                    break;
                }
                Ok(None) => {
                    thread::sleep(RETRY_INTERVAL);
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    if begin.elapsed() < UNANSWERED_TIMEOUT {
                        continue;
                    }
                    DisconnectReason::OutOfReach(error.to_string())
                }
                // It listens until it ends.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    DisconnectReason::Refused(format!(
                        "{} refuses the connection: the process has ended, or a firewall lies between",
                        self.address_of(rank)
                    ))
                }
                Err(error) => reason(&error),
            };
            let mut pair = self.pair(rank);
            if matches!(pair.state, State::Connecting) {
                pair.down(down);
            }
        }
    }

    fn address_of(&self, rank: usize) -> SocketAddr {
        let addresses = self.addresses.get();
        *addresses.and_then(|addresses| addresses.get(rank)).unwrap_or(&self.address)
    }

    /// None if the other's connection is used instead.
    fn try_connect(&self, rank: usize) -> io::Result<Option<Sockets>> {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        let socket = |kind: &str| {
            let name = format!("{kind}/{}/{attempt}", self.rank);
            connect(&self.token, self.address_of(rank), &name, CONNECT_TIMEOUT)
        };
        let (data, mut control) = (socket("data")?, socket("control")?);
        // A process that is stopped answers when it goes on.
        watch(&control)?;
        control.set_read_timeout(Some(CONNECT_TIMEOUT))?;
        let mut answer = [0];
        loop {
            match control.read(&mut answer) {
                Ok(1..) if answer[0] == ACCEPTED => return Sockets::new(data, control).map(Some),
                Ok(1..) => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::ConnectionReset.into()),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(error),
            }
            if self.is_closed() || !matches!(self.pair(rank).state, State::Connecting) {
                return Ok(None);
            }
        }
    }

    fn serve(&self, mut acceptor: Acceptor) {
        let mut halves = HashMap::new();
        while !self.is_closed() {
            self.sleep(&acceptor);
            let _ = rustix::io::read(&self.bell, &mut [0_u8; 8]);
            let (admitted, has_accepted_all) = acceptor.accept();
            for (name, stream) in admitted {
                self.admit(&name, stream, &mut halves);
            }
            for rank in 0..self.pairs.len() {
                let mut pair = self.pair(rank);
                pair.read_control(&|group| self.groups().contains(&group));
                pair.flush_control();
                pair.flush_orphan();
            }
            if !has_accepted_all {
                thread::sleep(RETRY_INTERVAL);
            }
        }
    }

    /// Waits until there is something to do.
    fn sleep(&self, acceptor: &Acceptor) {
        let mut waits = Vec::new();
        for rank in 0..self.pairs.len() {
            let pair = self.pair(rank);
            let State::Connected(sockets) = &pair.state else { continue };
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, pair.hears());
            events.set(PollFlags::OUT, pair.has_notices());
            if !events.is_empty() {
                waits.push((sockets.control.clone(), events));
            }
            if pair.has_orphan() {
                waits.push((sockets.data.clone(), PollFlags::OUT));
            }
        }
        let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN)];
        fds.extend(
            acceptor.fds().into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
        );
        let time = (acceptor.has_pending()).then_some(PENDING_INTERVAL);
        let time = time.map(|time| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: 0 });
        fds.extend(
            waits.iter().map(|(stream, events)| PollFd::from_borrowed_fd(stream.as_fd(), *events)),
        );
        let _ = rustix::event::poll(&mut fds, time.as_ref());
    }

    /// Takes one of the two sockets of a connection.
    fn admit(&self, name: &str, stream: TcpStream, halves: &mut HashMap<usize, Halves>) {
        let mut parts = name.splitn(3, '/');
        let (Some(kind), Some(Ok(rank)), Some(attempt)) =
            (parts.next(), parts.next().map(str::parse::<usize>), parts.next())
        else {
            return;
        };
        if rank >= self.pairs.len() {
            return;
        }
        let half = halves.entry(rank).or_default();
        if half.attempt != attempt {
            *half = Halves { attempt: attempt.into(), ..Halves::default() };
        }
        match kind {
            "data" => half.data = Some(stream),
            _ => half.control = Some(stream),
        }
        if let Halves { data: Some(_), control: Some(_), .. } = half {
            let Some(Halves { data: Some(data), control: Some(control), .. }) =
                halves.remove(&rank)
            else {
                return;
            };
            self.welcome(rank, data, control);
        }
    }

    /// Answers a rank that connects.
    fn welcome(&self, rank: usize, data: TcpStream, mut control: TcpStream) {
        let mut pair = self.pair(rank);
        let answer = match pair.state {
            State::Unconnected => ACCEPTED,
            State::Connecting if rank < self.rank => ACCEPTED,
            State::Connecting | State::Connected(_) => OTHER,
            State::Down(_) => return,
        };
        // So early it has room.
        let told = control.write_all(&[answer]);
        if answer == ACCEPTED {
            match told.and_then(|()| Sockets::new(data, control)) {
                Ok(sockets) => pair.connected(sockets),
                Err(error) => pair.down(reason(&error)),
            }
        }
    }
}
