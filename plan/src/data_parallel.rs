//! What data parallelism adds to a step: reducing gradients, gathering weights, the optimizer.

use crate::cluster::Group;
use crate::cost::Cost;
use crate::layout::Layout;
use crate::task::Task;
use crate::training::Training;

/// What data parallelism adds to a step, for the rank with the most parameters.
pub(crate) struct DataParallel {
    pub group: Group,
    /// Once in a step: seconds and bytes.
    once: f64,
    pub bytes_once: f64,
    /// For each micro-batch.
    each: f64,
    pub bytes_each: f64,
    /// Seconds of the optimizer.
    pub optimizer: f64,
    /// Whether ZeRO pays with time for memory.
    pub for_memory: bool,
}

impl DataParallel {
    /// `ranks` are the costs of the pipeline's ranks.
    pub fn new(ranks: &[Cost], task: &Task, layout: &Layout) -> Self {
        let group = task.cluster.group(layout.data, layout.tensor, layout.ranks());
        let Training { weights, gradients, optimizer, .. } = task.training;
        let parameters = ranks.iter().map(|cost| cost.parameters).fold(0.0, f64::max);
        let (weight_bytes, gradient_bytes) = (weights * parameters, gradients * parameters);
        // What is reduced or gathered once in a step, and for each micro-batch (Rajbhandari et al.
        // 2020, section 7): gradients of ZeRO 2 and 3 are not kept whole until the end of a step.
        let (once, each) = match layout.zero {
            0 => (2.0 * gradient_bytes, 0.0),
            1 => (gradient_bytes + weight_bytes, 0.0),
            2 => (weight_bytes, gradient_bytes),
            _ => (0.0, 2.0 * weight_bytes + gradient_bytes),
        };
        let updated = if layout.zero > 0 { parameters / layout.data as f64 } else { parameters };
        Self {
            group,
            once: group.half(once),
            bytes_once: group.half_bytes(once),
            each: group.half(each),
            bytes_each: group.half_bytes(each),
            // Everything is read once and written once.
            optimizer: 2.0 * updated * (weights + gradients + optimizer)
                / task.cluster.memory_bandwidth,
            for_memory: layout.zero > 1,
        }
    }

    /// Seconds in which nothing else runs. The reduction at the end runs beside the backward of the
    /// last micro-batch at most.
    pub fn exposed(&self, count: f64, slowest: &Cost, training: &Training, layout: &Layout) -> f64 {
        let beside = |seconds: f64, work: f64| {
            seconds - (training.data_overlap * seconds).min(work.max(0.0))
        };
        let backward = slowest.seconds() - slowest.forward - slowest.all_reduce;
        let each_beside = if layout.zero == 3 { slowest.seconds() } else { backward };
        beside(self.once, backward) + count * beside(self.each, each_beside)
    }
}
