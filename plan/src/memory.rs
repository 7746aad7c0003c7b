//! Bytes that a rank needs.

use serde::Serialize;

use crate::bubble::in_flight;
use crate::cost::{Cost, Costs};
use crate::layout::Layout;
use crate::task::Task;
use crate::training::Training;

/// Bytes of a rank, on the rank that needs most.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// Weights.
    pub weights: f64,
    /// Gradients.
    pub gradients: f64,
    /// The optimizer's state.
    pub optimizer: f64,
    /// What is kept for the backward, and what the backward of one layer needs beside.
    pub activations: f64,
    /// All of these.
    pub total: f64,
    /// Whether the cluster's memory is enough.
    pub fits: bool,
}

impl Memory {
    /// `ranks` are the costs of the pipeline's ranks.
    pub(crate) fn new(
        ranks: &[Cost],
        micro_batches: usize,
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
        let of = |(rank, cost): (usize, &Cost)| {
            let held =
                in_flight(layout.schedule, layout.chunks, rank, layout.pipeline, micro_batches);
            let parameters = cost.parameters;
            let mut memory = Self {
                weights: weights * (parameters / part(3) + whole(3)),
                gradients: gradients * (parameters / part(2) + whole(2)),
                optimizer: optimizer * parameters / part(1),
                activations: held * cost.kept + costs.working,
                total: 0.0,
                fits: false,
            };
            memory.total =
                memory.weights + memory.gradients + memory.optimizer + memory.activations;
            memory.fits = memory.total <= task.cluster.memory;
            memory
        };
        let all = ranks.iter().enumerate().map(of);
        all.max_by(|a, b| a.total.total_cmp(&b.total)).unwrap_or_else(|| of((0, &Cost::default())))
    }
}
