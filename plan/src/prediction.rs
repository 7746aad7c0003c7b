//! What a layout is predicted to need: the time of a step, and bytes on links.

use std::ops::Range;

use serde::Serialize;

use crate::bubble::{bubble, ScheduleKind, Work};
use crate::cluster::{Cluster, Group};
use crate::cost::{Cost, Costs};
use crate::data_parallel::DataParallel;
use crate::error::Result;
use crate::layout::{Layout, Recompute};
use crate::memory::Memory;
use crate::partition::partition;
use crate::task::Task;

/// Seconds of a step, on the rank that computes most.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Time {
    /// Forward and backward.
    pub compute: f64,
    /// Computing again in the backward, all-reduces included.
    pub recompute: f64,
    /// All-reduces of tensor parallelism.
    pub tensor: f64,
    /// Waiting for what other stages send.
    pub pipeline: f64,
    /// Reducing gradients, and gathering weights with ZeRO, as far as nothing runs beside it.
    pub data: f64,
    /// The optimizer.
    pub optimizer: f64,
    /// Waiting for other ranks of the pipeline at the beginning and at the end.
    pub bubble: f64,
    /// Waiting for cores that other ranks of the node use.
    pub cores: f64,
    /// All of these.
    pub step: f64,
}

/// Bytes that a rank sends in a step, on the rank that sends most, and over which link.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Traffic {
    /// Bytes.
    pub bytes: f64,
    /// Whether the ranks are on several nodes.
    pub crosses_nodes: bool,
    /// Bytes a second of the link.
    pub bandwidth: f64,
}

impl Traffic {
    fn over(group: &Group, bytes: f64) -> Self {
        let Group { crosses_nodes, link, .. } = *group;
        Self { bytes, crosses_nodes, bandwidth: link.bandwidth }
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
    /// The pipeline's idle time.
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
    /// The idle part of the step.
    pub bubble: f64,
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
    let stages = Stages::new(task, layout, &costs, &partition(&task.model, layout.stages()));
    Ok(stages.predict(task, layout, &costs))
}

/// The stages of a layout's ranks; the same for all stages of ZeRO.
pub(crate) struct Stages {
    /// By rank of the pipeline.
    ranks: Vec<Cost>,
    /// Seconds and bytes of what the stages of a rank send and receive for a micro-batch, at most.
    send: f64,
    sent_bytes: f64,
    /// Seconds of the slowest send.
    hop: f64,
}

impl Stages {
    /// `ranges` are the layers of each stage.
    pub fn new(task: &Task, layout: &Layout, costs: &Costs, ranges: &[Range<usize>]) -> Self {
        let group = neighbours(&task.cluster, layout);
        let (mut send, mut sent_bytes, mut hop) = (0.0_f64, 0.0_f64, 0.0_f64);
        let rank = |rank| {
            let mut sum = Cost::default();
            // An activation and a gradient over each border: one side's send, the other's receive.
            let (mut seconds, mut bytes) = (0.0, 0.0);
            for stage in layout.schedule.stages_of(rank, layout.pipeline, layout.chunks) {
                sum.add(&costs.of(ranges[stage].clone()));
                for border in [stage, stage + 1] {
                    // The two stages at the tip of the V are on one rank.
                    let is_tip = layout.schedule == ScheduleKind::ZbV && border == layout.pipeline;
                    if border == 0 || border == ranges.len() || layout.pipeline == 1 || is_tip {
                        continue;
                    }
                    let message = costs.sent_to(ranges[border].start);
                    seconds += group.send(message);
                    bytes += message;
                    hop = hop.max(group.send(message));
                }
            }
            // The first layer is here, and needs no copy.
            if rank == 0 {
                sum.parameters -= sum.tied_parameters;
            }
            send = send.max(seconds);
            sent_bytes = sent_bytes.max(bytes);
            sum
        };
        let ranks = (0..layout.pipeline).map(rank).collect();
        Self { ranks, send, sent_bytes, hop }
    }

    pub fn predict(&self, task: &Task, layout: &Layout, costs: &Costs) -> Prediction {
        let Task { model, cluster, training, batch, .. } = task;
        let micro_batches = layout.micro_batches(*batch);
        let count = micro_batches as f64;
        let slowest = self.ranks.iter().max_by(|a, b| a.seconds().total_cmp(&b.seconds()));
        let slowest = slowest.copied().unwrap_or_default();
        let memory = Memory::new(&self.ranks, micro_batches, task, layout, costs);
        let data = DataParallel::new(&self.ranks, task, layout);

        let hops = 2.0 * (layout.pipeline - 1) as f64 * self.hop;
        let pipeline = (1.0 - training.pipeline_overlap) * count * self.send + hops;
        let mut time = Time {
            compute: count * 3.0 * slowest.forward,
            recompute: count * (slowest.recompute + slowest.recompute_all_reduce),
            tensor: count * 2.0 * slowest.all_reduce,
            pipeline,
            data: data.exposed(count, &slowest, training, layout),
            optimizer: data.optimizer,
            bubble: bubble(layout.schedule, layout.chunks, self.others(&slowest)),
            cores: 0.0,
            step: 0.0,
        };
        let once = time.data + time.optimizer;
        let own = time.compute + time.recompute + time.tensor + once;
        let alone = own + time.pipeline + time.bubble;
        // Ranks that share cores fill each other's idle time.
        let all: f64 = self.ranks.iter().map(Cost::seconds).sum();
        let busy = count * all / layout.pipeline as f64 + once;
        time.step = alone.max(busy * cluster.ranks_per_core(layout.ranks()));
        time.cores = time.step - alone;

        let ranks = layout.ranks() as f64;
        let a_second = |flops: f64| *batch as f64 * flops / time.step / ranks;
        Prediction {
            layout: *layout,
            micro_batches,
            time,
            memory,
            tensor_traffic: Traffic::over(
                &cluster.group(layout.tensor, 1, layout.ranks()),
                count * slowest.reduced_bytes,
            ),
            pipeline_traffic: Traffic::over(&neighbours(cluster, layout), count * self.sent_bytes),
            data_traffic: Traffic::over(&data.group, data.bytes_once + count * data.bytes_each),
            bubble: time.bubble / time.step,
            flops: a_second(model.flops(layout.recompute == Recompute::Full)),
            utilization: a_second(model.flops(false)) / cluster.flops,
            limits: limits(&time, data.for_memory),
        }
    }

    /// The work of all ranks but the slowest.
    fn others(&self, slowest: &Cost) -> Work {
        let work = |cost: &Cost| Work {
            forward: cost.forward + cost.all_reduce,
            backward_input: cost.forward
                + cost.all_reduce
                + cost.recompute
                + cost.recompute_all_reduce,
            backward_weight: cost.forward,
        };
        let (mut sum, slowest) = (Work::default(), work(slowest));
        for cost in &self.ranks {
            let work = work(cost);
            sum.forward += work.forward;
            sum.backward_input += work.backward_input;
            sum.backward_weight += work.backward_weight;
        }
        Work {
            forward: sum.forward - slowest.forward,
            backward_input: sum.backward_input - slowest.backward_input,
            backward_weight: sum.backward_weight - slowest.backward_weight,
        }
    }
}

/// The ranks of an axis of stages.
fn neighbours(cluster: &Cluster, layout: &Layout) -> Group {
    cluster.group(layout.pipeline, layout.data * layout.tensor, layout.ranks())
}

/// The two largest parts of a step. What ZeRO 2 and 3 move, and what is computed again, is for want
/// of memory.
fn limits(time: &Time, zero_for_memory: bool) -> [Part; 2] {
    let (for_memory, data) = if zero_for_memory { (time.data, 0.0) } else { (0.0, time.data) };
    let mut parts = [
        (Limit::Compute, time.compute + time.optimizer),
        (Limit::Memory, time.recompute + for_memory),
        (Limit::TensorLink, time.tensor),
        (Limit::PipelineLink, time.pipeline),
        (Limit::DataLink, data),
        (Limit::Bubble, time.bubble),
        (Limit::Cores, time.cores),
    ]
    .map(|(limit, seconds)| Part { limit, part: seconds / time.step });
    parts.sort_by(|a, b| b.part.total_cmp(&a.part));
    [parts[0], parts[1]]
}
