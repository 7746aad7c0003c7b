//! The loop of the collectives in which each rank reads what it needs from the others.
//!
//! Each rank contributes blocks (one for all_gather, one per rank for all_to_all). If they lie in
//! shared memory on all ranks, everyone reads in place. Otherwise they go through the staging
//! buffers in chunks, a chunk holding the same range of every block; up to [`PAYLOAD`] bytes go
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

/// As [`read_from_all`], as a part of a collective that has begun.
pub fn read_in(
    host: &HostCollectives,
    state: &mut RoundState,
    operation: &OpDescriptor,
    contribution: &Contribution,
    read: &mut dyn FnMut(Range<usize>, AddressOf<'_>),
) -> Result<()> {
    let HostCollectives { core, control, rounds, inter_node, .. } = host;
    let Contribution { data, blocks, block_bytes, extent, .. } = *contribution;
    let most = (0..core.size()).map(|rank| contribution.total(rank)).max().unwrap_or(0);
    let total = contribution.total(core.rank);
    if most <= PAYLOAD {
        let round = rounds.acquire(state, operation)?;
        if let Some(data) = data {
            // SAFETY: `data` holds `total` bytes; the payload holds PAYLOAD and is ours alone until
            // we arrive.
            unsafe { bytes::copy(data, control.payload(round, core.rank), total) };
        }
        rounds.publish(round, operation, Location::Staged);
        rounds.arrive(round);
        host.wait_arrived(round, operation, most)?;
        rounds.check_agreement(round, operation)?;
        read(0..block_bytes, &|rank, block| {
            control.payload(round, rank).wrapping_add(extent(rank, block).start)
        });
        rounds.done(round);
        return Ok(());
    }

    let own = core.locate(data.unwrap_or(std::ptr::null()), total);
    let bytes = |rank| contribution.total(rank);
    let piece = CHUNK / blocks / 64 * 64;
    let mut locations = Vec::new();
    if let Some(inter_node) = inter_node {
        let agreed = inter_node.agree(state, operation, own, &bytes)?;
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
            // Of several blocks, this rank's own is read by itself only, where it is.
            for block in (0..blocks).filter(|&block| blocks == 1 || block != core.rank) {
                let count = contribution.clip(core.rank, block, &range).len();
                let from = data.wrapping_add(extent(core.rank, block).start + start);
                // SAFETY: the range is inside the block; `blocks` pieces fit the buffer, which
                // nobody reads now.
                unsafe { bytes::copy(from, staging.add(block * piece), count) };
            }
        }
        rounds.publish(round, operation, own);
        rounds.arrive(round);
        if inter_node.is_none() {
            rounds.wait_all_arrived(round, operation)?;
            if start == 0 {
                locations = rounds.locations(round, operation, &bytes)?;
            }
        }
        let at = |rank: usize, block: usize| match (locations[rank], data) {
            (_, Some(own)) if rank == core.rank => {
                own.wrapping_add(extent(rank, block).start + start)
            }
            (Location::Shared(offset), _) => {
                let position = extent(rank, block).start + start;
                core.world.arena.at(offset).wrapping_add(position).cast_const()
            }
            (Location::Staged, _) => {
                control.staging(rank, (round % 2) as usize).wrapping_add(block * piece)
            }
        };
        if let Some(inter_node) = inter_node {
            inter_node.wait_transferred(round, operation, || {
                inter_node.plan_transfers(contribution, &range, &at)
            })?;
        }
        // Nobody reads what a rank without any data has.
        let is_in_place = |rank| {
            !contribution.from.includes(rank)
                || contribution.total(rank) == 0
                || matches!(locations[rank], Location::Shared(_))
        };
        let in_place = inter_node.is_none() && (0..core.size()).all(is_in_place);
        let range = if in_place { 0..block_bytes } else { range };
        read(range.clone(), &at);
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
