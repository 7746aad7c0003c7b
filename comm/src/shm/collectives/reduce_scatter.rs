//! reduce_scatter and reduce_scatter_v: every rank contributes a block for each rank, which that
//! rank reduces.

use std::ops::Range;

use flow_kernels::{DType, ReduceOp};

use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::kind::Kind;
use crate::shm::contribution::{
    digest, equal_extents, extents_of, longest, BufferView, Contribution, Contributors, Readers,
};
use crate::shm::engine::Engine;

impl Engine {
    /// Rank r gets the reduction of all ranks' blocks r.
    pub fn reduce_scatter(
        &self,
        input: BufferView,
        output: BufferView,
        dtype: DType,
        reduce: ReduceOp,
    ) -> Result<()> {
        let count = input.bytes / dtype.size();
        let operation = self.operation(Kind::ReduceScatter, dtype, reduce, 0, count);
        self.reduce_blocks(operation, input, output, &equal_extents(output.bytes), output.bytes)
    }

    /// As [`Engine::reduce_scatter`], with `counts[r]` elements in block r.
    pub fn reduce_scatter_v(
        &self,
        input: BufferView,
        output: BufferView,
        counts: &[usize],
        dtype: DType,
        reduce: ReduceOp,
    ) -> Result<()> {
        let count = input.bytes / dtype.size();
        let mut operation = self.operation(Kind::ReduceScatterV, dtype, reduce, 0, count);
        operation.layout = digest(counts);
        let places = extents_of(counts, dtype.size());
        let extent = |_, block: usize| places[block].clone();
        self.reduce_blocks(operation, input, output, &extent, longest(&places))
    }

    fn reduce_blocks(
        &self,
        operation: OpDescriptor,
        input: BufferView,
        output: BufferView,
        extent: &dyn Fn(usize, usize) -> Range<usize>,
        block_bytes: usize,
    ) -> Result<()> {
        let (dtype, reduce) = (operation.dtype, operation.reduce);
        let contribution = Contribution {
            from: Contributors::All,
            to: Readers::OwnerOfBlock,
            data: Some(input.data),
            blocks: self.core.size(),
            block_bytes,
            extent,
        };
        self.read_from_all(operation, &contribution, &mut |range, at| {
            let range = contribution.clip(self.core.rank, self.core.rank, &range);
            let sources: Vec<*const u8> =
                (0..self.core.size()).map(|rank| at(rank, self.core.rank)).collect();
            let destination = output.data.wrapping_add(range.start);
            let count = range.len() / dtype.size();
            // SAFETY: each source has `range` of a block that no rank writes in this round; the
            // destination is the same range of our own output; both are aligned, as ranges begin at
            // multiples of 64 bytes.
            unsafe { flow_kernels::reduce(dtype, reduce, &sources, &[destination], count) };
        })
    }
}
