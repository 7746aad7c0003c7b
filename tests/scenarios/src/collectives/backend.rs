//! What the table needs of a back-end besides the collectives that it lists itself.

use anyhow::Result;
use flow_comm::{DType, ReduceOp};

use super::reference::{Number, Values};

/// One group, and memory of one kind.
pub trait Backend {
    type Memory<T: Number>;

    /// What ranks give.
    const VALUES: Values;

    fn rank(&self) -> usize;

    /// The node of each rank.
    fn nodes(&self) -> &[u32];

    /// Whether it has this reduction of this type.
    fn reduces(&self, dtype: DType, op: ReduceOp) -> bool;

    /// What collectives read.
    fn input<T: Number>(&self, content: Vec<T>) -> Result<Self::Memory<T>>;

    /// What collectives write, which holds something else before.
    fn output<T: Number>(&self, len: usize) -> Result<Self::Memory<T>>;

    fn read<T: Number>(&self, memory: &Self::Memory<T>) -> Result<Vec<T>>;

    fn broadcast<T: Number>(&self, data: &mut Self::Memory<T>, root: usize) -> Result<()>;

    fn send<T: Number>(&self, data: &Self::Memory<T>, to: usize) -> Result<()>;

    fn recv<T: Number>(&self, data: &mut Self::Memory<T>, from: usize) -> Result<()>;

    /// Sends to all these ranks and receives from all these at once.
    fn batch_send_recv<T: Number>(
        &self,
        sends: &mut [(usize, Self::Memory<T>)],
        receives: &mut [(usize, Self::Memory<T>)],
    ) -> Result<()>;
}
