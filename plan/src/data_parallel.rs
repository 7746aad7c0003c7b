//! Data parallelism in a step: reducing gradients, gathering weights, the optimizer.

use crate::bubble::StageTime;
use crate::cluster::Group;
use crate::cost::Cost;
use crate::layout::{Layout, Recompute};
use crate::task::Task;
use crate::training::Training;

/// Time and bytes that data parallelism adds to a step, on the rank with the most parameters.
pub(crate) struct DataParallel {
    pub group: Group,
    /// Bytes that the rank sends in a step.
    pub bytes: f64,
    /// Seconds in which nothing else runs.
    pub exposed: f64,
    /// The part of `exposed` that ZeRO 2 and 3 add to ZeRO 1 to save memory.
    pub for_memory: f64,
    /// Seconds of the optimizer.
    pub optimizer: f64,
}

impl DataParallel {
    /// Computes it. `ranks` are the costs of the pipeline's ranks, and `slowest` is the work of the
    /// slowest rank for a micro-batch. `count` is the number of micro-batches.
    pub fn new(
        ranks: &[Cost],
        slowest: &StageTime,
        count: f64,
        task: &Task,
        layout: &Layout,
    ) -> Self {
        let group = task.cluster.group(layout.data, layout.tensor, layout.ranks());
        let Training { weights, gradients, optimizer, data_overlap, gathering, .. } = task.training;
        let parameters = ranks.iter().map(|cost| cost.parameters).fold(0.0, f64::max);
        let layers = ranks.iter().map(|cost| cost.layers).fold(0.0, f64::max);
        let weight_bytes = weights * parameters;
        let gradient_bytes = gradients * parameters;
        let reduce = group.reduce_scatter(gradient_bytes);
        let gather = group.reduce_scatter(weight_bytes);
        // Part of the gradients' reduction runs beside the backward: that of the last micro-batch, if
        // gradients are reduced once in a step.
        let backward = slowest.backward_input + slowest.backward_weight;
        // Updated weights are gathered after the optimizer: beside nothing.
        let zero_1 = exposed(reduce, data_overlap, backward) + gather;
        // Rajbhandari et al. 2020, section 7. Gradients of ZeRO 2 and 3 are not kept whole until
        // the end of a step, and weights of ZeRO 3 are gathered layer by layer, twice.
        let (exposed_seconds, bytes) = match layout.zero {
            0 => (exposed(2.0 * reduce, data_overlap, backward), 2.0 * gradient_bytes),
            1 => (zero_1, gradient_bytes + weight_bytes),
            // Ranks that share weights fetch what others have updated from their caches.
            2 => {
                let seconds = count * exposed(reduce, data_overlap, backward) + gather;
                (seconds, count * gradient_bytes + weight_bytes)
            }
            _ => {
                let is_again = gathering.again && layout.recompute == Recompute::Full;
                let gathers = if is_again { 3.0 } else { 2.0 };
                let collectives = (gathers + 1.0) * layers * gathering.tensors;
                let bytes = gathers * weight_bytes + gradient_bytes;
                let moved = group.reduce_scatter_bytes(bytes) / group.link.bandwidth;
                let each = moved
                    + collectives * group.ring_latency()
                    + gathering.seconds(bytes, collectives, &group, &task.cluster);
                // Nothing is computed before the first layer has come, and after the last gradients.
                let ends = each * 2.0 / ((gathers + 1.0) * layers.max(1.0));
                let seconds = ends + exposed(each - ends, data_overlap, slowest.total());
                (count * seconds, count * bytes)
            }
        };
        let updated = if layout.zero > 0 { parameters / layout.data as f64 } else { parameters };
        Self {
            group,
            bytes: group.reduce_scatter_bytes(bytes),
            exposed: exposed_seconds,
            for_memory: if layout.zero > 1 { (exposed_seconds - zero_1).max(0.0) } else { 0.0 },
            // Everything is read once and written once.
            optimizer: 2.0 * updated * (weights + gradients + optimizer)
                / task.cluster.memory_bandwidth,
        }
    }
}

/// Returns the part of `seconds` in which nothing else runs, if the part `overlap` runs beside
/// `work` seconds of computing.
fn exposed(seconds: f64, overlap: f64, work: f64) -> f64 {
    seconds - (overlap * seconds).min(work)
}
