//! Linear layers whose weight is split by columns or by rows.
//!
//! The names are Megatron's: it writes a weight as inputs by outputs. libtorch's is outputs by
//! inputs, so that a column layer's weight is S(0).

use std::borrow::Borrow;

use tch::{Tensor, nn};

use super::{pinned, summed, variable};
use crate::error::Result;
use crate::placement::Placement;
use crate::sbp::{B, S, Sbp, reduced};
use crate::tensor::GlobalTensor;

/// A linear layer, each rank of which computes a part of the outputs.
#[derive(Debug)]
pub struct ColumnLinear {
    /// Outputs by inputs, S(0) on the axis.
    pub ws: Tensor,
    /// S(0) on the axis.
    pub bs: Option<Tensor>,
    axis: usize,
}

/// A linear layer, each rank of which has a part of the inputs.
#[derive(Debug)]
pub struct RowLinear {
    /// Outputs by inputs, S(1) on the axis.
    pub ws: Tensor,
    /// B.
    pub bs: Option<Tensor>,
    axis: usize,
    result: Sbp,
}

/// Returns a linear layer whose outputs are split over an axis of the placement. Names, sizes and
/// initial values are those of [`nn::linear`]; no rank has more than its part.
///
/// # Errors
/// The placement has no such axis.
pub fn column_linear<'a>(
    path: impl Borrow<nn::Path<'a>>,
    inputs: i64,
    outputs: i64,
    placement: &Placement,
    axis: usize,
    config: nn::LinearConfig,
) -> Result<ColumnLinear> {
    let split = [S(0), S(0)];
    let (ws, bs) = weights(path.borrow(), (inputs, outputs), placement, (axis, split), config)?;
    Ok(ColumnLinear { ws, bs, axis })
}

/// Returns a linear layer whose inputs are split over an axis of the placement. Names, sizes and
/// initial values are those of [`nn::linear`]; no rank has more than its part.
///
/// # Errors
/// The placement has no such axis.
pub fn row_linear<'a>(
    path: impl Borrow<nn::Path<'a>>,
    inputs: i64,
    outputs: i64,
    placement: &Placement,
    axis: usize,
    config: nn::LinearConfig,
) -> Result<RowLinear> {
    let split = [S(1), B];
    let (ws, bs) = weights(path.borrow(), (inputs, outputs), placement, (axis, split), config)?;
    Ok(RowLinear { ws, bs, axis, result: B })
}

fn weights(
    path: &nn::Path<'_>,
    (inputs, outputs): (i64, i64),
    placement: &Placement,
    (axis, [of_weight, of_bias]): (usize, [Sbp; 2]),
    config: nn::LinearConfig,
) -> Result<(Tensor, Option<Tensor>)> {
    let bound = 1.0 / (inputs as f64).sqrt();
    let init = config.bs_init.unwrap_or(nn::Init::Uniform { lo: -bound, up: bound });
    let bs = if config.bias {
        Some(variable(path, ("bias", &[outputs], init), placement, (axis, of_bias))?)
    } else {
        None
    };
    let weight = ("weight", &[outputs, inputs][..], config.ws_init);
    Ok((variable(path, weight, placement, (axis, of_weight))?, bs))
}

impl ColumnLinear {
    /// Runs the layer. The result is S(last) on the layer's axis. An input that is split there is
    /// gathered. Backward, the input's gradient is reduced, to the layout that the input had.
    ///
    /// # Errors
    /// The input is plain or does not fit, or a collective fails.
    pub fn f_forward(&self, xs: &Tensor) -> Result<Tensor> {
        let xs = xs.grad_sbp(reduced(&xs.sbp()?))?;
        let xs = pinned(&xs, self.axis, B)?;
        Ok(xs.f_linear(&self.ws, self.bs.as_ref())?)
    }
}

impl RowLinear {
    /// Has the result split by this dimension on the layer's axis: a reduce-scatter, instead of an
    /// all-reduce. With the dimension of tokens this is sequence parallelism (Korthikanti et al.,
    /// Reducing Activation Recomputation in Large Transformer Models, 2022). What lies between a
    /// row layer and the next column layer, such as layer norm and dropout, is split over the
    /// ranks.
    pub fn scattered(mut self, dim: usize) -> Self {
        self.result = S(dim);
        self
    }

    /// Runs the layer. The result is reduced: B on the layer's axis, or split as
    /// [`scattered`](Self::scattered) says.
    ///
    /// # Errors
    /// The input is plain or does not fit, or a collective fails.
    pub fn f_forward(&self, xs: &Tensor) -> Result<Tensor> {
        let xs = pinned(xs, self.axis, S(xs.dim().saturating_sub(1)))?;
        let terms = xs.f_linear(&self.ws, None::<&Tensor>)?;
        let sum = summed(&terms, self.axis, self.result)?;
        // Added once, not by each rank.
        Ok(match &self.bs {
            Some(bs) => sum.f_add(bs)?,
            None => sum,
        })
    }
}

impl nn::Module for ColumnLinear {
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.f_forward(xs).expect("column_linear")
    }
}

impl nn::Module for RowLinear {
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.f_forward(xs).expect("row_linear")
    }
}
