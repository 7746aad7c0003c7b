//! Rounds: the one protocol beneath all collectives of a group.
//!
//! A round: write the post (what, how much, where), raise `arrived`, wait until all have arrived,
//! compare the posts, data, raise `done`. Whoever waits watches the peers' lives and the clock. The
//! first failure poisons the group.
//!
//! Members on other nodes take part through the leader, this node's first member: when all members
//! here have arrived, it brings the posts of the others (see `internode_exchange`), and arrives for them;
//! when it is done, so are they.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::arena::Block;
use super::control::sleep_on;
use super::control::{Control, Counter, SLOTS};
use super::internode::InterNode;
use super::message_queue::MessageQueue;
use super::reduction::InFlight;
use crate::arguments::Caller;
use crate::descriptor::{Location, OpDescriptor};
use crate::error::{Error, Result};
use crate::stall::Stall;
use crate::trace::{Queued, Recorder, Start};
use crate::transport::{Connections, DisconnectReason, PeerDown};
use crate::world::{World, FIRST_WARNING, LIVENESS_INTERVAL};

/// How long a waiting rank keeps its core to itself, where every rank can have one: most waits are
/// shorter.
const SPIN: Duration = Duration::from_micros(20);
/// How long such a rank stays awake, and then offers its core to others between two looks: some
/// times what it takes to be woken, which is tens of microseconds, and more on virtual machines.
/// After that it sleeps.
const AWAKE: Duration = Duration::from_micros(500);
/// The same where there are more ranks than cores: a rank that has work to do should not take turns
/// with many that wait.
const AWAKE_ON_SHARED_CORES: Duration = Duration::from_micros(50);

/// To a rank on another node, once there has been a message.
pub type Link = Option<Box<dyn Connections>>;

/// A wait that goes on.
pub struct WaitDeadline<'a> {
    since: Instant,
    timeout: Duration,
    /// When it is next worth a line in the log.
    warning: Duration,
    long: Option<Stall<'a>>,
}

/// This rank's part in one group.
pub struct Engine {
    pub world: Arc<World>,
    pub control: Control,
    /// This rank within the group, and the members' ranks in the job.
    pub rank: usize,
    pub ranks: Vec<usize>,
    /// The members on this node, and this rank's place among them.
    pub locals: Vec<usize>,
    pub local: usize,
    /// What there is to members on other nodes, if there are any.
    pub inter_node: Option<InterNode>,
    /// Tells the group from others, of which so many were made from it.
    pub name: String,
    pub children: AtomicU64,
    /// What the group does and did, on GPUs too.
    pub recorder: Recorder,
    /// Groups of its members' own making that this rank is about to join.
    pub meetings: Mutex<Vec<String>>,
    /// The control block, in the first rank of the node.
    block: Mutex<Option<Block>>,
    timeout: AtomicU64,
    pub(super) quarantined: AtomicBool,
    state: Mutex<State>,
    /// Held while sending to each rank; with the link to a rank on another node.
    pub outgoing: Vec<Mutex<Link>>,
    /// What comes from each rank.
    pub queues: Vec<MessageQueue>,
    /// Where a receive from any rank begins to look, so that each has its turn.
    pub next_sender: AtomicUsize,
    /// This rank drops the group: nobody is to wait in it any longer.
    pub(super) cancelled: AtomicBool,
}

/// Advanced equally on all ranks.
#[derive(Default)]
pub struct State {
    round: u64,
    /// How many collectives there were on the host.
    pub sequence: u64,
    /// The last round that used each staging buffer.
    pub staged: [Option<u64>; 2],
    pub in_flight: VecDeque<InFlight>,
}

impl Engine {
    pub fn new(
        world: Arc<World>,
        control: Control,
        block: Option<Block>,
        ranks: Vec<usize>,
        timeout: Duration,
        name: String,
    ) -> Result<Self> {
        let outgoing = ranks.iter().map(|_| Default::default()).collect();
        let rank = ranks.iter().position(|&r| r == world.rank).expect("the caller is a member"); // invariant
        let locals: Vec<usize> =
            (0..ranks.len()).filter(|&r| world.local_index(ranks[r]).is_some()).collect();
        let local = locals.iter().position(|&r| r == rank).expect("a rank is on its own node"); // invariant
        let place = |rank: usize| locals.iter().position(|&local| local == rank);
        let queues = (0..ranks.len()).map(|rank| MessageQueue::new(place(rank))).collect();
        let inter_node =
            (locals.len() < ranks.len()).then(|| InterNode::new(&world, &ranks, &name));
        let backend = world.transport.as_ref().filter(|_| inter_node.is_some());
        let backend = backend.map_or("shm", |transport| transport.name());
        let recorder = Recorder::new(name.clone(), backend);
        let mut engine = Self {
            world,
            control,
            rank,
            ranks,
            locals,
            local,
            inter_node,
            name,
            children: AtomicU64::new(0),
            recorder,
            meetings: Mutex::default(),
            block: Mutex::new(block),
            timeout: AtomicU64::new(0),
            quarantined: AtomicBool::new(false),
            state: Mutex::default(),
            outgoing,
            queues,
            next_sender: AtomicUsize::new(0),
            cancelled: AtomicBool::new(false),
        };
        engine.set_timeout(timeout);
        engine.connect_leaders()?;
        Ok(engine)
    }

    /// Whether this rank carries data between nodes for those of its own.
    pub fn is_leader(&self) -> bool {
        self.inter_node.is_some() && self.local == 0
    }

    /// How many members are on other nodes.
    pub fn remote_size(&self) -> usize {
        self.size() - self.locals.len()
    }

    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    pub fn caller(&self) -> Caller {
        Caller { job_rank: self.world.rank, rank: self.rank, size: self.size() }
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout
            .store(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a collective its sequence number, and has it recorded from now on; fails at once in a
    /// poisoned group.
    pub fn assign_sequence(
        &self,
        state: &mut State,
        operation: &mut OpDescriptor,
    ) -> Result<Start> {
        let queued = Queued::take();
        let sequence = || self.recorder.next_collective();
        operation.sequence = queued.map_or_else(sequence, |queued| queued.sequence);
        self.check_poison(&operation)?;
        state.sequence += 1;
        if let Some(inter_node) = &self.inter_node {
            inter_node.sequence.store(state.sequence, Ordering::Relaxed);
        }
        Ok(operation.record(queued))
    }

    /// The next round, or None while its slot is still in use by a slow rank.
    pub fn try_acquire(&self, state: &mut State) -> Option<u64> {
        let round = state.round;
        let free = round < SLOTS
            || self.control.slot(round).done.reached(self.control.target(round - SLOTS));
        free.then(|| {
            state.round += 1;
            round
        })
    }

    /// The next two rounds, or None while their slots are in use.
    pub fn try_acquire_two(&self, state: &mut State) -> Option<(u64, u64)> {
        let round = state.round;
        let first = self.try_acquire(state)?;
        let second = self.try_acquire(state);
        if second.is_none() {
            state.round = round;
        }
        Some((first, second?))
    }

    /// The next round, waiting for its slot.
    pub fn acquire_slot(&self, state: &mut State, operation: &OpDescriptor) -> Result<u64> {
        if let Some(round) = self.try_acquire(state) {
            return Ok(round);
        }
        self.wait_done(state.round - SLOTS, operation)?;
        state.round += 1;
        Ok(state.round - 1)
    }

    pub fn publish_descriptor(&self, round: u64, operation: &OpDescriptor, location: Location) {
        operation.write(location, self.control.descriptor(round, self.rank));
    }

    // The counters first: a rank that is killed in between must be among those that the others
    // miss.

    pub fn arrive(&self, round: u64) {
        let targets = [self.control.target(round), self.control.local_target(round)];
        self.control.slot(round).arrived.raise_by(1, &targets);
        self.control.set_arrived(round, self.rank);
    }

    /// The leader, when it has what the members on other nodes show in a round.
    pub fn arrive_for_remote(&self, round: u64) {
        self.control
            .slot(round)
            .arrived
            .raise_by(self.remote_size() as u32, &[self.control.target(round)]);
        for rank in self.ranks_where(|r| !self.locals.contains(&r)) {
            self.control.set_arrived(round, rank);
        }
    }

    pub fn done(&self, round: u64) {
        let count = if self.is_leader() { 1 + self.remote_size() as u32 } else { 1 };
        self.control.slot(round).done.raise_by(count, &[self.control.target(round)]);
        self.control.set_done(round, self.rank);
    }

    pub fn all_arrived(&self, round: u64) -> bool {
        self.control.slot(round).arrived.reached(self.control.target(round))
    }

    /// Whether all members on this node have arrived.
    pub fn locals_arrived(&self, round: u64) -> bool {
        self.control.slot(round).arrived.reached(self.control.local_target(round))
    }

    pub fn all_done(&self, round: u64) -> bool {
        self.control.slot(round).done.reached(self.control.target(round))
    }

    /// Waits until all have arrived, with `payload` bytes each. That the leader sees to.
    pub fn wait_arrived(&self, round: u64, operation: &OpDescriptor, payload: usize) -> Result<()> {
        if self.is_leader() {
            self.wait_locals_arrived(round, operation)?;
            self.exchange_between_leaders(round, operation, payload)?;
        }
        self.wait_all_arrived(round, operation)
    }

    pub fn wait_all_arrived(&self, round: u64, operation: &OpDescriptor) -> Result<()> {
        let missing = || self.ranks_where(|r| !self.control.has_arrived(round, r));
        self.wait(
            &self.control.slot(round).arrived,
            self.control.target(round),
            operation,
            &missing,
        )
    }

    pub fn wait_locals_arrived(&self, round: u64, operation: &OpDescriptor) -> Result<()> {
        let here = |r| self.locals.contains(&r) && !self.control.has_arrived(round, r);
        let missing = || self.ranks_where(here);
        self.wait(
            &self.control.slot(round).arrived,
            self.control.local_target(round),
            operation,
            &missing,
        )
    }

    pub fn wait_done(&self, round: u64, operation: &OpDescriptor) -> Result<()> {
        let here = |r| self.locals.contains(&r) && !self.control.is_done(round, r);
        let missing = || self.ranks_where(here);
        self.wait(&self.control.slot(round).done, self.control.target(round), operation, &missing)
    }

    /// Every rank's post of a round in which all have arrived, compared with ours. `bytes(rank)`
    /// is how much a shared location must hold.
    pub fn locations(
        &self,
        round: u64,
        operation: &OpDescriptor,
        bytes: &dyn Fn(usize) -> usize,
    ) -> Result<Vec<Location>> {
        self.posted_by(&mut (0..self.size()), round, operation, bytes)
    }

    /// Whether all have posted this operation.
    pub fn all_agree(&self, round: u64, operation: &OpDescriptor) -> bool {
        let posted = |rank| OpDescriptor::read(self.control.descriptor(round, rank));
        (0..self.size()).all(|rank| posted(rank).is_ok_and(|(theirs, _)| theirs.agrees(operation)))
    }

    /// As [`Engine::locations`], of the members on this node, once these have arrived.
    pub fn local_locations(
        &self,
        round: u64,
        operation: &OpDescriptor,
        bytes: &dyn Fn(usize) -> usize,
    ) -> Result<Vec<Location>> {
        self.posted_by(&mut self.locals.iter().copied(), round, operation, bytes)
    }

    fn posted_by(
        &self,
        ranks: &mut dyn Iterator<Item = usize>,
        round: u64,
        operation: &OpDescriptor,
        bytes: &dyn Fn(usize) -> usize,
    ) -> Result<Vec<Location>> {
        let read = |rank| match OpDescriptor::read(self.control.descriptor(round, rank)) {
            Ok((theirs, location)) if theirs.agrees(operation) => match location {
                Location::Shared(offset)
                    if self.locals.contains(&rank)
                        && !self.is_reachable(rank, offset, bytes(rank)) =>
                {
                    Err(format!(
                        "rank {} posted {theirs} outside the shared memory",
                        self.ranks[rank]
                    ))
                }
                _ => Ok(location),
            },
            Ok((theirs, _))
                if theirs.bucket.and(operation.bucket).is_some()
                    && theirs.step != operation.step =>
            {
                let (own, peer) = (self.ranks[self.rank], self.ranks[rank]);
                let (step, other) = (operation.step, theirs.step);
                Err(format!(
                    "rank {own} is in step {step}, rank {peer} in step {other} (a forward in training mode without its \
                     backward is a step: one of them skipped a backward, had a loss without parameters, caught a \
                     backward's error, or had a forward more than the others: evaluate with train = false or under \
                     no_grad)"
                ))
            }
            Ok((theirs, _)) => {
                let same = OpDescriptor { layout: operation.layout, ..theirs }.agrees(operation);
                let pieces = match operation.bucket {
                    Some(_) if same => " with pieces of other lengths",
                    None if same => " with other counts",
                    _ => "",
                };
                let (own, peer) = (self.ranks[self.rank], self.ranks[rank]);
                Err(format!("rank {own} called {operation}, rank {peer} called {theirs}{pieces}"))
            }
            Err(unknown) => Err(format!("rank {} posted {unknown}", self.ranks[rank])),
        };
        ranks
            .map(read)
            .collect::<Result<_, String>>()
            .map_err(|detail| self.fail(Error::Mismatch { rank: self.world.rank, detail }))
    }

    /// Whether what a member says of its memory can be: offsets of peers are checked before use.
    pub fn is_reachable(&self, rank: usize, offset: usize, bytes: usize) -> bool {
        self.world
            .local_index(self.ranks[rank])
            .is_some_and(|index| self.world.arena.holds(index, offset, bytes))
    }

    /// Waits until `counter` has come to `target`; `missing` says which members of the group are
    /// waited for.
    pub fn wait(
        &self,
        counter: &Counter,
        target: u32,
        operation: &dyn Display,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Result<()> {
        if counter.reached(target) {
            return Ok(());
        }
        self.wait_until(operation, missing, &|| self.find_lost_peer(missing), &mut |time| {
            if !time.is_zero() {
                sleep_on(counter, target, time);
            }
            Ok(counter.reached(target))
        })
    }

    /// Waits until `attempt` says that what is waited for has come; it may take the time that it is
    /// given for that. `lost` says which member can never bring it, as far as `attempt` does not
    /// see that.
    pub fn wait_until(
        &self,
        operation: &dyn Display,
        missing: &dyn Fn() -> Vec<usize>,
        lost: &dyn Fn() -> Option<(usize, DisconnectReason)>,
        attempt: &mut dyn FnMut(Duration) -> Result<bool, PeerDown>,
    ) -> Result<()> {
        let mut waiting = self.begin_wait();
        let (start, timeout) = (waiting.since, waiting.timeout);
        let mut look = LIVENESS_INTERVAL.min(timeout);
        let (spin, awake) = match self.world.spin {
            true => (SPIN, AWAKE),
            false => (Duration::ZERO, AWAKE_ON_SHARED_CORES),
        };
        loop {
            let waited = start.elapsed();
            let is_awake = waited < awake;
            let time = if is_awake { Duration::ZERO } else { look.saturating_sub(waited) };
            match attempt(time) {
                Ok(true) => return Ok(()),
                Ok(false) if is_awake => {
                    if waited < spin {
                        std::hint::spin_loop();
                    } else {
                        // Whoever is waited for may be waiting for this core.
                        std::thread::yield_now();
                    }
                    continue;
                }
                Ok(false) => {}
                Err(loss) => return Err(self.link_lost_error(loss, operation)),
            }
            if let Err(error) = self.check_failure(operation, true) {
                // The others may have come to the end of this, and failed in what follows.
                return if matches!(attempt(Duration::ZERO), Ok(true)) {
                    Ok(())
                } else {
                    Err(error)
                };
            }
            if start.elapsed() < look {
                continue;
            }
            look = (start.elapsed() + LIVENESS_INTERVAL).min(timeout);
            if let Some((peer, how)) = lost() {
                // Arriving may have been the last thing it did.
                if matches!(attempt(Duration::ZERO), Ok(true)) {
                    return Ok(());
                }
                return Err(self.handle_disconnect(peer, how, operation));
            }
            self.check_deadline(&mut waiting, operation, missing)?;
        }
    }

    pub fn begin_wait(&self) -> WaitDeadline<'_> {
        let (since, timeout) = (Instant::now(), self.timeout());
        WaitDeadline { since, timeout, warning: FIRST_WARNING, long: self.world.long_wait() }
    }

    /// Tells of a wait that has become long, and fails the group when its time is over.
    pub fn check_deadline(
        &self,
        waiting: &mut WaitDeadline,
        operation: &dyn Display,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Result<()> {
        let (rank, timeout, waited) = (self.world.rank, waiting.timeout, waiting.since.elapsed());
        self.publish_progress(waited, timeout);
        if let Some(long) = &mut waiting.long {
            long.look(waited, operation, || missing().iter().map(|&r| self.ranks[r]).collect());
        }
        if waited >= timeout {
            let missing = self.describe_all(&self.lagging(missing()));
            let missing = format!("{missing} (rank {rank} is {})", self.recorder.summary());
            let operation = operation.to_string();
            return Err(self.fail(Error::Timeout { rank, operation, timeout, missing }));
        }
        if waited >= waiting.warning {
            let missing = self.describe_all(&missing());
            log::warn!("rank {rank}: {operation} has waited {} s for {missing}", waited.as_secs());
            waiting.warning *= 2;
        }
        Ok(())
    }

    pub fn has_buckets(&self) -> bool {
        !self.state().in_flight.is_empty()
    }

    pub fn ranks_where(&self, condition: impl Fn(usize) -> bool) -> Vec<usize> {
        (0..self.size()).filter(|&r| condition(r)).collect()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !state.in_flight.is_empty() {
            self.quarantine(); // others may yet write to these buckets
        }
        self.disconnect();
        self.control.rank(self.rank).left.store(1, Ordering::SeqCst);
        self.control.wake_all();
        self.control.header().attached.fetch_sub(1, Ordering::SeqCst);
        let block = self.block.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(block) = block {
            let control = Control::attach(
                Arc::clone(&self.world.arena),
                block.offset(),
                self.size(),
                self.locals.len(),
            );
            self.world.retire(block, control);
        }
    }
}
