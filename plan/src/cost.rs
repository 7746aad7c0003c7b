//! What stages cost a rank for one micro-batch: seconds and bytes.

use std::ops::Range;

use crate::cluster::{Cluster, Group};
use crate::layout::{Layout, Recompute};
use crate::model::{Layer, Model};
use crate::training::Training;

/// The costs of some layers for one micro-batch on a rank.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Cost {
    /// Parameters on the rank.
    pub parameters: f64,
    /// Of these, copies of those of the first layer.
    pub tied_parameters: f64,
    /// Seconds of the forward's computing. Each half of the backward takes as long.
    pub forward: f64,
    /// Seconds of the forward's all-reduces of tensor parallelism; the backward's are as long.
    pub all_reduce: f64,
    /// Seconds of computing again.
    pub recompute: f64,
    /// Seconds of the all-reduces of computing again.
    pub recompute_all_reduce: f64,
    /// Bytes that go through all-reduces, forward and backward.
    pub reduced_bytes: f64,
    /// Bytes kept from forward to backward.
    pub kept: f64,
}

impl Cost {
    pub fn add(&mut self, other: &Self) {
        self.parameters += other.parameters;
        self.tied_parameters += other.tied_parameters;
        self.forward += other.forward;
        self.all_reduce += other.all_reduce;
        self.recompute += other.recompute;
        self.recompute_all_reduce += other.recompute_all_reduce;
        self.reduced_bytes += other.reduced_bytes;
        self.kept += other.kept;
    }

    /// Seconds of a micro-batch.
    pub fn seconds(&self) -> f64 {
        3.0 * self.forward + 2.0 * self.all_reduce + self.recompute + self.recompute_all_reduce
    }
}

/// The costs of all layers under a layout's micro-batch, tensor parallelism and recomputation.
pub(crate) struct Costs {
    layers: Vec<Cost>,
    /// The most parameters of a layer on a rank.
    pub largest_layer: f64,
    /// The most bytes that the backward of one layer needs beside what is kept.
    pub working: f64,
    /// Bytes of each layer's input that a rank keeps.
    inputs: Vec<f64>,
}

impl Costs {
    pub fn new(model: &Model, cluster: &Cluster, training: &Training, layout: &Layout) -> Self {
        let group = cluster.group(layout.tensor, 1, layout.ranks());
        let mut costs = Self {
            layers: Vec::with_capacity(model.layers.len()),
            largest_layer: 0.0,
            working: 0.0,
            inputs: Vec::with_capacity(model.layers.len()),
        };
        // Most layers are as the one before.
        let mut last: Option<(&Layer, Cost, f64)> = None;
        for layer in &model.layers {
            let (cost, working) = match last {
                Some((same, cost, working)) if same == layer => (cost, working),
                _ => cost_of(layer, cluster, &group, layout),
            };
            last = Some((layer, cost, working));
            costs.largest_layer = costs.largest_layer.max(cost.parameters);
            costs.working = costs.working.max(working);
            costs.layers.push(cost);
            let is_split = layout.sequence_parallel || training.scatter_gather;
            let parts = if is_split { layout.tensor as f64 } else { 1.0 };
            costs.inputs.push(layer.input * layout.micro_batch as f64 / parts);
        }
        costs
    }

    /// The costs of a stage of these layers.
    pub fn of(&self, layers: Range<usize>) -> Cost {
        let mut sum = Cost::default();
        self.layers[layers].iter().for_each(|cost| sum.add(cost));
        sum
    }

    /// Bytes that a rank sends to the next stage, whose first layer this is, and gets back as
    /// gradients.
    pub fn sent_to(&self, layer: usize) -> f64 {
        self.inputs[layer]
    }
}

/// A layer's costs, and the bytes that its backward needs beside what is kept.
fn cost_of(layer: &Layer, cluster: &Cluster, group: &Group, layout: &Layout) -> (Cost, f64) {
    let samples = layout.micro_batch as f64;
    let tensor = layout.tensor as f64;
    let replicas = if layout.sequence_parallel { tensor } else { 1.0 };
    let rows = samples * layer.rows.unwrap_or(1.0);
    let share = match layer.matmul_size {
        Some(size) => cluster.matmul.of(rows.min(size / tensor)),
        None => cluster.matmul.peak_share,
    };
    let computing = |flops: f64| samples * flops / tensor / (cluster.flops * share);
    // What is kept has been written once, and read once by the operation that follows.
    let moving = |bytes: f64| 2.0 * bytes / cluster.memory_bandwidth;
    let scores = samples * layer.score_activations / tensor;
    let others = samples * (layer.activations / tensor + layer.replicated_activations / replicas);
    let overhead = if layer.flops > 0.0 { cluster.layer_overhead } else { 0.0 };
    let forward = computing(layer.flops) + moving(scores + others) + overhead;
    let all_reduce = group.all_reduce(samples * layer.all_reduce);
    let recompute = if layer.never_recomputed { Recompute::None } else { layout.recompute };
    let (again, again_all_reduce, kept) = match recompute {
        Recompute::None => (0.0, 0.0, scores + others),
        Recompute::Selective => (computing(layer.score_flops) + moving(scores), 0.0, others),
        Recompute::Full => (forward, all_reduce, samples * layer.input / replicas),
    };
    let passes = if recompute == Recompute::Full { 3.0 } else { 2.0 };
    let cost = Cost {
        parameters: (layer.parameters + layer.tied_parameters) / tensor,
        tied_parameters: layer.tied_parameters / tensor,
        forward,
        all_reduce,
        recompute: again,
        recompute_all_reduce: again_all_reduce,
        reduced_bytes: passes * 2.0 * group.half_bytes(samples * layer.all_reduce),
        kept,
    };
    (cost, scores + others - kept.min(scores + others))
}
