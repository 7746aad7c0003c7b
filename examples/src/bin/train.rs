//! OneFlow's documented data-parallel example: y = x w by gradient descent on two ranks, or as many
//! as you like.
//!
//!     flow-launch --nproc_per_node 2 train
//!     flow-launch --nproc_per_node 2 train --device cuda

use clap::Parser;
use flow::prelude::*;

/// Fits y = x w.
#[derive(Parser)]
struct Args {
    /// cpu, or cuda: a GPU for each rank
    #[arg(long, default_value = "cpu")]
    device: DeviceKind,
}

#[derive(Debug)]
struct Model {
    w: Tensor,
}

impl Module for Model {
    fn forward(&self, x: &Tensor) -> Tensor {
        x.matmul(&self.w)
    }
}

fn main() -> anyhow::Result<()> {
    // OneFlow's digits come from an update without fused multiply-add; libtorch's fastest kernels
    // fuse.
    // SAFETY: the program has no other thread yet.
    unsafe { std::env::set_var("ATEN_CPU_CAPABILITY", "default") };

    let args: Args = flow_examples::arguments::parse();
    let group = ProcessGroup::from_env()?;
    let device = group.use_device(args.device)?;
    // There is data for two ranks, which others have as well.
    let (x, y): ([[f32; 2]; 2], [[f32; 1]; 2]) = match group.rank() % 2 {
        0 => ([[1., 2.], [2., 3.]], [[8.], [13.]]),
        _ => ([[4., 6.], [3., 1.]], [[26.], [9.]]),
    };
    let x = Tensor::from_slice2(&x).to(device);
    let y = Tensor::from_slice2(&y).to(device);

    let vs = nn::VarStore::new(device);
    let w = vs.root().zeros("w", &[2, 1]);
    let model = Ddp::new(Model { w }, &vs, &group)?;
    let mut optimizer = nn::Sgd::default().build(&vs, 0.01)?;

    for step in 1..=500 {
        let loss = (model.forward(&x) - &y).square().sum(tch::Kind::Float);
        optimizer.backward_step(&loss); // the gradients are averaged over the ranks in here
        if step % 50 == 0 {
            println!("{step}/500 loss:{}", scientific(loss.double_value(&[])));
        }
    }
    println!("w: {}", rows(&model.w)?);
    Ok(())
}

/// Returns a number as Python prints it: `6.5e-06` where Rust has `0.0000065`.
fn scientific(number: f64) -> String {
    match format!("{number:e}").split_once("e-") {
        Some((digits, exponent)) if exponent.len() > 1 || exponent > "4" => {
            format!("{digits}e-{exponent:0>2}")
        }
        _ => number.to_string(),
    }
}

/// Returns a matrix in four decimals, as `[[2.0000], [3.0000]]`.
fn rows(matrix: &Tensor) -> anyhow::Result<String> {
    let mut rows = Vec::new();
    for row in Vec::<Vec<f64>>::try_from(matrix)? {
        let numbers: Vec<String> = row.iter().map(|number| format!("{number:.4}")).collect();
        rows.push(format!("[{}]", numbers.join(", ")));
    }
    Ok(format!("[{}]", rows.join(", ")))
}
