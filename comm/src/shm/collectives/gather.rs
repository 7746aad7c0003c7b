//! gather: every rank contributes one block, which the root reads.

use flow_kernels::{DType, ReduceOp};

use crate::error::Result;
use crate::kind::Kind;
use crate::shm::contribution::{equal_extents, BufferView, Contribution, Contributors, Readers};
use crate::shm::engine::Engine;

impl Engine {
    /// The root gets all ranks' `input`, in rank order, in its `output`.
    pub fn gather(
        &self,
        input: BufferView,
        output: Option<BufferView>,
        dtype: DType,
        root: usize,
    ) -> Result<()> {
        let count = input.bytes / dtype.size();
        let operation = self.operation(Kind::Gather, dtype, ReduceOp::Sum, root, count);
        let contribution = Contribution {
            from: Contributors::All,
            to: Readers::Root(root),
            data: Some(input.data),
            blocks: 1,
            block_bytes: input.bytes,
            extent: &equal_extents(input.bytes),
        };
        self.read_from_all(operation, &contribution, &mut |range, at| {
            let Some(output) = output else { return };
            for rank in 0..self.core.size() {
                output.write(rank * input.bytes + range.start, at(rank, 0), range.len());
            }
        })
    }
}
