//! The loop that all_reduce and reduce share.
//!
//! Rank r reduces slice r over all ranks' memory, in rank order, and writes the result to those who
//! receive it. In shared memory that is done in place: each rank moves 2N bytes however many ranks
//! there are, and all ranks hold the same bits. Ordinary memory goes through the staging buffers,
//! the copies of one chunk overlapping with the reduction of another.

use std::ops::Range;
use std::ptr;

use smallvec::SmallVec;

use super::host::HostCollectives;
use super::kernel::{reduce_all, slice};
use crate::descriptor::{Location, OpDescriptor};
use crate::error::Result;
use crate::group::core::GroupCore;
use crate::memory::BufferView;
use crate::shm::bytes;
use crate::shm::contribution::{Contribution, Contributors, Readers, equal_extents};
use crate::shm::control::{CHUNK, PAYLOAD};
use crate::shm::rounds::RoundState;

/// The addresses of this many ranks are kept without an allocation.
const FEW: usize = 8;

/// Addresses of ranks' memory. They begin as nulls and are filled in one by one: `collect` takes as
/// long as the rest of a small reduction.
type Addresses<T> = SmallVec<[T; FEW]>;

/// Reduces `data` over all ranks into the memory of `to`.
pub fn reduce_in_place(
    host: &HostCollectives,
    state: &mut RoundState,
    operation: &OpDescriptor,
    data: BufferView,
    to: Readers,
) -> Result<()> {
    let HostCollectives { core, control, rounds, inter_node, .. } = host;
    if data.bytes <= PAYLOAD {
        return reduce_payload(host, state, operation, data, to);
    }
    let own = core.locate(data.data, data.bytes);
    let mut locations = Vec::new();
    if let Some(inter_node) = inter_node {
        let agreed = inter_node.agree(state, operation, own, &|_| data.bytes)?;
        locations = inter_node.mark_remote_staged(agreed);
    }
    // The previous chunk: this rank has reduced its slice, others perhaps not yet.
    let mut pending: Option<(u64, Range<usize>)> = None;
    let mut start = 0;
    loop {
        let range = start..(start + CHUNK).min(data.bytes);
        let round = rounds.acquire(state, operation)?;
        if own == Location::Staged || core.is_leader() {
            let staging = rounds.stage(state, round, operation)?;
            // SAFETY: the range is inside the caller's memory and fits the buffer, which nobody
            // reads now.
            unsafe { bytes::copy(data.data.add(range.start), staging, range.len()) };
        }
        rounds.publish(round, operation, own);
        rounds.arrive(round);
        if let Some((round, range)) = pending.take() {
            copy_out(host, round, range, own, data, operation, to)?;
        }
        if inter_node.is_none() {
            rounds.wait_all_arrived(round, operation)?;
            if start == 0 {
                locations = rounds.locations(round, operation, &|_| data.bytes)?;
            }
        }
        let in_place = locations.iter().all(|l| matches!(l, Location::Shared(_)));
        let range = if in_place { 0..data.bytes } else { range };
        let mut memory = Addresses::from_elem(ptr::null_mut(), core.size());
        for (rank, memory) in memory.iter_mut().enumerate() {
            *memory = match locations[rank] {
                Location::Shared(offset) => core.world.arena.at(offset + start),
                Location::Staged => control.staging(rank, (round % 2) as usize),
            };
        }
        if let Some(inter_node) = inter_node {
            inter_node.wait_transferred(round, operation, || {
                let contribution = Contribution {
                    from: Contributors::All,
                    to,
                    data: Some(data.data),
                    blocks: 1,
                    block_bytes: data.bytes,
                    extent: &equal_extents(data.bytes),
                };
                inter_node
                    .plan_transfers(&contribution, &range, &|rank, _| memory[rank].cast_const())
            })?;
        }
        // SAFETY: all ranks have arrived, so their memory is there and holds still.
        unsafe { reduce_slice(core, operation, &memory, range.len(), to) };
        rounds.done(round);
        start = range.end;
        if start == data.bytes {
            return copy_out(host, round, range, own, data, operation, to);
        }
        pending = Some((round, range));
    }
}

/// Reduces this rank's slice of the `bytes` bytes that lie at `memory`, by rank. Those of the ranks
/// on this node that receive the result get it.
///
/// # Safety
///
/// The memory of all ranks is there and holds still. All ranks on this node call this.
unsafe fn reduce_slice(
    core: &GroupCore,
    operation: &OpDescriptor,
    memory: &[*mut u8],
    bytes: usize,
    to: Readers,
) {
    let element = operation.dtype.size();
    let slice = slice(bytes / element, core.locals.len(), core.local, element);
    let offset = slice.start * element;
    let mut sources = Addresses::from_elem(ptr::null(), memory.len());
    for (source, memory) in sources.iter_mut().zip(memory) {
        *source = memory.wrapping_add(offset).cast_const();
    }
    let mut destinations = Addresses::new();
    for &rank in core.locals.iter().filter(|&&rank| to.includes(rank)) {
        destinations.push(memory[rank].wrapping_add(offset));
    }
    // SAFETY: the caller's promise; slices do not overlap, so no other rank touches these elements.
    unsafe { reduce_all(operation, &sources, &destinations, slice.len()) };
}

/// Reduces as [`reduce_in_place`] does, in the payload of one round.
fn reduce_payload(
    host: &HostCollectives,
    state: &mut RoundState,
    operation: &OpDescriptor,
    data: BufferView,
    to: Readers,
) -> Result<()> {
    let HostCollectives { core, control, rounds, .. } = host;
    let round = rounds.acquire(state, operation)?;
    // SAFETY: the payload holds PAYLOAD bytes and is ours alone until we arrive.
    unsafe { bytes::copy(data.data, control.payload(round, core.rank), data.bytes) };
    rounds.publish(round, operation, Location::Staged);
    rounds.arrive(round);
    host.wait_arrived(round, operation, data.bytes)?;
    rounds.check_agreement(round, operation)?;
    if to.includes(core.rank) {
        let mut sources = Addresses::from_elem(ptr::null(), core.size());
        for (rank, source) in sources.iter_mut().enumerate() {
            *source = control.payload(round, rank).cast_const();
        }
        let count = data.bytes / operation.dtype.size();
        // SAFETY: all ranks have arrived and leave their payloads alone until the round is over;
        // the destination is the caller's memory.
        unsafe { reduce_all(operation, &sources, &[data.data], count) };
    }
    rounds.done(round);
    Ok(())
}

/// Waits until all ranks have reduced their slices of a chunk, and copies the result to the
/// caller's memory if it is not there.
fn copy_out(
    host: &HostCollectives,
    round: u64,
    range: Range<usize>,
    own: Location,
    data: BufferView,
    operation: &OpDescriptor,
    to: Readers,
) -> Result<()> {
    let rank = host.core.rank;
    host.rounds.wait_done(round, operation)?;
    if own == Location::Staged && to.includes(rank) {
        let staging = host.control.staging(rank, (round % 2) as usize);
        // SAFETY: the range is inside the caller's memory, and the staged chunk is as long.
        unsafe { bytes::copy(staging, data.data.add(range.start), range.len()) };
    }
    Ok(())
}
