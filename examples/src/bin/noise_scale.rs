//! The gradient noise scale, which says how large a batch pays.
//!
//!     flow-launch --nproc_per_node 2 noise_scale
//!
//! Up to about that many samples, a batch twice as large lets training take half the steps. In this
//! program the model is so simple that the noise scale is known.

use flow::ddp::comm_hooks::{AllReduce, NoiseScale};
use flow::prelude::*;

fn main() -> anyhow::Result<()> {
    const SIZE: i64 = 20_000;
    const BATCH: i64 = 8;
    const DEVIATION: f64 = 2.0;

    let group = ProcessGroup::from_env()?;
    tch::manual_seed(1 + group.rank() as i64);
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[SIZE]);
    // All steps weigh the same: the gradient stays what it is.
    let noise = NoiseScale::new(BATCH as u64).decay(1.0);
    let model = Ddp::builder(&group).comm_hook(noise.around(AllReduce)).wrap(w, &vs)?;
    let mut optimizer = nn::Sgd::default().build(&vs, 0.0)?;
    for _ in 0..20 {
        // Samples around 0: the gradient of half the squared distance is w - x, and on average w.
        let x = Tensor::randn([BATCH, SIZE], (Kind::Float, Device::Cpu)) * DEVIATION;
        let distance = (&*model - x).square().sum(Kind::Float) / (2 * BATCH);
        optimizer.try_backward_step(&distance)?;
    }
    let measured = noise.samples(&group)?;
    if group.rank() == 0 {
        // |true gradient|^2 = SIZE, and each of SIZE elements varies by DEVIATION^2.
        println!("noise scale: {measured:.2} samples, exactly {:.2}", DEVIATION.powi(2));
    }
    Ok(())
}
