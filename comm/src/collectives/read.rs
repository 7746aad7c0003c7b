//! The loop of the collectives in which each rank reads what it needs from the others.
//!
//! Each rank contributes blocks (one for all_gather, one per rank for all_to_all). If they lie in
//! shared memory on all ranks, everyone reads in place. Otherwise they go through the staging
//! buffers in chunks, a chunk holding the same range of every block. Up to [`PAYLOAD`] bytes go
//! through the round's payload at once. The leader puts what ranks on other nodes contribute where
//! they would stage it on this node.

use std::ops::Range;

use super::host::HostCollectives;
use crate::descriptor::{Location, OpDescriptor};
use crate::error::Result;
use crate::shm::bytes;
use crate::shm::contribution::{AddressOf, Contribution};
use crate::shm::control::{CHUNK, PAYLOAD};
use crate::shm::rounds::RoundState;

/// Runs one collective. `read(range, at)` is called for consecutive ranges of the blocks, each when
/// all ranks have contributed that range.
pub fn read_from_all(
    host: &HostCollectives,
    operation: OpDescriptor,
    contribution: &Contribution,
    read: &mut dyn FnMut(Range<usize>, AddressOf<'_>),
) -> Result<()> {
    let state = &mut *host.rounds.lock();
    read_in(host, state, &operation, contribution, read)
}

/// Runs as [`read_from_all`] does, as a part of a collective that has begun.
pub fn read_in(
    host: &HostCollectives,
    state: &mut RoundState,
    operation: &OpDescriptor,
    contribution: &Contribution,
    read: &mut dyn FnMut(Range<usize>, AddressOf<'_>),
) -> Result<()> {
    let most = (0..host.core.size()).map(|rank| contribution.total(rank)).max().unwrap_or(0);
    if most <= PAYLOAD {
        return read_payloads(host, state, operation, contribution, most, read);
    }
    let HostCollectives { core, rounds, inter_node, .. } = host;
    let Contribution { data, blocks, block_bytes, .. } = *contribution;
    let own = core.locate(data.unwrap_or(std::ptr::null()), contribution.total(core.rank));
    let piece = CHUNK / blocks / 64 * 64;
    let mut locations = Vec::new();
    if let Some(inter_node) = inter_node {
        let agreed = inter_node.agree(state, operation, own, &|rank| contribution.total(rank))?;
        locations = inter_node.mark_remote_staged(agreed);
    }
    let mut start = 0;
    loop {
        let range = start..(start + piece).min(block_bytes);
        let round = rounds.acquire(state, operation)?;
        if core.is_leader() {
            rounds.stage(state, round, operation)?;
        }
        if let (Some(data), Location::Staged) = (data, own) {
            let staging = rounds.stage(state, round, operation)?;
            stage_blocks(core.rank, contribution, data, &range, staging, piece);
        }
        rounds.publish(round, operation, own);
        rounds.arrive(round);
        if inter_node.is_none() {
            rounds.wait_all_arrived(round, operation)?;
            if start == 0 {
                locations = rounds.locations(round, operation, &|rank| contribution.total(rank))?;
            }
        }
        let chunk = Chunk { host, contribution, locations: &locations, round, start, piece };
        if let Some(inter_node) = inter_node {
            inter_node.wait_transferred(round, operation, || {
                inter_node
                    .plan_transfers(contribution, &range, &|rank, block| chunk.address(rank, block))
            })?;
        }
        let in_place = inter_node.is_none() && chunk.is_in_place();
        let range = if in_place { 0..block_bytes } else { range };
        read(range.clone(), &|rank, block| chunk.address(rank, block));
        rounds.done(round);
        start = range.end;
        if start == block_bytes {
            // Others read our own memory: it must stay as it is until they are done.
            return match own {
                Location::Shared(_) => rounds.wait_done(round, operation),
                Location::Staged => Ok(()),
            };
        }
    }
}

/// Runs as [`read_in`] does, where no rank has more than `most` bytes, which fit the payload of one
/// round.
fn read_payloads(
    host: &HostCollectives,
    state: &mut RoundState,
    operation: &OpDescriptor,
    contribution: &Contribution,
    most: usize,
    read: &mut dyn FnMut(Range<usize>, AddressOf<'_>),
) -> Result<()> {
    let HostCollectives { core, control, rounds, .. } = host;
    let round = rounds.acquire(state, operation)?;
    if let Some(data) = contribution.data {
        let total = contribution.total(core.rank);
        // SAFETY: `data` holds `total` bytes; the payload holds PAYLOAD and is ours alone until we
        // arrive.
        unsafe { bytes::copy(data, control.payload(round, core.rank), total) };
    }
    rounds.publish(round, operation, Location::Staged);
    rounds.arrive(round);
    host.wait_arrived(round, operation, most)?;
    rounds.check_agreement(round, operation)?;
    read(0..contribution.block_bytes, &|rank, block| {
        let start = (contribution.extent)(rank, block).start;
        control.payload(round, rank).wrapping_add(start)
    });
    rounds.done(round);
    Ok(())
}

/// Copies a range of this rank's blocks to its staging buffer, `piece` bytes for each block.
fn stage_blocks(
    own: usize,
    contribution: &Contribution,
    data: *const u8,
    range: &Range<usize>,
    staging: *mut u8,
    piece: usize,
) {
    for block in 0..contribution.blocks {
        // Of several blocks, this rank's own is read by itself only, where it is.
        if contribution.blocks > 1 && block == own {
            continue;
        }
        let count = contribution.clip(own, block, range).len();
        let from = data.wrapping_add((contribution.extent)(own, block).start + range.start);
        // SAFETY: the range is inside the block; `blocks` pieces fit the buffer, which nobody reads
        // now.
        unsafe { bytes::copy(from, staging.add(block * piece), count) };
    }
}

/// The range of all blocks that one round moves.
struct Chunk<'a> {
    host: &'a HostCollectives,
    contribution: &'a Contribution<'a>,
    locations: &'a [Location],
    round: u64,
    /// The place where the range begins in each block.
    start: usize,
    /// Bytes that a staging buffer has for each block.
    piece: usize,
}

impl Chunk<'_> {
    /// Returns where this rank finds the range of a rank's block.
    fn address(&self, rank: usize, block: usize) -> *const u8 {
        let HostCollectives { core, control, .. } = self.host;
        let position = (self.contribution.extent)(rank, block).start + self.start;
        match (self.locations[rank], self.contribution.data) {
            (_, Some(own)) if rank == core.rank => own.wrapping_add(position),
            (Location::Shared(offset), _) => {
                core.world.arena.at(offset).wrapping_add(position).cast_const()
            }
            (Location::Staged, _) => {
                control.staging(rank, (self.round % 2) as usize).wrapping_add(block * self.piece)
            }
        }
    }

    /// Whether every rank reads all blocks where they are.
    fn is_in_place(&self) -> bool {
        self.locations.iter().enumerate().all(|(rank, location)| {
            // Nobody reads what a rank without any data has.
            !self.contribution.from.includes(rank)
                || self.contribution.total(rank) == 0
                || matches!(location, Location::Shared(_))
        })
    }
}
