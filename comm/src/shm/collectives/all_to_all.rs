//! all_to_all and all_to_all_v: every rank contributes a block for each rank.

use flow_kernels::{DType, ReduceOp};

use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::shm::contribution::{
    digest, equal_extents, extents_of, longest, BufferView, Contribution, Contributors, Readers,
};
use crate::shm::engine::Engine;

impl Engine {
    /// Block s of rank r's output is block r of rank s' input.
    pub fn all_to_all(&self, input: BufferView, output: BufferView, dtype: DType) -> Result<()> {
        let count = input.bytes / dtype.size();
        let operation = self.operation(Kind::AllToAll, dtype, ReduceOp::Sum, 0, count);
        let block_bytes = input.bytes / self.core.size();
        let contribution = Contribution {
            from: Contributors::All,
            to: Readers::OwnerOfBlock,
            data: Some(input.data),
            blocks: self.core.size(),
            block_bytes,
            extent: &equal_extents(block_bytes),
        };
        self.read_from_all(operation, &contribution, &mut |range, at| {
            for rank in 0..self.core.size() {
                output.write(
                    rank * block_bytes + range.start,
                    at(rank, self.core.rank),
                    range.len(),
                );
            }
        })
    }

    /// As [`Engine::all_to_all`], with `input_counts[s]` elements for rank s and `output_counts[r]`
    /// of rank r. Ranks first tell each other their input counts.
    pub fn all_to_all_v(
        &self,
        (input, input_counts): (BufferView, &[usize]),
        (output, output_counts): (BufferView, &[usize]),
        dtype: DType,
    ) -> Result<()> {
        let own: Vec<u64> = input_counts.iter().map(|&count| count as u64).collect();
        let counts: Vec<Vec<usize>> = self
            .exchange_words(Kind::AllToAllV, &own)?
            .into_iter()
            .map(|counts| counts.into_iter().map(|count| count as usize).collect())
            .collect();
        // The exchange of counts is an operation of its own in the record.
        self.core.recorder.end(true);
        // All ranks see all counts, but each only its own expectations: it fails the group for all.
        let differs = |&rank: &usize| counts[rank][self.core.rank] != output_counts[rank];
        if let Some(rank) = (0..self.core.size()).find(differs) {
            let (sender, own) = (self.core.ranks[rank], self.core.ranks[self.core.rank]);
            let detail = format!(
                "rank {sender} called all_to_all_v with {} x {dtype} for rank {own}, which expects \
                 {}",
                counts[rank][self.core.rank], output_counts[rank]
            );
            return Err(self.failure.fail(Error::Mismatch { rank: self.core.world.rank, detail }));
        }
        let all: Vec<usize> = counts.concat();
        let total = all.iter().sum();
        let mut operation = self.operation(Kind::AllToAllV, dtype, ReduceOp::Sum, 0, total);
        operation.layout = digest(&all);
        let element = dtype.size();
        let sent: Vec<_> = counts.iter().map(|counts| extents_of(counts, element)).collect();
        let received = extents_of(output_counts, element);
        let contribution = Contribution {
            from: Contributors::All,
            to: Readers::OwnerOfBlock,
            data: Some(input.data),
            blocks: self.core.size(),
            block_bytes: sent.iter().map(|extents| longest(extents)).max().unwrap_or(0),
            extent: &|rank, block| sent[rank][block].clone(),
        };
        self.read_from_all(operation, &contribution, &mut |range, at| {
            for (rank, place) in received.iter().enumerate() {
                let range = contribution.clip(rank, self.core.rank, &range);
                output.write(place.start + range.start, at(rank, self.core.rank), range.len());
            }
        })
    }
}
