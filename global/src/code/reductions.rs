//! Sums, means, products and norms over split dimensions.

use flow_comm::ReduceOp;
use tch::{Kind, Tensor};

use super::context::Context;
use crate::error::Result;
use crate::kinds::{complex, is_complex, kind_of, real, wide};

/// The arguments of a sum, a mean or a product.
struct Reduction {
    /// The dimensions that are reduced.
    dims: Vec<i64>,
    /// They stay, with one element.
    keep: bool,
    /// The kind of the result.
    kind: Kind,
    /// The logical shape of the result.
    shape: Vec<usize>,
}

impl Reduction {
    /// Reads (self, dtype) or (self, dims, keepdim, dtype).
    fn of(context: &Context<'_, '_>) -> Self {
        let shape = context.shape(0);
        let rank = shape.len() as i64;
        let is_of_all = context.call.overload.is_empty();
        let mut dims = if is_of_all { Vec::new() } else { context.ints(1) };
        dims.extend(context.int(1).filter(|_| !is_of_all));
        if dims.is_empty() {
            dims = (0..rank).collect();
        }
        dims.iter_mut().filter(|dim| **dim < 0).for_each(|dim| *dim += rank);
        let keep = !is_of_all && context.flag(2);
        let kind = context.int(if is_of_all { 1 } else { 3 }).and_then(kind_of);
        let kind = kind.or(context.call.kind(0)).unwrap_or(Kind::Float);
        let shape = reduced(&shape, &dims, keep);
        Self { dims, keep, kind, shape }
    }

    /// Returns the sum of a local, in a kind that does not round terms.
    fn sum(&self, local: &Tensor) -> Result<Tensor> {
        let kind = wide(self.kind);
        if self.dims.is_empty() {
            return Ok(local.f_to_kind(kind)?);
        }
        Ok(local.f_sum_dim_intlist(&self.dims[..], self.keep, kind)?)
    }

    /// Returns the result to the caller.
    fn give(&self, context: &mut Context<'_, '_>, result: &Tensor) -> Result<()> {
        context.give(0, &result.f_to_kind(self.kind)?, &self.shape)
    }
}

/// Returns the shape without these dimensions, or with one element in each.
fn reduced(shape: &[usize], dims: &[i64], keep: bool) -> Vec<usize> {
    let mut sizes = Vec::new();
    for (dim, &size) in shape.iter().enumerate() {
        if !dims.contains(&(dim as i64)) {
            sizes.push(size);
        } else if keep {
            sizes.push(1);
        }
    }
    sizes
}

/// Fails as libtorch does: an average or a norm is no integer.
fn check_kind(context: &Context<'_, '_>, kind: Kind) -> Result<()> {
    match kind {
        Kind::Uint8 | Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64 | Kind::Bool => {
            let reason = format!("the result is no {kind:?}: convert the tensor by to_kind first");
            Err(context.fail(&reason))
        }
        _ => Ok(()),
    }
}

/// Computes a sum in half precision, of terms in single precision.
pub fn sum(context: &mut Context<'_, '_>) -> Result<()> {
    let reduction = Reduction::of(context);
    // libtorch rounds elements before it adds them up.
    let own = reduction.sum(&context.local(0)?.f_to_kind(reduction.kind)?)?;
    let sum = context.reduced(&own, &reduction.shape, ReduceOp::Sum)?;
    reduction.give(context, &sum)
}

/// Computes a mean: each rank's sum, divided by the number of all elements; in half precision that of
/// all ranks.
pub fn mean(context: &mut Context<'_, '_>) -> Result<()> {
    let reduction = Reduction::of(context);
    check_kind(context, reduction.kind)?;
    let own = reduction.sum(&context.local(0)?)?;
    let sum = context.reduced(&own, &reduction.shape, ReduceOp::Sum)?;
    let shape = context.shape(0);
    let count: usize = reduction.dims.iter().map(|&dim| shape[dim as usize]).product();
    reduction.give(context, &(sum / count as f64))
}

/// Computes a product in half precision, of factors in single precision.
pub fn product(context: &mut Context<'_, '_>) -> Result<()> {
    let reduction = Reduction::of(context);
    let local = context.local(0)?.f_to_kind(reduction.kind)?;
    let kind = wide(reduction.kind);
    let own = match reduction.dims[..] {
        [dim] => local.f_prod_dim_int(dim, reduction.keep, kind)?,
        _ => local.f_prod(kind)?,
    };
    let product = context.reduced(&own, &reduction.shape, ReduceOp::Product)?;
    reduction.give(context, &product)
}

/// Returns a norm of all elements, from those of the parts.
pub fn norm(context: &mut Context<'_, '_>) -> Result<()> {
    // (self, order, dims, keepdim, dtype), and norm(self, order, dtype)
    let dtype = if context.call.overload == "ScalarOpt_dtype" { 2 } else { 4 };
    let order = context.number(1).unwrap_or(2.0);
    let local = context.local(0)?;
    let kind = context.int(dtype).and_then(kind_of).unwrap_or(local.kind());
    check_kind(context, kind)?;
    let kind = real(kind);
    let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
    // Before the magnitude is taken, which rounds.
    let in_wide = if is_complex(local.kind()) { complex(wide) } else { wide };
    let magnitudes = local.f_to_kind(in_wide)?.f_abs()?.f_reshape([-1])?;
    let (own, op): (Tensor, ReduceOp) = if order == f64::INFINITY {
        (extreme(&magnitudes, 0.0, Tensor::f_max)?, ReduceOp::Max)
    } else if order == f64::NEG_INFINITY {
        (extreme(&magnitudes, f64::INFINITY, Tensor::f_min)?, ReduceOp::Min)
    } else if order == 0.0 {
        (magnitudes.f_ne(0.0)?.f_sum(wide)?, ReduceOp::Sum)
    } else {
        (magnitudes.f_pow_tensor_scalar(order)?.f_sum(wide)?, ReduceOp::Sum)
    };
    let mut norm = context.reduced(&own, &[], op)?;
    if order.is_finite() && order != 0.0 {
        norm = norm.f_pow_tensor_scalar(1.0 / order)?;
    }
    let shape = context.shape(0);
    let dims: Vec<i64> = (0..shape.len() as i64).collect();
    let shape = reduced(&shape, &dims, context.flag(3));
    let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
    context.give(0, &norm.f_to_kind(kind)?.f_view(&sizes[..])?, &shape)
}

/// Returns the greatest or least of the elements; `none` if there are none.
fn extreme(
    of: &Tensor,
    none: f64,
    find: impl Fn(&Tensor) -> std::result::Result<Tensor, tch::TchError>,
) -> Result<Tensor> {
    Ok(match of.numel() {
        0 => Tensor::f_full([0; 0], none, (of.kind(), of.device()))?,
        _ => find(of)?,
    })
}
