//! scatter: the root contributes a block for each rank.

use flow_kernels::{DType, ReduceOp};

use crate::error::Result;
use crate::kind::Kind;
use crate::shm::contribution::{equal_extents, BufferView, Contribution, Contributors, Readers};
use crate::shm::engine::Engine;

impl Engine {
    /// Rank r gets block r of the root's `input`.
    pub fn scatter(
        &self,
        input: Option<BufferView>,
        output: BufferView,
        dtype: DType,
        root: usize,
    ) -> Result<()> {
        let count = output.bytes / dtype.size();
        let operation = self.operation(Kind::Scatter, dtype, ReduceOp::Sum, root, count);
        let contribution = Contribution {
            from: Contributors::Root(root),
            to: Readers::OwnerOfBlock,
            data: input.map(|input| input.data.cast_const()),
            blocks: self.core.size(),
            block_bytes: output.bytes,
            extent: &equal_extents(output.bytes),
        };
        self.read_from_all(operation, &contribution, &mut |range, at| {
            output.write(range.start, at(root, self.core.rank), range.len());
        })
    }
}
