//! The text of `--explain`: each number of a prediction, part by part.

use flow_plan::{Cluster, Layout, Memory, Prediction, Time, Traffic};

use crate::table::{aligned, bytes, operations, percent, seconds};

/// Formats a layout's time, memory and traffic, part by part.
pub fn prediction(prediction: &Prediction, cluster: &Cluster) -> String {
    let layout = &prediction.layout;
    let time = &prediction.time;
    let memory = &prediction.memory;
    let links = [
        traffic("tp", &prediction.tensor_traffic, layout.tensor),
        traffic("pp", &prediction.pipeline_traffic, layout.pipeline),
        traffic("dp", &prediction.data_traffic, layout.data),
    ];
    format!(
        "{layout}\nstep {}: {}flop/s a rank; the model's own operations are {} of the \
         peak\n{}memory {} of {}, on the rank that needs most\n{}sent by a rank in a \
         step\n{}",
        seconds(time.step),
        operations(prediction.flops),
        percent(prediction.utilization),
        aligned(&times(layout, time, prediction.micro_batches)),
        bytes(memory.total),
        bytes(cluster.memory),
        aligned(&parts(layout, memory)),
        aligned(&links)
    )
}

/// Returns a row for each part of a step's time.
fn times(layout: &Layout, time: &Time, micro_batches: usize) -> [[String; 4]; 9] {
    let Layout { pipeline, chunks, zero, .. } = layout;
    let way = if layout.shared_weights { "Fsdp".into() } else { format!("ZeRO {zero}") };
    let sends = 2 * (pipeline - 1);
    let exchanged = match zero {
        0 => "gradients",
        1 => "gradients and weights",
        2 => "gradients of each micro-batch, and weights,",
        _ => "gradients and, twice, weights of each micro-batch,",
    };
    let schedule = layout.schedule.name();
    [
        (
            "compute",
            time.compute,
            format!("forward and backward of micro-batches: {micro_batches}"),
        ),
        ("recompute", time.recompute, format!("of activations: {}", layout.recompute.name())),
        ("tp", time.tensor, format!("all-reduces of {} ranks", layout.tensor)),
        ("pp", time.pipeline, format!("sends of micro-batches: {micro_batches}; hops: {sends}")),
        ("dp", time.data, format!("{exchanged} of {} ranks, {way}", layout.data)),
        ("optimizer", time.optimizer, "reads and writes its state once".into()),
        ("imbalance", time.imbalance, "stages that take longer than the average".into()),
        ("bubble", time.bubble, format!("{schedule}; stages: {pipeline} ranks x {chunks}")),
        ("cores", time.cores, "ranks of a node take turns".into()),
    ]
    .map(|(name, part, meaning)| {
        [format!("  {name}"), seconds(part), percent(part / time.step), meaning]
    })
}

/// Returns a row for each part of a rank's memory.
fn parts(layout: &Layout, memory: &Memory) -> [[String; 4]; 4] {
    let recomputed = format!("recomputed: {}", layout.recompute.name());
    [
        ("weights", memory.weights, shared(layout, 3)),
        ("gradients", memory.gradients, shared(layout, 2)),
        ("optimizer", memory.optimizer, shared(layout, 1)),
        ("activations", memory.activations, recomputed),
    ]
    .map(|(name, part, meaning)| {
        [format!("  {name}"), bytes(part), percent(part / memory.total), meaning]
    })
}

/// Says how ranks have what the stage `stage` of ZeRO shares out.
fn shared(layout: &Layout, stage: u8) -> String {
    let ranks = layout.data;
    match stage {
        3 if layout.shared_weights => format!("once for {ranks} ranks"),
        2 if layout.shared_weights => format!("shared by {ranks} ranks, and two buckets whole"),
        _ if layout.zero < stage => "whole".into(),
        // The optimizer needs no whole layer.
        1 => format!("shared by {ranks} ranks"),
        _ if layout.zero == 3 => format!("shared by {ranks} ranks, and a few layers whole"),
        _ => format!("shared by {ranks} ranks, and one layer whole"),
    }
}

/// Returns the row of the traffic between so many ranks.
fn traffic(name: &str, traffic: &Traffic, ranks: usize) -> [String; 4] {
    let within = bytes(traffic.intra_node);
    let between = bytes(traffic.inter_node);
    let link = match ranks {
        1 => "one rank".into(),
        _ => format!("{ranks} ranks, slowest link {}/s", bytes(traffic.bandwidth)),
    };
    let places = format!("{within} within a node, {between} between nodes");
    [format!("  {name}"), bytes(traffic.bytes()), places, link]
}
