//! Memory, traffic and time by value: what papers print, and what is computed by hand.

use flow_plan::{
    Constraints, Gathering, Layout, Limit, Prediction, Recompute, ScheduleKind, Task, compare,
    predict, search,
};
use serde_json::json;

const NARROW: Layout = Layout {
    data: 1,
    tensor: 1,
    pipeline: 1,
    micro_batch: 1,
    schedule: ScheduleKind::OneFOneB,
    chunks: 1,
    zero: 0,
    shared_weights: false,
    recompute: Recompute::None,
    sequence_parallel: false,
};

/// A model of equal layers on ranks without latency, 1 byte a second, and 8 ranks a node.
fn task(layers: usize, parameters: f64, batch: usize, latency: f64, overlap: f64) -> Task {
    let text = json!({
        "layers": [{ "repeat": layers, "parameters": parameters / layers as f64, "flops": 1e3 }],
        "batch": batch,
        "training": { "data_overlap": overlap },
        "cluster": {
            "ranks_per_node": 8, "memory": 80e9, "flops": 1.0, "memory_bandwidth": 1e30,
            "matmul": { "peak_share": 1.0, "half_size": 0.0 },
            "intra_node": { "bandwidth": 1.0, "latency": latency },
            "inter_node": { "bandwidth": 0.5, "latency": latency },
        },
    });
    Task::from_json(&text.to_string(), None).unwrap()
}

fn predicted(task: &Task, layout: Layout) -> Prediction {
    predict(task, &layout).unwrap()
}

/// Rajbhandari et al. 2020, figure 1: gigabytes of the state of 7.5 billion parameters on 64 ranks.
#[test]
fn zero_shares_the_state_as_its_paper_says() {
    let task = task(7_500, 7.5e9, 64, 0.0, 0.0);
    for (zero, gigabytes) in [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)] {
        let total = predicted(&task, Layout { data: 64, zero, ..NARROW }).memory.total;
        assert_eq!((total / 1e8).round() / 10.0, gigabytes, "ZeRO {zero}");
    }
}

/// The same, section 7: 2 psi elements, and 3 psi with ZeRO 3, of 2 bytes.
#[test]
fn zero_moves_as_many_bytes_as_its_paper_says() {
    let task = task(10, 1e6, 8, 0.0, 0.0);
    for (zero, times) in [(0, 2.0), (1, 2.0), (2, 2.0), (3, 3.0)] {
        let traffic = predicted(&task, Layout { data: 8, zero, ..NARROW }).data_traffic;
        assert_eq!(traffic.intra_node, times * 2e6 * 7.0 / 8.0, "ZeRO {zero}");
        assert_eq!(traffic.inter_node, 0.0);
    }
    // One rank of 8 on a node sends to the next node.
    let traffic = predicted(&task_of_nodes(), Layout { data: 16, ..NARROW }).data_traffic;
    assert_eq!(traffic.inter_node, 4e6 * 15.0 / 16.0 / 8.0);
    assert_eq!(traffic.bytes(), 4e6 * 15.0 / 16.0);
}

fn task_of_nodes() -> Task {
    task(10, 1e6, 16, 0.0, 0.0)
}

/// Per layer and micro-batch: 4 all-reduces of b s h elements of 2 bytes are 16 b s h (t - 1) / t.
#[test]
fn tensor_parallelism_moves_four_all_reduces_a_layer() {
    let bytes = |layers: usize| {
        let text = json!({
            "transformer": {
                "layers": layers, "hidden": 64, "heads": 8, "sequence": 32, "vocabulary": 128,
            },
            "batch": 4,
        });
        let cluster = include_str!("../../models/dgx-a100.json");
        let task = Task::from_json(&text.to_string(), Some(cluster)).unwrap();
        predicted(&task, Layout { tensor: 8, micro_batch: 4, ..NARROW }).tensor_traffic.intra_node
    };
    assert_eq!(bytes(3) - bytes(2), 16.0 * 4.0 * 32.0 * 64.0 * 7.0 / 8.0);
}

/// Korthikanti et al. 2022, table 2, with sequence parallelism: s b h / t (34 + 5 a s / h) bytes. Of
/// these 4 s b h are inputs of linear layers, and 5 a s^2 b are scores.
#[test]
fn sequence_parallelism_divides_what_is_not_gathered() {
    let (h, s, a, t) = (64.0, 32.0, 8.0, 8.0);
    let activations = |layers: usize, keep_gathered: bool, flash_attention: bool| {
        let text = json!({
            "transformer": {
                "layers": layers, "hidden": h as usize, "heads": a as usize, "sequence": s as usize,
                "vocabulary": 128, "flash_attention": flash_attention,
            },
            "training": { "keep_gathered": keep_gathered },
            "batch": 1,
        });
        let cluster = include_str!("../../models/dgx-a100.json");
        let task = Task::from_json(&text.to_string(), Some(cluster)).unwrap();
        let layout = Layout { tensor: 8, sequence_parallel: true, ..NARROW };
        predicted(&task, layout).memory.activations
    };
    let of_block = |keep, flash| activations(3, keep, flash) - activations(2, keep, flash);
    let paper = s * h / t * (34.0 + 5.0 * a * s / h);
    assert_eq!(of_block(false, false), paper);
    assert_eq!(of_block(true, false), paper + 4.0 * s * h * (t - 1.0) / t);
    assert_eq!(of_block(false, true), paper - 5.0 * a * s * s / t);
}

/// docs/sharded.md: on R ranks of a machine P bytes of parameters, P of gradients, and what of them waits
/// in buckets. What moves is as with ZeRO 2.
#[test]
fn shared_weights_are_there_once_for_a_node() {
    let mut task = task(1_000, 1e9, 8, 0.0, 0.0);
    task.cluster.shared_memory = true;
    let zero_2 = Layout { data: 8, zero: 2, ..NARROW };
    let fsdp = Layout { shared_weights: true, ..zero_2 };
    let memory = predicted(&task, fsdp).memory;
    assert_eq!(8.0 * memory.weights, 2e9);
    assert_eq!(8.0 * memory.optimizer, 12e9);
    let buckets = 2.0 * 4.0 * 1024.0 * 1024.0;
    assert!((memory.gradients - 2e9 / 8.0 - buckets).abs() < 1.0, "{memory:?}");
    assert_eq!(predicted(&task, fsdp).time.step, predicted(&task, zero_2).time.step);
    // No more of a small model waits than there is.
    let small = self::task(1, 1e3, 8, 0.0, 0.0);
    let small = Task { cluster: task.cluster.clone(), ..small };
    assert_eq!(predicted(&small, fsdp).memory.gradients, 2e3 / 8.0 + 2e3);

    let error = |layout| predict(&task, &layout).unwrap_err().to_string();
    assert!(error(Layout { zero: 3, ..fsdp }).contains("share weights with ZeRO 2"));
    assert!(error(Layout { data: 4, tensor: 1, pipeline: 2, ..fsdp }).contains("alone"));
    assert!(error(Layout { data: 16, ..fsdp }).contains("on one node"));
    task.cluster.shared_memory = false;
    let error = predict(&task, &fsdp).unwrap_err().to_string();
    assert!(error.contains("`cluster.shared_memory` is true"), "{error}");
}

/// docs/sharded.md: each of R ranks has its part of P bytes of parameters, of P of gradients, and of the
/// optimizer's state. Two modules are gathered, and gradients of three are whole, one of them twice.
#[test]
fn fully_shard_has_a_few_modules_whole() {
    let task = task(100, 1e9, 8, 0.0, 0.0);
    let layout = Layout { data: 8, zero: 3, ..NARROW };
    let memory = predicted(&task, layout).memory;
    let module = 2.0 * 1e9 / 100.0;
    assert_eq!(memory.weights, 2e9 / 8.0 + 2.0 * module);
    assert_eq!(memory.gradients, 2e9 / 8.0 + 4.0 * module);
    assert_eq!(memory.optimizer, 12e9 / 8.0);
    // No more of a small model is whole than there is.
    let small = predicted(&self::task(1, 1e3, 8, 0.0, 0.0), layout).memory;
    assert_eq!((small.weights, small.gradients), (2e3 / 8.0 + 2e3, 2e3 / 8.0 + 2e3));
    let without_pipelines = Constraints { pipeline: Some(1), ..Constraints::default() };
    let found = search(&task, 8, &without_pipelines, 1000).unwrap();
    let is_fully_sharded = |plan: &Prediction| plan.layout.zero == 3;
    assert!(found.best.iter().any(is_fully_sharded));
    assert!(is_fully_sharded(&found.smallest));
}

/// Three collectives of each layer for each micro-batch, each a ring of all ranks.
#[test]
fn zero_3_waits_for_each_layer() {
    let task = task(10, 1e-20, 8, 1e-3, 0.0);
    let data = predicted(&task, Layout { data: 4, zero: 3, ..NARROW }).time.data;
    assert!((data - 2.0 * 3.0 * 10.0 * 3.0 * 1e-3).abs() < 1e-9, "{data}");
}

/// Gradients are reduced beside the backward; updated weights are gathered beside nothing.
#[test]
fn only_gradients_are_overlapped() {
    let task = task(1, 1e3, 4, 0.0, 1.0);
    let data = |zero| predicted(&task, Layout { data: 4, zero, ..NARROW }).time.data;
    assert_eq!(data(0), 1_000.0, "an all-reduce of 3000 s beside a backward of 2000 s");
    assert_eq!(data(1), 1_500.0);
    assert_eq!(data(3), 3_000.0, "the only layer's weights, and its gradients");
    let task = self::task(10, 1e3, 4, 0.0, 1.0);
    let data = predicted(&task, Layout { data: 4, zero: 3, ..NARROW }).time.data;
    assert!(
        (data - 300.0).abs() < 1e-9,
        "{data}: of ten layers the first one's and the last one's"
    );
}

/// Ten layers of 100 parameters on 4 ranks: 2 bytes each, gathered three times and reduced once.
#[test]
fn software_that_gathers_costs_what_it_says() {
    let mut task = task(10, 1e3, 4, 0.0, 0.0);
    let data = |task: &Task, recompute| {
        predicted(task, Layout { data: 4, zero: 3, recompute, ..NARROW }).time.data
    };
    assert!((data(&task, Recompute::Full) - 4_500.0).abs() < 1e-9);
    task.cluster.memory_bandwidth = 2.0;
    task.training.gathering = Gathering {
        tensors: 5.0,
        again: true,
        memory_passes: 3.0,
        rank_seconds: 0.25,
        ..task.training.gathering
    };
    let sending = 4.0 * 1_500.0;
    let software = 3.0 * 4.0 * 2e3 / 2.0 + 0.25 * 4.0 * 10.0 * 5.0 * 4.0;
    assert!((data(&task, Recompute::Full) - sending - software).abs() < 1e-9);
    let less = data(&task, Recompute::Full) - data(&task, Recompute::None);
    assert!((less - (sending + software) / 4.0).abs() < 1e-9, "{less}");
}

/// What ZeRO 2 moves for one micro-batch, ZeRO 1 moves too.
#[test]
fn the_links_limit_zero_2_with_one_micro_batch() {
    let task = task(1, 1e6, 4, 0.0, 0.0);
    let limit = |micro_batch, zero| {
        let layout = Layout { data: 2, micro_batch, zero, ..NARROW };
        predicted(&task, layout).limits[0].limit
    };
    assert_eq!(limit(2, 2), Limit::DataLink);
    assert_eq!(limit(1, 1), Limit::DataLink);
    assert_eq!(limit(1, 3), Limit::Memory);
}

/// GPT-3 on 8 x 12 ranks: with full recomputation the last rank of ZB-H1 has what 12 micro-batches
/// computed again in 8 blocks, each s h (10 + 24 / t) + 5 a s^2 / t bytes but for the input.
#[test]
fn zero_bubble_keeps_what_is_computed_again() {
    let (model, cluster) =
        (include_str!("../../models/gpt3-175b.json"), include_str!("../../models/dgx-a100.json"));
    let task = Task::from_json(model, Some(cluster)).unwrap();
    let (h, s, a, v, t) = (12_288.0, 2_048.0, 96.0, 51_200.0, 8.0);
    let recompute = Recompute::Full;
    let layout = Layout { tensor: 8, pipeline: 12, recompute, ..NARROW };
    let of = |schedule| predicted(&task, Layout { schedule, ..layout }).memory.activations;
    let block = s * h * (8.0 + 24.0 / t) + 5.0 * a * s * s / t;
    // Inputs of blocks, and logits in 4 bytes with their inputs.
    let kept = 8.0 * 2.0 * s * h + 4.0 * s * v / t + 4.0 * s * h;
    let held = 12.0 * (8.0 * block + kept);
    assert!((of(ScheduleKind::ZbH1) / held - 1.0).abs() < 1e-9, "{}", of(ScheduleKind::ZbH1));
    // In 1F1B one layer is computed again at a time, and the first rank holds 12 micro-batches of
    // inputs, and the masks of the embedding's dropout.
    let first = 12.0 * (8.0 * 2.0 * s * h + s * h) + block;
    assert!((of(ScheduleKind::OneFOneB) / first - 1.0).abs() < 1e-9);
}

/// Stages of 1 and 2 layers: the slowest rank works all the time, the other half of it.
#[test]
fn imbalance_is_the_slowest_stage_less_the_average() {
    let task = task(3, 1e-20, 10, 0.0, 0.0);
    let time = predicted(&task, Layout { pipeline: 2, ..NARROW }).time;
    let seconds = 3_000.0;
    assert_eq!(time.compute, 10.0 * 1.5 * seconds);
    assert_eq!(time.imbalance, 10.0 * 0.5 * seconds);
    assert_eq!(time.bubble, seconds);
    // With a core for each rank none takes turns.
    let mut task = task;
    task.cluster.concurrent_ranks = Some(2);
    let shared = predicted(&task, Layout { pipeline: 2, ..NARROW }).time;
    assert_eq!((shared.cores, shared.step), (0.0, time.step));
}

#[test]
fn layouts_that_cannot_be_are_errors() {
    let mut task = task(3, 1e3, 8, 0.0, 0.0);
    let error = |task: &Task, layout| predict(task, &layout).unwrap_err().to_string();
    let huge = Layout { data: 1 << 32, micro_batch: 1 << 32, ..NARROW };
    assert!(error(&task, huge).contains("do not divide the batch of 8"));
    task.batch = 0;
    assert!(error(&task, NARROW).contains("a batch of 0; give 1 to 2^32 samples"));
}

#[test]
fn bad_runs_are_named() {
    let error = |runs: serde_json::Value| {
        let text = json!({ "source": "", "runs": runs }).to_string();
        let cluster = include_str!("../../models/dgx-a100.json");
        compare(&text, Some(cluster)).unwrap_err().to_string()
    };
    let run = |batch: usize, layout: serde_json::Value, flops: f64| {
        let layers = json!([{ "flops": 1.0 }, { "flops": flops }]);
        let measured = json!({ "seconds": 1 });
        json!([{ "name": "a", "batch": batch, "layers": layers, "layout": layout,
                 "measured": measured }])
    };
    assert_eq!(error(json!([])), "runs is []: give at least one run");
    let measured = |measured: serde_json::Value| {
        let mut runs = run(8, json!({}), 1.0);
        runs[0]["measured"] = measured;
        error(runs)
    };
    let without = r#"run "a": measured is without a speed: give `seconds` or `teraflops`"#;
    assert_eq!(measured(json!({ "memory": 1 })), without);
    assert!(measured(json!({ "seconds": 1, "teraflops": 1 })).contains("measured is two speeds"));
    assert!(measured(json!({ "seconds": 1, "memory": 0 })).contains("measured is 0: give"));
    assert!(error(run(0, json!({}), 1.0)).starts_with(r#"run "a": dp 1 x tp 1"#));
    assert_eq!(
        error(run(8, json!({}), 1e308)),
        format!(r#"run "a": layers[1].flops is {}: give a number from 0 to 1e30"#, 1e308)
    );
    assert_eq!(
        error(run(8, json!({"data": 0}), 1.0)),
        r#"run "a": layout.data is 0: give 1 or more"#
    );
    assert_eq!(error(run(8, json!({"zero": 9}), 1.0)), r#"run "a": layout.zero is 9: give 0 to 3"#);
}
