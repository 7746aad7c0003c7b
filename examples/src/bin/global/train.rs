//! Trains a linear model: data parallel by SBP, with the numbers of OneFlow's example.

use flow::prelude::*;

pub fn run(group: &ProcessGroup) -> anyhow::Result<()> {
    const STEPS: usize = 500;
    // Ddp averages the gradients of two ranks; the loss of the logical batch sums them.
    const RATE: f64 = 0.01 / 2.0;
    let placement = Placement::new(group, [0, 1])?;
    let x = Tensor::from_slice2(&[[1f32, 2.0], [2.0, 3.0], [4.0, 6.0], [3.0, 1.0]]);
    let y = Tensor::from_slice(&[8f32, 13.0, 26.0, 9.0]).view([4, 1]);
    let x = global::distribute_tensor(&x, &placement, [S(0)])?;
    let y = global::distribute_tensor(&y, &placement, [S(0)])?;
    let vs = nn::VarStore::new(group.device());
    let w = vs.root().zeros("w", &[2, 1]);
    global::distribute(&vs, &placement, |_, _| [B])?;
    let mut optimizer = nn::Sgd::default().build(&vs, RATE)?;
    for step in 1..=STEPS {
        let loss = (x.matmul(&w) - &y).square().sum(Kind::Float);
        if step % 50 == 0 && placement.position(group.rank()).is_some() {
            // The loss is the sum of what the ranks have.
            println!("{step}/{STEPS} loss:{:e}", loss.to_local()?.double_value(&[]));
        }
        optimizer.backward_step(&loss);
    }
    let w = w.full()?.view([2]);
    println!("w:{:?}", Vec::<f32>::try_from(w)?);
    Ok(())
}
