//! Batch norms that take the statistics of all ranks: PyTorch's `SyncBatchNorm`.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

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
        let layer = Layer::new(group.with_digest(digest(name)), mean);
        flow_autograd::replace_batch_norm(mean, move |norm| {
            Ok(sync_batch_norm(&layer.group, norm)?)
        })
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

/// The running means of converted layers, by identity, with the number of their [`Layer`]s.
static CONVERTED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// A converted layer, which lives as long as its running mean, or until that is converted again.
struct Layer {
    group: ProcessGroup,
    mean: usize,
}

impl Layer {
    fn new(group: ProcessGroup, mean: &Tensor) -> Self {
        let mean = flow_autograd::identity(mean);
        *converted().entry(mean).or_default() += 1;
        Self { group, mean }
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        let mut converted = converted();
        match converted.get_mut(&self.mean) {
            Some(layers) if *layers > 1 => *layers -= 1,
            _ => drop(converted.remove(&self.mean)),
        }
    }
}

/// Returns whether a layer was converted whose running mean is one of these, by identity.
pub(crate) fn has_converted(buffers: &[usize]) -> bool {
    let converted = converted();
    buffers.iter().any(|buffer| converted.contains_key(buffer))
}

fn converted() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    CONVERTED.lock().unwrap_or_else(PoisonError::into_inner)
}
