//! New global tensors with the sizes and the kind of another tensor, plain or global, or with its kind
//! only (`new_zeros` and others).

use tch::Tensor;

use crate::create;
use crate::error::Result;
use crate::local::distribute_tensor;
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

/// See [`randint`](crate::randint).
///
/// # Errors
/// The SBP does not fit the placement or the shape; `high` is not above `low`.
pub fn randint_like(
    tensor: &Tensor,
    low: i64,
    high: i64,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create::randint(low, high, tensor.size(), tensor.kind(), placement, sbp)
}

/// See [`empty`](crate::empty). As the other functions `new_...`: of the kind of `tensor`. On a
/// tensor's own placement, tch's methods of these names do the same.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn new_empty(
    tensor: &Tensor,
    sizes: impl AsRef<[i64]>,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create::empty(sizes, tensor.kind(), placement, sbp)
}

/// See [`zeros`](crate::zeros).
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn new_zeros(
    tensor: &Tensor,
    sizes: impl AsRef<[i64]>,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create::zeros(sizes, tensor.kind(), placement, sbp)
}

/// See [`ones`](crate::ones).
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn new_ones(
    tensor: &Tensor,
    sizes: impl AsRef<[i64]>,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create::ones(sizes, tensor.kind(), placement, sbp)
}

/// See [`full`](crate::full).
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn new_full(
    tensor: &Tensor,
    sizes: impl AsRef<[i64]>,
    value: f64,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create::full(sizes, value, tensor.kind(), placement, sbp)
}

/// See [`distribute_tensor`]: `data` is the same on all ranks, and converted to the kind of `tensor`.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn new_tensor(
    tensor: &Tensor,
    data: &Tensor,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    distribute_tensor(&data.to_kind(tensor.kind()), placement, sbp)
}
