//! The losses of a short training with `Ddp`, to be compared with PyTorch's:
//! `scripts/peers/losses.py` starts from the same weights and trains on the same numbers.

use anyhow::Result;
use clap::Args;
use flow_ddp::{Ddp, DeviceKind, ProcessGroup, ReduceOp, TensorCollectives};
use serde_json::json;
use tch::nn::{self, ModuleT, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use crate::models::Model;

const LEARNING_RATE: f64 = 0.05;

#[derive(Args)]
pub struct Options {
    /// One without dropout
    #[arg(long, value_enum)]
    model: Model,
    /// cpu, or cuda: a GPU for each rank
    #[arg(long, default_value = "cpu")]
    device: DeviceKind,
    #[arg(long, default_value_t = 20)]
    steps: usize,
}

/// Prints a JSON line: the mean loss over all ranks in each step.
pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = group.use_device(options.device)?;
    let rank = group.rank() as i64;
    let shape = options.model.input();
    let x = numbers(shape, 1_000_000 * (rank + 1)).to(device);
    let y = (Tensor::arange(shape[0], (Kind::Int64, Device::Cpu)) + rank).remainder(10).to(device);

    let store = VarStore::new(device);
    let model = options.model.build(&store.root());
    for (name, mut parameter) in
        store.variables().into_iter().filter(|(_, variable)| variable.requires_grad())
    {
        let shape = parameter.size();
        let start = match shape.len() {
            1 => {
                Tensor::full(&shape, f64::from(!name.ends_with("bias")), (Kind::Float, Device::Cpu))
            }
            _ => numbers(&shape, 0) / (shape[1..].iter().product::<i64>() as f64).sqrt(),
        };
        tch::no_grad(|| parameter.copy_(&start));
    }

    let ddp = Ddp::new(model, &store, &group)?;
    let mut optimizer = nn::Sgd::default().build(&store, LEARNING_RATE)?;
    let mut losses = Vec::new();
    for _ in 0..options.steps {
        let loss = ddp.forward_t(&x, true).cross_entropy_for_logits(&y);
        optimizer.zero_grad();
        loss.f_backward()?;
        optimizer.step();
        losses.push(loss.double_value(&[]));
    }
    group.all_reduce(&mut losses, ReduceOp::Avg)?;
    if rank == 0 {
        let line = json!({
            "bench": "losses", "model": options.model.name(), "ranks": group.world_size(),
            "losses": losses,
        });
        println!("{line}");
    }
    Ok(())
}

/// Numbers between -1 and 1 without a pattern, which any program can make: sin(n * n) for n from
/// `first`.
fn numbers(shape: &[i64], first: i64) -> Tensor {
    let end = first + shape.iter().product::<i64>();
    Tensor::arange_start(first, end, (Kind::Double, Device::Cpu))
        .square()
        .sin()
        .to_kind(Kind::Float)
        .view(shape)
}
