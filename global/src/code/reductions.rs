//! Means and norms over split dimensions.

use flow_comm::ReduceOp;
use tch::{Kind, Tensor};

use super::context::Context;
use crate::error::Result;
use crate::kinds::{kind_of, real, wide};
use crate::sbp::{B, NdSbp, Sbp};

/// Dimensions that are an argument; all if it is missing or empty.
fn dims(context: &Context<'_, '_>, argument: usize) -> Vec<i64> {
    let rank = context.shape(0).len() as i64;
    let dims = context.ints(argument);
    if dims.is_empty() {
        return (0..rank).collect();
    }
    dims.iter().map(|&dim| if dim < 0 { dim + rank } else { dim }).collect()
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

/// Returns each rank's sum, divided by the number of all elements.
pub fn mean(context: &mut Context<'_, '_>) -> Result<()> {
    // mean(self, dtype) and mean(self, dims, keepdim, dtype)
    let shape = context.shape(0);
    let (dims, keep, kind) = if context.call.overload.is_empty() {
        ((0..shape.len() as i64).collect(), false, context.int(1))
    } else {
        (dims(context, 1), context.flag(2), context.int(3))
    };
    let local = context.local(0)?;
    let kind = kind.and_then(kind_of).unwrap_or(local.kind());
    check_kind(context, kind)?;
    let count: usize = dims.iter().map(|&dim| shape[dim as usize]).product();
    let sum = if dims.is_empty() {
        local.f_to_kind(wide(kind))?
    } else {
        local.f_sum_dim_intlist(&dims[..], keep, wide(kind))?
    };
    let mean = (sum / count as f64).f_to_kind(kind)?;
    context.give(0, &mean, &reduced(&shape, &dims, keep))
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
    let magnitudes = local.f_abs()?.f_to_kind(wide)?.f_reshape([-1])?;
    let (own, op): (Tensor, ReduceOp) = if order == f64::INFINITY {
        (extreme(&magnitudes, 0.0, Tensor::f_max)?, ReduceOp::Max)
    } else if order == f64::NEG_INFINITY {
        (extreme(&magnitudes, f64::INFINITY, Tensor::f_min)?, ReduceOp::Min)
    } else if order == 0.0 {
        (magnitudes.f_ne(0.0)?.f_sum(wide)?, ReduceOp::Sum)
    } else {
        (magnitudes.f_pow_tensor_scalar(order)?.f_sum(wide)?, ReduceOp::Sum)
    };
    let of_parts = &context.choice.inputs[0];
    let from: NdSbp =
        of_parts.iter().map(|sbp| sbp.dim().map_or(B, |_| Sbp::Partial(op))).collect();
    let mut norm = context.boxed(&own, &[], &from, &vec![B; from.len()])?;
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
