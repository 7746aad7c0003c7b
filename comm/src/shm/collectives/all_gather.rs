//! all_gather and all_gather_v: every rank contributes one block, which all ranks read.

use flow_kernels::{DType, ReduceOp};

use crate::error::Result;
use crate::kind::Kind;
use crate::shm::contribution::{
    digest, equal_extents, extents_of, longest, BufferView, Contribution, Contributors, Readers,
};
use crate::shm::engine::Engine;

impl Engine {
    /// Every rank gets all ranks' `input`, in rank order, in `output`.
    pub fn all_gather(&self, input: BufferView, output: BufferView, dtype: DType) -> Result<()> {
        let count = input.bytes / dtype.size();
        let operation = self.operation(Kind::AllGather, dtype, ReduceOp::Sum, 0, count);
        let contribution = Contribution {
            from: Contributors::All,
            to: Readers::All,
            data: Some(input.data),
            blocks: 1,
            block_bytes: input.bytes,
            extent: &equal_extents(input.bytes),
        };
        self.read_from_all(operation, &contribution, &mut |range, at| {
            for rank in 0..self.core.size() {
                output.write(rank * input.bytes + range.start, at(rank, 0), range.len());
            }
        })
    }

    /// As [`Engine::all_gather`], with `counts[r]` elements of rank r.
    pub fn all_gather_v(
        &self,
        input: BufferView,
        output: BufferView,
        counts: &[usize],
        dtype: DType,
    ) -> Result<()> {
        let total = output.bytes / dtype.size();
        let mut operation = self.operation(Kind::AllGatherV, dtype, ReduceOp::Sum, 0, total);
        operation.layout = digest(counts);
        let places = extents_of(counts, dtype.size());
        let contribution = Contribution {
            from: Contributors::All,
            to: Readers::All,
            data: Some(input.data),
            blocks: 1,
            block_bytes: longest(&places),
            extent: &|rank, _| 0..places[rank].len(),
        };
        self.read_from_all(operation, &contribution, &mut |range, at| {
            for (rank, place) in places.iter().enumerate() {
                let range = contribution.clip(rank, 0, &range);
                output.write(place.start + range.start, at(rank, 0), range.len());
            }
        })
    }
}
