//! The prediction for a layout: the time of a step, and bytes on links.

use std::ops::Range;

use serde::Serialize;

use crate::bubble::{StageTime, Waits, waits};
use crate::cluster::{Cluster, Group};
use crate::cost::{Cost, LayerCosts};
use crate::data_parallel::DataParallel;
use crate::error::Result;
use crate::layout::{Layout, Recompute};
use crate::memory::{self, Memory};
use crate::schedule::ScheduleKind;
use crate::task::Task;

/// Seconds of a step on the average rank.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct Time {
    /// Forward and backward.
    pub compute: f64,
    /// Computing again in the backward, all-reduces included.
    pub recompute: f64,
    /// All-reduces of tensor parallelism.
    pub tensor: f64,
    /// Sending between stages, and waiting for messages on their way.
    pub pipeline: f64,
    /// Reducing gradients, and gathering weights with ZeRO, while nothing else runs.
    pub data: f64,
    /// The optimizer.
    pub optimizer: f64,
    /// Waiting for stages that take longer than the average.
    pub imbalance: f64,
    /// Waiting for other ranks of the pipeline at the beginning and at the end.
    pub bubble: f64,
    /// Waiting for cores that other ranks of the node use.
    pub cores: f64,
    /// The sum of the above.
    pub step: f64,
}

/// Bytes that a rank sends in a step, by link, on the rank that sends most. If only some ranks of a
/// node send to other nodes, as in a ring, each rank counts an equal part of these bytes.
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

    /// Returns all bytes.
    pub fn bytes(&self) -> f64 {
        self.intra_node + self.inter_node
    }
}

/// The limit of a step in a part of its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Forward, backward and the optimizer.
    Compute,
    /// Memory, which recomputation and sharing out weights or gradients save.
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
    /// The limit in this part.
    pub limit: Limit,
    /// The part of the step, from 0 to 1.
    pub part: f64,
}

/// The predicted time, memory and traffic of a layout.
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
    /// The traffic of tensor parallelism.
    pub tensor_traffic: Traffic,
    /// The traffic between stages.
    pub pipeline_traffic: Traffic,
    /// The traffic of data parallelism.
    pub data_traffic: Traffic,
    /// The part of the step in which the average rank waits for other stages. Waiting for messages on
    /// their way does not count.
    pub idle: f64,
    /// Floating point operations a second of a rank. Operations of full recomputation count, as in
    /// Narayanan et al. 2021.
    pub flops: f64,
    /// The part of the peak that the model's own operations reach.
    pub utilization: f64,
    /// The two largest parts of the step.
    pub limits: [Part; 2],
}

/// Predicts one layout.
///
/// # Errors
/// The layout does not divide the model or the batch.
/// Predicts time and memory of a step.
pub fn predict(task: &Task, layout: &Layout) -> Result<Prediction> {
    layout.check(&task.model, task.batch, &task.cluster)?;
    let costs = LayerCosts::new(&task.model, &task.cluster, &task.training, layout);
    let stages = Stages::new(task, layout, &costs, &task.model.stages(layout.stages()));
    Ok(stages.predict(task, layout, &costs))
}

/// The stages of a layout's ranks. They do not depend on the stage of ZeRO.
pub(crate) struct Stages {
    /// The costs of each rank of the pipeline.
    ranks: Vec<Cost>,
    /// Bytes of each rank's activations.
    activations: Vec<f64>,
    micro_batches: usize,
    waits: Waits,
    /// The most seconds for a micro-batch in which a rank sends and receives and does nothing else.
    busy: f64,
    /// The most bytes that a rank sends for a micro-batch.
    sent_bytes: f64,
    /// The most bytes that a rank gathers, for a micro-batch, of what it has received.
    gathered_bytes: f64,
    /// Seconds of the slowest send in which ranks do nothing else.
    busy_hop: f64,
}

impl Stages {
    /// Sums up the costs of each rank's stages. `ranges` are the layers of each stage.
    pub fn new(task: &Task, layout: &Layout, costs: &LayerCosts, ranges: &[Range<usize>]) -> Self {
        let Task { cluster, training, batch, .. } = task;
        let Layout { pipeline, chunks, schedule, .. } = *layout;
        let group = neighbours(cluster, layout);
        let tensor = cluster.group(layout.tensor, 1, layout.ranks());
        let micro_batches = layout.micro_batches(*batch);
        let mut stages: Vec<Cost> = ranges.iter().map(|range| costs.of(range.clone())).collect();
        // The first layer is on this rank, so that its stages need no copy.
        for stage in schedule.stages_of(0, pipeline, chunks) {
            stages[stage].parameters -= stages[stage].tied_parameters;
        }
        let busy_part = 1.0 - training.pipeline_overlap;
        let mut busy = 0.0_f64;
        let mut sent_bytes = 0.0_f64;
        let mut gathered_bytes = 0.0_f64;
        let mut hop = 0.0_f64;
        let mut ranks = Vec::new();
        let mut activations = Vec::new();
        for rank in 0..pipeline {
            let numbers: Vec<usize> = schedule.stages_of(rank, pipeline, chunks).collect();
            // An activation and a gradient over each border: one side's send, the other's receive.
            let mut seconds = 0.0;
            let mut bytes = 0.0;
            let mut gathered = 0.0;
            for border in numbers.iter().flat_map(|stage| [*stage, stage + 1]) {
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
            let stages_of_rank: Vec<Cost> = numbers.iter().map(|&stage| stages[stage]).collect();
            activations.push(memory::activations(
                rank,
                &stages_of_rank,
                micro_batches,
                layout,
                costs,
            ));
            ranks.push(Cost::sum(&stages_of_rank));
        }
        let work: Vec<StageTime> = stages.iter().map(Cost::work).collect();
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

    /// Returns the times of a step, and the memory of its ranks.
    pub fn predict(&self, task: &Task, layout: &Layout, costs: &LayerCosts) -> Prediction {
        let Task { model, cluster, batch, .. } = task;
        let count = self.micro_batches as f64;
        let mean = Cost::sum(&self.ranks).divided_by(self.ranks.len() as f64);
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
        let flops = *batch as f64 * model.flops(layout.recompute == Recompute::Full);
        let flops_of_model = *batch as f64 * model.flops(false);
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
            flops: flops / time.step / ranks,
            utilization: flops_of_model / time.step / ranks / cluster.flops,
            limits: limits(&time, data.for_memory),
        }
    }
}

/// Returns the ranks of a pipeline, which send to their neighbours.
fn neighbours(cluster: &Cluster, layout: &Layout) -> Group {
    cluster.neighbours(layout.pipeline, layout.data * layout.tensor, layout.ranks())
}

/// Returns the two largest parts of a step. Recomputation, and the time that ZeRO 2 and 3 add to
/// ZeRO 1, count for memory.
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
