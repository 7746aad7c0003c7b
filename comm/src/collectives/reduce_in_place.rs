//! The loop that all_reduce and reduce share.
//!
//! Rank r reduces slice r over all ranks' memory, in rank order, and writes the result to those who
//! receive it. In shared memory that is done in place: each rank moves 2N bytes however many ranks
//! there are, and all ranks hold the same bits. Ordinary memory goes through the staging buffers,
//! the copies of one chunk overlapping with the reduction of another. Two ranks that are far apart
//! exchange whole chunks, and each reduces all.

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
use crate::shm::control::{CHUNK, FAR_CHUNK, PAYLOAD};
use crate::shm::rounds::RoundState;

/// Two ranks reduce smaller data as others do, wherever they are: to reduce all of it takes each as long
/// as to get it.
const MIN_DIRECT: usize = 8 << 10;
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
    // All ranks find the same here, and with the distance that they have learnt.
    let may_be_direct =
        core.size() == 2 && inter_node.is_none() && to == Readers::All && data.bytes >= MIN_DIRECT;
    let is_far = may_be_direct && state.distance.is_far;
    let chunk = if is_far { FAR_CHUNK } else { CHUNK };
    let mut locations = Vec::new();
    if let Some(inter_node) = inter_node {
        let agreed = inter_node.agree(state, operation, own, &|_| data.bytes)?;
        locations = inter_node.mark_remote_staged(agreed);
    }
    // The previous chunk: this rank has reduced its slice, others perhaps not yet.
    let mut pending: Option<(u64, Range<usize>)> = None;
    let mut start = 0;
    loop {
        let range = start..(start + chunk).min(data.bytes);
        let round = rounds.acquire(state, operation)?;
        if own == Location::Staged || core.is_leader() {
            let staging = rounds.stage(state, round, operation)?;
            // SAFETY: the range is inside the caller's memory and fits the buffer, which nobody
            // reads now.
            unsafe {
                let from = data.data.add(range.start);
                if is_far {
                    bytes::copy_streaming(from, staging, range.len());
                } else {
                    bytes::copy(from, staging, range.len());
                }
            }
        }
        rounds.publish(round, operation, own);
        if may_be_direct && core.rank == 0 && own == Location::Staged {
            state.distance.publish(control, round);
        }
        rounds.arrive(round);
        if let Some((round, range)) = pending.take() {
            copy_out(host, round, range, own, data, operation, to)?;
        }
        if inter_node.is_none() {
            rounds.wait_all_arrived(round, operation)?;
            if start == 0 {
                if may_be_direct && core.rank == 0 {
                    state.distance.measure(control, round);
                }
                locations = rounds.locations(round, operation, &|_| data.bytes)?;
            }
        }
        if start == 0 && may_be_direct && locations == [Location::Staged; 2] {
            state.distance.learn(control, round);
            if is_far {
                return reduce_directly(host, state, operation, data, round);
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

/// Reduces all of `data` on each of two ranks, where they are far apart: staged chunks go from one to
/// the other once, and past the caches. Both are in `round`, with the first chunk. This rank stages
/// the next chunk before it waits for the other rank's last.
fn reduce_directly(
    host: &HostCollectives,
    state: &mut RoundState,
    operation: &OpDescriptor,
    data: BufferView,
    mut round: u64,
) -> Result<()> {
    let HostCollectives { core, control, rounds, .. } = host;
    for start in (0..data.bytes).step_by(FAR_CHUNK) {
        let bytes = FAR_CHUNK.min(data.bytes - start);
        let next = start + bytes;
        let mut next_round = round;
        if next < data.bytes {
            next_round = rounds.acquire(state, operation)?;
            let staging = rounds.stage(state, next_round, operation)?;
            let bytes = FAR_CHUNK.min(data.bytes - next);
            // SAFETY: the range is inside the caller's memory and fits the buffer, which nobody
            // reads now.
            unsafe { bytes::copy_streaming(data.data.add(next), staging, bytes) };
            rounds.publish(next_round, operation, Location::Staged);
            rounds.arrive(next_round);
        }
        rounds.wait_all_arrived(round, operation)?;
        // SAFETY: the range is inside the caller's memory.
        let own = unsafe { data.data.add(start) };
        let other = control.staging(1 - core.rank, (round % 2) as usize);
        let mut sources = [own.cast_const(), other.cast_const()];
        if core.rank == 1 {
            sources.swap(0, 1);
        }
        // SAFETY: the other rank has staged its chunk, and leaves it alone until the round is over.
        unsafe { reduce_all(operation, &sources, &[own], bytes / operation.dtype.size()) };
        rounds.done(round);
        round = next_round;
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use flow_kernels::{Element, ReduceOp};
    use proptest::prelude::*;

    use super::MIN_DIRECT;
    use crate::shm::control::{CHUNK, FAR_CHUNK};
    use crate::{Lane, ProcessGroup};

    /// Returns the sums of two ranks' numbers, of the sums and so on, on both ranks. The ranks act as
    /// if they had found out in each reduction whether they are far apart.
    fn reduced<T: Element>(
        data: &[Vec<T>; 2],
        op: ReduceOp,
        is_far: &[bool],
        are_shared: [bool; 2],
    ) -> Vec<Vec<T>> {
        let groups = ProcessGroup::in_process(2).unwrap();
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (rank, group) in groups.into_iter().enumerate() {
                threads.push(scope.spawn(move || {
                    let mut ordinary = data[rank].clone();
                    let mut shared = group.alloc_shared::<T>(ordinary.len()).unwrap();
                    shared.copy_from_slice(&ordinary);
                    let host = &group.parts(&Lane::Collectives).unwrap().host;
                    for is_far in is_far {
                        host.collectives.rounds.lock().distance.assume(*is_far);
                        if are_shared[rank] {
                            group.all_reduce(&mut shared, op).unwrap();
                        } else {
                            group.all_reduce(&mut ordinary, op).unwrap();
                        }
                    }
                    if are_shared[rank] { shared.to_vec() } else { ordinary }
                }));
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// Whatever the memory, and however often the ranks change their minds.
        #[test]
        fn far_ranks_get_the_bits_of_near_ones(
            count in prop_oneof![
                1usize..3 * FAR_CHUNK / 4,
                prop::sample::select(vec![
                    MIN_DIRECT / 4 - 1, MIN_DIRECT / 4, CHUNK / 4, CHUNK / 4 + 1, FAR_CHUNK / 4,
                    FAR_CHUNK / 4 + 1, FAR_CHUNK / 2,
                ]),
            ],
            seed in any::<u32>(),
            op in prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max]),
            is_far in prop::collection::vec(any::<bool>(), 1..5),
            are_shared in prop::sample::select(vec![[false; 2], [false; 2], [true, false], [false, true]]),
        ) {
            let number = |rank: u32, index: usize| {
                let mixed = (index as u32 ^ seed).wrapping_mul(2_654_435_761).rotate_left(7 + rank);
                f32::from_bits(mixed & 0xbfff_ffff)
            };
            let data = [0, 1].map(|rank| (0..count).map(|index| number(rank, index)).collect());
            let bits = |numbers: Vec<Vec<f32>>| -> Vec<Vec<u32>> {
                numbers.iter().map(|own| own.iter().map(|number| number.to_bits()).collect()).collect()
            };
            let near = bits(reduced(&data, op, &vec![false; is_far.len()], [false; 2]));
            prop_assert_eq!(&near[0], &near[1]);
            prop_assert!(bits(reduced(&data, op, &is_far, are_shared)) == near);
        }
    }
}
