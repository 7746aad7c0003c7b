//! Losses of split samples. For a mean each rank's sum is divided by the number of all samples. Sums of
//! half precision are added up in single precision.

use flow_comm::ReduceOp;
use tch::{Reduction, Tensor};

use super::context::Context;
use crate::error::Result;
use crate::kinds::wide;
use crate::sbp::B;

/// libtorch's `Reduction::Sum`.
const SUM: i64 = 2;

/// Returns the number of elements of a logical tensor.
fn elements(context: &Context<'_, '_>, tensor: usize) -> f64 {
    context.shape(tensor).iter().product::<usize>() as f64
}

/// Returns the sum, or the mean: the sum, divided by the number of all elements. Argument `reduction` says
/// which.
fn loss(
    context: &mut Context<'_, '_>,
    reduction: usize,
    sum: impl Fn(&Context<'_, '_>, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<()> {
    let input = context.local(0)?;
    let kind = wide(input.kind());
    let target = context.local(1)?.f_to_kind(kind)?;
    let own = sum(context, &input.f_to_kind(kind)?, &target)?;
    let sum = context.reduced(&own, &[], ReduceOp::Sum)?;
    let is_sum = context.int(reduction) == Some(SUM);
    let loss = if is_sum { sum } else { sum / elements(context, 0) };
    context.give(0, &loss.f_to_kind(input.kind())?, &[])
}

/// Returns the gradient of a mean: that of the sum, divided by the number of all elements.
fn mean_backward(
    context: &mut Context<'_, '_>,
    of_sum: impl Fn(&Context<'_, '_>, &Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<()> {
    let input = context.local(1)?;
    let kind = wide(input.kind());
    let gradient = context.local(0)?.f_to_kind(kind)? / elements(context, 1);
    let target = context.local(2)?.f_to_kind(kind)?;
    let gradient = of_sum(context, &gradient, &input.f_to_kind(kind)?, &target)?;
    let shape = context.shape(1);
    context.give(0, &gradient.f_to_kind(input.kind())?, &shape)
}

/// Runs `mse_loss`: (input, target, reduction).
pub fn mse_loss(context: &mut Context<'_, '_>) -> Result<()> {
    loss(context, 2, |_, input, target| Ok(input.f_mse_loss(target, Reduction::Sum)?))
}

/// Runs the backward of [`mse_loss`]: (gradient, input, target, reduction).
pub fn mse_loss_backward(context: &mut Context<'_, '_>) -> Result<()> {
    mean_backward(context, |_, gradient, input, target| {
        Ok(input.f_mse_loss_backward(gradient, target, Reduction::Sum)?)
    })
}

/// Runs `smooth_l1_loss`: (input, target, reduction, beta).
pub fn smooth_l1_loss(context: &mut Context<'_, '_>) -> Result<()> {
    loss(context, 2, |context, input, target| {
        let beta = context.number(3).unwrap_or(1.0);
        Ok(input.f_smooth_l1_loss(target, Reduction::Sum, beta)?)
    })
}

/// Runs the backward of [`smooth_l1_loss`]: (gradient, input, target, reduction, beta).
pub fn smooth_l1_loss_backward(context: &mut Context<'_, '_>) -> Result<()> {
    mean_backward(context, |context, gradient, input, target| {
        let beta = context.number(4).unwrap_or(1.0);
        Ok(input.f_smooth_l1_loss_backward(gradient, target, Reduction::Sum, beta)?)
    })
}

/// Runs `huber_loss`: (input, target, reduction, delta).
pub fn huber_loss(context: &mut Context<'_, '_>) -> Result<()> {
    loss(context, 2, |context, input, target| {
        let delta = context.number(3).unwrap_or(1.0);
        Ok(input.f_huber_loss(target, Reduction::Sum, delta)?)
    })
}

/// Runs the backward of [`huber_loss`]: (gradient, input, target, reduction, delta).
pub fn huber_loss_backward(context: &mut Context<'_, '_>) -> Result<()> {
    mean_backward(context, |context, gradient, input, target| {
        let delta = context.number(4).unwrap_or(1.0);
        Ok(input.f_huber_loss_backward(gradient, target, Reduction::Sum, delta)?)
    })
}

/// Runs `binary_cross_entropy`: (input, target, weight, reduction).
pub fn binary_cross_entropy(context: &mut Context<'_, '_>) -> Result<()> {
    loss(context, 3, |context, input, target| {
        Ok(input.f_binary_cross_entropy(target, context.optional(2)?, Reduction::Sum)?)
    })
}

/// Runs the backward of [`binary_cross_entropy`]: (gradient, input, target, weight, reduction).
pub fn binary_cross_entropy_backward(context: &mut Context<'_, '_>) -> Result<()> {
    mean_backward(context, |context, gradient, input, target| {
        let weight = context.optional(3)?;
        Ok(input.f_binary_cross_entropy_backward(gradient, target, weight, Reduction::Sum)?)
    })
}

/// Runs `binary_cross_entropy_with_logits`: (input, target, weight, weight of positives, reduction).
pub fn binary_cross_entropy_with_logits(context: &mut Context<'_, '_>) -> Result<()> {
    loss(context, 4, |context, input, target| {
        let weight = context.optional(2)?;
        let of_positives = context.optional(3)?;
        let sum = Reduction::Sum;
        Ok(input.f_binary_cross_entropy_with_logits(target, weight, of_positives, sum)?)
    })
}

/// Computes the sum or the mean, weighted by class, without samples of the ignored class.
pub fn nll_loss(context: &mut Context<'_, '_>) -> Result<()> {
    // (input, target, weight, reduction, ignored class) -> loss, total weight
    let input = context.local(0)?;
    let target = context.local(1)?;
    let kind = input.kind();
    let input = input.f_to_kind(wide(kind))?;
    let weight = context.optional(2)?;
    let weight = weight.map(|weight| weight.f_to_kind(wide(kind))).transpose()?;
    let ignored = context.int(4).unwrap_or(-100);
    let sum = if input.dim() <= 2 {
        input.f_nll_loss(&target, weight.as_ref(), Reduction::Sum, ignored)?
    } else {
        input.f_nll_loss2d(&target, weight.as_ref(), Reduction::Sum, ignored)?
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
    let sum = context.reduced(&sum, &[], ReduceOp::Sum)?;
    let is_sum = context.int(3) == Some(SUM);
    let loss = if is_sum { sum } else { sum / &total };
    context.give(0, &loss.f_to_kind(kind)?, &[])?;
    context.give_as(&total.f_to_kind(kind)?, &[], &vec![B; split.len()])
}
