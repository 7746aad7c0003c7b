//! What an operation on global tensors costs beyond the same one on plain tensors: without
//! communication, on one rank and one thread. Medians of many rounds, in which both take turns.
//!
//! `cargo bench -p flow-global --bench overhead`

use std::hint::black_box;
use std::time::Instant;

use flow_global::{distribute, distribute_tensor, Placement, Sbp, B, S};
use flow_tensor::ProcessGroup;
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};

const ROUNDS: usize = 31;
const CALLS: usize = 1000;

/// Medians, in microseconds a call, of two closures that take turns.
fn compare(mut plain: impl FnMut(), mut global: impl FnMut()) -> [f64; 2] {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS + 1 {
        for (which, times) in times.iter_mut().enumerate() {
            let start = Instant::now();
            for _ in 0..CALLS {
                if which == 0 {
                    plain();
                } else {
                    global();
                }
            }
            // The first round warms up.
            if round > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e6 / CALLS as f64);
            }
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    })
}

fn show(name: &str, [plain, global]: [f64; 2]) {
    println!(
        "{name:<24}{plain:>10.2}{global:>10.2}{:>+10.2}{:>8.2}",
        global - plain,
        global / plain
    );
}

fn random(sizes: &[i64]) -> Tensor {
    Tensor::randn(sizes, (Kind::Float, Device::Cpu))
}

/// An MLP and its optimizer, on global tensors if there is a placement.
fn mlp(placement: Option<&Placement>) -> (nn::Sequential, nn::Optimizer, nn::VarStore) {
    let vs = nn::VarStore::new(Device::Cpu);
    let net = nn::seq()
        .add(nn::linear(vs.root() / "a", 8, 16, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(vs.root() / "b", 16, 8, Default::default()));
    if let Some(placement) = placement {
        distribute(&vs, placement, |_, _| vec![B]).expect("the model becomes global");
    }
    let optimizer = nn::Adam::default().build(&vs, 0.01).expect("an optimizer");
    (net, optimizer, vs)
}

fn main() {
    tch::set_num_threads(1);
    let group = ProcessGroup::in_process(1).expect("a group").remove(0);
    let placement = Placement::all(&group).expect("a placement");
    let global =
        |tensor: &Tensor, sbp: Sbp| distribute_tensor(tensor, &placement, [sbp]).expect("a tensor");
    println!("{:<24}{:>10}{:>10}{:>10}{:>8}", "us a call", "plain", "global", "", "ratio");

    let (a, b) = (random(&[8, 8]), random(&[8, 8]));
    let (ga, gb, gw) = (global(&a, S(0)), global(&b, S(0)), global(&b, B));
    {
        let _no_grad = tch::no_grad_guard();
        show("add", compare(|| drop(black_box(&a + &b)), || drop(black_box(&ga + &gb))));
        show("mm", compare(|| drop(black_box(a.mm(&b))), || drop(black_box(ga.mm(&gw)))));
        show("relu", compare(|| drop(black_box(a.relu())), || drop(black_box(ga.relu()))));
        let view = |tensor: &Tensor| drop(black_box(tensor.view([64])));
        show("view", compare(|| view(&b), || view(&gw)));
        let (mut c, mut gc) = (a.copy(), global(&a, S(0)));
        let add = |to: &mut Tensor, what: &Tensor| drop(black_box(to.g_add_(what)));
        show("add_", compare(|| add(&mut c, &b), || add(&mut gc, &gb)));
    }
    let leaf = |tensor: &Tensor| tensor.detach().set_requires_grad(true);
    let (a, b, ga, gb, gw) = (leaf(&a), leaf(&b), leaf(&ga), leaf(&gb), leaf(&gw));
    let backward = |result: Tensor, inputs: &[&Tensor]| {
        drop(black_box(Tensor::run_backward(&[&result], inputs, false, false)));
    };
    show(
        "add, with backward",
        compare(|| backward(&a + &b, &[&a, &b]), || backward(&ga + &gb, &[&ga, &gb])),
    );
    show(
        "mm, with backward",
        compare(|| backward(a.mm(&b), &[&a, &b]), || backward(ga.mm(&gw), &[&ga, &gw])),
    );
    show(
        "relu, with backward",
        compare(|| backward(a.relu(), &[&a]), || backward(ga.relu(), &[&ga])),
    );

    let x = random(&[8, 8]);
    let gx = global(&x, B);
    let (net, mut optimizer, _vs) = mlp(None);
    let (gnet, mut goptimizer, _gvs) = mlp(Some(&placement));
    let step = |net: &nn::Sequential, optimizer: &mut nn::Optimizer, x: &Tensor| {
        optimizer.backward_step(&net.forward(x).mse_loss(x, Reduction::Sum));
    };
    show(
        "MLP step with Adam",
        compare(|| step(&net, &mut optimizer, &x), || step(&gnet, &mut goptimizer, &gx)),
    );
}
