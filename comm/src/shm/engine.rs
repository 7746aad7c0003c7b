//! Rounds: the one protocol beneath all collectives of a group.
//!
//! A round: write the post (what, how much, where), raise `arrived`, wait until all have arrived, compare the posts,
//! move data, raise `done`. Whoever waits watches the peers' lives and the clock. The first failure poisons the group.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::arena::Block;
use super::control::{Control, Counter, SLOTS};
use super::operation::{Location, Operation};
use super::reduction::InFlight;
use super::world::{sleep_on, World, FIRST_WARNING, SLICE};
use crate::arguments::Caller;
use crate::error::{Error, Result};

/// How long to spin before sleeping, where every rank has a core: some times what it takes to be woken, which is tens
/// of microseconds, and more on virtual machines.
const SPIN: Duration = Duration::from_micros(500);
/// Kind of a poison note whose ranks have more to say: see [`Engine::fail_with_notice`].
const NOTICES: u32 = 1;
/// Kind of a poison note about the loss of the group's first rank; of the next, one more; and so on.
const LOST: u32 = 2;

/// This rank's part in one group.
pub struct Engine {
    pub world: Arc<World>,
    pub control: Control,
    /// This rank within the group, and the members' ranks in the job.
    pub rank: usize,
    pub ranks: Vec<usize>,
    /// The control block, in its first rank.
    block: Mutex<Option<Block>>,
    timeout: AtomicU64,
    quarantined: AtomicBool,
    state: Mutex<State>,
    /// Held while sending to, and while receiving from, each rank.
    pub mail: Vec<[Mutex<()>; 2]>,
}

/// Advanced equally on all ranks.
#[derive(Default)]
pub struct State {
    round: u64,
    sequence: u64,
    /// The last round that used each staging buffer.
    pub staged: [Option<u64>; 2],
    pub in_flight: VecDeque<InFlight>,
    /// Buckets whose reduction is over, and when it was seen to be.
    pub finished: Vec<(u32, Instant)>,
}

impl Engine {
    pub fn new(
        world: Arc<World>,
        control: Control,
        block: Option<Block>,
        ranks: Vec<usize>,
        timeout: Duration,
    ) -> Self {
        let mail = ranks.iter().map(|_| Default::default()).collect();
        let rank = ranks.iter().position(|&r| r == world.rank).expect("the caller is a member"); // invariant
        let engine = Self {
            world,
            control,
            rank,
            ranks,
            block: Mutex::new(block),
            timeout: AtomicU64::new(0),
            quarantined: AtomicBool::new(false),
            state: Mutex::default(),
            mail,
        };
        engine.set_timeout(timeout);
        engine
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
        self.timeout.store(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an operation its sequence number; fails at once in a poisoned group.
    pub fn number(&self, state: &mut State, operation: &mut Operation) -> Result<()> {
        operation.sequence = state.sequence;
        self.check_poison(&operation)?;
        state.sequence += 1;
        Ok(())
    }

    /// The next round, or None while its slot is still in use by a slow rank.
    pub fn try_open(&self, state: &mut State) -> Option<u64> {
        let round = state.round;
        let free = round < SLOTS || self.control.slot(round).done.reached(self.control.target(round - SLOTS));
        free.then(|| {
            state.round += 1;
            round
        })
    }

    /// The next round, waiting for its slot.
    pub fn open(&self, state: &mut State, operation: &Operation) -> Result<u64> {
        if let Some(round) = self.try_open(state) {
            return Ok(round);
        }
        self.wait_done(state.round - SLOTS, operation)?;
        state.round += 1;
        Ok(state.round - 1)
    }

    pub fn post(&self, round: u64, operation: &Operation, location: Location) {
        operation.write(location, self.control.post(round, self.rank));
    }

    // The counters first: a rank that is killed in between must be among those that the others miss.

    pub fn arrive(&self, round: u64) {
        self.control.slot(round).arrived.raise(self.control.target(round));
        self.control.rank(self.rank).posted.store(round + 1, Ordering::Release);
    }

    pub fn done(&self, round: u64) {
        self.control.slot(round).done.raise(self.control.target(round));
        self.control.rank(self.rank).completed.store(round + 1, Ordering::Release);
    }

    pub fn all_arrived(&self, round: u64) -> bool {
        self.control.slot(round).arrived.reached(self.control.target(round))
    }

    pub fn all_done(&self, round: u64) -> bool {
        self.control.slot(round).done.reached(self.control.target(round))
    }

    pub fn wait_arrived(&self, round: u64, operation: &Operation) -> Result<()> {
        let missing = || self.ranks_where(|r| self.control.rank(r).posted.load(Ordering::Acquire) <= round);
        self.wait(&self.control.slot(round).arrived, self.control.target(round), operation, &missing)
    }

    pub fn wait_done(&self, round: u64, operation: &Operation) -> Result<()> {
        let missing = || self.ranks_where(|r| self.control.rank(r).completed.load(Ordering::Acquire) <= round);
        self.wait(&self.control.slot(round).done, self.control.target(round), operation, &missing)
    }

    /// Every rank's post of a round in which all have arrived, compared with ours. `bytes` is how much a shared
    /// location must hold.
    pub fn locations(&self, round: u64, operation: &Operation, bytes: usize) -> Result<Vec<Location>> {
        let read = |rank| match Operation::read(self.control.post(round, rank)) {
            Ok((theirs, location)) if theirs == *operation => match location {
                Location::Shared(offset) if !self.is_reachable(rank, offset, bytes) => {
                    Err(format!("rank {} posted {theirs} outside the shared memory", self.ranks[rank]))
                }
                _ => Ok(location),
            },
            Ok((theirs, _)) => {
                let same = Operation { layout: operation.layout, ..theirs } == *operation;
                let pieces = if same { " with pieces of other lengths" } else { "" };
                let (own, peer) = (self.ranks[self.rank], self.ranks[rank]);
                Err(format!("rank {own} called {operation}, rank {peer} called {theirs}{pieces}"))
            }
            Err(unknown) => Err(format!("rank {} posted {unknown}", self.ranks[rank])),
        };
        (0..self.size())
            .map(read)
            .collect::<Result<_, String>>()
            .map_err(|detail| self.fail(Error::Mismatch { rank: self.world.rank, detail }))
    }

    /// Whether what a member says of its memory can be: offsets of peers are checked before use.
    pub fn is_reachable(&self, rank: usize, offset: usize, bytes: usize) -> bool {
        self.world.arena.holds(self.ranks[rank], offset, bytes)
    }

    /// Waits until `counter` has come to `target`; `missing` says which members of the group are waited for.
    pub fn wait(
        &self,
        counter: &Counter,
        target: u32,
        operation: &dyn std::fmt::Display,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Result<()> {
        if counter.reached(target) {
            return Ok(());
        }
        let start = Instant::now();
        if self.world.spin {
            while start.elapsed() < SPIN {
                for _ in 0..64 {
                    if counter.reached(target) {
                        return Ok(());
                    }
                    std::hint::spin_loop();
                }
            }
        }
        let timeout = self.timeout();
        let mut warning = FIRST_WARNING;
        let mut look = SLICE.min(timeout);
        loop {
            sleep_on(counter, target, look.saturating_sub(start.elapsed()));
            if counter.reached(target) {
                return Ok(());
            }
            if let Err(error) = self.check_failure(operation, true) {
                // The others may have come to the end of this, and failed in what follows.
                return if counter.reached(target) { Ok(()) } else { Err(error) };
            }
            if start.elapsed() < look {
                continue;
            }
            look = (start.elapsed() + SLICE).min(timeout);
            if let Some(peer) = self.lost(missing) {
                // Arriving may have been the last thing it did.
                if counter.reached(target) {
                    return Ok(());
                }
                return Err(self.lose(peer, operation));
            }
            if start.elapsed() >= timeout {
                let missing = self.describe_all(&missing());
                let operation = operation.to_string();
                return Err(self.fail(Error::Timeout { rank: self.world.rank, operation, timeout, missing }));
            }
            if start.elapsed() >= warning {
                log::warn!(
                    "rank {}: {operation} has waited {} s for {}",
                    self.world.rank,
                    start.elapsed().as_secs(),
                    self.describe_all(&missing())
                );
                warning *= 2;
            }
        }
    }

    /// Marks the group as failed, wakes everyone, and hands the error back.
    pub fn fail(&self, error: Error) -> Error {
        self.poison(0, &error.to_string());
        error
    }

    /// Fails the group for a reason of which other ranks may have their own part to tell: every rank calls this,
    /// with an empty text if it has nothing to add, and gets what all ranks said, with their ranks.
    pub fn fail_with_notice(&self, operation: &str, own: &str) -> Vec<(usize, String)> {
        self.control.rank(self.rank).notice.write(0, own);
        self.poison(NOTICES, &format!("rank {}: {operation}: {own}", self.world.rank));
        let deadline = Instant::now() + self.timeout();
        let silent = || self.ranks_where(|r| !self.control.rank(r).notice.is_set());
        // If the group had failed for another reason, the others have heard of that and write no notices.
        let awaited = || self.control.header().poison.read().is_none_or(|(kind, _)| kind == NOTICES);
        while awaited() && !silent().is_empty() && Instant::now() < deadline && self.lost(&silent).is_none() {
            // A failure path: peers still finish their backward, so there is nothing to be quick about.
            std::thread::sleep(Duration::from_millis(2));
        }
        let notices = (0..self.size()).filter_map(|r| Some((self.ranks[r], self.control.rank(r).notice.read()?.1)));
        notices.filter(|(_, text)| !text.is_empty()).collect()
    }

    /// Whether the group failed in a way that [`Engine::fail_with_notice`] completes.
    pub fn awaits_notice(&self) -> bool {
        self.control.header().poison.read().is_some_and(|(kind, _)| kind == NOTICES)
    }

    /// The error of an operation that begins in a group that has failed.
    pub fn check_poison(&self, operation: &dyn std::fmt::Display) -> Result<()> {
        self.check_failure(operation, false)
    }

    /// Whichever rank saw it first, the loss of a peer is the same error to every operation that was `under_way`, and
    /// to the first that begins after it.
    pub fn check_failure(&self, operation: &dyn std::fmt::Display, under_way: bool) -> Result<()> {
        let Some((kind, cause)) = self.control.header().poison.read() else { return Ok(()) };
        let first = self.quarantine();
        let peer = kind.checked_sub(LOST).map(|peer| peer as usize).filter(|&peer| peer < self.size());
        Err(match peer {
            Some(peer) if under_way || first => self.peer_lost(peer, operation),
            _ => Error::Poisoned { rank: self.world.rank, operation: operation.to_string(), cause },
        })
    }

    /// Makes the group unusable on all ranks because this one says so.
    pub fn abort(&self, cause: &str) {
        // Nor is there anything else to wait for from this rank.
        self.control.rank(self.rank).notice.write(0, "");
        self.poison(0, &format!("rank {} aborted the group: {cause}", self.world.rank));
    }

    fn poison(&self, kind: u32, text: &str) {
        self.control.header().poison.write(kind, text);
        self.quarantine();
        self.control.wake_all();
    }

    /// Returns whether this is the first that this rank hears of a failure.
    fn quarantine(&self) -> bool {
        if self.quarantined.load(Ordering::SeqCst) {
            return false;
        }
        // Before anyone may take it for done; twice does no harm.
        self.world.arena.quarantine();
        !self.quarantined.swap(true, Ordering::SeqCst)
    }

    fn ranks_where(&self, condition: impl Fn(usize) -> bool) -> Vec<usize> {
        (0..self.size()).filter(|&r| condition(r)).collect()
    }

    /// The first of the missing ranks that can never arrive.
    fn lost(&self, missing: &dyn Fn() -> Vec<usize>) -> Option<usize> {
        let ranks: Vec<usize> = missing().iter().map(|&r| self.ranks[r]).collect();
        let ended = self.world.ended(&ranks, Duration::ZERO);
        // Only now is it certain that a rank that has ended, or left, did so without arriving.
        let missing = missing();
        let left = missing.iter().find(|&&r| self.has_left(r));
        left.or_else(|| missing.iter().find(|&&r| ended.contains(&self.ranks[r]))).copied()
    }

    /// Fails the group because `peer`, a rank of it, has left or ended.
    pub fn lose(&self, peer: usize, operation: &dyn std::fmt::Display) -> Error {
        let error = self.peer_lost(peer, operation);
        self.poison(LOST + peer as u32, &error.to_string());
        error
    }

    /// The other members that have left the group or ended.
    pub fn gone(&self) -> Vec<usize> {
        let ended = self.world.ended(&self.ranks, Duration::ZERO);
        self.ranks_where(|r| r != self.rank && (self.has_left(r) || ended.contains(&self.ranks[r])))
    }

    pub fn has_left(&self, rank: usize) -> bool {
        self.control.rank(rank).left.load(Ordering::SeqCst) != 0
    }

    /// The error for an operation that needs `peer`, a rank of this group that has left or ended.
    fn peer_lost(&self, peer: usize, operation: &dyn std::fmt::Display) -> Error {
        let global = self.ranks[peer];
        let end = self.world.cause_of_loss(global, self.has_left(peer));
        Error::PeerLost {
            rank: self.world.rank,
            operation: operation.to_string(),
            peer: format!("{} {end}", self.world.describe(global)),
        }
    }

    fn describe_all(&self, missing: &[usize]) -> String {
        let one = |&rank: &usize| {
            let rounds = self.control.rank(rank).posted.load(Ordering::Acquire);
            format!("{}, which has arrived {rounds} times", self.world.describe(self.ranks[rank]))
        };
        let mut text = missing.iter().take(8).map(one).collect::<Vec<_>>().join("; ");
        if missing.len() > 8 {
            text += &format!("; and {} more", missing.len() - 8);
        }
        text
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !state.in_flight.is_empty() {
            self.quarantine(); // others may yet write to these buckets
        }
        self.control.rank(self.rank).left.store(1, Ordering::SeqCst);
        self.control.wake_all();
        self.control.header().attached.fetch_sub(1, Ordering::SeqCst);
        let block = self.block.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(block) = block {
            let control = Control::attach(Arc::clone(&self.world.arena), block.offset(), self.ranks.len());
            self.world.bury(block, control);
        }
    }
}
