//! Gradients in 8 bits.

use flow_autograd::BoxError;
use flow_tensor::TensorCollectives;
use tch::{Kind, TchError, Tensor};

use super::wide;
use crate::bucket::comm_hook::{CommHook, GradBucket};
use crate::bucket::pending::Pending;

/// Sends each element as a byte: its place between the smallest and the largest element of its
/// channel. A channel is the whole bucket, PyTorch's `quantization_pertensor_hook`, or some elements
/// that follow each other, its `quantization_perchannel_hook`.
///
/// An element is wrong by at most half a 255th of its channel's range, on each rank. Each rank
/// receives what all ranks send: up to seven ranks, that is fewer bytes than the mean of 4-byte
/// elements takes.
#[derive(Debug, Clone, Copy)]
pub struct Quantize {
    /// Elements of a channel; None: the whole bucket.
    channel: Option<usize>,
}

impl Quantize {
    /// Returns the hook with one range for each bucket.
    pub fn per_tensor() -> Self {
        Self { channel: None }
    }

    /// Returns the hook with a range for each `elements` of a bucket (PyTorch: 512), 1 or more.
    pub fn per_channel(elements: usize) -> Self {
        Self { channel: Some(elements.max(1)) }
    }

    /// Returns the bytes of each channel, and the smallest element and the step of each.
    pub(crate) fn quantized(&self, flat: &Tensor) -> Result<(Tensor, Tensor), TchError> {
        let length = flat.numel() as i64;
        let channel =
            self.channel.map_or(length, |channel| channel.min(flat.numel()) as i64).max(1);
        let padding = (channel - length % channel) % channel;
        // The last element once more: zeros would widen the last channel's range.
        let last = flat.f_narrow(0, length - 1, 1)?.f_expand([padding], false)?;
        let rows = Tensor::f_cat(&[flat, &last], 0)?.f_view([-1, channel])?;
        let (smallest, largest) = rows.f_aminmax(1, true)?;
        let step = (largest - &smallest).f_div_scalar(255.0)?;
        let safe = step.f_where_self(&step.f_gt(0.0)?, &step.f_ones_like()?)?;
        let bytes = rows.f_sub(&smallest)?.f_div(&safe)?.f_round()?.f_clamp(0.0, 255.0)?;
        Ok((bytes.f_to_kind(Kind::Uint8)?, Tensor::f_cat(&[smallest, step], 1)?))
    }

    /// Returns the mean of so many elements, from the bytes and ranges of all ranks.
    pub(crate) fn mean(bytes: &Tensor, ranges: &Tensor, length: i64) -> Result<Tensor, TchError> {
        let smallest = ranges.f_narrow(2, 0, 1)?;
        let step = ranges.f_narrow(2, 1, 1)?;
        let values = bytes.f_to_kind(ranges.kind())?.f_mul(&step)?.f_add(&smallest)?;
        let mean = values.f_mean_dim(0i64, false, ranges.kind())?;
        mean.f_view([-1])?.f_narrow(0, 0, length)
    }
}

impl CommHook for Quantize {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        let _guard = tch::no_grad_guard();
        let buffer = bucket.buffer()?;
        let length = buffer.numel() as i64;
        let kind = buffer.kind();
        if length == 0 {
            return Ok(bucket.all_reduce()?);
        }
        let (bytes, ranges) = self.quantized(&buffer.f_to_kind(wide(kind))?)?;
        let group = bucket.group();
        let bytes = group.all_gather_tensor(&bytes)?;
        let ranges = group.all_gather_tensor(&ranges)?;
        Ok(Pending::ready(Self::mean(&bytes, &ranges, length)?.f_to_kind(kind)?))
    }

    fn waits_for_ranks(&self) -> bool {
        true
    }

    fn name(&self) -> String {
        format!("Quantize with channels of {:?} elements", self.channel)
    }
}
