//! Measures operations on global tensors beside the same ones on plain tensors, on a thread for each
//! rank. Forward, and an MLP step whose tensors are all B, communicate nothing.
//!
//! As in `scripts/peers/overhead.py`: medians of many rounds, in which both take turns.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use flow::global::{B, Placement, S, distribute, distribute_tensor};
use flow_ddp::{DeviceKind, ProcessGroup, TensorCollectives};
use serde_json::json;
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};

const CALLS: usize = 1000;
/// Calls of a training step, which is many operations.
const STEPS: usize = 100;

#[derive(Args)]
pub struct Options {
    /// Rounds, whose median is printed
    #[arg(long, default_value_t = 31, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    group.use_device(DeviceKind::Cpu)?;
    tch::set_num_threads(1);
    tch::manual_seed(0); // the same values on all ranks
    let placement = Placement::all(&group)?;
    if group.rank() == 0 && !options.json {
        println!("{:<24}{:>10}{:>10}{:>10}{:>8}", "us a call", "plain", "global", "", "ratio");
    }
    let bench = Bench { options, group: &group };
    let a = random(&[8, 8]);
    let b = random(&[8, 8]);
    let ga = distribute_tensor(&a, &placement, [S(0)])?;
    let gb = distribute_tensor(&b, &placement, [S(0)])?;
    let gw = distribute_tensor(&b, &placement, [B])?;
    {
        let _no_grad = tch::no_grad_guard();
        bench.results("add", || &a + &b, || &ga + &gb);
        bench.results("mm", || a.mm(&b), || ga.mm(&gw));
        bench.results("relu", || a.relu(), || ga.relu());
        bench.results("view", || b.view([64]), || gw.view([64]));
        let mut c = a.copy();
        let mut gc = distribute_tensor(&a, &placement, [S(0)])?;
        bench.results("add_", || c.g_add_(&b), || gc.g_add_(&gb));
    }
    let [a, b, ga, gb, gw] =
        [&a, &b, &ga, &gb, &gw].map(|tensor| tensor.detach().set_requires_grad(true));
    bench.show(
        "add, with backward",
        CALLS,
        || backward(&a + &b, &[&a, &b]),
        || backward(&ga + &gb, &[&ga, &gb]),
    );
    bench.show(
        "mm, with backward",
        CALLS,
        || backward(a.mm(&b), &[&a, &b]),
        || backward(ga.mm(&gw), &[&ga, &gw]),
    );
    bench.show(
        "relu, with backward",
        CALLS,
        || backward(a.relu(), &[&a]),
        || backward(ga.relu(), &[&ga]),
    );

    let x = random(&[8, 8]);
    let gx = distribute_tensor(&x, &placement, [B])?;
    let (net, mut optimizer, _vs) = mlp(None)?;
    let (gnet, mut goptimizer, _gvs) = mlp(Some(&placement))?;
    bench.show(
        "MLP step with Adam",
        STEPS,
        || step(&net, &mut optimizer, &x),
        || step(&gnet, &mut goptimizer, &gx),
    );
    Ok(())
}

/// Measures a pair of calls, and prints it on rank 0.
struct Bench<'a> {
    options: &'a Options,
    group: &'a ProcessGroup,
}

impl Bench<'_> {
    fn show(&self, name: &str, calls: usize, mut plain: impl FnMut(), mut global: impl FnMut()) {
        let medians = compare(self.options.rounds, calls, &mut plain, &mut global);
        if self.group.rank() == 0 {
            print(self.options, self.group.world_size(), name, medians);
        }
    }

    /// Measures calls whose results nobody needs.
    fn results(
        &self,
        name: &str,
        mut plain: impl FnMut() -> Tensor,
        mut global: impl FnMut() -> Tensor,
    ) {
        self.show(name, CALLS, || drop(black_box(plain())), || drop(black_box(global())));
    }
}

fn backward(result: Tensor, inputs: &[&Tensor]) {
    drop(black_box(Tensor::run_backward(&[&result], inputs, false, false)));
}

fn step(net: &nn::Sequential, optimizer: &mut nn::Optimizer, x: &Tensor) {
    optimizer.backward_step(&net.forward(x).mse_loss(x, Reduction::Sum));
}

/// Medians, in microseconds a call.
fn compare(
    rounds: u32,
    calls: usize,
    plain: &mut dyn FnMut(),
    global: &mut dyn FnMut(),
) -> [f64; 2] {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=rounds {
        let plain = microseconds_a_call(calls, plain);
        let global = microseconds_a_call(calls, global);
        // The first round warms up.
        if round > 0 {
            times[0].push(plain);
            times[1].push(global);
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    })
}

fn microseconds_a_call(calls: usize, work: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..calls {
        work();
    }
    start.elapsed().as_secs_f64() * 1e6 / calls as f64
}

fn print(options: &Options, ranks: usize, name: &str, [plain, global]: [f64; 2]) {
    let more = global - plain;
    let ratio = global / plain;
    if options.json {
        let line = json!({
            "bench": "overhead", "name": name, "ranks": ranks, "plain_us": plain,
            "global_us": global,
        });
        println!("{line}");
    } else {
        println!("{name:<24}{plain:>10.2}{global:>10.2}{more:>+10.2}{ratio:>8.2}");
    }
}

fn random(sizes: &[i64]) -> Tensor {
    Tensor::randn(sizes, (Kind::Float, Device::Cpu))
}

/// Returns an MLP and its optimizer, on global tensors if there is a placement.
fn mlp(placement: Option<&Placement>) -> Result<(nn::Sequential, nn::Optimizer, nn::VarStore)> {
    let vs = nn::VarStore::new(Device::Cpu);
    let net = nn::seq()
        .add(nn::linear(vs.root() / "a", 8, 16, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(vs.root() / "b", 16, 8, Default::default()));
    if let Some(placement) = placement {
        distribute(&vs, placement, |_, _| vec![B])?;
    }
    let optimizer = nn::Adam::default().build(&vs, 0.01)?;
    Ok((net, optimizer, vs))
}
