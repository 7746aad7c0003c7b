//! Bytes that a rank needs.

use serde::Serialize;

use crate::bubble::{in_flight, in_flight_of_chunk, weights_pending};
use crate::cost::{Cost, Costs};
use crate::layout::Layout;
use crate::schedule::ScheduleKind;
use crate::task::Task;
use crate::training::Training;

/// Bytes of a rank, on the rank that needs most.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct Memory {
    /// Weights.
    pub weights: f64,
    /// Gradients.
    pub gradients: f64,
    /// The optimizer's state.
    pub optimizer: f64,
    /// What is kept for the backward, and what the backward computes again.
    pub activations: f64,
    /// All of these.
    pub total: f64,
    /// Whether the cluster's memory is enough.
    pub fits: bool,
}

impl Memory {
    /// `ranks` are the costs of the pipeline's ranks, and `activations` the bytes of theirs.
    pub(crate) fn new(
        ranks: &[Cost],
        activations: &[f64],
        task: &Task,
        layout: &Layout,
        costs: &Costs,
    ) -> Self {
        let Training { weights, gradients, optimizer, .. } = task.training;
        let data = layout.data as f64;
        let part = |stage: u8| if layout.zero >= stage { data } else { 1.0 };
        // A layer's whole weights and gradients are there while the layer is computed.
        let whole = |stage: u8| match layout.zero >= stage && layout.data > 1 {
            true => costs.largest_layer,
            false => 0.0,
        };
        let of = |(cost, &activations): (&Cost, &f64)| {
            let parameters = cost.parameters;
            let mut memory = Self {
                weights: weights * (parameters / part(3) + whole(3)),
                gradients: gradients * (parameters / part(2) + whole(2)),
                optimizer: optimizer * parameters / part(1),
                activations,
                ..Self::default()
            };
            memory.total = memory.weights + memory.gradients + memory.optimizer + activations;
            memory.fits = memory.total <= task.cluster.memory;
            memory
        };
        let all = ranks.iter().zip(activations).map(of);
        all.max_by(|a, b| a.total.total_cmp(&b.total)).unwrap_or_default()
    }
}

/// Bytes of activations on a rank of the pipeline, whose stages have these costs.
pub(crate) fn activations(
    rank: usize,
    stages: &[Cost],
    micro_batches: usize,
    layout: &Layout,
    costs: &Costs,
) -> f64 {
    let Layout { schedule, pipeline, chunks, .. } = *layout;
    // All are not held at once: the largest of those that can be.
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
    bytes
        + match schedule {
            ScheduleKind::Gpipe | ScheduleKind::OneFOneB | ScheduleKind::Interleaved => {
                costs.largest_recomputed
            }
            // What is computed again for the gradients of inputs lives until those of weights.
            ScheduleKind::ZbH1 | ScheduleKind::ZbV => {
                let pending = |chunk| weights_pending(schedule, chunk, rank) as f64;
                let again = stages.iter().enumerate();
                again.map(|(chunk, stage)| pending(chunk) * stage.recomputed).sum()
            }
        }
}
