//! What must hold of predictions, whatever the numbers are.

use flow_plan::{Cluster, Layout, Model, Recompute, ScheduleKind, Task, predict, search};
use flow_plan::{Constraints, Training, Transformer};
use proptest::prelude::*;

fn cluster() -> Cluster {
    Cluster::from_json(include_str!("../../models/dgx-a100.json")).unwrap()
}

fn task(layers: usize, hidden: usize, batch: usize) -> Task {
    let (heads, sequence, vocabulary) = (16, 512, 8192);
    let (mlp, dropout, tied_embeddings, flash_attention) = (None, None, None, None);
    let shape = Transformer {
        layers,
        hidden,
        heads,
        sequence,
        vocabulary,
        mlp,
        dropout,
        tied_embeddings,
        flash_attention,
    };
    let training = Training::default();
    let model = Model::transformer(&shape, training.element).unwrap();
    Task { model, batch, cluster: cluster(), training, layout: Constraints::default() }
}

fn tasks() -> impl Strategy<Value = Task> {
    (8..40usize, 1..40usize).prop_map(|(layers, size)| task(layers, 64 * size, 128))
}

/// Layouts whose sizes can all be doubled with 128 samples.
fn layouts() -> impl Strategy<Value = Layout> {
    let power = || (0..2u32).prop_map(|exponent| 1usize << exponent);
    let schedule = prop::sample::select(vec![ScheduleKind::Gpipe, ScheduleKind::OneFOneB]);
    let recompute = prop::sample::select(Recompute::ALL.to_vec());
    (power(), power(), power(), power(), schedule, 0..4u8, recompute, any::<bool>()).prop_map(
        |(data, tensor, pipeline, micro_batch, schedule, zero, recompute, sequence_parallel)| {
            let chunks = 1;
            Layout {
                data,
                tensor,
                pipeline,
                micro_batch,
                schedule,
                chunks,
                zero,
                shared_weights: false,
                recompute,
                sequence_parallel,
            }
        },
    )
}

proptest! {
    #[test]
    fn the_step_is_the_sum_of_its_parts(task in tasks(), layout in layouts()) {
        let plan = predict(&task, &layout).unwrap();
        let time = plan.time;
        let parts = [
            time.compute, time.recompute, time.tensor, time.pipeline, time.data, time.optimizer,
            time.imbalance, time.bubble, time.cores,
        ];
        prop_assert!(parts.iter().all(|part| *part >= 0.0), "{time:?}");
        prop_assert!((parts.iter().sum::<f64>() / time.step - 1.0).abs() < 1e-9, "{time:?}");
        prop_assert!(plan.utilization > 0.0);
        prop_assert!(plan.utilization <= task.cluster.matmul.peak_share);
        let memory = plan.memory;
        let parts = [memory.weights, memory.gradients, memory.optimizer, memory.activations];
        prop_assert!((parts.iter().sum::<f64>() / memory.total - 1.0).abs() < 1e-9, "{memory:?}");
    }

    /// Nothing that splits the model, its state or its activations takes more memory.
    #[test]
    fn splitting_takes_no_more_memory(task in tasks(), layout in layouts()) {
        let needed = |layout: Layout| predict(&task, &layout).unwrap().memory.total;
        let before = needed(layout);
        let tensor = needed(Layout { tensor: 2 * layout.tensor, ..layout });
        prop_assert!(tensor < before);
        let sequence = needed(Layout { sequence_parallel: true, ..layout });
        prop_assert!(sequence <= before);
        let state = |pipeline| {
            let memory = predict(&task, &Layout { pipeline, zero: 0, ..layout }).unwrap().memory;
            memory.weights + memory.gradients + memory.optimizer
        };
        let (part, all) = (state(2 * layout.pipeline), state(1));
        prop_assert!(part < all);
        for recompute in [Recompute::Selective, Recompute::Full] {
            let least = Layout { recompute: Recompute::None, ..layout };
            let (less, all) = (needed(Layout { recompute, ..layout }), needed(least));
            prop_assert!(less < all);
        }
        // ZeRO's whole layers count only where something is shared out.
        let data = Layout { data: 4, zero: 0, ..layout };
        let (shared, whole) = (needed(Layout { zero: 1, ..data }), needed(data));
        prop_assert!(shared < whole);
        let held = |schedule| needed(Layout { schedule, pipeline: 2, ..layout });
        prop_assert!(held(ScheduleKind::OneFOneB) <= held(ScheduleKind::Gpipe));
    }

    #[test]
    fn better_machines_are_no_slower(task in tasks(), layout in layouts(), better in 0..5usize) {
        let before = predict(&task, &layout).unwrap().time.step;
        let mut task = task;
        let number = match better {
            0 => &mut task.cluster.flops,
            1 => &mut task.cluster.memory_bandwidth,
            2 => &mut task.cluster.intra_node.bandwidth,
            3 => &mut task.cluster.inter_node.bandwidth,
            _ => &mut task.training.data_overlap,
        };
        *number = if *number == 0.0 { 0.5 } else { 2.0 * *number };
        prop_assert!(predict(&task, &layout).unwrap().time.step <= before);
    }

    #[test]
    fn a_search_finds_what_is_wanted_in_order(
        layers in 4..12usize, ranks in 1..33usize, zero in prop::option::of(0..4u8),
    ) {
        let task = task(layers, 256, 96);
        let wanted = Constraints { zero, ..Constraints::default() };
        let Ok(plans) = search(&task, ranks, &wanted, 50) else {
            // Some numbers of ranks, as 11, divide neither the batch nor the heads.
            return Ok(());
        };
        prop_assert!(!plans.best.is_empty());
        prop_assert!(plans.best.windows(2).all(|pair| pair[0].time.step <= pair[1].time.step));
        for plan in &plans.best {
            prop_assert_eq!(plan.layout.ranks(), ranks);
            prop_assert!(plan.memory.fits && plan.memory.total >= plans.smallest.memory.total);
            prop_assert_eq!(plan.layout.zero, zero.unwrap_or(plan.layout.zero));
            // What the search has found is what the layout alone gives.
            let alone = predict(&task, &plan.layout).unwrap();
            prop_assert_eq!(alone.time.step, plan.time.step);
        }
    }
}

proptest! {
    /// However large or small the numbers are, there is a prediction or an error.
    #[test]
    fn no_numbers_panic(
        heads in 1..5usize,
        sizes in prop::collection::vec(
            prop::sample::select(vec![1usize, 2, 3, 7, 12, 1 << 20, 1 << 28]),
            8,
        ),
        numbers in prop::collection::vec(
            prop::sample::select(vec![1e-30, 0.5, 1.0, 3e9, 1e15, 1e30]),
            7,
        ),
        layers in 1..9usize,
        share in prop::sample::select(vec![1e-30, 0.5, 1.0]),
    ) {
        let text = serde_json::json!({
            "transformer": {
                "layers": layers, "hidden": heads * sizes[0], "heads": heads,
                "sequence": sizes[1], "vocabulary": sizes[2], "mlp": sizes[3],
            },
            "batch": sizes[4],
            "training": { "element": share, "optimizer": 1024.0 * share },
            "cluster": {
                "ranks_per_node": sizes[5], "concurrent_ranks": sizes[6],
                "memory": numbers[0], "flops": numbers[1], "memory_bandwidth": numbers[2],
                "matmul": { "peak_share": share, "half_size": numbers[3] },
                "intra_node": { "bandwidth": numbers[4], "latency": numbers[6] },
                "inter_node": { "bandwidth": numbers[5], "latency": numbers[6] },
            },
        });
        let task = Task::from_json(&text.to_string(), None).unwrap();
        match search(&task, sizes[7], &Constraints::default(), 3) {
            Ok(plans) => prop_assert!(plans.best.len() <= plans.fit && plans.fit <= plans.tried),
            Err(error) => prop_assert!(error.to_string().contains("is possible"), "{error}"),
        }
    }
}

/// With cores for two ranks, eight ranks are not faster than two, and idle time is used by others.
#[test]
fn ranks_that_share_cores_are_no_faster() {
    let mut task = task(8, 512, 64);
    task.cluster.concurrent_ranks = Some(2);
    let layout = |data, pipeline| Layout {
        data,
        tensor: 1,
        pipeline,
        micro_batch: 1,
        schedule: ScheduleKind::OneFOneB,
        chunks: 1,
        zero: 0,
        shared_weights: false,
        recompute: Recompute::None,
        sequence_parallel: false,
    };
    let two = predict(&task, &layout(2, 1)).unwrap().time;
    let eight = predict(&task, &layout(8, 1)).unwrap().time;
    assert_eq!(two.cores, 0.0);
    assert!(eight.cores > 0.0 && eight.step > 0.99 * two.step, "{two:?} {eight:?}");
}
