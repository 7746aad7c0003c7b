//! Seconds and bytes that layers cost a rank for one micro-batch.

use std::ops::Range;

use crate::bubble::StageTime;
use crate::cluster::{Cluster, Group};
use crate::layout::{Layout, Recompute};
use crate::model::{Layer, Model};
use crate::training::Training;

/// The costs of some layers for one micro-batch on a rank.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Cost {
    /// Parameters on the rank.
    pub parameters: f64,
    /// Parameters on the rank that are copies of the first layer's.
    pub tied_parameters: f64,
    /// Seconds of the forward's computing. Each half of the backward takes as long.
    pub forward: f64,
    /// Seconds of the forward's all-reduces of tensor parallelism; the backward's are as long.
    pub all_reduce: f64,
    /// Seconds of recomputation in the backward.
    pub recompute: f64,
    /// Seconds of the recomputation's all-reduces.
    pub recompute_all_reduce: f64,
    /// Bytes that go through all-reduces, forward and backward.
    pub reduced_bytes: f64,
    /// Bytes kept from forward to backward.
    pub activations: f64,
    /// Bytes that the backward recomputes.
    pub recomputed: f64,
    /// The number of layers with parameters.
    pub layers: f64,
}

impl Cost {
    /// Adds up costs.
    pub fn sum(costs: &[Self]) -> Self {
        let mut sum = Self::default();
        for cost in costs {
            sum.parameters += cost.parameters;
            sum.tied_parameters += cost.tied_parameters;
            sum.forward += cost.forward;
            sum.all_reduce += cost.all_reduce;
            sum.recompute += cost.recompute;
            sum.recompute_all_reduce += cost.recompute_all_reduce;
            sum.reduced_bytes += cost.reduced_bytes;
            sum.activations += cost.activations;
            sum.recomputed += cost.recomputed;
            sum.layers += cost.layers;
        }
        sum
    }

    /// Returns the seconds of a micro-batch.
    pub fn work(&self) -> StageTime {
        let forward = self.forward + self.all_reduce;
        StageTime {
            forward,
            backward_input: forward + self.recompute + self.recompute_all_reduce,
            backward_weight: self.forward,
        }
    }

    /// Divides each of these costs.
    pub fn divided_by(&self, count: f64) -> Self {
        Self {
            parameters: self.parameters / count,
            tied_parameters: self.tied_parameters / count,
            forward: self.forward / count,
            all_reduce: self.all_reduce / count,
            recompute: self.recompute / count,
            recompute_all_reduce: self.recompute_all_reduce / count,
            reduced_bytes: self.reduced_bytes / count,
            activations: self.activations / count,
            recomputed: self.recomputed / count,
            layers: self.layers / count,
        }
    }
}

/// The costs of all layers under a layout's micro-batch, tensor parallelism and recomputation.
pub(crate) struct LayerCosts {
    layers: Vec<Cost>,
    /// The most parameters of a layer on a rank.
    pub largest_layer: f64,
    /// The most bytes that the backward of one layer recomputes.
    pub largest_recomputed: f64,
    /// Bytes of each layer's input that a rank keeps.
    inputs: Vec<f64>,
}

impl LayerCosts {
    /// Returns the costs of a model's layers on the ranks of a layout.
    pub fn new(model: &Model, cluster: &Cluster, training: &Training, layout: &Layout) -> Self {
        let group = cluster.group(layout.tensor, 1, layout.ranks());
        let mut costs = Self {
            layers: Vec::with_capacity(model.layers.len()),
            largest_layer: 0.0,
            largest_recomputed: 0.0,
            inputs: Vec::with_capacity(model.layers.len()),
        };
        // Most layers equal the one before.
        let mut last: Option<(&Layer, Cost)> = None;
        for layer in &model.layers {
            let cost = match last {
                Some((same, cost)) if same == layer => cost,
                _ => cost_of(layer, cluster, training, &group, layout),
            };
            last = Some((layer, cost));
            costs.largest_layer = costs.largest_layer.max(cost.parameters);
            costs.largest_recomputed = costs.largest_recomputed.max(cost.recomputed);
            costs.layers.push(cost);
            let is_split = layout.sequence_parallel || training.scatter_gather;
            let parts = if is_split { layout.tensor as f64 } else { 1.0 };
            costs.inputs.push(layer.input * layout.micro_batch as f64 / parts);
        }
        costs
    }

    /// Sums the costs of these layers.
    pub fn of(&self, layers: Range<usize>) -> Cost {
        Cost::sum(&self.layers[layers])
    }

    /// Returns bytes that a rank sends to the stage that begins with this layer. As many come back
    /// as gradients.
    pub fn sent_to(&self, layer: usize) -> f64 {
        self.inputs[layer]
    }

    /// Returns bytes of a received input that a rank then gathers from its group of tensor
    /// parallelism.
    pub fn gathered(&self, layer: usize, training: &Training, layout: &Layout) -> f64 {
        if training.scatter_gather && !layout.sequence_parallel {
            self.inputs[layer] * layout.tensor as f64
        } else {
            0.0
        }
    }
}

/// Computes a layer's costs.
fn cost_of(
    layer: &Layer,
    cluster: &Cluster,
    training: &Training,
    group: &Group,
    layout: &Layout,
) -> Cost {
    let samples = layout.micro_batch as f64;
    let tensor = layout.tensor as f64;
    let replicas = if layout.sequence_parallel { tensor } else { 1.0 };
    let rows = samples * layer.rows.unwrap_or(1.0);
    let share = match layer.gemm_size {
        Some(size) => cluster.matmul.of(rows.min(size / tensor)),
        None => cluster.matmul.peak_share,
    };
    let computing = |flops: f64| samples * flops / tensor / (cluster.flops * share);
    // What is kept has been written once, and read once by the operation that follows.
    let moving = |bytes: f64| 2.0 * bytes / cluster.memory_bandwidth;
    let scores = samples * layer.score_activations / tensor;
    let gathered = if training.keep_gathered { 1.0 } else { replicas };
    let others = samples
        * (layer.activations / tensor
            + layer.replicated_activations / replicas
            + layer.gathered_activations / gathered);
    let overhead = if layer.flops > 0.0 { cluster.layer_overhead } else { 0.0 };
    let forward = computing(layer.flops) + moving(scores + others) + overhead;
    let all_reduce = group.all_reduce(samples * layer.all_reduce);
    let recompute = if layer.never_recomputed { Recompute::None } else { layout.recompute };
    let (again, again_all_reduce, activations) = match recompute {
        Recompute::None => (0.0, 0.0, scores + others),
        Recompute::Selective => (computing(layer.score_flops) + moving(scores), 0.0, others),
        Recompute::Full => (forward, all_reduce, samples * layer.input / replicas),
    };
    let passes = if recompute == Recompute::Full { 3.0 } else { 2.0 };
    Cost {
        parameters: (layer.parameters + layer.tied_parameters) / tensor,
        tied_parameters: layer.tied_parameters / tensor,
        forward,
        all_reduce,
        recompute: again,
        recompute_all_reduce: again_all_reduce,
        reduced_bytes: passes * 2.0 * group.reduce_scatter_bytes(samples * layer.all_reduce),
        activations,
        recomputed: (scores + others - activations).max(0.0),
        layers: if layer.parameters + layer.tied_parameters > 0.0 { 1.0 } else { 0.0 },
    }
}
