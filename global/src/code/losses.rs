//! Means over split samples: each rank's sum is divided by the number of all samples.

use tch::{Reduction, Tensor};

use super::context::Context;
use crate::error::Result;
use crate::kinds::wide;
use crate::sbp::B;

/// The number of elements of a logical tensor.
fn elements(context: &Context<'_, '_>, tensor: usize) -> f64 {
    context.shape(tensor).iter().product::<usize>() as f64
}

/// The mean.
pub fn mse_loss(context: &mut Context<'_, '_>) -> Result<()> {
    // (input, target, reduction)
    let (input, target) = (context.local(0)?, context.local(1)?);
    let kind = wide(input.kind());
    let sum = input.f_to_kind(kind)?.f_mse_loss(&target.f_to_kind(kind)?, Reduction::Sum)?;
    let mean = (sum / elements(context, 0)).f_to_kind(input.kind())?;
    context.give(0, &mean, &[])
}

/// Of the mean.
pub fn mse_loss_backward(context: &mut Context<'_, '_>) -> Result<()> {
    // (gradient, input, target, reduction)
    let difference = context.local(1)? - context.local(2)?;
    let gradient = difference * context.local(0)? * (2.0 / elements(context, 1));
    let shape = context.shape(1);
    context.give(0, &gradient, &shape)
}

/// The mean, weighted by class, without samples of the ignored class.
pub fn nll_loss(context: &mut Context<'_, '_>) -> Result<()> {
    // (input, target, weight, reduction, ignored class) -> loss, total weight
    let (input, target) = (context.local(0)?, context.local(1)?);
    let kind = input.kind();
    let input = input.f_to_kind(wide(kind))?;
    let weight = context.optional(2)?;
    let weight = weight.map(|weight| weight.f_to_kind(wide(kind))).transpose()?;
    let ignored = context.int(4).unwrap_or(-100);
    let is_flat = input.dim() <= 2;
    let sum = match is_flat {
        true => input.f_nll_loss(&target, weight.as_ref(), Reduction::Sum, ignored)?,
        false => input.f_nll_loss2d(&target, weight.as_ref(), Reduction::Sum, ignored)?,
    };
    let counts = target.f_ne(ignored)?;
    let own: Tensor = match weight {
        Some(weight) => {
            let classes = (&target * &counts).f_reshape([-1])?;
            let of_samples = weight.f_index_select(0, &classes)?;
            (of_samples * counts.f_reshape([-1])?).f_sum(input.kind())?
        }
        None => counts.f_sum(input.kind())?,
    };
    let split = context.choice.inputs[0].clone();
    let total = context.summed(&own, &split)?;
    context.give(0, &(sum / &total).f_to_kind(kind)?, &[])?;
    context.give_as(&total.f_to_kind(kind)?, &[], &vec![B; split.len()])
}
