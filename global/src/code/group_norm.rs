//! Group norm of a part of a batch: its size is an argument of libtorch's operation.

use tch::Tensor;

use super::context::Context;
use crate::error::Result;
use crate::kinds::wide;

pub fn group_norm(context: &mut Context<'_, '_>) -> Result<()> {
    // (input, weight, bias, images, channels, pixels, groups, eps)
    let input = context.local(0)?;
    let number = |index| context.int(index).unwrap_or(1);
    let (images, channels, pixels, groups) = (input.size()[0], number(4), number(5), number(6));
    let (weight, bias) = (context.optional(1)?, context.optional(2)?);
    let eps = context.number(7).unwrap_or(1e-5);
    let (output, mean, inverse) = input
        .f_contiguous()?
        .f_native_group_norm(weight, bias, images, channels, pixels, groups, eps)?;
    let shape = context.shape(0);
    let of_groups = [shape[0], groups as usize];
    context.give(0, &output, &shape)?;
    context.give(1, &mean, &of_groups)?;
    context.give(2, &inverse, &of_groups)
}

pub fn group_norm_backward(context: &mut Context<'_, '_>) -> Result<()> {
    // (gradient, input, mean, reciprocal deviation, weight, images, channels, pixels, groups, mask)
    let (gradient, input) = (context.local(0)?, context.local(1)?);
    let kind = wide(input.kind());
    let number = |index| context.int(index).unwrap_or(1);
    let (channels, groups) = (number(6), number(8));
    let images = input.size()[0];
    // Images, groups, channels of a group, pixels.
    let grouped = |tensor: &Tensor| -> Result<Tensor> {
        let shape = [images, groups, channels / groups.max(1), number(7)];
        Ok(tensor.f_to_kind(kind)?.f_reshape(shape)?)
    };
    let of_groups = |tensor: Tensor| -> Result<Tensor> {
        Ok(tensor.f_to_kind(kind)?.f_view([images, groups, 1, 1])?)
    };
    let (mean, inverse) = (of_groups(context.local(2)?)?, of_groups(context.local(3)?)?);
    let normal = (grouped(&input)? - mean) * &inverse;
    let gradient = grouped(&gradient)?;
    let of_channels = |tensor: Tensor| -> Result<Tensor> {
        Ok(tensor.f_sum_dim_intlist([0i64, 3].as_slice(), false, kind)?.f_reshape([channels])?)
    };
    let (of_weight, of_bias) = (of_channels(&gradient * &normal)?, of_channels(gradient.copy())?);
    let weight = context.optional(4)?;
    let of_normal = match &weight {
        Some(weight) => gradient * weight.f_to_kind(kind)?.f_view([1, groups, -1, 1])?,
        None => gradient,
    };
    let average = |tensor: &Tensor| tensor.f_mean_dim([2i64, 3].as_slice(), true, kind);
    let along = average(&of_normal)? + &normal * average(&(&of_normal * &normal))?;
    let of_input = ((of_normal - along) * inverse).f_reshape(input.size())?;
    let shape = context.shape(1);
    context.give(0, &of_input.f_to_kind(input.kind())?, &shape)?;
    let kind = weight.map_or(input.kind(), |weight| weight.kind());
    let channels = [channels as usize];
    context.give(1, &of_weight.f_to_kind(kind)?, &channels)?;
    context.give(2, &of_bias.f_to_kind(kind)?, &channels)
}
