//! The memory of a rank, by what it is for.

use std::fmt;

use anyhow::Result;
use flow::ddp::is_fully_sharded;
use flow::global::GlobalTensor;
use flow::prelude::Tensor;

use super::job::Job;

/// AdamW keeps two means of each gradient.
const MEANS: usize = 2;

/// Bytes of a rank's tensors: weights, gradients, the optimizer's and activations.
pub struct Memory([usize; 4]);

impl Memory {
    /// Measures the rank that has most. Activations are the most that it held in the last step.
    /// Gradients are those that it has now: call this before the optimizer's step, on all ranks. Of
    /// what ranks have in common each holds an equal part.
    pub fn most(job: &Job) -> Result<Self> {
        let variables = job.vs.trainable_variables();
        let gradients: Vec<Tensor> = variables.iter().map(Tensor::grad).collect();
        let shards = job.optimizer.shards().trainable_variables();
        let [own_weights, common_weights] = bytes(&variables)?;
        let [own_shards, common_shards] = bytes(&shards)?;
        let own = [
            own_weights + common_weights / job.replicas_on_machine,
            bytes(&gradients)?[0],
            // A shard that is in common is a part of the weights.
            own_shards + MEANS * (own_shards + common_shards),
            job.pipeline.report()?.peak_activation_bytes,
        ];
        let mut all = vec![0_i64; own.len() * job.group.world_size()];
        job.group.all_gather(&own.map(|bytes| bytes as i64)[..], &mut all[..])?;
        let ranks = all.chunks(own.len());
        let most = ranks.max_by_key(|rank| rank.iter().sum::<i64>()).unwrap_or_default();
        Ok(Self(std::array::from_fn(|part| most.get(part).map_or(0, |&bytes| bytes as usize))))
    }
}

/// Returns the bytes of this rank's parts of tensors: in its own memory, and in memory that ranks have in
/// common.
fn bytes(tensors: &[Tensor]) -> Result<[usize; 2]> {
    let mut bytes = [0; 2];
    for tensor in tensors.iter().filter(|tensor| tensor.defined()) {
        let local = tensor.detach().to_local()?;
        let is_common = usize::from(is_fully_sharded(&local));
        bytes[is_common] += local.numel() * local.kind().elt_size_in_bytes();
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
