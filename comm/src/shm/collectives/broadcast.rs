//! broadcast: the root contributes one block, which all ranks read.

use flow_kernels::{DType, ReduceOp};

use crate::error::Result;
use crate::kind::Kind;
use crate::shm::contribution::{equal_extents, BufferView, Contribution, Contributors, Readers};
use crate::shm::engine::Engine;

impl Engine {
    /// Copies `data` from the root to all ranks.
    pub fn broadcast(&self, data: BufferView, dtype: DType, root: usize) -> Result<()> {
        let count = data.bytes / dtype.size();
        let operation = self.operation(Kind::Broadcast, dtype, ReduceOp::Sum, root, count);
        let contribution = Contribution {
            from: Contributors::Root(root),
            to: Readers::All,
            data: (self.core.rank == root).then_some(data.data),
            blocks: 1,
            block_bytes: data.bytes,
            extent: &equal_extents(data.bytes),
        };
        self.read_from_all(operation, &contribution, &mut |range, at| {
            if self.core.rank != root {
                data.write(range.start, at(root, 0), range.len());
            }
        })
    }
}
