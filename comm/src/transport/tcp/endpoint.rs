//! This process' end of all its connections, and the thread that serves it.
//!
//! The thread makes and accepts connections at any time while the process lives, and reads the
//! notices of other processes. So to connect never waits for the other's program, and a process
//! that is gone refuses at once. A connection is made when a channel first needs it (leaders of
//! nodes begin to connect when their group is made). If both processes connect at once, the
//! connection of the lower rank stays.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustc_hash::FxHashSet;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};

use super::control::{GroupId, Sockets, reason};
use super::dial::{ACCEPTED, CONNECT_TIMEOUT, Dial, OTHER};
use super::pair::{Pair, PairState};
use super::socket_name::{SocketKind, SocketName};
use crate::transport::DisconnectReason;
use crate::transport::acceptor::Acceptor;

/// The interval between looks whether there are file descriptors again.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// The interval at which a process that ends looks whether the others know.
const CLOSE_INTERVAL: Duration = Duration::from_millis(1);
/// The longest sleep of the thread while somebody has not said who it is.
const PENDING_INTERVAL: Duration = Duration::from_secs(1);

/// A process' connections to all others.
pub struct Endpoint {
    rank: usize,
    token: String,
    address: SocketAddr,
    /// The addresses of all ranks.
    pub addresses: OnceLock<Vec<SocketAddr>>,
    /// The connections by rank.
    pairs: Vec<Mutex<Pair>>,
    /// The groups that this rank is in.
    groups: Mutex<FxHashSet<GroupId>>,
    /// The ranks that the thread is to connect to.
    wanted: Mutex<Vec<usize>>,
    is_closed: AtomicBool,
    /// Readable when the thread has something to do.
    bell: OwnedFd,
}

/// One of the two sockets of a connection that comes in, with the number of the attempt.
#[derive(Default)]
struct Halves {
    attempt: u64,
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
            wanted: Mutex::default(),
            is_closed: AtomicBool::new(false),
            bell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        });
        let served = Arc::clone(&endpoint);
        let thread = thread::Builder::new().name("flow-endpoint".into());
        let thread = thread.spawn(move || served.serve(acceptor))?;
        Ok((endpoint, thread))
    }

    /// Returns the address at which this process listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Locks the connection to a rank.
    pub fn pair(&self, rank: usize) -> MutexGuard<'_, Pair> {
        self.pairs[rank].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn groups(&self) -> MutexGuard<'_, FxHashSet<GroupId>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes this process a member of the group from here on.
    pub fn join_group(&self, group: GroupId) {
        self.groups().insert(group);
    }

    /// Closes all channels of a group. Who opens one later learns that this rank is not in the
    /// group.
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
        while self.owes_ends() && begin.elapsed() < CONNECT_TIMEOUT {
            thread::sleep(CLOSE_INTERVAL);
        }
        while self.drain() && begin.elapsed() < CONNECT_TIMEOUT {
            thread::sleep(CLOSE_INTERVAL);
        }
        self.is_closed.store(true, Ordering::SeqCst);
        self.ring();
        for rank in 0..self.pairs.len() {
            self.pair(rank).down(DisconnectReason::Ended);
        }
    }

    /// Whether another rank has yet to be told how this one has left a channel.
    fn owes_ends(&self) -> bool {
        (0..self.pairs.len()).any(|rank| self.pair(rank).owes_ends())
    }

    /// Discards what comes from all ranks. Returns whether any may send more.
    fn drain(&self) -> bool {
        let mut is_more = false;
        for rank in 0..self.pairs.len() {
            is_more |= self.pair(rank).drain();
        }
        is_more
    }

    /// Makes the thread look at what is to be done.
    pub fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Connects to a rank, unless that has begun, without waiting for it.
    pub fn connect(&self, rank: usize, pair: &mut Pair) {
        if matches!(pair.state, PairState::Unconnected) {
            pair.state = PairState::Connecting;
            self.wanted().push(rank);
            self.ring();
        }
    }

    fn wanted(&self) -> MutexGuard<'_, Vec<usize>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes on to connect; whether the connection is still to be made.
    fn advance(&self, dial: &mut Dial) -> bool {
        let mut pair = self.pair(dial.rank);
        // The other's connection may have come.
        if !matches!(pair.state, PairState::Connecting) {
            return false;
        }
        match dial.advance(self.rank, &self.token) {
            None => return true,
            Some(Ok(sockets)) => pair.connected(sockets),
            Some(Err(how)) => pair.down(how),
        }
        false
    }

    fn address_of(&self, rank: usize) -> SocketAddr {
        let addresses = self.addresses.get();
        *addresses.and_then(|addresses| addresses.get(rank)).unwrap_or(&self.address)
    }

    fn serve(&self, mut acceptor: Acceptor) {
        let mut halves = HashMap::new();
        let mut dials: Vec<Dial> = Vec::new();
        while !self.is_closed() {
            self.sleep(&acceptor, &dials);
            let _ = rustix::io::read(&self.bell, &mut [0_u8; 8]);
            let (admitted, has_accepted_all) = acceptor.accept();
            for (name, stream) in admitted {
                self.admit(&name, stream, &mut halves);
            }
            let wanted = std::mem::take(&mut *self.wanted());
            dials.extend(wanted.into_iter().map(|rank| Dial::new(rank, self.address_of(rank))));
            dials.retain_mut(|dial| self.advance(dial));
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
    fn sleep(&self, acceptor: &Acceptor, dials: &[Dial]) {
        let mut waits = Vec::new();
        for rank in 0..self.pairs.len() {
            let pair = self.pair(rank);
            let PairState::Connected(sockets) = &pair.state else { continue };
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
        let sockets = dials.iter().flat_map(Dial::sockets);
        fds.extend(sockets.map(|(fd, events)| PollFd::from_borrowed_fd(fd, events)));
        let now = Instant::now();
        let deadlines = dials.iter().filter_map(Dial::deadline);
        let pending = acceptor.has_pending().then_some(now + PENDING_INTERVAL);
        let time = deadlines.chain(pending).min().map(|until| until.saturating_duration_since(now));
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        fds.extend(
            waits.iter().map(|(stream, events)| PollFd::from_borrowed_fd(stream.as_fd(), *events)),
        );
        let _ = rustix::event::poll(&mut fds, time.as_ref());
    }

    /// Takes one of the two sockets of a connection.
    fn admit(&self, name: &str, stream: TcpStream, halves: &mut HashMap<usize, Halves>) {
        let Some(SocketName { kind, rank, attempt }) = SocketName::decode(name) else { return };
        if rank >= self.pairs.len() {
            return;
        }
        let half = halves.entry(rank).or_default();
        // Of an attempt that was given up a half may come late.
        if attempt < half.attempt {
            return;
        }
        if attempt > half.attempt {
            *half = Halves { attempt, ..Halves::default() };
        }
        match kind {
            SocketKind::Data => half.data = Some(stream),
            SocketKind::Control => half.control = Some(stream),
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
            PairState::Unconnected => ACCEPTED,
            PairState::Connecting if rank < self.rank => ACCEPTED,
            PairState::Connecting | PairState::Connected(_) => OTHER,
            PairState::Down(_) => return,
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
