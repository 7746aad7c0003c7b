//! Buckets of gradients: reductions that begin during backward, where each rank does its share
//! without waiting for the others.
//!
//! Launching publishes where the gradients lie. For each bucket that all ranks have launched, rank
//! r then reduces slice r over all ranks' gradients. It writes the result into all of them; where
//! ranks get parts, each reduces its own, and writes into memory that is its alone. Over
//! several nodes a bucket has two rounds: reduced on this node, into the leader's gradients, and
//! reduced everywhere. Between them a thread of the leader transfers. At the end each rank copies
//! the whole, or its parts, from the leader. Virtual ranks are added up in a tree; over several nodes, in
//! its largest subtrees that are on one node each, and then these.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::hierarchical::{Hierarchical, InterNodeBucket};
use super::kernel::{is_mean_of_integers, reduce_all, reduce_on_node, slice, sum_in_tree};
use super::launch::{BucketLaunch, LaunchedBucket};
use super::pieces::pieces_of_locals;
use crate::descriptor::OpDescriptor;
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::group::core::GroupCore;
use crate::shm::bytes;
use crate::shm::rounds::Rounds;
use crate::shm::segments::Segments;
use crate::virtual_ranks::{NodeTree, Subtree};
use crate::work::Worker;

/// The operation's name in errors.
const LAUNCH: &str = "launch_bucket";

/// The buckets that this rank has launched, the oldest first.
pub struct BucketQueue {
    /// Reduces buckets between nodes, in the leader. Its thread ends first.
    leader_thread: Mutex<Option<Worker>>,
    core: Arc<GroupCore>,
    failure: Arc<Failure>,
    rounds: Arc<Rounds>,
    hierarchical: Option<Arc<Hierarchical>>,
    launched: Mutex<VecDeque<QueuedBucket>>,
}

struct QueuedBucket {
    bucket: LaunchedBucket,
    round: u64,
    /// Over several nodes: the round in which all ranks copy the result from their leaders.
    result_round: Option<u64>,
    reduced: bool,
}

impl BucketQueue {
    /// Returns an empty queue.
    pub fn new(rounds: Arc<Rounds>, hierarchical: Option<Arc<Hierarchical>>) -> Self {
        Self {
            leader_thread: Mutex::default(),
            core: Arc::clone(&rounds.core),
            failure: Arc::clone(&rounds.failure),
            rounds,
            hierarchical,
            launched: Mutex::default(),
        }
    }

    /// Launches a bucket. Does not wait; false if too many buckets are under way, then nothing was
    /// done. All ranks launch the same buckets in the same order.
    pub fn launch(&self, launch: BucketLaunch) -> Result<bool> {
        if self.hierarchical.is_some() && is_mean_of_integers(&launch.operation) {
            let reason = format!(
                "bucket {} is to be an average of integers, which buckets cannot be over several \
                 nodes; sum them",
                launch.segments.bucket
            );
            return Err(self.core.caller().argument(LAUNCH, reason));
        }
        let mut launched = self.launched();
        let Some((round, result_round)) = self.try_acquire() else {
            return self.advance(&mut launched, false).map(|()| false);
        };
        let bucket = launch.begin();
        self.rounds.publish(round, &bucket.operation, bucket.segments.location());
        self.rounds.arrive(round);
        if let Some(result_round) = result_round {
            self.rounds.arrive(result_round);
        }
        let inter_node =
            result_round.filter(|_| self.core.is_leader()).map(|result_round| InterNodeBucket {
                round,
                result_round,
                operation: bucket.operation,
                segments: Arc::clone(&bucket.segments),
            });
        // In the leader the leader thread does the rest.
        let reduced = inter_node.is_some();
        launched.push_back(QueuedBucket { bucket, round, result_round, reduced });
        if let Some(bucket) = inter_node {
            self.reduce_between_nodes(bucket)?;
        }
        Ok(true)
    }

    /// Hands a bucket to the leader thread, in the order of launching.
    fn reduce_between_nodes(&self, bucket: InterNodeBucket) -> Result<()> {
        let Some(hierarchical) = self.hierarchical.clone() else { return Ok(()) };
        let rank = self.core.rank;
        let mut worker = self.leader_thread.lock().unwrap_or_else(PoisonError::into_inner);
        let worker = match &mut *worker {
            Some(worker) => worker,
            none => none.insert(Worker::start(rank).map_err(|error| {
                self.failure.fail(Error::System {
                    rank: self.core.world.rank,
                    operation: LAUNCH.into(),
                    reason: format!("cannot start a thread: {error}"),
                })
            })?),
        };
        // An error is the group's, and found by whoever waits for the bucket.
        drop(worker.submit(rank, LAUNCH, move || hierarchical.reduce_bucket(&bucket)));
        Ok(())
    }

    /// Takes the rounds of a bucket, or None while their slots are in use.
    fn try_acquire(&self) -> Option<(u64, Option<u64>)> {
        let mut state = self.rounds.lock();
        match self.hierarchical {
            None => Some((self.rounds.try_acquire(&mut state)?, None)),
            Some(_) => {
                let (round, result_round) = self.rounds.try_acquire_two(&mut state)?;
                Some((round, Some(result_round)))
            }
        }
    }

    /// Reduces this rank's slices of all buckets that all ranks have launched, without waiting.
    pub fn progress(&self) -> Result<()> {
        self.advance(&mut self.launched(), false)
    }

    /// Waits for all launched buckets.
    pub fn finish(&self) -> Result<()> {
        self.advance(&mut self.launched(), true)
    }

    /// Waits for a launched bucket and those before it, but not for those after it.
    pub fn finish_one(&self, segments: &Segments) -> Result<()> {
        self.advance_in_turn(&mut self.launched(), Some(segments))
    }

    /// Waits until no thread of this process reduces a bucket, and has none begin, in a group that has
    /// failed.
    pub fn settle(&self) {
        let leader = self.leader_thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(worker) = &*leader {
            worker.drain();
        }
        let _not_under_way = self.launched();
        self.failure.cancel();
    }

    fn launched(&self) -> MutexGuard<'_, VecDeque<QueuedBucket>> {
        self.launched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn advance(&self, launched: &mut VecDeque<QueuedBucket>, wait: bool) -> Result<()> {
        if wait && self.hierarchical.is_some() {
            return self.advance_in_turn(launched, None);
        }
        if let Some(first) = launched.front().filter(|_| self.failure.is_cancelled()) {
            return self.failure.check_failure(&first.bucket.operation, true);
        }
        for queued in launched.iter_mut().filter(|queued| !queued.reduced) {
            if wait {
                self.rounds.wait_locals_arrived(queued.round, &queued.bucket.operation)?;
            } else if !self.rounds.locals_arrived(queued.round) {
                break;
            }
            match queued.bucket.segments.destinations() {
                Some(destinations) if self.hierarchical.is_none() => {
                    self.reduce_parts(queued, &destinations)?;
                }
                _ => self.reduce(queued)?,
            }
            queued.reduced = true;
            self.rounds.done(queued.round);
        }
        while let Some(first) = launched.front_mut().filter(|first| first.reduced) {
            if let Some(result_round) = first.result_round {
                if wait {
                    self.rounds.wait_all_arrived(result_round, &first.bucket.operation)?;
                } else if !self.rounds.all_arrived(result_round) {
                    break;
                }
                self.copy_from_leader(first)?;
                self.rounds.done(result_round);
                first.round = result_round;
                first.result_round = None;
            }
            if wait {
                self.rounds.wait_done(first.round, &first.bucket.operation)?;
            } else if !self.rounds.all_done(first.round) {
                break;
            }
            first.bucket.finish();
            launched.pop_front();
        }
        let Some(first) = launched.front() else { return Ok(()) };
        self.failure.check_failure(&first.bucket.operation, true).or_else(|error| {
            // The others may have come to the end of these, and failed in what follows.
            let is_over = launched.iter().all(|queued| self.rounds.all_done(queued.round));
            if is_over { Ok(()) } else { Err(error) }
        })
    }

    /// Finishes one bucket after the other, up to `last` if that is given: ranks that have launched
    /// fewer may wait for this one to copy the result of the first.
    fn advance_in_turn(
        &self,
        launched: &mut VecDeque<QueuedBucket>,
        last: Option<&Segments>,
    ) -> Result<()> {
        while let Some(first) = launched.front() {
            if last.is_some_and(|last| last.finished().is_some()) {
                return Ok(());
            }
            let QueuedBucket { bucket, round, result_round, reduced } = first;
            let operation = &bucket.operation;
            match result_round {
                _ if !reduced => self.rounds.wait_locals_arrived(*round, operation)?,
                Some(result_round) => self.rounds.wait_all_arrived(*result_round, operation)?,
                None => self.rounds.wait_done(*round, operation)?,
            }
            self.advance(launched, false)?;
        }
        Ok(())
    }

    /// Reduces this rank's slice of a bucket over the members on this node.
    fn reduce(&self, queued: &QueuedBucket) -> Result<()> {
        let LaunchedBucket { operation, segments, .. } = &queued.bucket;
        let pieces = pieces_of_locals(segments, &self.rounds, queued.round, operation)?;
        let element = segments.dtype.size();
        let core = &*self.core;
        // Over several nodes the leader gets the sum; it takes no slice, as it has other work.
        let (reducers, own) = match self.hierarchical {
            None => (core.size(), core.local),
            Some(_) => (core.locals.len() - 1, core.local.wrapping_sub(1)),
        };
        let slice = slice(segments.total, reducers, own, element);
        let mut begin = 0;
        for (length, places) in segments.lengths.iter().zip(pieces) {
            let low = slice.start.max(begin);
            let high = slice.end.min(begin + length);
            if low < high {
                let offset = (low - begin) * element;
                let to: Vec<*mut u8> =
                    places.into_iter().map(|place| place.wrapping_add(offset)).collect();
                let from: Vec<*const u8> = to.iter().map(|place| place.cast_const()).collect();
                // SAFETY: the members on this node have arrived, so their gradients are there and
                // hold still; slices do not overlap, so no other rank touches these elements.
                unsafe {
                    match (&segments.tree, &self.hierarchical) {
                        (Some(tree), _) => {
                            self.add_in_tree(operation, tree, &from, &to, high - low)
                        }
                        (None, None) => reduce_all(operation, &from, &to, high - low),
                        (None, Some(_)) => {
                            reduce_on_node(operation, &from, &to[..1], high - low, core.size());
                        }
                    }
                }
            }
            begin += length;
        }
        Ok(())
    }

    /// Adds up elements of the members on this node in the tree of their virtual ranks. Over several nodes, each
    /// subtree that is on this node alone gets its sum, in the memory of its first member.
    ///
    /// # Safety
    ///
    /// As for [`reduce_all`].
    unsafe fn add_in_tree(
        &self,
        operation: &OpDescriptor,
        tree: &NodeTree,
        from: &[*const u8],
        to: &[*mut u8],
        count: usize,
    ) {
        let core = &*self.core;
        if self.hierarchical.is_none() {
            // SAFETY: the caller's promise.
            unsafe {
                sum_in_tree(operation, &tree.subtrees[0].sums, from, to, count, Some(tree.count))
            };
            return;
        }
        for Subtree { members, sums, .. } in tree.of_node(core.nodes[core.rank]) {
            let first = core.locals.partition_point(|&rank| rank < members.start);
            let own = first..first + members.len();
            if own.len() > 1 {
                // SAFETY: the caller's promise.
                unsafe {
                    sum_in_tree(operation, sums, &from[own], &to[first..=first], count, None)
                };
            }
        }
    }

    /// Reduces this rank's parts of a bucket, each to its destination.
    fn reduce_parts(
        &self,
        queued: &QueuedBucket,
        destinations: &[(Range<usize>, *mut u8)],
    ) -> Result<()> {
        let LaunchedBucket { operation, segments, .. } = &queued.bucket;
        let pieces = pieces_of_locals(segments, &self.rounds, queued.round, operation)?;
        for (places, (part, destination)) in pieces.into_iter().zip(destinations) {
            if part.is_empty() {
                continue;
            }
            let offset = part.start * segments.dtype.size();
            let from: Vec<*const u8> =
                places.into_iter().map(|place| place.wrapping_add(offset).cast_const()).collect();
            // SAFETY: all ranks have arrived, so their gradients are there and hold still. The
            // destination is as long as the part, and this rank's alone.
            unsafe { reduce_all(operation, &from, &[*destination], part.len()) };
        }
        Ok(())
    }

    /// Copies what the leader has of a bucket that is reduced over all nodes, or this rank's parts.
    fn copy_from_leader(&self, queued: &QueuedBucket) -> Result<()> {
        let LaunchedBucket { operation, segments, .. } = &queued.bucket;
        // Only now are the descriptors of the other nodes here.
        self.rounds.locations(queued.round, operation, &|_| 0)?;
        let destinations = segments.destinations();
        if self.core.local == 0 && destinations.is_none() {
            return Ok(());
        }
        let element = segments.dtype.size();
        let pieces = pieces_of_locals(segments, &self.rounds, queued.round, operation)?;
        if let Some(destinations) = destinations {
            for (places, (part, destination)) in pieces.iter().zip(destinations) {
                if !part.is_empty() {
                    let from = places[0].wrapping_add(part.start * element);
                    // SAFETY: the part is in the leader's piece, which is final. The destination is as
                    // long, and this rank's alone.
                    unsafe { bytes::copy(from, destination, part.len() * element) };
                }
            }
            return Ok(());
        }
        let pieces = segments.lengths.iter().zip(pieces).zip(segments.pieces());
        for ((length, places), own) in pieces.filter(|((length, _), _)| **length > 0) {
            // SAFETY: both are pieces of that length, in memory that all ranks of this node map;
            // the leader's is final, and this rank's own is its alone now.
            unsafe { bytes::copy(places[0], own, length * element) };
        }
        Ok(())
    }
}

impl Drop for BucketQueue {
    fn drop(&mut self) {
        let thread = self.leader_thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let launched = self.launched.get_mut().unwrap_or_else(PoisonError::into_inner);
        let has_buckets = !launched.is_empty();
        if thread.is_some() && has_buckets {
            // Nobody waits for the buckets that are still under way.
            self.failure.cancel();
        }
        drop(thread);
        if has_buckets {
            self.failure.quarantine(); // others may yet write to these buckets
        }
    }
}
