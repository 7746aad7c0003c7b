//! The ranks of a job on this machine: how they find each other, the arena they share, and whether they still live.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags};
use rustix::thread::CpuSet;

use super::arena::{Arena, Block};
use super::control::{Control, Counter, Note};
use super::joining::{has_ended, Joining, LOOK};
use crate::env::{Membership, Rendezvous};
use crate::error::{Error, Result};
use crate::store::{Address, Error as StoreError, Server, Store};

/// How long a waiting rank sleeps before it looks whether its peers live.
pub const SLICE: Duration = Duration::from_millis(100);
/// A wait this long is worth a line in the log.
pub const FIRST_WARNING: Duration = Duration::from_secs(30);
/// How long a rank that left a group may take to end, and the launcher to say how.
pub const EXIT_REPORT: Duration = Duration::from_millis(500);

/// At the beginning of rank 0's region.
#[repr(C)]
struct Header {
    attached: Counter,
    /// Offset of the control block of the group of all ranks.
    root: AtomicU64,
    /// Why the ranks cannot come together, as the first of them found out.
    failure: Note,
    /// The processors that some rank may run on, a bit each.
    processors: [AtomicU64; CpuSet::MAX_CPU / 64],
}

struct Peer {
    pid: u32,
    /// Readable once the process has ended. None for this rank itself, and for one that is gone.
    pidfd: Option<OwnedFd>,
    /// The process had ended before it could be watched.
    gone: bool,
}

/// What the groups of one job share in this process.
pub struct World {
    pub rank: usize,
    pub size: usize,
    pub arena: Arc<Arena>,
    /// Every local rank can have a core of its own: a short spin is then cheaper than sleeping.
    pub spin: bool,
    root: usize,
    host: String,
    peers: Vec<Peer>,
    store: Option<Store>,
    launched: bool,
    _server: Option<Server>,
    /// Control blocks of dropped groups that peers have not yet left.
    graveyard: Mutex<Vec<(Block, Control)>>,
}

impl World {
    /// Meets the other ranks of the job. All ranks call this equally often, in the same order.
    pub fn join(membership: &Membership, timeout: Duration) -> Result<Self> {
        static GENERATION: AtomicUsize = AtomicUsize::new(0);
        let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
        let (rank, size) = (membership.rank, membership.world_size);
        let begin = Instant::now();
        let fail = |reason: String| Error::Join { rank, reason };
        if membership.local_world_size != size {
            return Err(fail(format!(
                "the job has {size} ranks and only {} of them on this machine; process groups over several machines \
                 are not available yet: start all ranks on one machine",
                membership.local_world_size
            )));
        }
        let connect =
            |address: &Address, token: &str| Store::connect(address, token, timeout).map_err(|e| fail(e.to_string()));
        let (server, store) = match &membership.rendezvous {
            Rendezvous::None => (None, None),
            Rendezvous::Server { address, token } => (None, Some(connect(address, token)?)),
            Rendezvous::RankZero { address, token } => {
                // A server for each join: that of the one before may be there still, or gone already.
                let address = &match address {
                    Address::Unix(name) if generation > 0 => Address::Unix(format!("{name}-{generation}")),
                    address => address.clone(),
                };
                let server = (rank == 0).then(|| Server::start(address, token)).transpose().map_err(|e| {
                    fail(format!(
                        "cannot serve the rendezvous at {address}: {e}; if another job of yours runs here, give each its own MASTER_PORT"
                    ))
                })?;
                (server, Some(connect(address, token)?))
            }
        };
        let launched = matches!(membership.rendezvous, Rendezvous::Server { .. });
        let prefix = format!("world/{generation}/");
        let key = |name: &str| format!("{prefix}{name}");
        let mut joining = store.as_ref().map(|store| Joining {
            rank,
            size,
            store,
            prefix: &prefix,
            launched,
            begin,
            timeout,
            next_look: begin + LOOK,
            next_warning: begin + FIRST_WARNING,
        });
        if let Some(store) = &store {
            let joined = store
                .compare_and_set(&key(&format!("rank/{rank}")), None, std::process::id().to_string().as_bytes())
                .map_err(|e| fail(e.to_string()))?;
            if let Err(other) = joined {
                let other = String::from_utf8_lossy(&other.unwrap_or_default()).into_owned();
                return Err(fail(format!(
                    "process {other} has joined as rank {rank} before: every process needs its own RANK"
                )));
            }
        }

        let reserved = std::mem::size_of::<Header>() + size * std::mem::size_of::<AtomicU32>();
        let (arena, file) = if rank == 0 {
            let (file, region) = Arena::create_file(size).map_err(fail)?;
            let arena = Arc::new(Arena::map(&file, size, region, 0, reserved).map_err(fail)?);
            let block = arena
                .allocate_zeroed(Control::bytes(size))
                .ok_or_else(|| fail(format!("no shared memory for the control block of {size} ranks")))?;
            let root = Control::attach(Arc::clone(&arena), block.offset(), size);
            root.header().attached.store(size as u32, Ordering::SeqCst);
            header(&arena).root.store(block.offset() as u64, Ordering::Release);
            // Nobody can know when every rank has left the job: this block goes with the arena.
            block.abandon();
            if let Some(store) = &store {
                let place = format!("{} {} {region}", std::process::id(), file.as_raw_fd());
                store.set(&key("arena"), place.as_bytes()).map_err(|e| fail(e.to_string()))?;
            }
            (arena, Some(file))
        } else {
            let (Some(store), Some(joining)) = (&store, &mut joining) else {
                return Err(fail("there is no rendezvous store".into()));
            };
            let place = loop {
                match store.get(&key("arena"), joining.left(LOOK)) {
                    Ok(place) => break place,
                    Err(StoreError::Timeout { .. }) => joining.look(&|| vec![0], &|_| 0).map_err(fail)?,
                    Err(error) => return Err(fail(format!("rank 0 has not joined: {error}"))),
                }
            };
            let place = String::from_utf8_lossy(&place).into_owned();
            let fields: Vec<usize> = place.split(' ').filter_map(|f| f.parse().ok()).collect();
            let [pid, fd, region] = fields[..] else {
                return Err(fail(format!("rank 0 announced its shared memory as {place:?}, which is not understood")));
            };
            let path = format!("/proc/{pid}/fd/{fd}");
            let file = std::fs::File::options().read(true).write(true).open(&path).map_err(|e| {
                fail(match joining.given_up() {
                    Some(reason) => reason,
                    None if has_ended(pid as u32) => format!("rank 0 (pid {pid}) died before all ranks had joined"),
                    None => format!(
                        "cannot open rank 0's shared memory at {path}: {e}; all ranks must run on one machine as one user"
                    ),
                })
            })?;
            (Arc::new(Arena::map(&file, size, region, rank, 0).map_err(fail)?), None)
        };

        let own = std::process::id();
        announce_processors(&arena);
        pid(&arena, rank).store(own, Ordering::Release);
        header(&arena).attached.raise(size as u32);
        let attached = &header(&arena).attached;
        let missing = || -> Vec<usize> { (0..size).filter(|&r| pid(&arena, r).load(Ordering::Acquire) == 0).collect() };
        let failure = &header(&arena).failure;
        while let (Some(joining), false, None) = (&mut joining, missing().is_empty(), failure.read()) {
            sleep_on(attached, size as u32, joining.left(SLICE));
            if let Err(reason) = joining.look(&missing, &|r| pid(&arena, r).load(Ordering::Acquire)) {
                // Only if it is the first: what this rank found out may be a consequence of that.
                failure.write(0, &reason);
                let reason = failure.read().map_or(reason, |(_, first)| first);
                joining.give_up(&reason);
                return Err(fail(reason));
            }
        }
        if let Some((_, reason)) = failure.read() {
            return Err(fail(reason));
        }
        // All have it mapped: from here on it lives only as long as they do.
        drop(file);

        let watch = |r: usize| {
            let pid = pid(&arena, r).load(Ordering::Acquire);
            let others = Pid::from_raw(pid as i32).filter(|_| r != rank);
            match others.map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty())).transpose() {
                Ok(pidfd) => Ok(Peer { pid, pidfd, gone: false }),
                Err(rustix::io::Errno::SRCH) => Ok(Peer { pid, pidfd: None, gone: true }),
                Err(error) => Err(fail(format!(
                    "cannot watch rank {r} (pid {pid}): {error}; that takes Linux 5.3, and a file descriptor for each \
                     rank (ulimit -n)"
                ))),
            }
        };
        let peers = (0..size).map(watch).collect::<Result<_>>()?;
        let root = header(&arena).root.load(Ordering::Acquire) as usize;
        Ok(Self {
            rank,
            size,
            spin: size <= processors(&arena),
            arena,
            root,
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            peers,
            store,
            launched,
            _server: server,
            graveyard: Mutex::default(),
        })
    }

    /// The control block of the group of all ranks.
    pub fn root_control(&self) -> Control {
        Control::attach(Arc::clone(&self.arena), self.root, self.size)
    }

    /// The control block of a new group of `size` ranks, allocated by its first rank.
    pub fn new_control_block(&self, size: usize) -> Option<Block> {
        self.sweep();
        let block = self.arena.allocate_zeroed(Control::bytes(size))?;
        let control = Control::attach(Arc::clone(&self.arena), block.offset(), size);
        control.header().attached.store(size as u32, Ordering::SeqCst);
        Some(block)
    }

    /// Frees a group's control block as soon as its last member has left.
    pub fn bury(&self, block: Block, control: Control) {
        self.graveyard.lock().unwrap_or_else(PoisonError::into_inner).push((block, control));
        self.sweep();
    }

    fn sweep(&self) {
        let mut graveyard = self.graveyard.lock().unwrap_or_else(PoisonError::into_inner);
        graveyard.retain(|(_, control)| control.header().attached.load(Ordering::SeqCst) != 0);
    }

    /// The rendezvous store; None for a process alone.
    pub fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// Which of `ranks` have ended, or the first that do within `time`.
    pub fn ended(&self, ranks: &[usize], time: Duration) -> Vec<usize> {
        let watched: Vec<(usize, &OwnedFd)> =
            ranks.iter().filter_map(|&r| Some((r, self.peers[r].pidfd.as_ref()?))).collect();
        let mut fds: Vec<PollFd<'_>> = watched.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)).collect();
        let time = rustix::event::Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
        if rustix::event::poll(&mut fds, Some(&time)).is_err() {
            return Vec::new();
        }
        let ended = watched.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty()).map(|((r, _), _)| *r);
        ranks.iter().copied().filter(|&r| self.peers[r].gone).chain(ended).collect()
    }

    /// "rank 1 (pid 42 on host) ...", for messages.
    pub fn describe(&self, rank: usize) -> String {
        format!("rank {rank} (pid {} on {})", self.peers[rank].pid, self.host)
    }

    /// What became of a rank that has ended, or `left` its group, which it may have done on its way to its end: to
    /// wait for that tells the cause, and lets its process end before those that only fail because of it.
    pub fn cause_of_loss(&self, rank: usize, left: bool) -> String {
        if left && self.ended(&[rank], EXIT_REPORT).is_empty() {
            return "has left the group".into();
        }
        let report = self.store.as_ref().filter(|_| self.launched);
        let report = report.and_then(|store| store.get(&format!("exit/{rank}"), EXIT_REPORT).ok());
        let end = report.map(|text| format!("ended with {}", String::from_utf8_lossy(&text)));
        match (left, end) {
            (false, end) => end.unwrap_or_else(|| "died".into()),
            (true, end) => format!("has left the group, and {}", end.as_deref().unwrap_or("ended")),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.sweep();
        let graveyard = self.graveyard.get_mut().unwrap_or_else(PoisonError::into_inner);
        graveyard.drain(..).for_each(|(block, _)| block.abandon());
    }
}

/// Sleeps until `counter` may have come to `target`, at most for `time`.
pub fn sleep_on(counter: &Counter, target: u32, time: Duration) {
    use rustix::thread::futex;
    counter.waiters.fetch_add(1, Ordering::SeqCst);
    let seen = counter.value.load(Ordering::SeqCst);
    if (seen.wrapping_sub(target) as i32) < 0 {
        let time = futex::Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
        // Woken, timed out, interrupted: the caller looks at the counter in any case.
        let _ = futex::wait(&counter.value, futex::Flags::empty(), seen, Some(&time));
    }
    counter.waiters.fetch_sub(1, Ordering::SeqCst);
}

fn header(arena: &Arena) -> &Header {
    // SAFETY: the mapping begins with the header, page aligned and zero at first; it consists of atomics.
    unsafe { &*arena.at(0).cast::<Header>() }
}

fn announce_processors(arena: &Arena) {
    let Ok(own) = rustix::thread::sched_getaffinity(None) else { return };
    for processor in (0..CpuSet::MAX_CPU).filter(|&p| own.is_set(p)) {
        header(arena).processors[processor / 64].fetch_or(1 << (processor % 64), Ordering::Relaxed);
    }
}

/// How many processors all ranks have together: each may be bound to its own, or to less than its share by a quota.
fn processors(arena: &Arena) -> usize {
    let all: u32 = header(arena).processors.iter().map(|p| p.load(Ordering::Relaxed).count_ones()).sum();
    let bound = rustix::thread::sched_getaffinity(None).map_or(0, |own| own.count() as usize);
    let usable = std::thread::available_parallelism().map_or(1, |n| n.get());
    if usable < bound {
        usable
    } else {
        all as usize
    }
}

fn pid(arena: &Arena, rank: usize) -> &AtomicU32 {
    let pids = arena.at(std::mem::size_of::<Header>()).cast::<AtomicU32>();
    // SAFETY: the header is followed by one word per rank, reserved when the arena was mapped.
    unsafe { &*pids.add(rank) }
}
