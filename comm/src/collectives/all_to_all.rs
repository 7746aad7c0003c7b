//! all_to_all and all_to_all_v: every rank contributes a block for each rank.

use super::host::HostCollectives;
use super::read::{read_from_all, read_in};
use crate::buffer::Buffer;
use crate::descriptor::{Elements, OpDescriptor};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::kind::Kind;
use crate::label::Label;
use crate::memory::{BufferView, Buffers};
use crate::nccl::CudaGroup;
use crate::nccl::operations::{blocks, blocks_of, count};
use crate::shm::contribution::{
    Contribution, Contributors, Readers, equal_extents, extents_of, longest,
};
use crate::shm::rounds::RoundState;
use flow_kernels::cuda::{DeviceBuffer, Stream};
use flow_kernels::digest;

impl ProcessGroup {
    /// Block s of rank r's `output` becomes block r of rank s' `input`; both are world size equal
    /// blocks.
    pub fn all_to_all<I, O>(&self, input: &I, output: &mut O) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, output, dtype) = self.caller().pair("all_to_all", input, output, (1, 1))?;
        self.caller().check_blocks("all_to_all", input.bytes / dtype.size())?;
        let operation = OpDescriptor::new(Kind::AllToAll, dtype, input.bytes / dtype.size());
        self.collective(operation, Buffers::new(input, output), run)
    }

    /// Exchanges as [`ProcessGroup::all_to_all`] does, with blocks of different lengths. This rank
    /// sends `input_counts[s]` elements to rank s, and gets `output_counts[r]` from rank r. These
    /// are rank r's `input_counts` for this rank. A rank that sends another number than its
    /// receiver expects is an error.
    pub fn all_to_all_v<I, O>(
        &self,
        input: &I,
        input_counts: &[usize],
        output: &mut O,
        output_counts: &[usize],
    ) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let name = "all_to_all_v";
        let (input, output, dtype) = self.caller().uneven_pair(name, input, output)?;
        self.caller().check_counts(name, "input_counts", input_counts)?;
        self.caller().check_counts(name, "output_counts", output_counts)?;
        self.caller().check_length(
            name,
            "input",
            input.bytes / dtype.size(),
            input_counts.iter().sum(),
        )?;
        self.caller().check_length(
            name,
            "output",
            output.bytes / dtype.size(),
            output_counts.iter().sum(),
        )?;
        let operation = OpDescriptor::new(Kind::AllToAllV, dtype, input_counts.iter().sum());
        self.collective(operation, Buffers { input, output, input_counts, output_counts }, run_v)
    }
}

/// Block s of rank r's output is block r of rank s' input.
fn run(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { input, output, .. }: Buffers,
) -> Result<()> {
    let size = host.core.size();
    let own = host.core.rank;
    let block_bytes = input.bytes / size;
    let contribution = Contribution {
        from: Contributors::All,
        to: Readers::OwnerOfBlock,
        data: Some(input.data),
        blocks: size,
        block_bytes,
        extent: &equal_extents(block_bytes),
    };
    read_from_all(host, operation, &contribution, &mut |range, at| {
        for rank in 0..size {
            output.write(rank * block_bytes + range.start, at(rank, own), range.len());
        }
    })
}

/// Exchanges as [`run`] does, with `input_counts[s]` elements for rank s and `output_counts[r]` of
/// rank r. Ranks first exchange their input counts.
fn run_v(
    host: &HostCollectives,
    mut operation: OpDescriptor,
    Buffers { input, output, input_counts, output_counts }: Buffers,
) -> Result<()> {
    let own = host.core.rank;
    let OpDescriptor { dtype, label, .. } = operation;
    let state = &mut *host.rounds.lock();
    let counts = exchange_counts(host, state, &operation, input_counts)?;
    // All ranks see all counts, but each only its own expectations: it fails the group for all.
    let mut ranks = 0..host.core.size();
    if let Some(rank) = ranks.find(|&rank| counts[rank][own] != output_counts[rank]) {
        let sender = host.core.ranks[rank];
        let receiver = host.core.world.rank;
        let detail = format!(
            "rank {sender} called {} with {} for rank {receiver}, which expects {}",
            label.map_or(operation.kind, Label::kind).name(),
            Elements(counts[rank][own] as u64, dtype, label),
            output_counts[rank]
        );
        return Err(host.rounds.failure.fail(Error::Mismatch { rank: receiver, detail }));
    }
    operation.digest ^= digest(&counts.concat());
    let element = dtype.size();
    let sent: Vec<_> = counts.iter().map(|counts| extents_of(counts, element)).collect();
    let received = extents_of(output_counts, element);
    let contribution = Contribution {
        from: Contributors::All,
        to: Readers::OwnerOfBlock,
        data: Some(input.data),
        blocks: counts.len(),
        block_bytes: sent.iter().map(|extents| longest(extents)).max().unwrap_or(0),
        extent: &|rank, block| sent[rank][block].clone(),
    };
    read_in(host, state, &operation, &contribution, &mut |range, at| {
        for (rank, place) in received.iter().enumerate() {
            let range = contribution.clip(rank, own, &range);
            output.write(place.start + range.start, at(rank, own), range.len());
        }
    })
}

/// Exchanges the ranks' input counts.
fn exchange_counts(
    host: &HostCollectives,
    state: &mut RoundState,
    operation: &OpDescriptor,
    own: &[usize],
) -> Result<Vec<Vec<usize>>> {
    let size = host.core.size();
    let own: Vec<u64> = own.iter().map(|&count| count as u64).collect();
    let mut all = vec![0_u64; size * size];
    let bytes = size_of_val(&own[..]);
    let input = BufferView { data: own.as_ptr().cast_mut().cast(), bytes };
    let output = BufferView { data: all.as_mut_ptr().cast(), bytes: size * bytes };
    let contribution = Contribution {
        from: Contributors::All,
        to: Readers::All,
        data: Some(input.data),
        blocks: 1,
        block_bytes: bytes,
        extent: &equal_extents(bytes),
    };
    read_in(host, state, operation, &contribution, &mut |range, at| {
        for rank in 0..size {
            output.write(rank * bytes + range.start, at(rank, 0), range.len());
        }
    })?;
    let all: Vec<usize> = all.into_iter().map(|count| count as usize).collect();
    Ok(all.chunks(size).map(<[usize]>::to_vec).collect())
}

impl CudaGroup {
    /// Block s of rank r's `output` becomes block r of rank s' `input`. Both buffers consist of
    /// equal blocks, one for each rank.
    pub fn all_to_all(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_device_pair("all_to_all", input, output, (1, 1))?;
        self.caller().check_blocks("all_to_all", count(input))?;
        let operation = OpDescriptor::new(Kind::AllToAll, input.dtype(), count(input));
        let sends = blocks(input, self.size());
        let receives = blocks(&*output, self.size());
        // SAFETY: `in_order` has the buffers used in the order of the caller's stream; the blocks
        // are parts of them.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.exchange(&sends, &receives, own)
        })
    }

    /// Exchanges blocks: `input` is one block for each rank, of `input_counts[r]` elements for rank
    /// r; `output` one block from each, of `output_counts[r]` elements from rank r. What a rank
    /// sends is what its peer expects. Each rank sees its own counts only. If they do not fit those
    /// of a peer, the operation does not end.
    pub fn all_to_all_v(
        &self,
        input: &impl DeviceBuffer,
        input_counts: &[usize],
        output: &mut impl DeviceBuffer,
        output_counts: &[usize],
        stream: &Stream,
    ) -> Result<()> {
        let name = "all_to_all_v";
        let caller = self.caller();
        caller.check_types(name, input.dtype(), output.dtype())?;
        caller.check_counts(name, "input_counts", input_counts)?;
        caller.check_counts(name, "output_counts", output_counts)?;
        caller.check_own_count(name, input_counts, output_counts)?;
        caller.check_length(name, "input", count(input), input_counts.iter().sum())?;
        caller.check_length(name, "output", count(output), output_counts.iter().sum())?;
        let operation = OpDescriptor::new(Kind::AllToAllV, input.dtype(), count(input));
        let sends = blocks_of(input, input_counts);
        let receives = blocks_of(&*output, output_counts);
        // SAFETY: `in_order` has the buffers used in the order of the caller's stream; the blocks
        // are parts of them.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.exchange(&sends, &receives, own)
        })
    }
}
