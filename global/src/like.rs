//! New global tensors with the sizes and the kind of another tensor, plain or global.

use tch::Tensor;

use crate::create;
use crate::error::Result;
use crate::placement::Placement;
use crate::sbp::Sbp;

/// See [`empty`](crate::empty).
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn empty_like(
    tensor: &Tensor,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create::empty(tensor.size(), tensor.kind(), placement, sbp)
}

/// See [`zeros`](crate::zeros).
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn zeros_like(
    tensor: &Tensor,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create::zeros(tensor.size(), tensor.kind(), placement, sbp)
}

/// See [`ones`](crate::ones).
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn ones_like(tensor: &Tensor, placement: &Placement, sbp: impl AsRef<[Sbp]>) -> Result<Tensor> {
    create::ones(tensor.size(), tensor.kind(), placement, sbp)
}

/// See [`full`](crate::full).
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn full_like(
    tensor: &Tensor,
    value: f64,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create::full(tensor.size(), value, tensor.kind(), placement, sbp)
}

/// See [`rand`](crate::rand).
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn rand_like(tensor: &Tensor, placement: &Placement, sbp: impl AsRef<[Sbp]>) -> Result<Tensor> {
    create::rand(tensor.size(), tensor.kind(), placement, sbp)
}

/// See [`randn`](crate::randn).
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn randn_like(
    tensor: &Tensor,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create::randn(tensor.size(), tensor.kind(), placement, sbp)
}
