//! What is recorded of real operations, on ranks that are threads: the trace shows what ran, and a
//! replay of it makes the same choices.

use std::sync::Mutex;

use crate::common::ranks::ranks;
use flow_global::explain::Table;
use flow_global::planner::{Prices, auto_sbp, cost};
use flow_global::trace::{CallKind, Phase, Trace};
use flow_global::{
    B, GlobalTensor, P, Placement, S, Sbp, distribute, distribute_tensor, explain, record,
};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};

/// A step of a perceptron with Adam, on each rank.
fn traces(data: Sbp, weights: impl Fn(&str) -> Sbp + Sync) -> Vec<Trace> {
    let traces = Mutex::new(Vec::new());
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let vs = nn::VarStore::new(Device::Cpu);
        let net = nn::seq()
            .add(nn::linear(vs.root() / "a", 8, 16, Default::default()))
            .add_fn(Tensor::relu)
            .add(nn::linear(vs.root() / "b", 16, 4, Default::default()));
        let mut optimizer = nn::Adam::default().build(&vs, 0.01).unwrap();
        distribute(&vs, &placement, |name, _| vec![weights(name)]).unwrap();
        let ones = |width: i64| Tensor::ones([12, width], (Kind::Float, Device::Cpu));
        let x = distribute_tensor(&ones(8), &placement, [data]).unwrap();
        let y = distribute_tensor(&ones(4), &placement, [data]).unwrap();
        let (_, trace) = record(|| {
            optimizer.backward_step(&net.forward(&x).mse_loss(&y, Reduction::Mean));
        });
        traces.lock().unwrap().push(trace);
    });
    traces.into_inner().unwrap()
}

fn bytes(trace: &Trace) -> f64 {
    trace.calls.iter().flat_map(|call| trace.boxings(call)).map(|boxing| boxing.bytes).sum()
}

#[test]
fn a_step_is_recorded_as_it_ran() {
    let columns = |name: &str| match name {
        "a.weight" | "a.bias" => S(0),
        "b.weight" => S(1),
        _ => B,
    };
    type Weights = fn(&str) -> Sbp;
    let layouts: [(Sbp, Weights); 3] = [(S(0), |_| B), (B, columns), (S(0), |_| S(0))];
    for (data, weights) in layouts {
        let traces = traces(data, weights);
        // All ranks have the same trace.
        let calls = |trace: &Trace| format!("{:?}", trace.calls);
        let values = |trace: &Trace| -> Vec<_> {
            let values = trace.values.iter();
            values.map(|value| (value.tensor.clone(), value.sbp.clone(), value.role)).collect()
        };
        assert_eq!(values(&traces[0]), values(&traces[1]));
        let without_nodes = |trace: &Trace| {
            let mut trace = trace.clone();
            trace.calls.iter_mut().for_each(|call| call.node = None);
            calls(&trace)
        };
        assert_eq!(without_nodes(&traces[0]), without_nodes(&traces[1]));
        let trace = &traces[0];
        // Rules make of it again what has run.
        assert_eq!(cost(trace).bytes, bytes(trace), "{:?}", Table::of(trace));
        // Weights have their names, and values their gradients.
        for name in ["a.weight", "a.bias", "b.weight", "b.bias"] {
            let named = trace.values.iter().filter(|value| value.name == name);
            assert_eq!(named.map(|value| value.sbp.clone()).collect::<Vec<_>>(), [[weights(name)]]);
        }
        let gradients = trace.gradients();
        let products = trace.calls.iter().filter(|call| {
            call.kind == CallKind::Operation && call.phase == Phase::Forward && call.name == "addmm"
        });
        let products: Vec<_> = products.map(|call| gradients[call.outputs[0].unwrap()]).collect();
        assert!(products.len() == 2 && products.iter().all(Option::is_some), "{products:?}");
    }
}

/// Forward and backward of a transformer's block, whose linear layers are split by columns, then by
/// rows; pinned by hand or not.
fn block(tokens: i64, width: i64, is_pinned: bool) -> Trace {
    let traces = Mutex::new(Vec::new());
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let vs = nn::VarStore::new(Device::Cpu);
        let root = vs.root();
        let linear = |name: &str, from, to| nn::linear(&root / name, from, to, Default::default());
        let norm = |name: &str| nn::layer_norm(&root / name, vec![width], Default::default());
        let (first, second) = (norm("ln1"), norm("ln2"));
        let [q, k, v, proj] = ["q", "k", "v", "proj"].map(|name| linear(name, width, width));
        let (up, down) = (linear("up", width, 4 * width), linear("down", 4 * width, width));
        let sbp = |name: &str| match name.split_once('.').unwrap() {
            ("q" | "k" | "v" | "up", _) => S(0),
            ("proj" | "down", "weight") => S(1),
            _ => B,
        };
        distribute(&vs, &placement, |name, _| vec![sbp(name)]).unwrap();
        let sum = |x: Tensor| if is_pinned { x.to_global(&placement, [B]).unwrap() } else { x };
        let copy = |x: Tensor| if is_pinned { sum(x).grad_sbp([B]).unwrap() } else { x };
        let ones = Tensor::ones([2, tokens / 2, width], (Kind::Float, Device::Cpu));
        let x = distribute_tensor(&ones, &placement, [B]).unwrap().set_requires_grad(true);
        let (_, trace) = record(|| {
            let n = copy(first.forward(&x));
            let heads = |layer: &nn::Linear| {
                layer.forward(&n).view([2, tokens / 2, 4, width / 4]).transpose(1, 2)
            };
            let (q, k, v) = (heads(&q), heads(&k), heads(&v));
            let none = None::<Tensor>;
            let a = Tensor::scaled_dot_product_attention(&q, &k, &v, none, 0.0, true, None, false);
            let a = a.transpose(1, 2).contiguous().view([2, tokens / 2, width]);
            let y = &x + sum(proj.forward(&a));
            let h = up.forward(&copy(second.forward(&y))).gelu("none");
            let y = &y + sum(down.forward(&h));
            y.sum(Kind::Float).backward();
        });
        traces.lock().unwrap().push(trace);
    });
    traces.into_inner().unwrap().remove(0)
}

/// Of two ranks, each receives as many elements as an all-reduce has: two of them in forward, two in
/// backward. What explain finds is no worse.
#[test]
fn a_block_with_four_pins_moves_megatrons_bytes() {
    let (tokens, width) = (16, 64);
    let megatrons = (4 * tokens * width * 4) as f64;
    let (greedy, pinned) = (block(tokens, width, false), block(tokens, width, true));
    for trace in [&greedy, &pinned] {
        assert_eq!(cost(trace).bytes, bytes(trace));
    }
    assert_eq!(bytes(&pinned), megatrons);
    assert!(bytes(&greedy) > 1.15 * megatrons, "{}", bytes(&greedy));
    let table = Table::of(&greedy);
    println!("{table}");
    let saved: f64 = table.pins.iter().map(|pin| pin.saved).sum();
    assert!(bytes(&greedy) - saved <= megatrons, "{table}");
}

/// Of data parallel, each gradient is reduced once.
#[test]
fn a_data_parallel_step_moves_the_gradients() {
    let trace = traces(S(0), |_| B).remove(0);
    let weights = (8 * 16 + 16 + 16 * 4 + 4) * 4;
    assert_eq!(bytes(&trace), f64::from(weights));
    let reduced = trace.calls.iter().filter(|call| call.kind == CallKind::Gradient);
    assert_eq!(reduced.count(), 4);
}

/// A plan of a recorded step: with weights as planned, the step costs what the plan says.
#[test]
fn a_plan_costs_what_it_says() {
    let plan =
        auto_sbp(&traces(B, |_| B)[0], &Prices { memory: 100.0, ..Prices::default() }).unwrap();
    assert!(plan.weights.iter().any(|(_, sbp)| sbp != &[B]), "{plan:?}");
    let sbp = |name: &str| plan.weights.iter().find(|(other, _)| other == name).unwrap().1[0];
    let trace = &traces(B, sbp)[0];
    assert_eq!((bytes(trace), cost(trace)), (plan.without_pins.bytes, plan.without_pins));
}

#[test]
fn explain_shows_boxing() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let ones = |shape: [i64; 2]| Tensor::ones(shape, (Kind::Float, Device::Cpu));
        let x = distribute_tensor(&ones([4, 6]), &placement, [S(1)]).unwrap();
        let w = distribute_tensor(&ones([6, 8]), &placement, [S(0)]).unwrap();
        let (y, table) = explain(|| x.matmul(&w).to_global(&placement, [B]).unwrap());
        assert_eq!(y.sbp().unwrap(), [B]);
        let text = table.to_string();
        let lines: Vec<_> = text.lines().collect();
        assert!(lines.contains(&"     1x             mm([4, 6] S(1), [6, 8] S(0)) -> P"), "{text}");
        assert!(lines.contains(&"     1x      128 B  to_global([4, 8] P>B) -> B"), "{text}");
        assert!(lines.contains(&"     1x      128 B  all-reduce"), "{text}");
        assert_eq!(table.rows[0].outputs, [[P]]);
        // Nothing is recorded afterwards.
        drop(x.matmul(&w));
        assert_eq!(record(|| ()).1.calls.len(), 0);
    });
}

/// With `FLOW_EXPLAIN=1` the first rank prints each kind of call once.
#[test]
fn flow_explain_prints() {
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["record::explain_shows_boxing", "--exact", "--nocapture"])
        .env("FLOW_EXPLAIN", "1")
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&run.stderr);
    let line = "flow-explain:     1x             mm([4, 6] S(1), [6, 8] S(0)) -> P\n";
    assert!(run.status.success(), "{printed}");
    // It runs twice, and on two ranks.
    assert_eq!(printed.matches(line).count(), 1, "{printed}");
}
