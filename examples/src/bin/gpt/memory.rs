//! The memory of a rank, by what it is for.

use std::fmt;

use anyhow::Result;
use flow::global::GlobalTensor;
use flow::prelude::Tensor;

use super::job::Job;

/// AdamW keeps two means of each gradient, beside the optimizer's shard of the parameter.
const COPIES_OF_SHARDS: usize = 3;

/// Bytes of a rank's tensors: weights, gradients, the optimizer's and activations.
pub struct Memory([usize; 4]);

impl Memory {
    /// Measures the rank that has most. Activations are the most that it held in the last step.
    /// Gradients are those that it has now: call this before the optimizer's step, on all ranks.
    pub fn most(job: &Job) -> Result<Self> {
        let variables = job.vs.trainable_variables();
        let gradients = variables.iter().map(Tensor::grad).filter(Tensor::defined);
        let own = [
            bytes(variables.iter())?,
            bytes(gradients.collect::<Vec<_>>().iter())?,
            COPIES_OF_SHARDS * bytes(job.optimizer.shards().trainable_variables().iter())?,
            job.pipeline.report()?.peak_activation_bytes,
        ];
        let mut all = vec![0_i64; own.len() * job.group.world_size()];
        job.group.all_gather(&own.map(|bytes| bytes as i64)[..], &mut all[..])?;
        let ranks = all.chunks(own.len());
        let most = ranks.max_by_key(|rank| rank.iter().sum::<i64>()).unwrap_or_default();
        Ok(Self(std::array::from_fn(|part| most.get(part).map_or(0, |&bytes| bytes as usize))))
    }
}

/// Returns the bytes of this rank's parts of tensors.
fn bytes<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Result<usize> {
    let mut bytes = 0;
    for tensor in tensors {
        let local = tensor.detach().to_local()?;
        bytes += local.numel() * local.kind().elt_size_in_bytes();
    }
    Ok(bytes)
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [weights, gradients, optimizer, activations] = self.0.map(|bytes| bytes as f64 / 1e6);
        write!(
            f,
            "a rank holds at most {:.3} MB: weights {weights:.3}, gradients {gradients:.3}, \
             optimizer {optimizer:.3}, activations {activations:.3}",
            self.0.iter().sum::<usize>() as f64 / 1e6
        )
    }
}
