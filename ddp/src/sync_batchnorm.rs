//! Batch norms that take the statistics of all ranks: PyTorch's `SyncBatchNorm`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use flow_comm::{ProcessGroup, ReduceOp, digest};
use flow_tensor::sync_batch_norm;
use tch::Tensor;
use tch::nn::VarStore;

use crate::error::{Error, Result, job_rank};
use crate::model_check::first_mismatch;

/// The converted layers, by the identities of their running means. A layer ends with its mean, after
/// which another tensor may have that identity.
static LAYERS: Mutex<BTreeMap<usize, Weak<Layer>>> = Mutex::new(BTreeMap::new());

struct Layer {
    group: Arc<LayerGroup>,
    /// Ranks that are in different layers of one size must not take each other's statistics.
    digest: u64,
}

/// The group in which a model's layers meet. It is their own: a `Ddp` whose backward fails ends it, so
/// that no rank waits in a layer for one that does not come.
struct LayerGroup {
    /// The program's, of which it is a duplicate.
    program: ProcessGroup,
    own: Mutex<ProcessGroup>,
}

impl LayerGroup {
    fn new(program: &ProcessGroup) -> Result<Self> {
        Ok(Self { program: program.clone(), own: Mutex::new(program.duplicate()?) })
    }

    fn own(&self) -> MutexGuard<'_, ProcessGroup> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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
/// A backward that fails in the `Ddp` ends the layers' communication as well, on all ranks of
/// `group`, until they wrap the model anew.
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
    if layers.is_empty() {
        return Ok(0);
    }
    let shared = Arc::new(LayerGroup::new(group)?);
    for (name, mean) in &layers {
        let layer = Arc::new(Layer { group: Arc::clone(&shared), digest: digest(name) });
        let known = Arc::downgrade(&layer);
        flow_autograd::replace_batch_norm(mean, move |norm| {
            let group = layer.group.own().with_digest(layer.digest);
            Ok(sync_batch_norm(&group, norm)?)
        })
        .map_err(|error| Error::torch(group, "convert_sync_batchnorm", error))?;
        let mut all = LAYERS.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, layer| layer.strong_count() > 0);
        all.insert(flow_autograd::identity(mean), known);
    }
    Ok(layers.len())
}

/// Gives converted layers new groups where a failure has ended the old ones, as some rank of `group`
/// knows. All its ranks call this.
pub(crate) fn renew(buffers: &[usize], group: &ProcessGroup) -> Result<()> {
    for layers in groups_of(buffers) {
        let mut has_failed = [i32::from(layers.own().check("wrap").is_err())];
        group.all_reduce(&mut has_failed, ReduceOp::Max)?;
        if has_failed == [1] {
            let renewed = layers.program.duplicate()?;
            *layers.own() = renewed;
        }
    }
    Ok(())
}

/// Whether one of these tensors is the running mean of a converted layer.
pub(crate) fn has_converted(tensors: &[Tensor]) -> bool {
    let identities: Vec<usize> = tensors.iter().map(flow_autograd::identity).collect();
    !groups_of(&identities).is_empty()
}

/// Ends the groups of converted layers.
pub(crate) fn abort(buffers: &[usize], cause: &str) {
    for group in groups_of(buffers) {
        group.own().abort(cause);
    }
}

/// Returns the groups of the layers that have these running means.
fn groups_of(buffers: &[usize]) -> Vec<Arc<LayerGroup>> {
    let layers = LAYERS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut found: Vec<Arc<LayerGroup>> = Vec::new();
    for layer in buffers.iter().filter_map(|buffer| layers.get(buffer)?.upgrade()) {
        if !found.iter().any(|other| Arc::ptr_eq(other, &layer.group)) {
            found.push(Arc::clone(&layer.group));
        }
    }
    found
}

fn is_mean((name, _): &(String, Tensor)) -> bool {
    name.rsplit('.').next() == Some("running_mean")
}
