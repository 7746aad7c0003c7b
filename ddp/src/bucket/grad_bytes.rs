//! Gradients as memory.

use tch::Tensor;

/// The memory of a contiguous CPU tensor; empty for other tensors.
pub(crate) struct GradBytes(pub Tensor);

impl AsMut<[u8]> for GradBytes {
    fn as_mut(&mut self) -> &mut [u8] {
        flow_autograd::bytes_mut(&mut self.0).unwrap_or_default()
    }
}
