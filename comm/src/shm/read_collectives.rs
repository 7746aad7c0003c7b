//! Collectives in which ranks show memory and each reads what it needs from the others.
//!
//! What is contribution consists of `blocks` equal blocks (one for all_gather, one per rank for
//! all_to_all). If it lies in shared memory on all ranks, everyone reads in place. Otherwise it
//! goes through the staging buffers in chunks, a chunk holding the same range of every block; up to
//! [`PAYLOAD`] bytes go through the round's payload at once. What ranks on other nodes show, the
//! leader puts where they would stage it here.

use std::ops::Range;

use flow_kernels::{DType, ReduceOp};

use super::control::{CHUNK, PAYLOAD, SLOTS};
use super::engine::{Engine, State};
use crate::descriptor::{Kind, Location, OpDescriptor};
use crate::error::Result;

/// Memory of a caller, valid for the length of the call.
#[derive(Clone, Copy)]
pub struct BufferView {
    pub data: *mut u8,
    pub bytes: usize,
}

impl BufferView {
    /// Copies `count` bytes from `from` to position `start`.
    fn write(self, start: usize, from: *const u8, count: usize) {
        debug_assert!(start + count <= self.bytes);
        // SAFETY: the range is inside the caller's memory, which no other rank writes in this
        // collective.
        unsafe { super::bytes::copy(from, self.data.add(start), count) };
    }
}

/// What a rank contributes: `blocks` blocks of `block_bytes` bytes, in `data` unless only others show.
struct Contribution {
    data: Option<*const u8>,
    blocks: usize,
    block_bytes: usize,
}

/// Address of the range at hand in a rank's block: `at(rank, block)`.
pub type AddressOf<'a> = &'a dyn Fn(usize, usize) -> *const u8;

impl Engine {
    /// Copies `data` from the root to all ranks.
    pub fn broadcast(&self, data: BufferView, dtype: DType, root: usize) -> Result<()> {
        let operation =
            self.operation(Kind::Broadcast, dtype, ReduceOp::Sum, root, data.bytes / dtype.size());
        let contribution = Contribution {
            data: (self.rank == root).then_some(data.data),
            blocks: 1,
            block_bytes: data.bytes,
        };
        self.exchange(
            operation,
            &contribution,
            |rank| rank == root,
            |range, at| {
                if self.rank != root {
                    data.write(range.start, at(root, 0), range.len());
                }
            },
        )
    }

    /// Every rank gets all ranks' `input`, in rank order, in `output`.
    pub fn all_gather(&self, input: BufferView, output: BufferView, dtype: DType) -> Result<()> {
        let operation =
            self.operation(Kind::AllGather, dtype, ReduceOp::Sum, 0, input.bytes / dtype.size());
        self.gather_into(operation, input, Some(output))
    }

    /// As [`Engine::all_gather`], for the root only.
    pub fn gather(
        &self,
        input: BufferView,
        output: Option<BufferView>,
        dtype: DType,
        root: usize,
    ) -> Result<()> {
        let operation =
            self.operation(Kind::Gather, dtype, ReduceOp::Sum, root, input.bytes / dtype.size());
        self.gather_into(operation, input, output)
    }

    fn gather_into(
        &self,
        operation: OpDescriptor,
        input: BufferView,
        output: Option<BufferView>,
    ) -> Result<()> {
        let contribution =
            Contribution { data: Some(input.data), blocks: 1, block_bytes: input.bytes };
        self.exchange(
            operation,
            &contribution,
            |_| true,
            |range, at| {
                if let Some(output) = output {
                    for rank in 0..self.size() {
                        output.write(rank * input.bytes + range.start, at(rank, 0), range.len());
                    }
                }
            },
        )
    }

    /// Rank r gets block r of the root's `input`.
    pub fn scatter(
        &self,
        input: Option<BufferView>,
        output: BufferView,
        dtype: DType,
        root: usize,
    ) -> Result<()> {
        let operation =
            self.operation(Kind::Scatter, dtype, ReduceOp::Sum, root, output.bytes / dtype.size());
        let contribution = Contribution {
            data: input.map(|i| i.data.cast_const()),
            blocks: self.size(),
            block_bytes: output.bytes,
        };
        self.exchange(
            operation,
            &contribution,
            |rank| rank == root,
            |range, at| {
                output.write(range.start, at(root, self.rank), range.len());
            },
        )
    }

    /// Block s of rank r's output is block r of rank s' input.
    pub fn all_to_all(&self, input: BufferView, output: BufferView, dtype: DType) -> Result<()> {
        let operation =
            self.operation(Kind::AllToAll, dtype, ReduceOp::Sum, 0, input.bytes / dtype.size());
        let block_bytes = input.bytes / self.size();
        let contribution =
            Contribution { data: Some(input.data), blocks: self.size(), block_bytes };
        self.exchange(
            operation,
            &contribution,
            |_| true,
            |range, at| {
                for rank in 0..self.size() {
                    output.write(
                        rank * block_bytes + range.start,
                        at(rank, self.rank),
                        range.len(),
                    );
                }
            },
        )
    }

    /// Rank r gets the reduction of all ranks' blocks r.
    pub fn reduce_scatter(
        &self,
        input: BufferView,
        output: BufferView,
        dtype: DType,
        reduce: ReduceOp,
    ) -> Result<()> {
        let operation =
            self.operation(Kind::ReduceScatter, dtype, reduce, 0, input.bytes / dtype.size());
        let contribution =
            Contribution { data: Some(input.data), blocks: self.size(), block_bytes: output.bytes };
        self.exchange(
            operation,
            &contribution,
            |_| true,
            |range, at| {
                let sources: Vec<*const u8> =
                    (0..self.size()).map(|rank| at(rank, self.rank)).collect();
                let destination = output.data.wrapping_add(range.start);
                // SAFETY: each source contributes `range` of a block that no rank writes in this round;
                // the destination is the same range of our own output; both are aligned, as ranges
                // begin at multiples of 64 bytes.
                unsafe {
                    flow_kernels::reduce(
                        dtype,
                        reduce,
                        &sources,
                        &[destination],
                        range.len() / dtype.size(),
                    )
                };
            },
        )
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<()> {
        self.exchange_words(Kind::Barrier, &[]).map(|_| ())
    }

    /// All ranks' words, in rank order: for the group's own bookkeeping.
    pub fn exchange_words(&self, kind: Kind, own: &[u64]) -> Result<Vec<Vec<u64>>> {
        let operation = self.operation(kind, DType::U8, ReduceOp::Sum, 0, own.len() * 8);
        let mut words = vec![vec![0; own.len()]; self.size()];
        let contribution =
            Contribution { data: Some(own.as_ptr().cast()), blocks: 1, block_bytes: own.len() * 8 };
        self.exchange(
            operation,
            &contribution,
            |_| true,
            |range, at| {
                for (rank, words) in words.iter_mut().enumerate() {
                    let words =
                        BufferView { data: words.as_mut_ptr().cast(), bytes: words.len() * 8 };
                    words.write(range.start, at(rank, 0), range.len());
                }
            },
        )?;
        Ok(words)
    }

    /// Runs one collective. `contributes(rank)` says whose memory is looked at; `read(range, at)` is
    /// called for consecutive ranges of the blocks, each when all ranks show that range.
    fn exchange(
        &self,
        mut operation: OpDescriptor,
        contribution: &Contribution,
        contributes: impl Fn(usize) -> bool,
        mut read: impl FnMut(Range<usize>, AddressOf<'_>),
    ) -> Result<()> {
        let state = &mut *self.state();
        self.begin(state, &mut operation)?;
        let operation = &operation;
        let Contribution { data, blocks, block_bytes } = *contribution;
        let total = blocks * block_bytes;
        if total <= PAYLOAD {
            let round = self.acquire_slot(state, operation)?;
            if let Some(data) = data {
                // SAFETY: `data` holds `total` bytes; the payload holds PAYLOAD and is ours alone
                // until we arrive.
                unsafe { super::bytes::copy(data, self.control.payload(round, self.rank), total) };
            }
            self.publish_descriptor(round, operation, Location::Staged);
            self.arrive(round);
            self.wait_arrived(round, operation, total)?;
            self.locations(round, operation, total)?;
            read(0..block_bytes, &|rank, block| {
                self.control.payload(round, rank).wrapping_add(block * block_bytes)
            });
            self.done(round);
            return Ok(());
        }

        let own = self.locate(data.unwrap_or(std::ptr::null()), total);
        let piece = CHUNK / blocks / 64 * 64;
        let mut locations = Vec::new();
        if self.inter_node.is_some() {
            locations =
                self.mark_remote_staged(self.exchange_descriptors(state, operation, own, total)?);
        }
        let mut start = 0;
        loop {
            let range = start..(start + piece).min(block_bytes);
            let round = self.acquire_slot(state, operation)?;
            if self.is_leader() {
                self.stage(state, round, operation)?;
            }
            if let (Some(data), Location::Staged) = (data, own) {
                let staging = self.stage(state, round, operation)?;
                // Nobody else reads this rank's block of several.
                for block in (0..blocks).filter(|&block| blocks == 1 || block != self.rank) {
                    let from = data.wrapping_add(block * block_bytes + start);
                    // SAFETY: the range is inside the block; `blocks` pieces fit the buffer, which
                    // nobody reads now.
                    unsafe { super::bytes::copy(from, staging.add(block * piece), range.len()) };
                }
            }
            self.publish_descriptor(round, operation, own);
            self.arrive(round);
            if self.inter_node.is_none() {
                self.wait_arrived(round, operation, 0)?;
                if start == 0 {
                    locations = self.locations(round, operation, total)?;
                }
            }
            let at = |rank: usize, block: usize| match (locations[rank], data) {
                (_, Some(own)) if rank == self.rank => {
                    own.wrapping_add(block * block_bytes + start)
                }
                (Location::Shared(offset), _) => {
                    self.world.arena.at(offset + block * block_bytes + start).cast_const()
                }
                (Location::Staged, _) => {
                    self.control.staging(rank, (round % 2) as usize).wrapping_add(block * piece)
                }
            };
            if self.inter_node.is_some() {
                self.wait_transferred(round, operation, || {
                    self.plan_transfers(operation, blocks, &range, &at)
                })?;
            }
            let in_place = self.inter_node.is_none()
                && (0..self.size())
                    .all(|r| !contributes(r) || matches!(locations[r], Location::Shared(_)));
            let range = if in_place { 0..block_bytes } else { range };
            read(range.clone(), &at);
            self.done(round);
            start = range.end;
            if start == block_bytes {
                // Others read our own memory: it must stay as it is until they are done.
                return if matches!(own, Location::Shared(_)) {
                    self.wait_done(round, operation)
                } else {
                    Ok(())
                };
            }
        }
    }

    /// Where the other ranks can find memory of this one.
    pub fn locate(&self, data: *const u8, bytes: usize) -> Location {
        self.world.arena.offset_of(data, bytes).map_or(Location::Staged, Location::Shared)
    }

    /// This rank's staging buffer for a round, as soon as nobody reads what it held before.
    pub fn stage(
        &self,
        state: &mut State,
        round: u64,
        operation: &OpDescriptor,
    ) -> Result<*mut u8> {
        self.stage_in(state, (round % 2) as usize, round, operation)
    }

    /// As [`Engine::stage`], with the buffer chosen; `round` is the one until whose end it is used.
    pub fn stage_in(
        &self,
        state: &mut State,
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
        Ok(self.control.staging(self.rank, which))
    }

    pub fn operation(
        &self,
        kind: Kind,
        dtype: DType,
        reduce: ReduceOp,
        root: usize,
        count: usize,
    ) -> OpDescriptor {
        OpDescriptor {
            sequence: 0,
            kind,
            dtype,
            reduce,
            root: root as u32,
            count: count as u64,
            bucket: None,
            step: 0,
            layout: 0,
        }
    }
}
