//! What data parallelism adds to a step: reducing gradients, gathering weights, the optimizer.

use crate::bubble::Work;
use crate::cluster::Group;
use crate::cost::Cost;
use crate::layout::Layout;
use crate::task::Task;
use crate::training::Training;

/// What data parallelism adds to a step, for the rank with the most parameters.
pub(crate) struct DataParallel {
    pub group: Group,
    /// Bytes that the rank sends in a step.
    pub bytes: f64,
    /// Seconds in which nothing else runs.
    pub exposed: f64,
    /// Of these, what ZeRO 2 and 3 add to ZeRO 1, for want of memory.
    pub for_memory: f64,
    /// Seconds of the optimizer.
    pub optimizer: f64,
}

impl DataParallel {
    /// `ranks` are the costs of the pipeline's ranks, `slowest` the work of the slowest for a
    /// micro-batch, of which there are `count`.
    pub fn new(ranks: &[Cost], slowest: &Work, count: f64, task: &Task, layout: &Layout) -> Self {
        let group = task.cluster.group(layout.data, layout.tensor, layout.ranks());
        let Training { weights, gradients, optimizer, data_overlap, .. } = task.training;
        let most = |of: fn(&Cost) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
        let (parameters, layers) = (most(|cost| cost.parameters), most(|cost| cost.layers));
        let (weight_bytes, gradient_bytes) = (weights * parameters, gradients * parameters);
        let reduce = group.reduce_scatter(gradient_bytes);
        let gather = group.reduce_scatter(weight_bytes);
        // Part of the gradients' reduction runs beside the backward, of the last micro-batch if
        // they are reduced once in a step.
        let beside = |seconds: f64, work: f64| seconds - (data_overlap * seconds).min(work);
        let backward = slowest.backward_input + slowest.backward_weight;
        // Updated weights are gathered after the optimizer: beside nothing.
        let zero_1 = beside(reduce, backward) + gather;
        // Rajbhandari et al. 2020, section 7. Gradients of ZeRO 2 and 3 are not kept whole until
        // the end of a step, and weights of ZeRO 3 are gathered layer by layer, twice.
        let (exposed, bytes) = match layout.zero {
            0 => (beside(2.0 * reduce, backward), 2.0 * gradient_bytes),
            1 => (zero_1, gradient_bytes + weight_bytes),
            2 => (count * beside(reduce, backward) + gather, count * gradient_bytes + weight_bytes),
            _ => {
                let latency = 3.0 * (layers - 1.0).max(0.0) * group.reduce_scatter_latency();
                let each = reduce + 2.0 * gather + latency;
                let bytes = gradient_bytes + 2.0 * weight_bytes;
                (count * beside(each, slowest.total()), count * bytes)
            }
        };
        let updated = if layout.zero > 0 { parameters / layout.data as f64 } else { parameters };
        Self {
            group,
            bytes: group.reduce_scatter_bytes(bytes),
            exposed,
            for_memory: if layout.zero > 1 { (exposed - zero_1).max(0.0) } else { 0.0 },
            // Everything is read once and written once.
            optimizer: 2.0 * updated * (weights + gradients + optimizer)
                / task.cluster.memory_bandwidth,
        }
    }
}
