//! A communication hook of one's own: the gradient noise scale, which says how large a batch pays.
//! It is from McCandlish et al., "An Empirical Model of Large-Batch Training", appendix A.1.
//!
//!     flow-launch --nproc_per_node 2 noise_scale
//!
//! Up to about that many samples, a batch twice as large lets training take half the steps. Each
//! rank's gradient is that of a small batch, and their mean that of a large one: the hook sees
//! both. In this program the model is so simple that the noise scale is known.

use std::sync::{Arc, Mutex, PoisonError};

use flow::ddp::{BoxError, CommHook, GradBucket, Pending};
use flow::prelude::*;

/// Sums of squares over all gradients and steps.
#[derive(Default)]
struct Squares {
    /// The sum over this rank's gradients.
    own: f64,
    /// The sum over the means of all ranks.
    mean: f64,
}

/// Averages gradients, as without a hook, and notes how much the mean is smaller than its parts.
struct NoiseScale(Arc<Mutex<Squares>>);

impl CommHook for NoiseScale {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        let own = bucket.buffer()?;
        let mut mean = own.copy();
        bucket.group().all_reduce_tensor(&mut mean, ReduceOp::Avg)?;
        let mut squares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        squares.own += own.square().sum(Kind::Double).double_value(&[]);
        squares.mean += mean.square().sum(Kind::Double).double_value(&[]);
        Ok(Pending::ready(mean))
    }
}

/// Returns the noise scale in samples; each rank's batch has `batch` of them. All ranks call this.
fn noise_scale(group: &ProcessGroup, squares: &Squares, batch: f64) -> anyhow::Result<f64> {
    let mut own = [squares.own];
    group.all_reduce(&mut own, ReduceOp::Avg)?;
    let small = batch;
    let large = batch * group.world_size() as f64;
    // A batch of B samples: E|gradient|^2 = |true gradient|^2 + noise / B.
    let gradient = (large * squares.mean - small * own[0]) / (large - small);
    let noise = (own[0] - squares.mean) / (1.0 / small - 1.0 / large);
    Ok(noise / gradient)
}

fn main() -> anyhow::Result<()> {
    const SIZE: i64 = 20_000;
    const BATCH: i64 = 8;
    const DEVIATION: f64 = 2.0;

    let group = ProcessGroup::from_env()?;
    anyhow::ensure!(group.world_size() > 1, "start two ranks or more: one has nothing to compare");
    tch::manual_seed(1 + group.rank() as i64);
    let squares = Arc::new(Mutex::new(Squares::default()));
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[SIZE]);
    let hook = NoiseScale(Arc::clone(&squares));
    let model = Ddp::builder(&group).comm_hook(hook).wrap(w, &vs)?;
    // With a learning rate of 0, so that the gradient stays what is known.
    let mut optimizer = nn::Sgd::default().build(&vs, 0.0)?;
    for _ in 0..20 {
        // Samples around 0: the gradient of half the squared distance is w - x, and on average w.
        let x = Tensor::randn([BATCH, SIZE], (Kind::Float, Device::Cpu)) * DEVIATION;
        let distance = (&*model - x).square().sum(Kind::Float) / (2 * BATCH);
        optimizer.try_backward_step(&distance)?;
    }
    let squares = squares.lock().unwrap_or_else(PoisonError::into_inner);
    let measured = noise_scale(&group, &squares, BATCH as f64)?;
    if group.rank() == 0 {
        // |true gradient|^2 = SIZE, and each of SIZE elements varies by DEVIATION^2.
        println!("noise scale: {measured:.2} samples, exactly {:.2}", DEVIATION.powi(2));
    }
    Ok(())
}
