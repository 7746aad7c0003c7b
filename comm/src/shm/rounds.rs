//! Rounds: the one protocol beneath all collectives of a group.
//!
//! A round: publish the descriptor (what, how much, where), raise `arrived`, wait until all have
//! arrived, compare the descriptors, move data, raise `done`. Whoever waits watches the peers'
//! lives and the clock. The first failure poisons the group.
//!
//! Members on other nodes take part through the leader, this node's first member. When all members
//! here have arrived, the leader fetches the descriptors of the others (see `internode`), and
//! arrives for them. When it is done, so are they.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::control::{Control, SLOTS};
use super::distance::Distance;
use crate::descriptor::{Location, OpDescriptor};
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::group::core::GroupCore;

/// A group's control block, and how far this rank is in it.
pub struct Rounds {
    pub core: Arc<GroupCore>,
    pub failure: Arc<Failure>,
    pub control: Arc<Control>,
    state: Mutex<RoundState>,
}

/// All ranks advance it equally. One collective at a time has it.
#[derive(Default)]
pub struct RoundState {
    next: u64,
    /// The last round that used each staging buffer.
    staged: [Option<u64>; 2],
    /// How far the ranks are apart, if they are two.
    pub distance: Distance,
}

impl Rounds {
    /// Returns the rounds of a group, before the first.
    pub fn new(failure: Arc<Failure>) -> Self {
        Self {
            core: Arc::clone(&failure.core),
            control: Arc::clone(&failure.control),
            failure,
            state: Mutex::default(),
        }
    }

    /// Locks the state, for the length of a collective.
    pub fn lock(&self) -> MutexGuard<'_, RoundState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next round, or None while its slot is still in use by a slow rank.
    pub fn try_acquire(&self, state: &mut RoundState) -> Option<u64> {
        let round = state.next;
        let is_free = round < SLOTS
            || self.control.slot(round).done.reached(self.control.target(round - SLOTS));
        is_free.then(|| {
            state.next += 1;
            round
        })
    }

    /// Takes the next two rounds, or None while their slots are in use.
    pub fn try_acquire_two(&self, state: &mut RoundState) -> Option<(u64, u64)> {
        let round = state.next;
        let first = self.try_acquire(state)?;
        let second = self.try_acquire(state);
        if second.is_none() {
            state.next = round;
        }
        Some((first, second?))
    }

    /// Takes the next round, waiting for its slot.
    pub fn acquire(&self, state: &mut RoundState, operation: &OpDescriptor) -> Result<u64> {
        if let Some(round) = self.try_acquire(state) {
            return Ok(round);
        }
        self.wait_done(state.next - SLOTS, operation)?;
        state.next += 1;
        Ok(state.next - 1)
    }

    /// Returns this rank's staging buffer for a round, as soon as nobody reads what it held before.
    pub fn stage(
        &self,
        state: &mut RoundState,
        round: u64,
        operation: &OpDescriptor,
    ) -> Result<*mut u8> {
        self.stage_in(state, (round % 2) as usize, round, operation)
    }

    /// Waits as [`Rounds::stage`] does, with the buffer chosen; `round` is the last round that uses
    /// it.
    pub fn stage_in(
        &self,
        state: &mut RoundState,
        which: usize,
        round: u64,
        operation: &OpDescriptor,
    ) -> Result<*mut u8> {
        // A round whose slot has been opened again is over, and its counters have moved on.
        if let Some(last) =
            state.staged[which].replace(round).filter(|&last| last < round && round - last < SLOTS)
        {
            self.wait_done(last, operation)?;
        }
        Ok(self.control.staging(self.core.rank, which))
    }

    /// Publishes what this rank does in a round, and where its data lies.
    pub fn publish(&self, round: u64, operation: &OpDescriptor, location: Location) {
        operation.write(location, self.control.descriptor(round, self.core.rank));
    }

    /// Arrives in a round.
    pub fn arrive(&self, round: u64) {
        // The counter comes first: if a rank is killed in between, the others still miss it.
        let targets = [self.control.target(round), self.control.local_target(round)];
        self.control.slot(round).arrived.raise_by(1, &targets);
        self.control.set_arrived(round, self.core.rank);
    }

    /// Arrives for the members on other nodes, in the leader, once it has what they contribute to a
    /// round.
    pub fn arrive_for_remote(&self, round: u64) {
        let count = self.core.remote_size() as u32;
        self.control.slot(round).arrived.raise_by(count, &[self.control.target(round)]);
        for rank in self.core.ranks_where(|r| !self.core.locals.contains(&r)) {
            self.control.set_arrived(round, rank);
        }
    }

    /// Ends a round for this rank: it no longer touches others' memory of the round.
    pub fn done(&self, round: u64) {
        let count = if self.core.is_leader() { 1 + self.core.remote_size() as u32 } else { 1 };
        self.control.slot(round).done.raise_by(count, &[self.control.target(round)]);
        self.control.set_done(round, self.core.rank);
    }

    /// Whether all ranks have arrived in a round.
    pub fn all_arrived(&self, round: u64) -> bool {
        self.control.slot(round).arrived.reached(self.control.target(round))
    }

    /// Whether all members on this node have arrived.
    pub fn locals_arrived(&self, round: u64) -> bool {
        self.control.slot(round).arrived.reached(self.control.local_target(round))
    }

    /// Whether all ranks are done with a round.
    pub fn all_done(&self, round: u64) -> bool {
        self.control.slot(round).done.reached(self.control.target(round))
    }

    /// Waits until all ranks have arrived in a round.
    pub fn wait_all_arrived(&self, round: u64, operation: &OpDescriptor) -> Result<()> {
        let arrived = &self.control.slot(round).arrived;
        self.failure.wait(arrived, self.control.target(round), operation, &|| {
            self.core.ranks_where(|rank| !self.control.has_arrived(round, rank))
        })
    }

    /// Waits until all members on this node have arrived in a round.
    pub fn wait_locals_arrived(&self, round: u64, operation: &OpDescriptor) -> Result<()> {
        let arrived = &self.control.slot(round).arrived;
        self.failure.wait(arrived, self.control.local_target(round), operation, &|| {
            self.core.locals_where(|rank| !self.control.has_arrived(round, rank))
        })
    }

    /// Waits until all ranks are done with a round. The leader is done for members on other nodes,
    /// so only those on this node can be missing.
    pub fn wait_done(&self, round: u64, operation: &OpDescriptor) -> Result<()> {
        let done = &self.control.slot(round).done;
        self.failure.wait(done, self.control.target(round), operation, &|| {
            self.core.locals_where(|rank| !self.control.is_done(round, rank))
        })
    }

    /// Returns where every rank's data of a round lies, once all have arrived and their descriptors
    /// agree with ours. `bytes(rank)` is how much a shared location must hold.
    pub fn locations(
        &self,
        round: u64,
        operation: &OpDescriptor,
        bytes: &dyn Fn(usize) -> usize,
    ) -> Result<Vec<Location>> {
        self.published_by(&mut (0..self.core.size()), round, operation, bytes)
    }

    /// Returns the same as [`Rounds::locations`] of the members on this node, once these have
    /// arrived.
    pub fn local_locations(
        &self,
        round: u64,
        operation: &OpDescriptor,
        bytes: &dyn Fn(usize) -> usize,
    ) -> Result<Vec<Location>> {
        self.published_by(&mut self.core.locals.iter().copied(), round, operation, bytes)
    }

    /// Whether all have published this operation.
    pub fn all_agree(&self, round: u64, operation: &OpDescriptor) -> bool {
        (0..self.core.size()).all(|rank| operation.is_in(self.control.descriptor(round, rank)))
    }

    /// Returns the error of ranks that differ, once all have arrived, where no data is shared.
    pub fn check_agreement(&self, round: u64, operation: &OpDescriptor) -> Result<()> {
        if self.all_agree(round, operation) {
            return Ok(());
        }
        self.locations(round, operation, &|_| 0).map(drop)
    }

    fn published_by(
        &self,
        ranks: &mut dyn Iterator<Item = usize>,
        round: u64,
        operation: &OpDescriptor,
        bytes: &dyn Fn(usize) -> usize,
    ) -> Result<Vec<Location>> {
        ranks
            .map(|rank| self.location(rank, round, operation, bytes(rank)))
            .collect::<Result<_, String>>()
            .map_err(|detail| {
                self.failure.fail(Error::Mismatch { rank: self.core.world.rank, detail })
            })
    }

    /// Returns where a rank's data of a round lies; `bytes` is how much a shared location must
    /// hold.
    ///
    /// # Errors
    /// How what the rank has published differs from this rank's `operation`.
    fn location(
        &self,
        rank: usize,
        round: u64,
        operation: &OpDescriptor,
        bytes: usize,
    ) -> Result<Location, String> {
        let peer = self.core.ranks[rank];
        let (theirs, location) = OpDescriptor::read(self.control.descriptor(round, rank))
            .map_err(|unknown| format!("rank {peer} published {unknown}"))?;
        if !theirs.agrees(operation) {
            return Err(self.difference(operation, &theirs, peer));
        }
        match location {
            Location::Shared(offset)
                if self.core.locals.contains(&rank)
                    && !self.core.is_reachable(rank, offset, bytes) =>
            {
                Err(format!("rank {peer} published {theirs} outside the shared memory"))
            }
            location => Ok(location),
        }
    }

    /// Returns how the operation of `peer`, a rank of the job, differs from this rank's.
    fn difference(&self, operation: &OpDescriptor, theirs: &OpDescriptor, peer: usize) -> String {
        let own = self.core.world.rank;
        if theirs.bucket.and(operation.bucket).is_some() && theirs.step != operation.step {
            return format!(
                "rank {own} is in step {}, rank {peer} in step {} (a forward in training mode \
                 without its backward is a step: one of them skipped a backward, had a loss \
                 without parameters, caught a backward's error, or had a forward more than the \
                 others: evaluate with train = false or under no_grad)",
                operation.step, theirs.step
            );
        }
        let is_same = OpDescriptor { digest: operation.digest, ..*theirs }.agrees(operation);
        let pieces = match operation.bucket {
            Some(_) if is_same => " with pieces of other lengths",
            None if is_same => " with other counts or another layout",
            _ => "",
        };
        format!("rank {own} called {operation}, rank {peer} called {theirs}{pieces}")
    }
}
