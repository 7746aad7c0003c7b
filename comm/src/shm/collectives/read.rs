//! The loop that collectives share in which each rank reads what it needs from the others.
//!
//! Each rank contributes blocks (one for all_gather, one per rank for all_to_all). If they lie in
//! shared memory on all ranks, everyone reads in place. Otherwise they go through the staging
//! buffers in chunks, a chunk holding the same range of every block; up to [`PAYLOAD`] bytes go
//! through the round's payload at once. What ranks on other nodes contribute, the leader puts where
//! they would stage it here.

use std::ops::Range;

use flow_kernels::{DType, ReduceOp};

use crate::descriptor::{Location, OpDescriptor};
use crate::error::Result;
use crate::kind::Kind;
use crate::shm::bytes;
use crate::shm::contribution::{AddressOf, Contribution};
use crate::shm::control::{CHUNK, PAYLOAD, SLOTS};
use crate::shm::engine::{Engine, State};

impl Engine {
    /// Runs one collective. `read(range, at)` is called for consecutive ranges of the blocks, each
    /// when all ranks have contributed that range.
    pub fn read_from_all(
        &self,
        mut operation: OpDescriptor,
        contribution: &Contribution,
        read: &mut dyn FnMut(Range<usize>, AddressOf<'_>),
    ) -> Result<()> {
        let state = &mut *self.state();
        self.begin(state, &mut operation)?;
        let operation = &operation;
        let Contribution { data, blocks, block_bytes, extent, .. } = *contribution;
        let most = (0..self.core.size()).map(|rank| contribution.total(rank)).max().unwrap_or(0);
        let total = contribution.total(self.core.rank);
        if most <= PAYLOAD {
            let round = self.acquire_slot(state, operation)?;
            if let Some(data) = data {
                // SAFETY: `data` holds `total` bytes; the payload holds PAYLOAD and is ours alone
                // until we arrive.
                unsafe { bytes::copy(data, self.control.payload(round, self.core.rank), total) };
            }
            self.publish_descriptor(round, operation, Location::Staged);
            self.arrive(round);
            self.wait_arrived(round, operation, most)?;
            self.locations(round, operation, &|_| 0)?;
            read(0..block_bytes, &|rank, block| {
                self.control.payload(round, rank).wrapping_add(extent(rank, block).start)
            });
            self.done(round);
            return Ok(());
        }

        let own = self.locate(data.unwrap_or(std::ptr::null()), total);
        let bytes = |rank| contribution.total(rank);
        let piece = CHUNK / blocks / 64 * 64;
        let mut locations = Vec::new();
        if self.inter_node.is_some() {
            locations =
                self.mark_remote_staged(self.exchange_descriptors(state, operation, own, &bytes)?);
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
                for block in (0..blocks).filter(|&block| blocks == 1 || block != self.core.rank) {
                    let count = contribution.clip(self.core.rank, block, &range).len();
                    let from = data.wrapping_add(extent(self.core.rank, block).start + start);
                    // SAFETY: the range is inside the block; `blocks` pieces fit the buffer, which
                    // nobody reads now.
                    unsafe { bytes::copy(from, staging.add(block * piece), count) };
                }
            }
            self.publish_descriptor(round, operation, own);
            self.arrive(round);
            if self.inter_node.is_none() {
                self.wait_arrived(round, operation, 0)?;
                if start == 0 {
                    locations = self.locations(round, operation, &bytes)?;
                }
            }
            let at = |rank: usize, block: usize| match (locations[rank], data) {
                (_, Some(own)) if rank == self.core.rank => {
                    own.wrapping_add(extent(rank, block).start + start)
                }
                (Location::Shared(offset), _) => {
                    let position = extent(rank, block).start + start;
                    self.core.world.arena.at(offset).wrapping_add(position).cast_const()
                }
                (Location::Staged, _) => {
                    self.control.staging(rank, (round % 2) as usize).wrapping_add(block * piece)
                }
            };
            if self.inter_node.is_some() {
                self.wait_transferred(round, operation, || {
                    self.plan_transfers(contribution, &range, &at)
                })?;
            }
            let in_place = self.inter_node.is_none()
                && (0..self.core.size()).all(|r| {
                    !contribution.from.includes(r) || matches!(locations[r], Location::Shared(_))
                });
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
        self.core.world.arena.offset_of(data, bytes).map_or(Location::Staged, Location::Shared)
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
        Ok(self.control.staging(self.core.rank, which))
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
