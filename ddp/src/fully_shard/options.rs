//! Options of a module.

use crate::mixed_precision::MixedPrecision;

/// How a module is sharded. All ranks choose the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShardOptions {
    /// Whether the module is freed after its forward (default: yes). Otherwise it stays until its backward,
    /// and ranks need memory for all such modules (ZeRO's stage 2).
    pub reshard_after_forward: bool,
    /// The types that the module computes in, and sends gradients in: PyTorch's `MixedPrecisionPolicy`. The
    /// optimizer changes the parameters in their own type. Parameters are gathered in `param`, and inputs of
    /// a floating-point type are cast to it. Without `param` inputs stay as they are. `buffer` has a meaning in [`FullyShardBuilder`](super::FullyShardBuilder) only.
    pub mixed_precision: MixedPrecision,
}

impl Default for ShardOptions {
    fn default() -> Self {
        Self { reshard_after_forward: true, mixed_precision: MixedPrecision::default() }
    }
}
