//! all_reduce, reduce, and bucket reductions.
//!
//! Rank r reduces slice r over all ranks' memory, in rank order, and writes the result to all of
//! them (for `reduce`: to the root). In shared memory that is done in place: each rank moves 2N
//! bytes however many ranks there are, and all ranks hold the same bits. Ordinary memory goes
//! through the staging buffers, the copies of one chunk overlapping with the reduction of another.
//!
//! Over several nodes that is so for small data, and for what needs each rank's own; see
//! `hierarchical` for the rest.

use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use flow_kernels::{DType, ReduceOp};
use fnv::FnvHasher;

use super::arena::{Arena, Block};
use super::contribution::{equal_extents, BufferView, Contribution, Contributors, Readers};
use super::control::{CHUNK, PAYLOAD};
use super::engine::{Engine, State};
use crate::descriptor::{Location, OpDescriptor};
use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::trace::RecordId;

/// Pieces of shared memory that are reduced as one: a bucket of gradients, where each was born.
///
/// Every rank has as many pieces of the same lengths; where they lie may differ.
pub struct Segments {
    bucket: u32,
    dtype: DType,
    pub(super) lengths: Vec<usize>,
    pub(super) total: usize,
    /// Tells buckets apart whose pieces differ in number or lengths.
    layout: u64,
    /// Which step the bucket is reduced in, the same on all ranks.
    step: AtomicU32,
    /// Offsets of the pieces, readable by all ranks.
    table: Block,
    pieces: Mutex<PlacedPieces>,
}

struct PlacedPieces {
    /// Keep the pieces' memory until it is reduced.
    owners: Vec<Option<Owner>>,
    under_way: bool,
    /// When this rank saw that the last reduction was over.
    finished: Option<Instant>,
}

type Owner = Box<dyn AsMut<[u8]> + Send>;

impl Segments {
    pub(crate) fn new(
        arena: &Arc<Arena>,
        bucket: u32,
        dtype: DType,
        lengths: Vec<usize>,
    ) -> Option<Self> {
        let total = lengths.iter().try_fold(0usize, |total, &length| total.checked_add(length))?;
        total.checked_mul(dtype.size())?;
        let mut hasher = FnvHasher::default();
        lengths.hash(&mut hasher);
        let table = arena.allocate_zeroed(lengths.len() * 8)?;
        let pieces = Mutex::new(PlacedPieces {
            owners: lengths.iter().map(|_| None).collect(),
            under_way: false,
            finished: None,
        });
        let (layout, step) = (hasher.finish(), AtomicU32::new(0));
        Some(Self { bucket, dtype, lengths, total, layout, step, table, pieces })
    }

    /// Says in which step, from 1 on, the bucket is posted next: ranks whose steps differ get an
    /// error that names both.
    pub fn set_step(&self, step: u32) {
        self.step.store(step, Ordering::Relaxed);
    }

    /// Says where piece `index` lies now: in `memory`, whose address stays the same until it is
    /// dropped, which is when the piece has been reduced; its `Drop` must not call the group. False
    /// if there is no such piece, the memory is too short or badly aligned for it, not all ranks
    /// can reach it there, or the bucket is being reduced.
    pub fn set_piece(&self, index: usize, memory: impl AsMut<[u8]> + Send + 'static) -> bool {
        let Some(length) = self.lengths.get(index) else { return false };
        let bytes = length * self.dtype.size();
        let mut owner: Owner = Box::new(memory);
        let memory = (*owner).as_mut();
        // Nothing at all may lie anywhere: nobody will look.
        let nothing = (bytes == 0).then_some(0);
        let Some(offset) = nothing.or_else(|| self.table.arena().offset_of(memory.as_ptr(), bytes))
        else {
            return false;
        };
        let mut pieces = self.pieces();
        if pieces.under_way || memory.len() < bytes || offset % self.dtype.size() != 0 {
            return false;
        }
        self.entry(self.table.offset(), index).store(offset as u64, Ordering::Relaxed);
        pieces.owners[index] = Some(owner);
        true
    }

    /// Lets go of the memory of all pieces, unless they are being reduced.
    pub fn clear(&self) {
        let mut pieces = self.pieces();
        if !pieces.under_way {
            pieces.owners.fill_with(|| None);
        }
    }

    /// When this rank saw that the last reduction was over; None if there was none, or if it is
    /// under way.
    pub fn finished(&self) -> Option<Instant> {
        self.pieces().finished
    }

    /// The pieces have been reduced: lets go of their memory.
    fn finish(&self) {
        let mut pieces = self.pieces();
        pieces.under_way = false;
        pieces.finished = Some(Instant::now());
        pieces.owners.fill_with(|| None);
    }

    fn pieces(&self) -> MutexGuard<'_, PlacedPieces> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all pieces together.
    pub fn bytes(&self) -> usize {
        self.total * self.dtype.size()
    }

    fn entry(&self, table: usize, index: usize) -> &AtomicU64 {
        let entry = self.table.arena().at(table + index * 8);
        // SAFETY: `table` was checked to hold an entry per piece, is cache line aligned, and is
        // written only while its rank has not arrived.
        unsafe { &*entry.cast::<AtomicU64>() }
    }
}

/// A bucket reduction that this rank has posted.
pub struct InFlight {
    round: u64,
    /// Over several nodes: in which all ranks take the result home.
    result_round: Option<u64>,
    operation: OpDescriptor,
    segments: Arc<Segments>,
    reduced: bool,
    record: RecordId,
}

/// A bucket for a leader to reduce between nodes.
pub struct InterNodeBucket {
    pub round: u64,
    pub result_round: u64,
    pub operation: OpDescriptor,
    pub segments: Arc<Segments>,
}

impl Engine {
    /// Reduces `data` over all ranks, in place.
    pub fn all_reduce(&self, data: BufferView, dtype: DType, reduce: ReduceOp) -> Result<()> {
        let operation =
            self.operation(Kind::AllReduce, dtype, reduce, 0, data.bytes / dtype.size());
        self.reduce_into(operation, data, |_| true)
    }

    /// Reduces `data` over all ranks into the root's; other ranks' stays as it is.
    pub fn reduce(
        &self,
        data: BufferView,
        dtype: DType,
        reduce: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let operation =
            self.operation(Kind::Reduce, dtype, reduce, root, data.bytes / dtype.size());
        self.reduce_into(operation, data, |rank| rank == root)
    }

    fn reduce_into(
        &self,
        mut operation: OpDescriptor,
        data: BufferView,
        receives: impl Fn(usize) -> bool,
    ) -> Result<()> {
        let state = &mut *self.state();
        self.begin(state, &mut operation)?;
        let operation = &operation;
        let element = operation.dtype.size();
        if data.bytes <= PAYLOAD {
            let round = self.acquire_slot(state, operation)?;
            // SAFETY: the payload holds PAYLOAD bytes and is ours alone until we arrive.
            unsafe {
                super::bytes::copy(
                    data.data,
                    self.control.payload(round, self.core.rank),
                    data.bytes,
                )
            };
            self.publish_descriptor(round, operation, Location::Staged);
            self.arrive(round);
            self.wait_arrived(round, operation, data.bytes)?;
            self.locations(round, operation, &|_| 0)?;
            if receives(self.core.rank) {
                let from = |rank| self.control.payload(round, rank);
                self.reduce_local(operation, &from, &mut [data.data], data.bytes / element);
            }
            self.done(round);
            return Ok(());
        }

        let own = self.locate(data.data, data.bytes);
        let mut locations = Vec::new();
        if self.inter_node.is_some() {
            locations = self.exchange_descriptors(state, operation, own, &|_| data.bytes)?;
            if operation.kind == Kind::AllReduce && !is_mean_of_integers(operation) {
                return self.reduce_between_nodes(state, operation, data, &locations);
            }
            locations = self.mark_remote_staged(locations);
        }
        // The chunk before: reduced here, not yet by all.
        let mut pending: Option<(u64, Range<usize>)> = None;
        let mut start = 0;
        loop {
            let range = start..(start + CHUNK).min(data.bytes);
            let round = self.acquire_slot(state, operation)?;
            if own == Location::Staged || self.is_leader() {
                let staging = self.stage(state, round, operation)?;
                // SAFETY: the range is inside the caller's memory and fits the buffer, which nobody
                // reads now.
                unsafe { super::bytes::copy(data.data.add(range.start), staging, range.len()) };
            }
            self.publish_descriptor(round, operation, own);
            self.arrive(round);
            if let Some((round, range)) = pending.take() {
                self.copy_out(round, range, own, data, operation, &receives)?;
            }
            if self.inter_node.is_none() {
                self.wait_arrived(round, operation, 0)?;
                if start == 0 {
                    locations = self.locations(round, operation, &|_| data.bytes)?;
                }
            }
            let in_place = locations.iter().all(|l| matches!(l, Location::Shared(_)));
            let range = if in_place { 0..data.bytes } else { range };
            let at = |rank: usize| match locations[rank] {
                Location::Shared(offset) => self.core.world.arena.at(offset + start),
                Location::Staged => self.control.staging(rank, (round % 2) as usize),
            };
            if self.inter_node.is_some() {
                let at = |rank: usize, _| at(rank).cast_const();
                self.wait_transferred(round, operation, || {
                    let contribution = Contribution {
                        from: Contributors::All,
                        to: match operation.kind {
                            Kind::Reduce => Readers::Root(operation.root as usize),
                            _ => Readers::All,
                        },
                        data: Some(data.data),
                        blocks: 1,
                        block_bytes: data.bytes,
                        extent: &equal_extents(data.bytes),
                    };
                    self.plan_transfers(&contribution, &range, &at)
                })?;
            }
            let slice =
                slice(range.len() / element, self.core.locals.len(), self.core.local, element);
            let from = |rank| at(rank).wrapping_add(slice.start * element);
            let mut to: Vec<*mut u8> =
                self.core.locals.iter().copied().filter(|&r| receives(r)).map(from).collect();
            self.reduce_local(operation, &from, &mut to, slice.len());
            self.done(round);
            start = range.end;
            if start == data.bytes {
                return self.copy_out(round, range, own, data, operation, &receives);
            }
            pending = Some((round, range));
        }
    }

    /// Waits until all ranks have reduced their slices of a chunk, and takes the result home.
    fn copy_out(
        &self,
        round: u64,
        range: Range<usize>,
        own: Location,
        data: BufferView,
        operation: &OpDescriptor,
        receives: &impl Fn(usize) -> bool,
    ) -> Result<()> {
        self.wait_done(round, operation)?;
        if own == Location::Staged && receives(self.core.rank) {
            let staging = self.control.staging(self.core.rank, (round % 2) as usize);
            // SAFETY: the range is inside the caller's memory, and the staged chunk is as long.
            unsafe { super::bytes::copy(staging, data.data.add(range.start), range.len()) };
        }
        Ok(())
    }

    /// Reduces `count` elements at `from(rank)` of all ranks to all addresses in `to`.
    fn reduce_local(
        &self,
        operation: &OpDescriptor,
        from: &dyn Fn(usize) -> *mut u8,
        to: &mut [*mut u8],
        count: usize,
    ) {
        let places: Vec<*mut u8> = (0..self.core.size()).map(from).collect();
        self.reduce_local_at(operation, &places, to, count);
    }

    /// Reduces `count` elements at all of `from`, some members' or all, to all of `to`.
    pub fn reduce_local_at(
        &self,
        operation: &OpDescriptor,
        from: &[*mut u8],
        to: &mut [*mut u8],
        count: usize,
    ) {
        let sources: Vec<*const u8> = from.iter().map(|place| place.cast_const()).collect();
        let (dtype, is_part) = (operation.dtype, from.len() < self.core.size());
        // SAFETY: all ranks have arrived, so their memory is there and holds still; slices do not
        // overlap, so no other rank touches these elements; each destination is one of the sources
        // or apart from all.
        unsafe {
            match operation.reduce {
                ReduceOp::Avg if is_part && !is_divided_first(operation) => {
                    flow_kernels::reduce(dtype, ReduceOp::Sum, &sources, to, count);
                }
                ReduceOp::Avg => {
                    flow_kernels::average(dtype, &sources, to, count, self.core.size())
                }
                reduce => flow_kernels::reduce(dtype, reduce, &sources, to, count),
            }
        }
    }

    /// Posts a bucket whose pieces are all in place. Does not wait; false if too many buckets are
    /// under way, then nothing was done. All ranks post the same buckets in the same order.
    ///
    /// With a bucket, which has to be given to [`Engine::reduce_bucket_between_nodes`], in the order of posting.
    pub fn launch_bucket(
        &self,
        segments: &Arc<Segments>,
        reduce: ReduceOp,
    ) -> Result<(bool, Option<InterNodeBucket>)> {
        let refuse = |reason: &str| {
            let (operation, reason) =
                ("launch_bucket".into(), format!("bucket {} {reason}", segments.bucket));
            Err(Error::Argument { rank: self.core.world.rank, operation, reason })
        };
        if !Arc::ptr_eq(segments.table.arena(), &self.core.world.arena) {
            return refuse(
                "was made by a group of another job; make it with this one's segments()",
            );
        }
        let state = &mut *self.state();
        let mut operation =
            self.operation(Kind::AllReduce, segments.dtype, reduce, 0, segments.total);
        operation.bucket = Some(segments.bucket);
        operation.step = segments.step.load(Ordering::Relaxed);
        operation.layout = segments.layout;
        // Before anything is said of the state in which a failure has left the bucket.
        self.failure.check_poison(&operation)?;
        if self.inter_node.is_some() && is_mean_of_integers(&operation) {
            return refuse("is to be an average of integers, which buckets cannot be over several nodes; sum them");
        }
        let mut pieces = segments.pieces();
        if pieces.under_way || pieces.owners.iter().any(Option::is_none) {
            return refuse("is being reduced already, or not all its pieces are placed");
        }
        let Some((round, result_round)) = self.try_acquire_bucket(state) else {
            drop(pieces);
            return self.advance(state, false).map(|()| (false, None));
        };
        let record = self.assign_sequence(state, &mut operation)?;
        let record = self.core.recorder.start(&record);
        (pieces.under_way, pieces.finished) = (true, None);
        self.publish_descriptor(round, &operation, Location::Shared(segments.table.offset()));
        self.arrive(round);
        let bucket = result_round.filter(|_| self.is_leader()).map(|result_round| {
            let segments = Arc::clone(segments);
            InterNodeBucket { round, result_round, operation, segments }
        });
        if let Some(result_round) = result_round {
            self.arrive(result_round);
        }
        // In the leader the carrier does the rest.
        let reduced = bucket.is_some();
        state.in_flight.push_back(InFlight {
            round,
            result_round,
            operation,
            segments: Arc::clone(segments),
            reduced,
            record,
        });
        Ok((true, bucket))
    }

    /// The rounds of a bucket, or None while their slots are in use.
    fn try_acquire_bucket(&self, state: &mut State) -> Option<(u64, Option<u64>)> {
        match self.inter_node {
            None => Some((self.try_acquire(state)?, None)),
            Some(_) => {
                self.try_acquire_two(state).map(|(round, result_round)| (round, Some(result_round)))
            }
        }
    }

    /// Reduces this rank's slices of all posted buckets that all ranks have reached, without
    /// waiting.
    pub fn progress(&self) -> Result<()> {
        self.advance(&mut self.state(), false)
    }

    /// Waits for all posted buckets.
    pub fn finish_buckets(&self) -> Result<()> {
        let state = &mut *self.state();
        self.advance(state, true).inspect_err(|_| {
            state.in_flight.iter().for_each(|bucket| self.core.recorder.fail(bucket.record));
        })
    }

    /// Starts a collective: buckets that were posted before come first.
    pub fn begin(&self, state: &mut State, operation: &mut OpDescriptor) -> Result<()> {
        if !state.in_flight.is_empty() {
            self.advance(state, true)?;
        }
        let record = self.assign_sequence(state, operation)?;
        self.core.recorder.begin(&record);
        Ok(())
    }

    fn advance(&self, state: &mut State, wait: bool) -> Result<()> {
        if wait && self.inter_node.is_some() {
            return self.advance_in_turn(state);
        }
        for flight in state.in_flight.iter_mut().filter(|f| !f.reduced) {
            if wait {
                self.wait_locals_arrived(flight.round, &flight.operation)?;
            } else if !self.locals_arrived(flight.round) {
                break;
            }
            self.reduce_bucket(flight)?;
            flight.reduced = true;
            self.done(flight.round);
        }
        while let Some(first) = state.in_flight.front_mut().filter(|f| f.reduced) {
            if let Some(result_round) = first.result_round {
                if wait {
                    self.wait_all_arrived(result_round, &first.operation)?;
                } else if !self.all_arrived(result_round) {
                    break;
                }
                self.copy_from_leader(first.round, &first.operation, &first.segments)?;
                self.done(result_round);
                (first.round, first.result_round) = (result_round, None);
            }
            if wait {
                self.wait_done(first.round, &first.operation)?;
            } else if !self.all_done(first.round) {
                break;
            }
            self.core.recorder.finish(first.record);
            first.segments.finish();
            state.in_flight.pop_front();
        }
        let Some(first) = state.in_flight.front() else { return Ok(()) };
        self.failure.check_failure(&first.operation, true).or_else(|error| {
            // The others may have come to the end of these, and failed in what follows.
            let over = state.in_flight.iter().all(|flight| self.all_done(flight.round));
            if over {
                Ok(())
            } else {
                Err(error)
            }
        })
    }

    /// Finishes one bucket after the other: ranks that have posted fewer may wait for this one to
    /// take the first home.
    fn advance_in_turn(&self, state: &mut State) -> Result<()> {
        while let Some(InFlight { round, result_round, operation, reduced, .. }) =
            state.in_flight.front()
        {
            match result_round {
                _ if !reduced => self.wait_locals_arrived(*round, operation)?,
                Some(result_round) => self.wait_all_arrived(*result_round, operation)?,
                None => self.wait_done(*round, operation)?,
            }
            self.advance(state, false)?;
        }
        Ok(())
    }

    /// The error where a rank that has posted a bucket no longer has its pieces.
    fn invalid_piece_error(&self, rank: usize, operation: &OpDescriptor) -> Error {
        if let Err(error) = self.failure.check_failure(operation, true) {
            return error;
        }
        if self.failure.has_left(rank) {
            return self.failure.fail_peer_lost(rank, operation);
        }
        let detail =
            format!("rank {} placed a gradient outside the shared memory", self.core.ranks[rank]);
        self.failure.fail(Error::Mismatch { rank: self.core.world.rank, detail })
    }

    fn reduce_bucket(&self, flight: &InFlight) -> Result<()> {
        let InFlight { round, operation, segments, .. } = flight;
        let pieces = self.pieces_of_all(*round, operation, segments)?;
        let element = segments.dtype.size();
        // Over several nodes the leader has other work, and is where the sum goes.
        let (reducers, own) = match self.inter_node {
            None => (self.core.size(), self.core.local),
            Some(_) => (self.core.locals.len() - 1, self.core.local.wrapping_sub(1)),
        };
        let slice = slice(segments.total, reducers, own, element);
        let mut begin = 0;
        for (length, mut places) in segments.lengths.iter().zip(pieces) {
            let (low, high) = (slice.start.max(begin), slice.end.min(begin + length));
            if low < high {
                places
                    .iter_mut()
                    .for_each(|place| *place = place.wrapping_add((low - begin) * element));
                let mut to = places.clone();
                to.truncate(if self.inter_node.is_some() { 1 } else { to.len() });
                self.reduce_local_at(operation, &places, &mut to, high - low);
            }
            begin += length;
        }
        Ok(())
    }

    /// Where the pieces of a bucket lie on the members on this node, once these have arrived.
    pub fn pieces_of_all(
        &self,
        round: u64,
        operation: &OpDescriptor,
        segments: &Segments,
    ) -> Result<Vec<Vec<*mut u8>>> {
        let tables = self.local_locations(round, operation, &|_| segments.lengths.len() * 8)?;
        let element = segments.dtype.size();
        let place = |index: usize, rank: usize, table: Location| {
            let length = segments.lengths[index];
            let offset = match table {
                // Nothing may lie anywhere.
                _ if length == 0 => return Ok(std::ptr::null_mut()),
                Location::Shared(table) if table.is_multiple_of(64) => {
                    segments.entry(table, index).load(Ordering::Relaxed)
                }
                _ => 0,
            } as usize;
            if !offset.is_multiple_of(element) || !self.is_reachable(rank, offset, length * element)
            {
                return Err(self.invalid_piece_error(rank, operation));
            }
            Ok(self.core.world.arena.at(offset))
        };
        let all = |index| {
            self.core
                .locals
                .iter()
                .zip(&tables)
                .map(|(&rank, &table)| place(index, rank, table))
                .collect()
        };
        (0..segments.lengths.len()).map(all).collect()
    }

    /// Copies what the leader has of a bucket that is reduced over all nodes.
    fn copy_from_leader(
        &self,
        round: u64,
        operation: &OpDescriptor,
        segments: &Segments,
    ) -> Result<()> {
        // Only now is known what the other nodes have posted.
        self.locations(round, operation, &|_| 0)?;
        if self.core.local == 0 {
            return Ok(());
        }
        let pieces = self.pieces_of_all(round, operation, segments)?;
        for (length, places) in
            segments.lengths.iter().zip(pieces).filter(|(&length, _)| length > 0)
        {
            let (from, to, bytes) =
                (places[0], places[self.core.local], length * segments.dtype.size());
            // SAFETY: both are pieces of that length, in memory that all ranks of this node map;
            // the leader's is final, and this rank's own is its alone now.
            unsafe { super::bytes::copy(from, to, bytes) };
        }
        Ok(())
    }
}

/// A mean of integers is exact: sums of a node's values would not fit their type.
fn is_mean_of_integers(operation: &OpDescriptor) -> bool {
    operation.reduce == ReduceOp::Avg
        && matches!(operation.dtype, DType::I32 | DType::I64 | DType::U8)
}

/// Whether an average is divided in each node, before the sum between nodes: that of half numbers
/// might overflow.
pub fn is_divided_first(operation: &OpDescriptor) -> bool {
    operation.reduce == ReduceOp::Avg && matches!(operation.dtype, DType::F16 | DType::BF16)
}

/// Rank `rank`'s part of `count` elements: all parts but the last are whole cache lines.
pub fn slice(count: usize, ranks: usize, rank: usize, element: usize) -> Range<usize> {
    let line = (64 / element).max(1);
    let each = count.div_ceil(ranks).next_multiple_of(line);
    (rank * each).min(count)..((rank + 1) * each).min(count)
}

#[cfg(test)]
mod tests {
    use super::slice;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_cover_everything_once(count in 0usize..100_000, ranks in 1usize..40, element in prop::sample::select(vec![1usize, 2, 4, 8])) {
            let mut end = 0;
            for rank in 0..ranks {
                let part = slice(count, ranks, rank, element);
                prop_assert_eq!(part.start, end);
                end = part.end;
            }
            prop_assert_eq!(end, count);
        }
    }
}
