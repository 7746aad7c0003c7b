//! all_to_all and all_to_all_v: every rank contributes a block for each rank.

use flow_kernels::DType;

use super::host::HostCollectives;
use super::read::{read_from_all, read_in};
use crate::backend::{BufferView, Buffers};
use crate::descriptor::OpDescriptor;
use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::shm::contribution::{
    digest, equal_extents, extents_of, longest, Contribution, Contributors, Readers,
};
use crate::shm::rounds::RoundState;

/// Block s of rank r's output is block r of rank s' input.
pub fn all_to_all(
    host: &HostCollectives,
    operation: OpDescriptor,
    Buffers { input, output, .. }: Buffers,
) -> Result<()> {
    let (size, own) = (host.core.size(), host.core.rank);
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

/// As [`all_to_all`], with `input_counts[s]` elements for rank s and `output_counts[r]` of rank r.
/// Ranks first exchange their input counts.
pub fn all_to_all_v(
    host: &HostCollectives,
    mut operation: OpDescriptor,
    Buffers { input, output, input_counts, output_counts }: Buffers,
) -> Result<()> {
    let (size, own, dtype) = (host.core.size(), host.core.rank, operation.dtype);
    let state = &mut *host.rounds.lock();
    let counts = exchange_counts(host, state, operation.sequence, input_counts)?;
    // All ranks see all counts, but each only its own expectations: it fails the group for all.
    let differs = |&rank: &usize| counts[rank][own] != output_counts[rank];
    if let Some(rank) = (0..size).find(differs) {
        let (sender, receiver) = (host.core.ranks[rank], host.core.world.rank);
        let detail = format!(
            "rank {sender} called all_to_all_v with {} x {dtype} for rank {receiver}, which \
             expects {}",
            counts[rank][own], output_counts[rank]
        );
        return Err(host.rounds.failure.fail(Error::Mismatch { rank: receiver, detail }));
    }
    let all: Vec<usize> = counts.concat();
    operation.count = all.iter().sum::<usize>() as u64;
    operation.layout ^= digest(&all);
    let element = dtype.size();
    let sent: Vec<_> = counts.iter().map(|counts| extents_of(counts, element)).collect();
    let received = extents_of(output_counts, element);
    let contribution = Contribution {
        from: Contributors::All,
        to: Readers::OwnerOfBlock,
        data: Some(input.data),
        blocks: size,
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

/// Every rank's input counts.
fn exchange_counts(
    host: &HostCollectives,
    state: &mut RoundState,
    sequence: u64,
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
    let operation =
        OpDescriptor { sequence, ..OpDescriptor::new(Kind::AllToAllV, DType::U8, bytes) };
    read_in(host, state, &operation, &contribution, &mut |range, at| {
        for rank in 0..size {
            output.write(rank * bytes + range.start, at(rank, 0), range.len());
        }
    })?;
    let counts = |counts: &[u64]| counts.iter().map(|&count| count as usize).collect();
    Ok(all.chunks(size).map(counts).collect())
}
