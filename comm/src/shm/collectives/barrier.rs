//! barrier, and words for the group's own bookkeeping.

use flow_kernels::{DType, ReduceOp};

use crate::error::Result;
use crate::kind::Kind;
use crate::shm::contribution::{equal_extents, BufferView, Contribution, Contributors, Readers};
use crate::shm::engine::Engine;

impl Engine {
    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<()> {
        self.exchange_words(Kind::Barrier, &[]).map(|_| ())
    }

    /// All ranks' words, in rank order.
    pub fn exchange_words(&self, kind: Kind, own: &[u64]) -> Result<Vec<Vec<u64>>> {
        let bytes = own.len() * 8;
        let operation = self.operation(kind, DType::U8, ReduceOp::Sum, 0, bytes);
        let mut words = vec![vec![0_u64; own.len()]; self.core.size()];
        let contribution = Contribution {
            from: Contributors::All,
            to: Readers::All,
            data: Some(own.as_ptr().cast()),
            blocks: 1,
            block_bytes: bytes,
            extent: &equal_extents(bytes),
        };
        self.read_from_all(operation, &contribution, &mut |range, at| {
            for (rank, words) in words.iter_mut().enumerate() {
                let words = BufferView { data: words.as_mut_ptr().cast(), bytes };
                words.write(range.start, at(rank, 0), range.len());
            }
        })?;
        Ok(words)
    }
}
