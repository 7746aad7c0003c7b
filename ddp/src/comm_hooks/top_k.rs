//! The largest elements of gradients.

use std::collections::{HashMap, HashSet};

use flow_autograd::BoxError;
use flow_tensor::TensorCollectives;
use tch::Tensor;

use super::wide;
use crate::bucket::comm_hook::{CommHook, GradBucket};
use crate::bucket::pending::Pending;

/// Sends a share of each gradient's elements, the largest by amount, with their places (S. U. Stich,
/// J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", 2018). The others are added to the next
/// step's gradient (error feedback).
///
/// Each rank receives what all ranks send: with a share `s` of 4-byte elements, that is `12 s` bytes
/// for an element and rank.
#[derive(Debug)]
pub struct TopK {
    share: f64,
    /// What each parameter's gradients have left unsent.
    errors: HashMap<String, Tensor>,
    /// The parameters of this step.
    seen: HashSet<String>,
}

impl TopK {
    /// Returns the hook that sends this share of elements, above 0 and at most 1. At least one element
    /// of each gradient is sent.
    pub fn new(share: f64) -> Self {
        Self { share: share.clamp(0.0, 1.0), errors: HashMap::new(), seen: HashSet::new() }
    }
}

impl CommHook for TopK {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        let _guard = tch::no_grad_guard();
        let gradients = bucket.gradients()?;
        let kind = gradients[0].kind();
        let mut values = Vec::with_capacity(gradients.len());
        let mut places = Vec::with_capacity(gradients.len());
        let mut start = 0;
        for (((name, _), gradient), is_used) in
            bucket.parameters().zip(&gradients).zip(bucket.used())
        {
            let mut flat = gradient.f_reshape([-1])?.f_to_kind(wide(kind))?;
            self.seen.insert(name.to_owned());
            // An error that comes where no rank uses the parameter would be lost.
            if let Some(error) = self.errors.get(name).filter(|_| is_used) {
                flat = flat.f_add(error)?;
            }
            let length = flat.numel() as i64;
            let sent = ((length as f64 * self.share).ceil() as i64).clamp(length.min(1), length);
            let (_, indices) = flat.f_abs()?.f_topk(sent, 0, true, false)?;
            values.push(flat.f_gather(0, &indices, false)?);
            places.push(indices.f_add_scalar(start)?);
            // A gradient that overflows, of which a GradScaler makes nothing, must not come again.
            let rest = flat.f_index_fill(0, &indices, 0.0)?.f_nan_to_num(0.0, 0.0, 0.0)?;
            if is_used {
                self.errors.insert(name.to_owned(), rest);
            }
            start += length;
        }
        if bucket.is_last() {
            let seen = std::mem::take(&mut self.seen);
            self.errors.retain(|name, _| seen.contains(name));
        }
        let group = bucket.group();
        let values = group.all_gather_tensor(&Tensor::f_cat(&values, 0)?)?;
        let places = group.all_gather_tensor(&Tensor::f_cat(&places, 0)?)?;
        let mut sum = values.f_new_zeros([start], (values.kind(), values.device()))?;
        // One rank after the other, so that all ranks add in the same order.
        for rank in 0..group.world_size() as i64 {
            sum = sum.f_index_add_(0, &places.f_get(rank)?, &values.f_get(rank)?)?;
        }
        let mean = sum.f_div_scalar(group.world_size() as i64)?;
        Ok(Pending::ready(mean.f_to_kind(kind)?))
    }

    fn waits_for_ranks(&self) -> bool {
        true
    }

    fn name(&self) -> String {
        format!("TopK of {}", self.share)
    }
}
