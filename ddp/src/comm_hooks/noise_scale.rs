//! The gradient noise scale, measured while gradients are averaged.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_autograd::BoxError;
use flow_comm::{ProcessGroup, ReduceOp};
use tch::{Kind, TchError, Tensor};

use crate::bucket::comm_hook::{CommHook, GradBucket};
use crate::bucket::pending::Pending;
use crate::error::{Error, Result, job_rank};

/// Measures the gradient noise scale: the number of samples up to which a batch twice as large lets
/// training take about half the steps. It is from S. McCandlish, J. Kaplan, D. Amodei, "An Empirical
/// Model of Large-Batch Training", 2018, appendix A.1.
///
/// Each rank's gradient is that of a small batch, and their mean that of a large one. Of a batch of
/// `B` samples, the mean of `|gradient|^2` is `|G|^2 + S / B`: `G` is the true gradient, and `S` the sum
/// of the variances of its elements in one sample. Two sizes give both, and the noise scale is
/// `S / |G|^2`.
///
/// Another hook averages the gradients, over all ranks, and measuring changes none of them:
///
/// ```no_run
/// use flow_ddp::comm_hooks::{AllReduce, NoiseScale};
/// use flow_ddp::{Ddp, Error, ProcessGroup};
/// use tch::nn::{self, ModuleT};
///
/// # fn main() -> anyhow::Result<()> {
/// # let group = ProcessGroup::from_env()?;
/// # let vs = nn::VarStore::new(tch::Device::Cpu);
/// # let net = nn::linear(vs.root(), 784, 10, Default::default());
/// # let (images, labels) = (tch::Tensor::new(), tch::Tensor::new());
/// let noise = NoiseScale::new(50); // samples of a rank in each step
/// let model = Ddp::builder(&group).comm_hook(noise.around(AllReduce)).wrap(net, &vs)?;
/// let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
/// loss.f_backward().map_err(Error::from_backward)?;
/// let samples = noise.samples(&group)?; // of the steps so far
/// # Ok(()) }
/// ```
///
/// This is a handle, of which there may be several. The loss is a mean over the samples of a rank, of
/// which all ranks have as many. In a [`join`](crate::join()) the result is of no use, nor are sparse
/// gradients part of it.
#[derive(Clone)]
pub struct NoiseScale {
    batch: u64,
    decay: f64,
    squares: Arc<Mutex<Squares>>,
}

/// Sums over all gradients and steps, where the gradients are.
#[derive(Default)]
struct Squares {
    /// Of the squares of this rank's gradients.
    own: Option<Tensor>,
    /// Of the squares of the means.
    mean: Option<Tensor>,
}

impl fmt::Debug for NoiseScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, decay, .. } = self;
        f.debug_struct("NoiseScale")
            .field("batch", batch)
            .field("decay", decay)
            .finish_non_exhaustive()
    }
}

impl NoiseScale {
    /// Begins to measure; each rank has gradients of `batch` samples in each step.
    pub fn new(batch: u64) -> Self {
        Self { batch, decay: 0.99, squares: Arc::default() }
    }

    /// Sets how much each step weighs, as a share of the next one (default: 0.99). With 1 all steps
    /// weigh the same.
    pub fn decay(mut self, decay: f64) -> Self {
        self.decay = decay;
        self
    }

    /// Returns the hook that averages gradients as `hook` does, and measures. `hook` averages over all
    /// ranks.
    pub fn around<H: CommHook>(&self, hook: H) -> impl CommHook + use<H> {
        Measured { hook, noise: self.clone(), is_begun: false }
    }

    /// Returns the noise scale of the steps so far, in samples. All ranks call this, between two steps.
    /// It is a ratio of estimates: of few steps it may be negative, or far off.
    ///
    /// # Errors
    ///
    /// There is one rank, or there was no step; a failure of the group.
    pub fn samples(&self, group: &ProcessGroup) -> Result<f64> {
        let ranks = group.world_size();
        if ranks == 1 {
            let reason =
                "one rank has no other batch to compare its own with: start two ranks or more";
            return Err(failed(group, reason));
        }
        let squares = self.squares();
        let (Some(own), Some(mean)) = (&squares.own, &squares.mean) else {
            let reason = "no gradients were averaged: call this after a step of the Ddp that was built \
                          with comm_hook(noise.around(..))";
            return Err(failed(group, reason));
        };
        let mut own = [own.double_value(&[])];
        let mean = mean.double_value(&[]);
        drop(squares);
        group.all_reduce(&mut own, ReduceOp::Avg)?;
        let small = self.batch as f64;
        let large = small * ranks as f64;
        let gradient = (large * mean - small * own[0]) / (large - small);
        let noise = (own[0] - mean) / (1.0 / small - 1.0 / large);
        Ok(noise / gradient)
    }

    fn squares(&self) -> MutexGuard<'_, Squares> {
        self.squares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Squares {
    /// Has what was added so far weigh less.
    fn fade(&mut self, decay: f64) -> Result<(), TchError> {
        for sum in [&mut self.own, &mut self.mean].into_iter().flatten() {
            let _ = sum.f_mul_scalar_(decay)?;
        }
        Ok(())
    }
}

/// A hook whose gradients are measured.
struct Measured<H> {
    hook: H,
    noise: NoiseScale,
    /// Buckets of this step were launched.
    is_begun: bool,
}

impl<H: CommHook> CommHook for Measured<H> {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        let _guard = tch::no_grad_guard();
        let mut squares = self.noise.squares();
        if !self.is_begun {
            squares.fade(self.noise.decay)?;
        }
        add(&mut squares.own, &bucket.gradients()?)?;
        drop(squares);
        self.is_begun = !bucket.is_last();
        let noise = self.noise.clone();
        let pending = self.hook.launch(bucket)?;
        Ok(pending.inspect(move |means| Ok(add(&mut noise.squares().mean, means)?)))
    }

    fn kind(&self) -> Option<Kind> {
        self.hook.kind()
    }

    fn waits_for_ranks(&self) -> bool {
        self.hook.waits_for_ranks()
    }

    fn is_same_on_all_ranks(&self) -> bool {
        self.hook.is_same_on_all_ranks()
    }

    fn groups(&self) -> Vec<ProcessGroup> {
        self.hook.groups()
    }

    fn name(&self) -> String {
        format!("{:?} around {}", self.noise, self.hook.name())
    }
}

/// Adds the squares of all elements to a sum, on their device.
fn add(sum: &mut Option<Tensor>, gradients: &[Tensor]) -> Result<(), TchError> {
    for gradient in gradients {
        let square = gradient.f_norm_scalaropt_dtype(2, Kind::Double)?.f_square()?;
        *sum = Some(match sum.take() {
            Some(sum) => sum.f_add(&square)?,
            None => square,
        });
    }
    Ok(())
}

fn failed(group: &ProcessGroup, reason: &str) -> Error {
    Error::Torch { rank: job_rank(group), operation: "NoiseScale", reason: reason.to_owned() }
}
