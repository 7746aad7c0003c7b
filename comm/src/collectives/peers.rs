//! read_peers: every rank reads what it needs from the others, in whatever order.

use super::host::HostCollectives;
use crate::backend::BufferView;
use crate::descriptor::{Location, OpDescriptor};
use crate::error::Result;
use crate::shm::bytes;
use crate::shm::control::PAYLOAD;

/// Calls `read` with the address of each rank's data, of `lengths` bytes, unless a rank's is not in
/// shared memory. Returns whether it did.
pub fn read_peers(
    host: &HostCollectives,
    operation: OpDescriptor,
    data: BufferView,
    lengths: &[usize],
    read: &mut dyn FnMut(&[*const u8]),
) -> Result<bool> {
    let HostCollectives { core, control, rounds, .. } = host;
    let state = &mut *rounds.lock();
    let round = rounds.acquire(state, &operation)?;
    if lengths.iter().all(|&length| length <= PAYLOAD) {
        // SAFETY: the payload holds PAYLOAD bytes and is ours alone until we arrive.
        unsafe { bytes::copy(data.data, control.payload(round, core.rank), data.bytes) };
        rounds.publish(round, &operation, Location::Staged);
        rounds.arrive(round);
        rounds.wait_all_arrived(round, &operation)?;
        rounds.check_agreement(round, &operation)?;
        let payload = |rank| control.payload(round, rank).cast_const();
        read(&(0..core.size()).map(payload).collect::<Vec<_>>());
        rounds.done(round);
        return Ok(true);
    }
    let found = core.locate(data.data, data.bytes);
    let is_copied = found == Location::Staged && data.bytes > 0;
    let copy = is_copied.then(|| core.world.arena.allocate(data.bytes)).flatten();
    let own = match &copy {
        Some(block) => {
            // SAFETY: the block is ours alone, and as long as the data.
            unsafe { bytes::copy(data.data, block.as_ptr(), data.bytes) };
            Location::Shared(block.offset())
        }
        None => found,
    };
    rounds.publish(round, &operation, own);
    rounds.arrive(round);
    rounds.wait_all_arrived(round, &operation)?;
    let locations = rounds.locations(round, &operation, &|rank| lengths[rank])?;
    let at = |(location, &length): (&Location, &usize)| match *location {
        _ if length == 0 => Some(std::ptr::null()),
        Location::Shared(offset) => Some(core.world.arena.at(offset).cast_const()),
        Location::Staged => None,
    };
    let memory: Option<Vec<_>> = locations.iter().zip(lengths).map(at).collect();
    if let Some(memory) = &memory {
        read(memory);
    }
    rounds.done(round);
    if data.bytes > 0 {
        // Others read our own memory: it must stay as it is until they are done.
        rounds.wait_done(round, &operation)?;
    }
    Ok(memory.is_some())
}
