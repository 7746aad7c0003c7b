//! Bytes that a rank needs.

use serde::Serialize;

use crate::activations::{in_flight, in_flight_of_chunk, weights_pending};
use crate::cost::{Cost, LayerCosts};
use crate::layout::Layout;
use crate::schedule::ScheduleKind;
use crate::task::Task;
use crate::training::Training;

/// Bytes of gradients that Flow's `Fsdp` has not reduced yet: two buckets.
const UNREDUCED: f64 = 2.0 * 4.0 * 1024.0 * 1024.0;

/// Bytes on the rank that needs most.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct Memory {
    /// Weights.
    pub weights: f64,
    /// Gradients.
    pub gradients: f64,
    /// The optimizer's state.
    pub optimizer: f64,
    /// Activations: those kept for the backward, and those that the backward recomputes.
    pub activations: f64,
    /// The sum of the above.
    pub total: f64,
    /// Whether `total` is at most the cluster's memory.
    pub fits: bool,
}

impl Memory {
    /// Computes the memory of the rank that needs most. `ranks` are the costs of the pipeline's ranks,
    /// and `activations` their bytes of activations.
    pub(crate) fn new(
        ranks: &[Cost],
        activations: &[f64],
        task: &Task,
        layout: &Layout,
        costs: &LayerCosts,
    ) -> Self {
        ranks
            .iter()
            .zip(activations)
            .map(|(cost, &bytes)| Self::of_rank(cost.parameters, bytes, task, layout, costs))
            .max_by(|a, b| a.total.total_cmp(&b.total))
            .unwrap_or_default()
    }

    fn of_rank(
        parameters: f64,
        activations: f64,
        task: &Task,
        layout: &Layout,
        costs: &LayerCosts,
    ) -> Self {
        let Training { weights, gradients, optimizer, gathering, .. } = task.training;
        let shares = layout.data as f64;
        let mut stored_weights = parameters;
        let mut stored_gradients = parameters;
        // A layer's whole gradients and weights are there while the layer is computed.
        let whole_layer = if layout.data > 1 { costs.largest_layer } else { 0.0 };
        if layout.zero >= 2 {
            stored_gradients = parameters / shares + whole_layer;
        }
        if layout.zero >= 3 {
            let whole = |layers: f64| (layers * whole_layer).min(parameters);
            stored_weights = parameters / shares + whole(gathering.whole_weights);
            stored_gradients = parameters / shares + whole(gathering.whole_gradients);
        }
        if layout.shared_weights {
            stored_weights = parameters / shares;
            let buckets = (UNREDUCED / gradients).max(whole_layer).min(parameters);
            stored_gradients = parameters / shares + buckets;
        }
        let mut memory = Self {
            weights: weights * stored_weights,
            gradients: gradients * stored_gradients,
            optimizer: optimizer * parameters / if layout.zero >= 1 { shares } else { 1.0 },
            activations,
            ..Self::default()
        };
        memory.total = memory.weights + memory.gradients + memory.optimizer + activations;
        memory.fits = memory.total <= task.cluster.memory;
        memory
    }
}

/// Returns bytes of activations on a rank of the pipeline. `stages` are the costs of its stages.
pub(crate) fn activations(
    rank: usize,
    stages: &[Cost],
    micro_batches: usize,
    layout: &Layout,
    costs: &LayerCosts,
) -> f64 {
    let Layout { schedule, pipeline, chunks, .. } = *layout;
    // Not all chunks hold their most at once: the largest activations count first.
    let mut left = in_flight(schedule, chunks, rank, pipeline, micro_batches);
    let mut by_size: Vec<(usize, f64)> =
        stages.iter().map(|stage| stage.activations).enumerate().collect();
    by_size.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut bytes = 0.0;
    for (chunk, size) in by_size {
        let most = in_flight_of_chunk(schedule, (chunk, chunks), rank, pipeline, micro_batches);
        let held = most.min(left);
        bytes += held as f64 * size;
        left -= held;
    }
    let recomputed: f64 = match schedule {
        ScheduleKind::Gpipe | ScheduleKind::OneFOneB | ScheduleKind::Interleaved => {
            costs.largest_recomputed
        }
        // What is recomputed for the gradients of inputs lives until those of weights.
        ScheduleKind::ZbH1 | ScheduleKind::ZbV => stages
            .iter()
            .enumerate()
            .map(|(chunk, stage)| weights_pending(schedule, chunk, rank) as f64 * stage.recomputed)
            .sum(),
    };
    bytes + recomputed
}
