//! What tests of hooks and of callbacks share.

use tch::{Kind, TchError, Tensor};

pub fn parameter(values: &[f32]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

/// A scalar with the gradient 2 for each element of `parameter`.
pub fn loss(parameter: &Tensor) -> Tensor {
    (parameter * 2).sum(Kind::Float)
}

/// The text of the error that `backward` must end with.
pub fn error_text(result: Result<(), TchError>) -> String {
    result.expect_err("backward should have failed").to_string()
}
