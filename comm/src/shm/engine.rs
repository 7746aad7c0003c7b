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
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::arena::Block;
use super::control::{Control, SLOTS};
use super::internode::InterNode;
use super::message_queue::MessageQueue;
use super::reduction::InFlight;
use crate::descriptor::{Location, OpDescriptor};
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::group::core::GroupCore;
use crate::trace::{Queued, Start};
use crate::transport::Connections;
use crate::world::World;

/// To a rank on another node, once there has been a message.
pub type Link = Option<Box<dyn Connections>>;

/// This rank's part in one group.
pub struct Engine {
    pub core: Arc<GroupCore>,
    pub failure: Arc<Failure>,
    pub control: Arc<Control>,
    /// What there is to members on other nodes, if there are any.
    pub inter_node: Option<InterNode>,
    state: Mutex<State>,
    /// Held while sending to each rank; with the link to a rank on another node.
    pub outgoing: Vec<Mutex<Link>>,
    /// What comes from each rank.
    pub queues: Vec<MessageQueue>,
    /// Where a receive from any rank begins to look, so that each has its turn.
    pub next_sender: AtomicUsize,
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
        let core = Arc::new(GroupCore::new(world, ranks, timeout, name));
        let control = Arc::new(control);
        let failure = Arc::new(Failure::new(Arc::clone(&core), Arc::clone(&control), block));
        let outgoing = core.ranks.iter().map(|_| Default::default()).collect();
        let local = |rank: usize| core.locals.iter().position(|&local| local == rank);
        let queues = (0..core.size()).map(|rank| MessageQueue::new(local(rank))).collect();
        let inter_node = core.is_inter_node().then(|| InterNode::new(&core));
        let mut engine = Self {
            core,
            failure,
            control,
            inter_node,
            state: Mutex::default(),
            outgoing,
            queues,
            next_sender: AtomicUsize::new(0),
        };
        // Leaders see each other end from here on.
        engine.link()?;
        Ok(engine)
    }

    /// Whether this rank carries data between nodes for those of its own.
    pub fn is_leader(&self) -> bool {
        self.inter_node.is_some() && self.core.local == 0
    }

    /// How many members are on other nodes.
    pub fn remote_size(&self) -> usize {
        self.core.size() - self.core.locals.len()
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
        let sequence = || self.core.recorder.next_collective();
        operation.sequence = queued.map_or_else(sequence, |queued| queued.sequence);
        self.failure.check_poison(&operation)?;
        state.sequence += 1;
        self.core.sequence.store(state.sequence, Ordering::Relaxed);
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
        operation.write(location, self.control.descriptor(round, self.core.rank));
    }

    // The counters first: a rank that is killed in between must be among those that the others
    // miss.

    pub fn arrive(&self, round: u64) {
        let targets = [self.control.target(round), self.control.local_target(round)];
        self.control.slot(round).arrived.raise_by(1, &targets);
        self.control.set_arrived(round, self.core.rank);
    }

    /// The leader, when it has what the members on other nodes show in a round.
    pub fn arrive_for_remote(&self, round: u64) {
        self.control
            .slot(round)
            .arrived
            .raise_by(self.remote_size() as u32, &[self.control.target(round)]);
        for rank in self.core.ranks_where(|r| !self.core.locals.contains(&r)) {
            self.control.set_arrived(round, rank);
        }
    }

    pub fn done(&self, round: u64) {
        let count = if self.is_leader() { 1 + self.remote_size() as u32 } else { 1 };
        self.control.slot(round).done.raise_by(count, &[self.control.target(round)]);
        self.control.set_done(round, self.core.rank);
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
        let missing = || self.core.ranks_where(|r| !self.control.has_arrived(round, r));
        self.failure.wait(
            &self.control.slot(round).arrived,
            self.control.target(round),
            operation,
            &missing,
        )
    }

    pub fn wait_locals_arrived(&self, round: u64, operation: &OpDescriptor) -> Result<()> {
        let here = |r| self.core.locals.contains(&r) && !self.control.has_arrived(round, r);
        let missing = || self.core.ranks_where(here);
        self.failure.wait(
            &self.control.slot(round).arrived,
            self.control.local_target(round),
            operation,
            &missing,
        )
    }

    pub fn wait_done(&self, round: u64, operation: &OpDescriptor) -> Result<()> {
        let here = |r| self.core.locals.contains(&r) && !self.control.is_done(round, r);
        let missing = || self.core.ranks_where(here);
        self.failure.wait(
            &self.control.slot(round).done,
            self.control.target(round),
            operation,
            &missing,
        )
    }

    /// Every rank's post of a round in which all have arrived, compared with ours. `bytes(rank)`
    /// is how much a shared location must hold.
    pub fn locations(
        &self,
        round: u64,
        operation: &OpDescriptor,
        bytes: &dyn Fn(usize) -> usize,
    ) -> Result<Vec<Location>> {
        self.posted_by(&mut (0..self.core.size()), round, operation, bytes)
    }

    /// Whether all have posted this operation.
    pub fn all_agree(&self, round: u64, operation: &OpDescriptor) -> bool {
        let posted = |rank| OpDescriptor::read(self.control.descriptor(round, rank));
        (0..self.core.size())
            .all(|rank| posted(rank).is_ok_and(|(theirs, _)| theirs.agrees(operation)))
    }

    /// As [`Engine::locations`], of the members on this node, once these have arrived.
    pub fn local_locations(
        &self,
        round: u64,
        operation: &OpDescriptor,
        bytes: &dyn Fn(usize) -> usize,
    ) -> Result<Vec<Location>> {
        self.posted_by(&mut self.core.locals.iter().copied(), round, operation, bytes)
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
                    if self.core.locals.contains(&rank)
                        && !self.is_reachable(rank, offset, bytes(rank)) =>
                {
                    Err(format!(
                        "rank {} posted {theirs} outside the shared memory",
                        self.core.ranks[rank]
                    ))
                }
                _ => Ok(location),
            },
            Ok((theirs, _))
                if theirs.bucket.and(operation.bucket).is_some()
                    && theirs.step != operation.step =>
            {
                let (own, peer) = (self.core.ranks[self.core.rank], self.core.ranks[rank]);
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
                let (own, peer) = (self.core.ranks[self.core.rank], self.core.ranks[rank]);
                Err(format!("rank {own} called {operation}, rank {peer} called {theirs}{pieces}"))
            }
            Err(unknown) => Err(format!("rank {} posted {unknown}", self.core.ranks[rank])),
        };
        ranks.map(read).collect::<Result<_, String>>().map_err(|detail| {
            self.failure.fail(Error::Mismatch { rank: self.core.world.rank, detail })
        })
    }

    /// Whether what a member says of its memory can be: offsets of peers are checked before use.
    pub fn is_reachable(&self, rank: usize, offset: usize, bytes: usize) -> bool {
        self.core
            .world
            .local_index(self.core.ranks[rank])
            .is_some_and(|index| self.core.world.arena.holds(index, offset, bytes))
    }

    pub fn has_buckets(&self) -> bool {
        !self.state().in_flight.is_empty()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !state.in_flight.is_empty() {
            self.failure.quarantine(); // others may yet write to these buckets
        }
        self.disconnect();
    }
}
