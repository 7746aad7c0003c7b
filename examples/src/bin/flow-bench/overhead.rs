//! What operations on global tensors cost beyond the same ones on plain tensors, on a thread for
//! each rank. Forward, and an MLP step whose tensors are all B, communicate nothing.
//!
//! As in `scripts/peers/overhead.py`: medians of many rounds, in which both take turns.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use flow::global::{distribute, distribute_tensor, Placement, Sbp, B, S};
use flow_ddp::{DeviceKind, ProcessGroup, TensorCollectives};
use serde_json::json;
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};

const ROUNDS: usize = 31;
const CALLS: usize = 1000;
/// Of a training step, which is many operations.
const STEPS: usize = 100;

#[derive(Args)]
pub struct Options {
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
    let global = |tensor: &Tensor, sbp: Sbp| distribute_tensor(tensor, &placement, [sbp]);
    if group.rank() == 0 && !options.json {
        println!("{:<24}{:>10}{:>10}{:>10}{:>8}", "us a call", "plain", "global", "", "ratio");
    }
    let show = |name, calls, plain: &mut dyn FnMut(), global: &mut dyn FnMut()| {
        let medians = compare(calls, plain, global);
        if group.rank() == 0 {
            print(options, group.world_size(), name, medians);
        }
    };

    let (a, b) = (random(&[8, 8]), random(&[8, 8]));
    let (ga, gb, gw) = (global(&a, S(0))?, global(&b, S(0))?, global(&b, B)?);
    {
        let _no_grad = tch::no_grad_guard();
        let bench = |name, plain: &dyn Fn() -> Tensor, global: &dyn Fn() -> Tensor| {
            let mut plain = || drop(black_box(plain()));
            show(name, CALLS, &mut plain, &mut || drop(black_box(global())));
        };
        bench("add", &|| &a + &b, &|| &ga + &gb);
        bench("mm", &|| a.mm(&b), &|| ga.mm(&gw));
        bench("relu", &|| a.relu(), &|| ga.relu());
        bench("view", &|| b.view([64]), &|| gw.view([64]));
        let (mut c, mut gc) = (a.copy(), global(&a, S(0))?);
        let add = |to: &mut Tensor, what: &Tensor| drop(black_box(to.g_add_(what)));
        show("add_", CALLS, &mut || add(&mut c, &b), &mut || add(&mut gc, &gb));
    }
    let leaf = |tensor: &Tensor| tensor.detach().set_requires_grad(true);
    let (a, b, ga, gb, gw) = (leaf(&a), leaf(&b), leaf(&ga), leaf(&gb), leaf(&gw));
    let backward = |result: Tensor, inputs: &[&Tensor]| {
        drop(black_box(Tensor::run_backward(&[&result], inputs, false, false)));
    };
    show("add, with backward", CALLS, &mut || backward(&a + &b, &[&a, &b]), &mut || {
        backward(&ga + &gb, &[&ga, &gb])
    });
    show("mm, with backward", CALLS, &mut || backward(a.mm(&b), &[&a, &b]), &mut || {
        backward(ga.mm(&gw), &[&ga, &gw])
    });
    show("relu, with backward", CALLS, &mut || backward(a.relu(), &[&a]), &mut || {
        backward(ga.relu(), &[&ga])
    });

    let x = random(&[8, 8]);
    let gx = global(&x, B)?;
    let (net, mut optimizer, _vs) = mlp(None)?;
    let (gnet, mut goptimizer, _gvs) = mlp(Some(&placement))?;
    let step = |net: &nn::Sequential, optimizer: &mut nn::Optimizer, x: &Tensor| {
        optimizer.backward_step(&net.forward(x).mse_loss(x, Reduction::Sum));
    };
    show("MLP step with Adam", STEPS, &mut || step(&net, &mut optimizer, &x), &mut || {
        step(&gnet, &mut goptimizer, &gx)
    });
    Ok(())
}

/// Medians, in microseconds a call.
fn compare(calls: usize, plain: &mut dyn FnMut(), global: &mut dyn FnMut()) -> [f64; 2] {
    let time = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..calls).for_each(|_| work());
        start.elapsed().as_secs_f64() * 1e6 / calls as f64
    };
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS + 1 {
        let taken = [time(plain), time(global)];
        // The first round warms up.
        if round > 0 {
            times.iter_mut().zip(taken).for_each(|(times, taken)| times.push(taken));
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    })
}

fn print(options: &Options, ranks: usize, name: &str, [plain, global]: [f64; 2]) {
    let (more, ratio) = (global - plain, global / plain);
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

/// An MLP and its optimizer, on global tensors if there is a placement.
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
