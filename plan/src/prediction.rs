//! What a layout is predicted to need: the time of a step, and bytes on links.

use std::ops::Range;

use serde::Serialize;

use crate::bubble::{waits, Waits, Work};
use crate::cluster::{Cluster, Group};
use crate::cost::{Cost, Costs};
use crate::data_parallel::DataParallel;
use crate::error::Result;
use crate::layout::{Layout, Recompute};
use crate::memory::{self, Memory};
use crate::schedule::ScheduleKind;
use crate::task::Task;

/// Seconds of a step, of the average rank.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct Time {
    /// Forward and backward.
    pub compute: f64,
    /// Computing again in the backward, all-reduces included.
    pub recompute: f64,
    /// All-reduces of tensor parallelism.
    pub tensor: f64,
    /// Sending between stages, and waiting for what is on its way.
    pub pipeline: f64,
    /// Reducing gradients, and gathering weights with ZeRO, as far as nothing runs beside it.
    pub data: f64,
    /// The optimizer.
    pub optimizer: f64,
    /// Waiting for stages that take longer than the average.
    pub imbalance: f64,
    /// Waiting for other ranks of the pipeline at the beginning and at the end.
    pub bubble: f64,
    /// Waiting for cores that other ranks of the node use.
    pub cores: f64,
    /// All of these.
    pub step: f64,
}

/// Bytes that a rank sends in a step, on the rank that sends most, and over which links. Where only
/// some ranks of a node send to other nodes, as in a ring, each is given an equal part of that.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Traffic {
    /// Bytes within a node.
    pub intra_node: f64,
    /// Bytes between nodes.
    pub inter_node: f64,
    /// Bytes a second of the slowest link.
    pub bandwidth: f64,
}

impl Traffic {
    fn over(group: &Group, bytes: f64) -> Self {
        let inter_node = if group.crosses_nodes() { bytes / group.on_a_node as f64 } else { 0.0 };
        Self { intra_node: bytes - inter_node, inter_node, bandwidth: group.link.bandwidth }
    }

    /// Bytes in all.
    pub fn bytes(&self) -> f64 {
        self.intra_node + self.inter_node
    }
}

/// What a part of a step's time goes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Forward, backward and the optimizer.
    Compute,
    /// Memory: it takes computing again, or sharing out weights or gradients.
    Memory,
    /// The links of tensor parallelism.
    TensorLink,
    /// The links of the pipeline.
    PipelineLink,
    /// The links of data parallelism.
    DataLink,
    /// Stages that take longer than the average.
    Imbalance,
    /// The pipeline's begin and end.
    Bubble,
    /// Ranks share cores.
    Cores,
}

/// A part of a step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Part {
    /// What the time goes to.
    pub limit: Limit,
    /// From 0 to 1.
    pub part: f64,
}

/// A layout and what it needs.
#[derive(Clone, Debug, Serialize)]
pub struct Prediction {
    /// The layout.
    pub layout: Layout,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Seconds of a step.
    pub time: Time,
    /// Bytes of a rank.
    pub memory: Memory,
    /// Of tensor parallelism.
    pub tensor_traffic: Traffic,
    /// Between stages.
    pub pipeline_traffic: Traffic,
    /// Of data parallelism.
    pub data_traffic: Traffic,
    /// The part of the step that the average rank waits for other stages, without what is on its
    /// way.
    pub idle: f64,
    /// Floating point operations a second of a rank, counted as Narayanan et al. 2021 do: with what
    /// full recomputation computes again.
    pub flops: f64,
    /// The part of the peak that the model's own operations reach.
    pub utilization: f64,
    /// What limits it: the two largest parts of the step.
    pub limits: [Part; 2],
}

/// The prediction for one layout.
///
/// # Errors
/// The layout does not divide the model or the batch.
pub fn predict(task: &Task, layout: &Layout) -> Result<Prediction> {
    layout.check(&task.model, task.batch)?;
    let costs = Costs::new(&task.model, &task.cluster, &task.training, layout);
    let stages = Stages::new(task, layout, &costs, &task.model.stages(layout.stages()));
    Ok(stages.predict(task, layout, &costs))
}

/// The stages of a layout's ranks; the same for all stages of ZeRO.
pub(crate) struct Stages {
    /// By rank of the pipeline.
    ranks: Vec<Cost>,
    /// Bytes of each rank's activations.
    activations: Vec<f64>,
    micro_batches: usize,
    waits: Waits,
    /// For a micro-batch, of what the stages of a rank send and receive, at most: seconds in which
    /// it does nothing else, bytes, and bytes that it gathers of what it has received.
    busy: f64,
    sent_bytes: f64,
    gathered_bytes: f64,
    /// Seconds of the slowest send, as far as ranks do nothing else.
    busy_hop: f64,
}

impl Stages {
    /// `ranges` are the layers of each stage.
    pub fn new(task: &Task, layout: &Layout, costs: &Costs, ranges: &[Range<usize>]) -> Self {
        let Task { cluster, training, batch, .. } = task;
        let Layout { pipeline, chunks, schedule, .. } = *layout;
        let group = neighbours(cluster, layout);
        let tensor = cluster.group(layout.tensor, 1, layout.ranks());
        let micro_batches = layout.micro_batches(*batch);
        let mut stages: Vec<Cost> = ranges.iter().map(|range| costs.of(range.clone())).collect();
        // The first layer is here, and needs no copy.
        for stage in schedule.stages_of(0, pipeline, chunks) {
            stages[stage].parameters -= stages[stage].tied_parameters;
        }
        let busy_part = 1.0 - training.pipeline_overlap;
        let (mut busy, mut sent_bytes, mut gathered_bytes) = (0.0_f64, 0.0_f64, 0.0_f64);
        let (mut hop, mut ranks, mut activations) = (0.0_f64, Vec::new(), Vec::new());
        for rank in 0..pipeline {
            let of: Vec<usize> = schedule.stages_of(rank, pipeline, chunks).collect();
            // An activation and a gradient over each border: one side's send, the other's receive.
            let (mut seconds, mut bytes, mut gathered) = (0.0, 0.0, 0.0);
            for border in of.iter().flat_map(|stage| [*stage, stage + 1]) {
                // The two stages at the tip of the V are on one rank.
                let is_tip = schedule == ScheduleKind::ZbV && border == pipeline;
                if border == 0 || border == ranges.len() || pipeline == 1 || is_tip {
                    continue;
                }
                let layer = ranges[border].start;
                let send = group.send(costs.sent_to(layer));
                let gather = costs.gathered(layer, training, layout);
                hop = hop.max(send);
                seconds += busy_part * send + tensor.reduce_scatter(gather);
                bytes += costs.sent_to(layer);
                gathered += tensor.reduce_scatter_bytes(gather);
            }
            busy = busy.max(seconds);
            sent_bytes = sent_bytes.max(bytes);
            gathered_bytes = gathered_bytes.max(gathered);
            let own: Vec<Cost> = of.iter().map(|&stage| stages[stage]).collect();
            activations.push(memory::activations(rank, &own, micro_batches, layout, costs));
            let mut sum = Cost::default();
            own.iter().for_each(|stage| sum.add(stage));
            ranks.push(sum);
        }
        let work: Vec<Work> = stages.iter().map(Cost::work).collect();
        let on_the_way = training.pipeline_overlap * hop;
        let waits = waits(schedule, pipeline, &work, on_the_way, micro_batches);
        let busy_hop = busy_part * hop;
        Self {
            ranks,
            activations,
            micro_batches,
            waits,
            busy,
            sent_bytes,
            gathered_bytes,
            busy_hop,
        }
    }

    pub fn predict(&self, task: &Task, layout: &Layout, costs: &Costs) -> Prediction {
        let Task { model, cluster, batch, .. } = task;
        let count = self.micro_batches as f64;
        let mut mean = Cost::default();
        self.ranks.iter().for_each(|cost| mean.add(cost));
        let mean = mean.divided_by(self.ranks.len() as f64);
        let works = self.ranks.iter().map(Cost::work);
        let slowest = works.max_by(|a, b| a.total().total_cmp(&b.total())).unwrap_or_default();
        let memory = Memory::new(&self.ranks, &self.activations, task, layout, costs);
        let data = DataParallel::new(&self.ranks, &slowest, count, task, layout);

        let hops = 2.0 * (layout.pipeline - 1) as f64;
        let sending = count * self.busy + hops * self.busy_hop;
        let mut time = Time {
            compute: count * 3.0 * mean.forward,
            recompute: count * (mean.recompute + mean.recompute_all_reduce),
            tensor: count * 2.0 * mean.all_reduce,
            pipeline: sending + self.waits.sends,
            data: data.exposed,
            optimizer: data.optimizer,
            imbalance: self.waits.imbalance,
            bubble: self.waits.bubble,
            ..Time::default()
        };
        let busy = time.compute + time.recompute + time.tensor + time.data + time.optimizer;
        let alone = busy + time.pipeline + time.imbalance + time.bubble;
        // Ranks that share cores fill each other's idle time.
        time.step = alone.max((busy + sending) * cluster.ranks_per_core(layout.ranks()));
        time.cores = time.step - alone;

        let ranks = layout.ranks() as f64;
        let a_second = |flops: f64| *batch as f64 * flops / time.step / ranks;
        let tensor = cluster.group(layout.tensor, 1, layout.ranks());
        let reduced = self.ranks.iter().map(|cost| cost.reduced_bytes).fold(0.0, f64::max);
        Prediction {
            layout: *layout,
            micro_batches: self.micro_batches,
            time,
            memory,
            tensor_traffic: Traffic::over(&tensor, count * (reduced + self.gathered_bytes)),
            pipeline_traffic: Traffic::over(&neighbours(cluster, layout), count * self.sent_bytes),
            data_traffic: Traffic::over(&data.group, data.bytes),
            idle: (time.imbalance + time.bubble) / time.step,
            flops: a_second(model.flops(layout.recompute == Recompute::Full)),
            utilization: a_second(model.flops(false)) / cluster.flops,
            limits: limits(&time, data.for_memory),
        }
    }
}

/// The ranks of an axis of stages.
fn neighbours(cluster: &Cluster, layout: &Layout) -> Group {
    cluster.neighbours(layout.pipeline, layout.data * layout.tensor, layout.ranks())
}

/// The two largest parts of a step. What ZeRO 2 and 3 move beside what ZeRO 1 does, and what is
/// computed again, is for want of memory.
fn limits(time: &Time, data_for_memory: f64) -> [Part; 2] {
    let mut parts = [
        (Limit::Compute, time.compute + time.optimizer),
        (Limit::Memory, time.recompute + data_for_memory),
        (Limit::TensorLink, time.tensor),
        (Limit::PipelineLink, time.pipeline),
        (Limit::DataLink, time.data - data_for_memory),
        (Limit::Imbalance, time.imbalance),
        (Limit::Bubble, time.bubble),
        (Limit::Cores, time.cores),
    ]
    .map(|(limit, seconds)| Part { limit, part: seconds / time.step });
    parts.sort_by(|a, b| b.part.total_cmp(&a.part));
    [parts[0], parts[1]]
}
