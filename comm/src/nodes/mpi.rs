//! Links over MPI: how a message goes from rank to rank is MPI's affair.
//!
//! MPI may read or write a message's memory until the message is through, whoever has given up on it meanwhile. So
//! messages lie in buffers of their own: parts are copied to and from them, at most [`CHUNK`] bytes each, and a buffer
//! whose message never comes through is left to MPI for good.
//!
//! Each member of a link numbers what it sends there with a tag of its own, and tells the others by a *hello*. Nobody
//! waits for hellos: what is sent before its tag is known waits at its destination. One lock is held for every call of
//! MPI, none of which waits; [`Threading::Serialized`] is enough. As MPI moves messages only while it is called, a
//! thread calls it now and then, for ranks that compute meanwhile.
//!
//! A process that exits with status 0 finalizes MPI, which waits for all others to come so far. One that fails does
//! not: that is how `mpirun` sees that the job has to be ended.
//!
//! This file is the only one outside `shm` and `nccl` with `unsafe` code: all of it calls MPI.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_char, c_int, c_void};
use std::io::Read;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mpi::environment::Universe;
use mpi::ffi;
use mpi::traits::{AsRaw, Communicator};
use mpi::Threading;

use super::queue::Queue;
use super::{Departure, Loss, Network, Patience, Unlinked, Wire};
use crate::env::Membership;
use crate::shm::{Part, LOCAL_ADDRESS};
use crate::store::{Address, Server};

/// The most bytes of one message, and how many messages to and from a member are under way at most.
const CHUNK: usize = 256 << 10;
const DEPTH: usize = 4;
/// The tag of hellos, which no link has, and the longest hello.
const HELLO: c_int = 0;
const MAX_HELLO: usize = 2048;
/// The longest text of [`meet`].
const MAX_PLACE: usize = 512;
/// How often MPI is called while no rank waits, and the longest sleep of one that does.
const TICK: Duration = Duration::from_millis(2);
const NAP: Duration = Duration::from_millis(1);

/// A message's first byte: data follows, or nothing more does, because the sender leaves or has given up.
const DATA: u8 = 0;
const LEAVES: u8 = 1;
const GIVES_UP: u8 = 2;

static SESSION: Mutex<State> = Mutex::new(State::New);

enum State {
    New,
    Open(Session),
    Over,
}

/// This process' use of MPI. All calls of MPI are methods of it, so that there is one at a time.
struct Session {
    communicator: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    /// The tag of the last link.
    tag: c_int,
    /// What hellos have told: the tag of a rank in a channel.
    tags: HashMap<(c_int, String), c_int>,
    /// Where the next hello comes in.
    hello: Option<Message>,
    /// What is still to be sent, though nobody waits for that.
    leftovers: Vec<Message>,
    /// Finalizes MPI, after all else here is dropped. None where the program itself had initialized MPI.
    _universe: Option<Universe>,
}

// SAFETY: the handles in it name objects of the whole process, and MPI was told that any thread may come with them.
unsafe impl Send for Session {}

/// What MPI sends or fills.
struct Message {
    request: ffi::MPI_Request,
    buffer: Vec<u8>,
    is_through: bool,
}

// SAFETY: as for the session.
unsafe impl Send for Message {}

impl Drop for Message {
    fn drop(&mut self) {
        if !self.is_through {
            // MPI may use it at any time.
            std::mem::forget(std::mem::take(&mut self.buffer));
        }
    }
}

/// Of a message that is through.
struct Receipt {
    source: c_int,
    bytes: usize,
}

extern "C" {
    /// As `atexit`, but it is told the status.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

extern "C" fn finalize(status: c_int, _: *mut c_void) {
    if status == 0 {
        let mut state = lock();
        drop(std::mem::replace(&mut *state, State::Over));
    }
}

fn lock() -> MutexGuard<'static, State> {
    SESSION.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with<T>(action: impl FnOnce(&mut Session) -> Result<T, String>) -> Result<T, String> {
    let mut state = lock();
    if matches!(*state, State::New) {
        *state = State::Open(Session::open()?);
    }
    match &mut *state {
        State::Open(session) => action(session),
        _ => Err("MPI is finalized: the process is about to end".into()),
    }
}

/// The error of an MPI function, from what it returned.
fn check(code: c_int) -> Result<(), String> {
    if code == 0 {
        return Ok(());
    }
    let mut text = [0_u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut length = 0;
    // SAFETY: the buffer has the size that the standard asks for.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    Err(String::from_utf8_lossy(&text[..usize::try_from(length).unwrap_or(0)]).into_owned())
}

impl Session {
    fn open() -> Result<Self, String> {
        let (universe, threading) = match mpi::initialize_with_threading(Threading::Serialized) {
            Some((universe, threading)) => (Some(universe), threading),
            None => (None, mpi::environment::threading_support()),
        };
        if threading < Threading::Serialized {
            return Err(format!("MPI was initialized for {threading:?} threads: it takes MPI_THREAD_SERIALIZED"));
        }
        // Apart from what the program itself may send.
        let own = mpi::topology::SimpleCommunicator::world().duplicate();
        let communicator = own.as_raw();
        let (rank, size) = (own.rank() as usize, own.size() as usize);
        std::mem::forget(own); // lives as long as MPI does
        let (tags, leftovers) = (HashMap::new(), Vec::new());
        let session = Self { communicator, rank, size, tag: HELLO, tags, hello: None, leftovers, _universe: universe };
        // SAFETY: the communicator was just made.
        check(unsafe { ffi::MPI_Comm_set_errhandler(communicator, ffi::RSMPI_ERRORS_RETURN) })?;
        // SAFETY: the function lives as long as the process.
        if unsafe { on_exit(finalize, std::ptr::null_mut()) } != 0 {
            return Err("there is no room for a function to be called at exit".into());
        }
        let tick = || loop {
            std::thread::sleep(TICK);
            match &mut *lock() {
                // Whoever drives a wire hears of what goes wrong.
                State::Open(session) => drop(session.progress()),
                _ => break,
            }
        };
        std::thread::Builder::new().name("flow-mpi".into()).spawn(tick).map_err(|e| e.to_string())?;
        Ok(session)
    }

    fn send(&self, mut buffer: Vec<u8>, to: c_int, tag: c_int) -> Result<Message, String> {
        let (data, count) = (buffer.as_mut_ptr().cast::<c_void>(), buffer.len() as c_int);
        Message::begin(buffer, |request| {
            // SAFETY: the buffer is that long, and lives until the message is through.
            unsafe { ffi::MPI_Isend(data, count, ffi::RSMPI_UINT8_T, to, tag, self.communicator, request) }
        })
    }

    fn receive(&self, mut buffer: Vec<u8>, from: c_int, tag: c_int) -> Result<Message, String> {
        let (data, count) = (buffer.as_mut_ptr().cast::<c_void>(), buffer.len() as c_int);
        Message::begin(buffer, |request| {
            // SAFETY: as above, and nobody else uses it.
            unsafe { ffi::MPI_Irecv(data, count, ffi::RSMPI_UINT8_T, from, tag, self.communicator, request) }
        })
    }

    /// Rank 0's buffer to all, which are as long.
    fn broadcast(&self, mut buffer: Vec<u8>) -> Result<Message, String> {
        let (data, count) = (buffer.as_mut_ptr().cast::<c_void>(), buffer.len() as c_int);
        Message::begin(buffer, |request| {
            // SAFETY: as above.
            unsafe { ffi::MPI_Ibcast(data, count, ffi::RSMPI_UINT8_T, 0, self.communicator, request) }
        })
    }

    /// Whether the message is through.
    fn test(&self, message: &mut Message) -> Result<Option<Receipt>, String> {
        let (mut flag, mut status, mut count) = (0, MaybeUninit::<ffi::MPI_Status>::zeroed(), 0);
        // SAFETY: the request is under way: whoever has heard that it is through drops it, or uses its buffer anew.
        check(unsafe { ffi::MPI_Test(&mut message.request, &mut flag, status.as_mut_ptr()) })?;
        if flag == 0 {
            return Ok(None);
        }
        message.is_through = true;
        // SAFETY: a status consists of numbers.
        let status = unsafe { status.assume_init() };
        // SAFETY: it is one of a message of bytes.
        check(unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count) })?;
        Ok(Some(Receipt { source: status.MPI_SOURCE, bytes: usize::try_from(count).unwrap_or(0) }))
    }

    /// Forgets what was to come in.
    fn cancel(&self, mut message: Message) {
        // SAFETY: the request is under way.
        if unsafe { ffi::MPI_Cancel(&mut message.request) } == 0 {
            let _ = self.test(&mut message);
        }
    }

    /// Takes what hellos have come, and goes on with what is left over.
    fn progress(&mut self) -> Result<(), String> {
        loop {
            let mut hello = match self.hello.take() {
                Some(hello) => hello,
                // SAFETY: it is a number.
                None => self.receive(vec![0; MAX_HELLO], unsafe { ffi::RSMPI_ANY_SOURCE }, HELLO)?,
            };
            let Some(Receipt { source, bytes }) = self.test(&mut hello)? else {
                self.hello = Some(hello);
                break;
            };
            if let Some((tag, channel)) = hello.buffer[..bytes].split_first_chunk() {
                let channel = String::from_utf8_lossy(channel).into_owned();
                self.tags.insert((source, channel), c_int::from_le_bytes(*tag));
            }
        }
        let mut leftovers = std::mem::take(&mut self.leftovers);
        leftovers.retain_mut(|message| matches!(self.test(message), Ok(None)));
        self.leftovers = leftovers;
        Ok(())
    }
}

impl Message {
    fn begin(buffer: Vec<u8>, begin: impl FnOnce(*mut ffi::MPI_Request) -> c_int) -> Result<Self, String> {
        let mut request = MaybeUninit::uninit();
        check(begin(request.as_mut_ptr()))?;
        // SAFETY: MPI has written it.
        Ok(Self { request: unsafe { request.assume_init() }, buffer, is_through: false })
    }
}

/// Serves the store of a join in rank 0, and tells all ranks where. Returns the server, the address, and the token.
pub fn meet(membership: &Membership, timeout: Duration) -> Result<(Option<Server>, Address, String), String> {
    let (rank, size) = (membership.rank, membership.world_size);
    let begin = Instant::now();
    let mut buffer = vec![0; MAX_PLACE];
    with(|session| {
        match (session.rank, session.size) {
        place if place == (rank, size) => Ok(()),
        (own, of) => Err(format!(
            "this is rank {rank} of {size}, but rank {own} of {of} to MPI: start the job with the mpirun of the MPI that \
             the program is built with, or with a srun that knows it (srun --mpi=list), or set FLOW_BACKEND=tcp"
        )),
    }
    })?;
    let server = (rank == 0).then(|| serve(&mut buffer)).transpose().map_err(|e| format!("no rendezvous: {e}"))?;
    let mut message = with(|session| session.broadcast(buffer))?;
    while with(|session| session.test(&mut message))?.is_none() {
        if begin.elapsed() >= timeout {
            return Err(format!("rank 0 has not joined within {timeout:?}"));
        }
        std::thread::sleep(NAP);
    }
    let text = String::from_utf8_lossy(&message.buffer);
    let (token, place) = text.trim_end_matches('\0').split_once(' ').ok_or("rank 0 has told nonsense of itself")?;
    Ok((server, Address::Tcp(place.into()), token.into()))
}

/// Starts the store, and writes down its token and its place.
fn serve(buffer: &mut [u8]) -> std::io::Result<Server> {
    let mut random = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    let token = format!("{:032x}", u128::from_ne_bytes(random));
    let local = std::env::var(LOCAL_ADDRESS).ok();
    let server = Server::start(&Address::Tcp(format!("{}:0", local.as_deref().unwrap_or("0.0.0.0"))), &token)?;
    let Address::Tcp(at) = server.address() else { return Err(std::io::ErrorKind::Unsupported.into()) };
    let (_, port) = at.rsplit_once(':').unwrap_or_default();
    let host = local.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let text = format!("{token} {host}:{port}");
    let too_long = || std::io::Error::other(format!("{host:?} is too long for the name of a host"));
    buffer.get_mut(..text.len()).ok_or_else(too_long)?.copy_from_slice(text.as_bytes());
    Ok(server)
}

/// The ranks of the job, which are MPI's.
pub struct MpiNetwork;

impl Network for MpiNetwork {
    fn link(&self, channel: &str, members: &[usize], own: usize, _: Patience) -> Result<Box<dyn Wire>, Unlinked> {
        let others = (0..members.len()).filter(|&member| member != own);
        let linked = with(|session| {
            session.tag += 1;
            let hello = [&session.tag.to_le_bytes(), channel.as_bytes()].concat();
            for member in others.clone() {
                let message = session.send(hello.clone(), members[member] as c_int, HELLO)?;
                session.leftovers.push(message);
            }
            Ok(session.tag)
        });
        let tag = linked.map_err(|error| {
            Unlinked::Lost(Loss { member: others.clone().next().unwrap_or(own), how: Departure::OutOfReach(error) })
        })?;
        let peer = |member: usize| (member != own).then(|| Peer::new(members[member] as c_int));
        let peers = (0..members.len()).map(peer).collect();
        Ok(Box::new(MpiWire { channel: channel.into(), tag, peers, has_ended: false }))
    }
}

struct MpiWire {
    channel: String,
    /// Of what this rank sends.
    tag: c_int,
    /// By position; None for this rank.
    peers: Vec<Option<Peer>>,
    /// It has told the others that it sends nothing more.
    has_ended: bool,
}

struct Peer {
    rank: c_int,
    sending: Queue,
    receiving: Queue,
    outgoing: VecDeque<Message>,
    /// Where messages come in, once the peer's tag is known.
    incoming: VecDeque<Message>,
    tag: Option<c_int>,
    /// The first that has come, and what of it is still to be copied.
    come: Option<(Message, Range<usize>)>,
    departure: Option<Departure>,
}

impl Peer {
    fn new(rank: c_int) -> Self {
        Self {
            rank,
            sending: Queue::default(),
            receiving: Queue::default(),
            outgoing: VecDeque::new(),
            incoming: VecDeque::new(),
            tag: None,
            come: None,
            departure: None,
        }
    }

    /// Moves what can be moved now; whether that was anything.
    fn go_on(&mut self, session: &Session, channel: &str, tag: c_int) -> Result<bool, Departure> {
        let moved =
            self.go_on_sending(session, tag).and_then(|sent| Ok(self.go_on_receiving(session, channel)? || sent));
        let moved = moved.map_err(Departure::OutOfReach)?;
        match &self.departure {
            Some(how) if !self.receiving.parts.is_empty() || !self.sending.parts.is_empty() => Err(how.clone()),
            _ => Ok(moved),
        }
    }

    fn go_on_sending(&mut self, session: &Session, tag: c_int) -> Result<bool, String> {
        let mut moved = false;
        while let Some(first) = self.outgoing.front_mut() {
            if session.test(first)?.is_none() {
                break;
            }
            self.outgoing.pop_front();
        }
        while !self.sending.parts.is_empty() && self.outgoing.len() < DEPTH {
            let mut buffer = vec![DATA];
            while let Some(part) = self.sending.parts.front().filter(|_| buffer.len() <= CHUNK) {
                let rest = &part.bytes()[self.sending.offset..];
                let count = rest.len().min(CHUNK + 1 - buffer.len());
                buffer.extend_from_slice(&rest[..count]);
                self.sending.skip(count);
            }
            self.outgoing.push_back(session.send(buffer, self.rank, tag)?);
            moved = true;
        }
        Ok(moved)
    }

    fn go_on_receiving(&mut self, session: &Session, channel: &str) -> Result<bool, String> {
        let mut moved = false;
        if self.tag.is_none() {
            self.tag = session.tags.get(&(self.rank, channel.to_string())).copied();
            for _ in 0..self.tag.map_or(0, |_| DEPTH) {
                self.expect(session, vec![0; CHUNK + 1])?;
            }
        }
        while self.departure.is_none() {
            let Some((mut message, mut rest)) = self.come.take() else {
                let Some(first) = self.incoming.front_mut() else { break };
                let Some(receipt) = session.test(first)? else { break };
                let Some(message) = self.incoming.pop_front() else { break };
                match message.buffer[0] {
                    DATA => self.come = Some((message, 1..receipt.bytes)),
                    LEAVES => self.departure = Some(Departure::Left),
                    _ => self.departure = Some(Departure::Ended),
                }
                continue;
            };
            let Some(part) = self.receiving.parts.front_mut() else {
                self.come = Some((message, rest));
                break;
            };
            let to = &mut part.bytes_mut()[self.receiving.offset..];
            let count = to.len().min(rest.len());
            to[..count].copy_from_slice(&message.buffer[rest.start..rest.start + count]);
            rest.start += count;
            self.receiving.skip(count);
            moved = true;
            if rest.is_empty() {
                self.expect(session, std::mem::take(&mut message.buffer))?;
            } else {
                self.come = Some((message, rest));
            }
        }
        Ok(moved)
    }

    fn expect(&mut self, session: &Session, buffer: Vec<u8>) -> Result<(), String> {
        if let Some(tag) = self.tag {
            self.incoming.push_back(session.receive(buffer, self.rank, tag)?);
        }
        Ok(())
    }
}

impl MpiWire {
    fn peer(&mut self, member: usize) -> &mut Peer {
        self.peers[member].as_mut().expect("no member talks to itself") // invariant
    }

    fn go_on(&mut self) -> Result<bool, Loss> {
        let Self { channel, tag, peers, .. } = self;
        // What goes wrong in all of MPI is told of somebody.
        let mut last = peers.iter().position(Option::is_some).unwrap_or_default();
        let moved = with(|session| {
            session.progress()?;
            let mut moved = false;
            for (member, peer) in
                peers.iter_mut().enumerate().filter_map(|(member, peer)| Some((member, peer.as_mut()?)))
            {
                last = member;
                match peer.go_on(session, channel, *tag) {
                    Ok(some) => moved |= some,
                    Err(how) => return Ok(Err(Loss { member, how })),
                }
            }
            Ok(Ok(moved))
        });
        moved.unwrap_or_else(|error| Err(Loss { member: last, how: Departure::OutOfReach(error) }))
    }

    /// Tells the others, once, that nothing more is sent, and why.
    fn end(&mut self, why: u8) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        // At the end of the process nobody listens.
        let _ = with(|session| {
            for peer in self.peers.iter_mut().flatten() {
                session.leftovers.extend(peer.outgoing.drain(..));
                if let Ok(message) = session.send(vec![why], peer.rank, self.tag) {
                    session.leftovers.push(message);
                }
            }
            Ok(())
        });
    }
}

impl Wire for MpiWire {
    fn send(&mut self, to: usize, part: Part) -> u64 {
        self.peer(to).sending.push(part)
    }

    fn receive(&mut self, from: usize, part: Part) -> u64 {
        self.peer(from).receiving.push(part)
    }

    fn sent(&self, to: usize) -> u64 {
        self.peers[to].as_ref().map_or(0, |peer| peer.sending.done)
    }

    fn received(&self, from: usize) -> u64 {
        self.peers[from].as_ref().map_or(0, |peer| peer.receiving.done)
    }

    fn is_idle(&self) -> bool {
        self.peers.iter().flatten().all(|peer| peer.sending.parts.is_empty() && peer.receiving.parts.is_empty())
    }

    fn drive(&mut self, time: Duration) -> Result<(), Loss> {
        let begin = Instant::now();
        let mut nap = Duration::from_micros(10);
        while !self.go_on()? && begin.elapsed() < time {
            std::thread::sleep(nap);
            nap = (2 * nap).min(NAP);
        }
        Ok(())
    }

    fn lost(&mut self) -> Option<Loss> {
        let departure =
            |(member, peer): (usize, &Option<Peer>)| Some(Loss { member, how: peer.as_ref()?.departure.clone()? });
        self.go_on().err().or_else(|| self.peers.iter().enumerate().find_map(departure))
    }

    fn abandon(&mut self) {
        self.end(GIVES_UP);
        for peer in self.peers.iter_mut().flatten() {
            peer.sending = Queue::default();
            peer.receiving = Queue::default();
            peer.departure = Some(Departure::Ended);
        }
    }

    fn leave(&mut self) {
        self.end(LEAVES);
    }
}

impl Drop for MpiWire {
    fn drop(&mut self) {
        self.end(GIVES_UP);
        let _ = with(|session| {
            let incoming = self.peers.iter_mut().flatten().flat_map(|peer| peer.incoming.drain(..));
            incoming.for_each(|message| session.cancel(message));
            Ok(())
        });
    }
}
