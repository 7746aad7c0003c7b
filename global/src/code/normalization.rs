//! Batch norm over a split batch, with the statistics of all ranks: SyncBatchNorm.

use tch::{Kind, Tensor};

use super::context::Context;
use crate::error::Result;
use crate::kinds::wide;
use crate::sbp::{B, NdSbp, P, S};

/// A batch as batch norm sees it.
struct Batch {
    /// All dimensions but that of channels.
    dims: Vec<i64>,
    /// Sizes of a tensor that is to be broadcast from channels.
    view: Vec<i64>,
    /// Elements of a channel, on all ranks.
    count: f64,
    /// The SBP of a rank's sums over the batch, and of all ranks' sums.
    sbps: [NdSbp; 2],
    channels: usize,
}

impl Batch {
    fn of(context: &Context<'_, '_>, input: usize) -> Self {
        let shape = context.shape(input);
        let sbp = &context.choice.inputs[input];
        let mut terms = NdSbp::new();
        for sbp in sbp {
            terms.push(match sbp.dim() {
                Some(1) => S(0),
                Some(_) => P,
                None => B,
            });
        }
        let sums = terms.iter().map(|&sbp| if sbp == P { B } else { sbp }).collect();
        Self {
            dims: (0..shape.len() as i64).filter(|&dim| dim != 1).collect(),
            view: (0..shape.len()).map(|dim| if dim == 1 { -1 } else { 1 }).collect(),
            count: (shape.iter().product::<usize>() / shape[1].max(1)) as f64,
            sbps: [terms, sums],
            channels: shape[1],
        }
    }

    /// Returns the sum over the batch of each channel.
    fn sum(&self, context: &Context<'_, '_>, of: &Tensor) -> Result<Tensor> {
        let own = of.f_sum_dim_intlist(&self.dims[..], false, of.kind())?;
        let [terms, sums] = &self.sbps;
        context.boxed(&own, &[self.channels], terms, sums)
    }

    /// Returns values of channels, for the elements of the batch.
    fn spread(&self, values: &Tensor) -> Result<Tensor> {
        Ok(values.f_view(&self.view[..])?)
    }
}

/// Normalizes a batch in training.
pub fn batch_norm(context: &mut Context<'_, '_>) -> Result<()> {
    // (input, weight, bias, running mean, running variance, training, momentum, eps)
    let batch = Batch::of(context, 0);
    let given = context.local(0)?;
    let momentum = context.number(6).unwrap_or(0.1);
    let eps = context.number(7).unwrap_or(1e-5);
    let input = given.f_to_kind(wide(given.kind()))?;
    let mean = batch.sum(context, &input)? / batch.count;
    let centered = &input - batch.spread(&mean)?;
    let variance = batch.sum(context, &(&centered * &centered))? / batch.count;
    let inverse = (&variance + eps).f_rsqrt()?;
    let mut output = centered * batch.spread(&inverse)?;
    if let Some(weight) = context.optional(1)? {
        output *= batch.spread(&weight)?;
    }
    if let Some(bias) = context.optional(2)? {
        output += batch.spread(&bias)?;
    }
    for (tensor, now, scale) in
        [(3, &mean, 1.0), (4, &variance, batch.count / (batch.count - 1.0).max(1.0))]
    {
        if let Some(running) = context.optional(tensor)? {
            let next = &running * (1.0 - momentum) + now * (momentum * scale);
            context.overwrite(tensor, &next)?;
        }
    }
    let shape = context.shape(0);
    context.give(0, &output.f_to_kind(given.kind())?, &shape)?;
    let sbp = batch.sbps[1].clone();
    context.give_as(&mean, &[batch.channels], &sbp)?;
    context.give_as(&inverse, &[batch.channels], &sbp)?;
    if context.choice.outputs.len() > 3 {
        // What cuDNN's backward would read.
        let nothing = Tensor::f_empty([0], (Kind::Uint8, given.device()))?;
        context.give(3, &nothing, &[0])?;
    }
    Ok(())
}

/// Runs the backward of [`batch_norm`].
pub fn batch_norm_backward(context: &mut Context<'_, '_>) -> Result<()> {
    // (gradient, input, weight, running mean, running variance, mean, deviation, training, eps, mask)
    backward(context, 0, 1)
}

/// Runs the backward of [`batch_norm`] for cuDNN's operation.
pub fn cudnn_batch_norm_backward(context: &mut Context<'_, '_>) -> Result<()> {
    // (input, gradient, weight, running mean, running variance, mean, deviation, eps, memory)
    backward(context, 1, 0)
}

/// The rest of the arguments is the same.
fn backward(context: &mut Context<'_, '_>, gradient: usize, input: usize) -> Result<()> {
    let batch = Batch::of(context, input);
    let shape = context.shape(input);
    let input = context.local(input)?;
    let kind = input.kind();
    let input = input.f_to_kind(wide(kind))?;
    let gradient = context.local(gradient)?.f_to_kind(wide(kind))?;
    let mean = context.local(5)?;
    let inverse = context.local(6)?;
    let normal = (&input - batch.spread(&mean)?) * batch.spread(&inverse)?;
    let of_bias = batch.sum(context, &gradient)?;
    let of_weight = batch.sum(context, &(&gradient * &normal))?;
    let along = (batch.spread(&of_bias)? + &normal * batch.spread(&of_weight)?) / batch.count;
    let mut of_input = (gradient - along) * batch.spread(&inverse)?;
    let weight = context.optional(2)?;
    if let Some(weight) = &weight {
        of_input *= batch.spread(weight)?;
    }
    context.give(0, &of_input.f_to_kind(kind)?, &shape)?;
    let sbp = batch.sbps[1].clone();
    let kind = weight.map_or(kind, |weight| weight.kind());
    context.give_as(&of_weight.f_to_kind(kind)?, &[batch.channels], &sbp)?;
    context.give_as(&of_bias.f_to_kind(kind)?, &[batch.channels], &sbp)
}
