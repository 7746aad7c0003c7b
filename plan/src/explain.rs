//! What the numbers of a prediction are made of.

use flow_plan::{Cluster, Prediction, Traffic};

use crate::table::{aligned, bytes, operations, percent, seconds};

/// A layout's time, memory and traffic, part by part.
pub fn prediction(plan: &Prediction, cluster: &Cluster) -> String {
    let (layout, time, memory) = (&plan.layout, &plan.time, &plan.memory);
    let share = |part: f64| [seconds(part), percent(part / time.step)];
    let row = |name: &str, part: f64, meaning: String| {
        let [seconds, percent] = share(part);
        [format!("  {name}"), seconds, percent, meaning]
    };
    let count = plan.micro_batches;
    let chunks = layout.chunks;
    let sends = 2 * (layout.pipeline - 1);
    let schedule = layout.schedule.name();
    let exchanged = match layout.zero {
        0 => "gradients",
        1 => "gradients and weights",
        2 => "gradients of each micro-batch, and weights,",
        _ => "gradients and, twice, weights of each micro-batch,",
    };
    let times = [
        row("compute", time.compute, format!("forward and backward of micro-batches: {count}")),
        row("recompute", time.recompute, format!("of activations: {}", layout.recompute.name())),
        row("tp", time.tensor, format!("all-reduces of {} ranks", layout.tensor)),
        row("pp", time.pipeline, format!("sends of micro-batches: {count}; hops: {sends}")),
        row("dp", time.data, format!("{exchanged} of {} ranks, ZeRO {}", layout.data, layout.zero)),
        row("optimizer", time.optimizer, "reads and writes its state once".into()),
        row("imbalance", time.imbalance, "stages that take longer than the average".into()),
        row(
            "bubble",
            time.bubble,
            format!("{schedule}; stages: {} ranks x {chunks}", layout.pipeline),
        ),
        row("cores", time.cores, "ranks of a node take turns".into()),
    ];
    let part = |name: &str, part: f64, meaning: String| {
        [format!("  {name}"), bytes(part), percent(part / memory.total), meaning]
    };
    let shared = |stage: u8| match layout.zero >= stage {
        // The optimizer needs no whole layer.
        true if stage > 1 => format!("shared by {} ranks, and one layer whole", layout.data),
        true => format!("shared by {} ranks", layout.data),
        false => "whole".into(),
    };
    let parts = [
        part("weights", memory.weights, shared(3)),
        part("gradients", memory.gradients, shared(2)),
        part("optimizer", memory.optimizer, shared(1)),
        part("activations", memory.activations, format!("recomputed: {}", layout.recompute.name())),
    ];
    let traffic = |name: &str, traffic: &Traffic, ranks: usize| {
        let [within, between] = [traffic.intra_node, traffic.inter_node].map(bytes);
        let link = match ranks {
            1 => "one rank".into(),
            _ => format!("{ranks} ranks, slowest link {}/s", bytes(traffic.bandwidth)),
        };
        let places = format!("{within} within a node, {between} between nodes");
        [format!("  {name}"), bytes(traffic.bytes()), places, link]
    };
    let links = [
        traffic("tp", &plan.tensor_traffic, layout.tensor),
        traffic("pp", &plan.pipeline_traffic, layout.pipeline),
        traffic("dp", &plan.data_traffic, layout.data),
    ];
    let (flops, used) = (operations(plan.flops), percent(plan.utilization));
    let (step, needed) = (seconds(time.step), bytes(memory.total));
    let available = bytes(cluster.memory);
    format!(
        "{layout}\nstep {step}: {flops}flop/s a rank; the model's own operations are {used} of the \
         peak\n{}memory {needed} of {available}, on the rank that needs most\n{}sent by a rank in a \
         step\n{}",
        aligned(&times),
        aligned(&parts),
        aligned(&links)
    )
}
