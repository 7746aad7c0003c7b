//! Layers that pin the layout of their inputs and results: tensor parallelism as in Megatron.
//!
//! Operations on global tensors are boxed one by one, each as cheaply as it can be. For the layers
//! of a transformer that is not the cheapest on the whole. These layers pin their inputs, their
//! results and the gradients. So a column layer and a row layer after it move one all-reduce
//! forward and one backward.
//!
//! | function | weight on the layer's axis | input | result |
//! |---|---|---|---|
//! | [`column_linear`] | S(0) | B, else gathered; its gradient is reduced | S(last) |
//! | [`row_linear`] | S(1) | S(last) | B, reduced |
//! | [`vocab_embedding`] | S(0) | B | B, reduced |
//! | [`parallel_cross_entropy`] | | S(last), the classes | B |
//!
//! [`scattered`](RowLinear::scattered) has the results of row layers and of embeddings split by tokens:
//! sequence parallelism. Column layers take such inputs.
//!
//! The other axes of the placement are as the input has them: a batch that is split there stays so.

mod cross_entropy;
mod embedding;
mod linear;

pub use cross_entropy::parallel_cross_entropy;
pub use embedding::{VocabEmbedding, vocab_embedding};
pub use linear::{ColumnLinear, RowLinear, column_linear, row_linear};

use tch::{Tensor, nn};

use crate::create;
use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::sbp::{B, NdSbp, Sbp};
use crate::tensor::GlobalTensor;

/// Returns a new variable: one axis has this SBP, the others B. No rank makes more than its part.
fn variable(
    path: &nn::Path<'_>,
    (name, sizes, init): (&str, &[i64], nn::Init),
    placement: &Placement,
    (axis, on_axis): (usize, Sbp),
) -> Result<Tensor> {
    let mut sbp = vec![B; placement.axes()];
    match sbp.get_mut(axis) {
        Some(sbp) => *sbp = on_axis,
        None => {
            return Err(Error::Unsupported {
                operation: "a layer of global::nn".to_owned(),
                reason: format!("the placement {placement} has no axis {axis}; axes count from 0"),
            });
        }
    }
    let mut tensor = create::zeros(sizes, path.kind(), placement, &sbp)?;
    tch::no_grad(|| init.set(&mut tensor));
    Ok(path.add(name, tensor, true))
}

/// Returns the SBP of a tensor, with another one on this axis.
fn with_axis(tensor: &Tensor, axis: usize, on_axis: Sbp) -> Result<NdSbp> {
    let mut sbp = tensor.sbp()?;
    if let Some(sbp) = sbp.get_mut(axis) {
        *sbp = on_axis;
    }
    Ok(sbp)
}

/// Returns the tensor, boxed on this axis.
fn pinned(tensor: &Tensor, axis: usize, on_axis: Sbp) -> Result<Tensor> {
    tensor.to_global(&tensor.placement()?, with_axis(tensor, axis, on_axis)?)
}

/// Partial values, added up on this axis: B, or split there. The gradient of split ones is gathered
/// once, for all that it is needed for.
fn summed(terms: &Tensor, axis: usize, result: Sbp) -> Result<Tensor> {
    if result == B {
        return pinned(terms, axis, B);
    }
    pinned(&terms.grad_sbp(with_axis(terms, axis, B)?)?, axis, result)
}
