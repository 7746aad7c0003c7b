//! Traced steps: what explain makes of them, and what the planner chooses.

use crate::common::models::{Gpt, Update, megatron, mlp};
use crate::common::tape::Tape;
use flow_global::explain::Table;
use flow_global::planner::{ChosenSbps, Prices, auto_sbp, cost};
use flow_global::trace::Trace;
use flow_global::{B, Error, Placement, S, Sbp};

const SMALL: Gpt = Gpt {
    samples: 2,
    length: 8,
    width: 64,
    heads: 4,
    blocks: 1,
    optimizer: None,
    is_fused: true,
    is_pinned: false,
};

fn two() -> Placement {
    Placement::of([0, 1]).unwrap()
}

fn mesh() -> Placement {
    Placement::of([[0, 1], [2, 3]]).unwrap()
}

fn tensor_parallel(gpt: Gpt) -> Trace {
    gpt.trace(&two(), &[B], |name| vec![megatron(name)])
}

/// Received by a rank, as recorded.
fn bytes(trace: &Trace) -> f64 {
    trace.calls.iter().flat_map(|call| trace.boxings(call)).map(|boxing| boxing.bytes).sum()
}

fn sbp<'a>(plan: &'a ChosenSbps, name: &str) -> &'a [Sbp] {
    &plan.weights.iter().find(|(other, _)| other == name).unwrap().1
}

/// Of two ranks, each receives as many elements as an all-reduce has.
#[test]
fn four_pins_make_it_megatrons_bytes() {
    for (samples, length) in [(2, 8), (2, 128)] {
        let megatrons = (4 * samples * length * 64 * 4) as f64;
        let greedy = tensor_parallel(Gpt { samples, length, ..SMALL });
        let pinned = tensor_parallel(Gpt { samples, length, is_pinned: true, ..SMALL });
        assert_eq!(bytes(&pinned), megatrons);
        assert!(bytes(&greedy) > 1.15 * megatrons, "{}", bytes(&greedy));
        // So do the operations that attention consists of, for one sample.
        let gpt = Gpt { samples: 1, length, is_pinned: true, is_fused: false, ..SMALL };
        assert_eq!(bytes(&tensor_parallel(gpt)), megatrons / samples as f64);
    }
}

#[test]
fn a_replay_makes_of_a_trace_what_was_recorded() {
    let optimizer: Option<Update> = Some(Tape::adam);
    for gpt in [SMALL, Gpt { is_pinned: true, blocks: 2, ..SMALL }, Gpt { optimizer, ..SMALL }] {
        let trace = tensor_parallel(gpt);
        assert_eq!(cost(&trace).bytes, bytes(&trace));
    }
    let trace =
        Gpt { samples: 5, ..SMALL }.trace(&mesh(), &[S(0), B], |name| vec![B, megatron(name)]);
    assert_eq!(cost(&trace).bytes, bytes(&trace));
}

/// The pins that explain finds are no worse than Megatron's. Where weights are small, beside the
/// data, others cost less.
#[test]
fn explain_finds_the_pins() {
    for length in [8, 128] {
        let greedy = tensor_parallel(Gpt { length, ..SMALL });
        let pinned = cost(&tensor_parallel(Gpt { length, is_pinned: true, ..SMALL }));
        let table = Table::of(&greedy);
        let saved: f64 = table.pins.iter().map(|pin| pin.saved).sum();
        assert_eq!(table.cost.bytes, bytes(&greedy));
        assert!(table.cost.bytes - saved <= 1.01 * pinned.bytes, "{table}");
        assert!(!table.pins.is_empty() && table.pins.len() <= 4, "{table}");
        let text = table.to_string();
        assert!(text.contains("it would receive less, with:"), "{text}");
    }
}

#[test]
fn explain_tells_what_is_moved() {
    let trace = mlp(&two(), 4, &[6, 8, 2], &[S(0)], |_| vec![B]);
    let table = Table::of(&trace).to_string();
    println!("{table}");
    let lines: Vec<_> = table.lines().collect();
    assert!(lines.contains(&"     1x             addmm([8] B, [4, 6] S(0), [6, 8] B) -> S(0)"));
    assert!(lines.contains(&"     1x      192 B  backward gradient([8, 6] P>B, [8, 6] B) -> B"));
    assert!(lines.contains(&"     4x      296 B  all-reduce"));
}

/// Much data and few weights: data parallel.
#[test]
fn a_large_batch_makes_it_data_parallel() {
    for data in [B, S(0)] {
        let trace = mlp(&two(), 4096, &[64, 128, 64], &[data], |_| vec![B]);
        let plan = auto_sbp(&trace, &Prices::default()).unwrap();
        assert!(plan.weights.iter().all(|(_, sbp)| sbp == &[B]), "{plan:?}");
        // All gradients once.
        let weights = 4 * (64 * 128 + 128 + 128 * 64 + 64);
        assert_eq!(plan.cost.bytes, f64::from(weights));
    }
}

/// Few samples and wide layers: columns, then rows, and one all-reduce of what is between.
#[test]
fn wide_layers_make_it_tensor_parallel() {
    let widths = [512, 2048, 512];
    let trace = mlp(&two(), 16, &widths, &[B], |_| vec![B]);
    let plan = auto_sbp(&trace, &Prices::default()).unwrap();
    assert_eq!((sbp(&plan, "a.weight"), sbp(&plan, "b.weight")), (&[S(0)][..], &[S(1)][..]));
    let by_hand = mlp(&two(), 16, &widths, &[B], |name| {
        vec![match name {
            "a.weight" | "a.bias" => S(0),
            "b.weight" => S(1),
            _ => B,
        }]
    });
    assert!(plan.cost.total(&Prices::default()) <= cost(&by_hand).total(&Prices::default()));
}

#[test]
fn a_gpt_becomes_tensor_parallel() {
    let gpt = Gpt { optimizer: Some(Tape::adam), ..SMALL };
    let plan = auto_sbp(&gpt.trace(&two(), &[B], |_| vec![B]), &Prices::default()).unwrap();
    for layer in ["q", "k", "v", "up"] {
        assert_eq!(sbp(&plan, &format!("h.0.{layer}.weight")), [S(0)], "{plan:?}");
    }
    for layer in ["proj", "down"] {
        assert_eq!(sbp(&plan, &format!("h.0.{layer}.weight")), [S(1)], "{plan:?}");
    }
    let by_hand = tensor_parallel(Gpt { is_pinned: true, ..gpt });
    assert!(plan.cost.bytes <= cost(&by_hand).bytes, "{plan:?}");
    assert!(plan.cost.total(&Prices::default()) <= cost(&by_hand).total(&Prices::default()));
}

/// Data on one axis, and layers on the other.
#[test]
fn a_mesh_mixes() {
    let trace = mlp(&mesh(), 4096, &[512, 2048, 512], &[S(0), B], |_| vec![B, B]);
    let plan = auto_sbp(&trace, &Prices::default()).unwrap();
    println!("{plan:?}");
    assert_eq!(sbp(&plan, "a.weight"), [B, S(0)]);
    assert_eq!(sbp(&plan, "b.weight"), [B, S(1)]);
}

#[test]
fn equal_layers_get_equal_sbps_and_each_rank_the_same_plan() {
    let gpt = Gpt { blocks: 3, optimizer: Some(Tape::adam), ..SMALL };
    let trace = gpt.trace(&mesh(), &[S(0), B], |_| vec![B, B]);
    let plan = auto_sbp(&trace, &Prices::default()).unwrap();
    assert_eq!(plan, auto_sbp(&trace, &Prices::default()).unwrap());
    for (name, own) in &plan.weights {
        let first = name.replace("h.1.", "h.0.").replace("h.2.", "h.0.");
        assert_eq!(own, sbp(&plan, &first), "{name}");
    }
}

#[test]
fn one_rank_has_everything() {
    let one = Placement::of([0]).unwrap();
    let plan = auto_sbp(&SMALL.trace(&one, &[B], |_| vec![B]), &Prices::default()).unwrap();
    assert!(plan.weights.iter().all(|(_, sbp)| sbp == &[B]), "{plan:?}");
    assert_eq!((plan.cost.bytes, plan.pins), (0.0, vec![]));
}

/// A trace of one rank is enough to plan for others.
#[test]
fn a_trace_can_be_taken_to_another_placement() {
    let one = Placement::of([0]).unwrap();
    let weights = [64, 128, 64];
    let trace = mlp(&one, 4096, &weights, &[B], |_| vec![B]);
    let moved = trace.on(&two(), |value| vec![if value.name == "x" { S(0) } else { B }]);
    let other = mlp(&two(), 4096, &weights, &[S(0)], |_| vec![B]);
    assert_eq!(cost(&moved).bytes, cost(&other).bytes);
    let plan = auto_sbp(&moved, &Prices::default()).unwrap();
    assert_eq!(plan, auto_sbp(&other, &Prices::default()).unwrap());
}

/// Where memory is dear, nobody has all of a weight.
#[test]
fn memory_counts() {
    let trace = mlp(&two(), 4096, &[64, 128, 64], &[S(0)], |_| vec![B]);
    let dear = Prices { memory: 100.0, ..Prices::default() };
    let plan = auto_sbp(&trace, &dear).unwrap();
    assert!(plan.weights.iter().all(|(_, sbp)| sbp != &[B]), "{plan:?}");
}

#[test]
fn a_plan_is_for_one_placement() {
    let mut trace = mlp(&two(), 4, &[6, 2], &[S(0)], |_| vec![B]);
    trace.values[0].placement = Placement::of([2, 3]).unwrap();
    let error = auto_sbp(&trace, &Prices::default()).unwrap_err();
    assert!(matches!(error, Error::SeveralPlacements(..)), "{error}");
}
