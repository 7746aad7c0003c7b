//! Group norm of a part of a batch: its size is an argument of libtorch's operation.

use tch::{Kind, Tensor};

use super::context::Context;
use crate::error::Result;
use crate::kinds::wide;

/// Normalizes this rank's images.
pub fn group_norm(context: &mut Context<'_, '_>) -> Result<()> {
    // (input, weight, bias, images, channels, pixels, groups, eps)
    let input = context.local(0)?;
    let weight = context.optional(1)?;
    let bias = context.optional(2)?;
    let channels = context.int(4).unwrap_or(1);
    let pixels = context.int(5).unwrap_or(1);
    let groups = context.int(6).unwrap_or(1);
    let images = input.size()[0];
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

/// The groups of channels of this rank's images.
struct ChannelGroups {
    images: i64,
    groups: i64,
    /// Channels of a group.
    channels: i64,
    pixels: i64,
    /// The kind that sums are computed in.
    kind: Kind,
}

impl ChannelGroups {
    /// Returns a tensor of the images' size: images, groups, channels of a group, pixels.
    fn grouped(&self, tensor: &Tensor) -> Result<Tensor> {
        let shape = [self.images, self.groups, self.channels, self.pixels];
        Ok(tensor.f_to_kind(self.kind)?.f_reshape(shape)?)
    }

    /// Returns values of groups, for the elements of [`Self::grouped`].
    fn spread(&self, values: &Tensor) -> Result<Tensor> {
        Ok(values.f_to_kind(self.kind)?.f_view([self.images, self.groups, 1, 1])?)
    }

    /// Returns the sum over images and pixels, for each channel.
    fn sum(&self, of: &Tensor) -> Result<Tensor> {
        let sum = of.f_sum_dim_intlist([0i64, 3].as_slice(), false, self.kind)?;
        Ok(sum.f_reshape([self.groups * self.channels])?)
    }

    /// Returns the mean of each group, for its elements.
    fn mean(&self, of: &Tensor) -> Result<Tensor> {
        Ok(of.f_mean_dim([2i64, 3].as_slice(), true, self.kind)?)
    }
}

/// Runs the backward of [`group_norm`].
pub fn group_norm_backward(context: &mut Context<'_, '_>) -> Result<()> {
    // (gradient, input, mean, reciprocal deviation, weight, images, channels, pixels, groups, mask)
    let input = context.local(1)?;
    let channels = context.int(6).unwrap_or(1);
    let pixels = context.int(7).unwrap_or(1);
    let groups = context.int(8).unwrap_or(1);
    let layout = ChannelGroups {
        images: input.size()[0],
        groups,
        channels: channels / groups.max(1),
        pixels,
        kind: wide(input.kind()),
    };
    let mean = layout.spread(&context.local(2)?)?;
    let inverse = layout.spread(&context.local(3)?)?;
    let normal = (layout.grouped(&input)? - mean) * &inverse;
    let gradient = layout.grouped(&context.local(0)?)?;
    let of_weight = layout.sum(&(&gradient * &normal))?;
    let of_bias = layout.sum(&gradient)?;
    let weight = context.optional(4)?;
    let of_normal = match &weight {
        Some(weight) => gradient * weight.f_to_kind(layout.kind)?.f_view([1, groups, -1, 1])?,
        None => gradient,
    };
    let along = layout.mean(&of_normal)? + &normal * layout.mean(&(&of_normal * &normal))?;
    let of_input = ((of_normal - along) * inverse).f_reshape(input.size())?;
    let shape = context.shape(1);
    context.give(0, &of_input.f_to_kind(input.kind())?, &shape)?;
    let kind = weight.map_or(input.kind(), |weight| weight.kind());
    let channels = [channels as usize];
    context.give(1, &of_weight.f_to_kind(kind)?, &channels)?;
    context.give(2, &of_bias.f_to_kind(kind)?, &channels)
}
