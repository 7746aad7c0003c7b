//! read_peers: every rank reads what it needs from the others, in whatever order.

use std::ops::Range;

use flow_kernels::{DType, ReduceOp};

use super::host::HostCollectives;
use crate::buffer::Buffer;
use crate::descriptor::{Location, OpDescriptor};
use crate::error::Result;
use crate::group::{Lane, ProcessGroup};
use crate::kind::Kind;
use crate::memory::BufferView;
use crate::shm::bytes;
use crate::shm::control::PAYLOAD;

/// All ranks' data, for as long as they hold still.
pub struct Peers<'a> {
    memory: &'a [*const u8],
    counts: &'a [usize],
    dtype: DType,
}

impl Peers<'_> {
    /// Returns a rank's elements, as bytes.
    pub fn bytes(&self, rank: usize) -> &[u8] {
        let bytes = self.counts[rank] * self.dtype.size();
        if bytes == 0 {
            return &[];
        }
        // SAFETY: the rank has published so many bytes there, and leaves them alone until all ranks
        // have read.
        unsafe { std::slice::from_raw_parts(self.memory[rank], bytes) }
    }

    /// Reduces these elements, which every rank has, in rank order. `to` is as long, and aligned
    /// for elements.
    pub fn reduce(&self, range: Range<usize>, op: ReduceOp, to: &mut [u8]) {
        let size = self.dtype.size();
        let is_inside = self.counts.iter().all(|&count| range.end <= count);
        assert!(is_inside && range.len() * size == to.len(), "the range is what all ranks have");
        assert!(to.as_ptr().addr().is_multiple_of(size), "the result is aligned");
        let offset = range.start * size;
        let from: Vec<*const u8> =
            self.memory.iter().map(|memory| memory.wrapping_add(offset)).collect();
        // SAFETY: all ranks have these elements, aligned, and leave them alone until all have read;
        // the result is borrowed mutably.
        unsafe { flow_kernels::reduce(self.dtype, op, &from, &[to.as_mut_ptr()], range.len()) }
    }
}

impl ProcessGroup {
    /// Lets each rank read what all ranks have, where it lies: collectives of any layout, with one
    /// copy. `counts[r]` is the number of elements of rank r's `data`, the same list on all ranks.
    /// `digest` is that of what else all must agree on. `read` runs when all ranks have come;
    /// the ranks' data stays as it is until all have read. Data outside the shared memory is copied
    /// there first.
    ///
    /// False if ranks cannot read each other's memory, on all ranks alike. Members are then on
    /// several nodes, or the shared memory of one is full, and nothing is read.
    ///
    /// ```
    /// # use flow_comm::ProcessGroup;
    /// let group = ProcessGroup::from_env()?; // alone: a group of one
    /// let mut last = 0;
    /// let is_read = group.read_peers(&[3_u8, 4], &[2], 0, |peers| last = peers.bytes(0)[1])?;
    /// assert_eq!((is_read, last), (true, 4));
    /// # Ok::<(), flow_comm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Ranks give other counts or another layout, or do not come.
    pub fn read_peers<B: Buffer + ?Sized>(
        &self,
        data: &B,
        counts: &[usize],
        digest: u64,
        mut read: impl FnMut(&Peers),
    ) -> Result<bool> {
        let name = Kind::ReadPeers.name();
        let (data, dtype) = self.caller().view(name, data)?;
        self.caller().check_counts(name, "counts", counts)?;
        let own = counts[self.rank()];
        self.caller().check_length(name, "data", data.bytes / dtype.size(), own)?;
        if self.core().is_inter_node() {
            return Ok(false);
        }
        let mut operation = OpDescriptor::new(Kind::ReadPeers, dtype, counts.iter().sum());
        operation.digest = digest;
        let lengths: Vec<usize> = counts.iter().map(|count| count * dtype.size()).collect();
        self.run_in_order(Lane::Collectives, |group| {
            group.finish_buckets()?;
            group.begin(&mut operation)?;
            run(&group.host.collectives, operation, data, &lengths, &mut |memory| {
                read(&Peers { memory, counts, dtype });
            })
        })
    }
}

/// Calls `read` with the address of each rank's data, of `lengths` bytes, unless a rank's is not in
/// shared memory. Returns whether it did.
fn run(
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
        let payloads: Vec<*const u8> =
            (0..core.size()).map(|rank| control.payload(round, rank).cast_const()).collect();
        read(&payloads);
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
    let mut memory = vec![std::ptr::null(); lengths.len()];
    let mut is_shared = true;
    for rank in (0..lengths.len()).filter(|&rank| lengths[rank] > 0) {
        match locations[rank] {
            Location::Shared(offset) => memory[rank] = core.world.arena.at(offset).cast_const(),
            Location::Staged => is_shared = false,
        }
    }
    if is_shared {
        read(&memory);
    }
    rounds.done(round);
    if data.bytes > 0 {
        // Others read our own memory: it must stay as it is until they are done.
        rounds.wait_done(round, &operation)?;
    }
    Ok(is_shared)
}
