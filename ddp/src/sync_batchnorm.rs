//! Batch norms that take the statistics of all ranks: PyTorch's `SyncBatchNorm`.

use flow_comm::{ProcessGroup, digest};
use flow_tensor::sync_batch_norm;
use tch::Tensor;
use tch::nn::VarStore;

use crate::error::{Error, Result, job_rank};
use crate::model_check::first_mismatch;

/// Makes every batch norm of a model take, in training, the statistics of all ranks' batches:
/// PyTorch's `SyncBatchNorm.convert_sync_batchnorm`. Returns the number of these layers.
///
/// The layers are those whose `running_mean` is in `vs`: tch's `nn::batch_norm1d`, `2d` and `3d`,
/// also inside models of others, such as `tch::vision`'s. The model itself stays as it is, its
/// checkpoints too. In evaluation each layer takes its running statistics, without communication.
///
/// Call it on all ranks, after the model is made, and before or after it is wrapped in `Ddp`. From
/// then on each forward in training, and its backward, are collective: all ranks run the same layers
/// in the same order, as [`sync_batch_norm`] says. If they do not, it is an error of the layer, with
/// which tch's modules panic. Nothing is converted where the group has one rank.
///
/// ```no_run
/// # fn main() -> anyhow::Result<()> {
/// use flow_ddp::{Ddp, ProcessGroup, TensorCollectives, convert_sync_batchnorm};
/// use tch::{nn, vision::mobilenet};
///
/// let group = ProcessGroup::from_env()?;
/// let vs = nn::VarStore::new(group.device());
/// let net = mobilenet::v2(&vs.root(), 10);
/// convert_sync_batchnorm(&vs, &group)?;
/// let model = Ddp::new(net, &vs, &group)?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// Ranks whose layers differ, on all ranks; a lost rank.
pub fn convert_sync_batchnorm(vs: &VarStore, group: &ProcessGroup) -> Result<usize> {
    let mut layers: Vec<(String, Tensor)> = vs.variables().into_iter().filter(is_mean).collect();
    if group.world_size() == 1 {
        return Ok(layers.len());
    }
    layers.sort_by(|(one, _), (other, _)| one.cmp(other));
    let lines: Vec<String> =
        layers.iter().map(|(name, mean)| format!("buffer {name} {:?}", mean.size())).collect();
    if let Some(difference) = first_mismatch(group, &lines)? {
        return Err(Error::Mismatch { rank: job_rank(group), difference });
    }
    for (name, mean) in &layers {
        // Ranks that are in different layers of one size must not take each other's statistics.
        let layer = group.with_digest(digest(name));
        flow_autograd::replace_batch_norm(mean, move |norm| Ok(sync_batch_norm(&layer, norm)?))
            .map_err(|error| Error::Torch {
                rank: job_rank(group),
                operation: "convert_sync_batchnorm",
                reason: error.to_string(),
            })?;
    }
    Ok(layers.len())
}

fn is_mean((name, _): &(String, Tensor)) -> bool {
    name.rsplit('.').next() == Some("running_mean")
}
