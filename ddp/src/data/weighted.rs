//! Samples by weight, as `torch.utils.data.WeightedRandomSampler` draws them.

use flow_comm::digest;
use rand_mt::Mt;

use super::order::{Order, Sampler};
use super::permutation::draw_64;
use super::sampler_state::SamplerError;
use super::shuffle::Shuffle;

/// Draws samples by their weights, anew in each epoch: `torch.utils.data.WeightedRandomSampler`,
/// for all ranks together.
///
/// With replacement, the draws are those of PyTorch on a CPU for `manual_seed(seed + epoch)`, if
/// there are two or more. Without replacement they are those of a PyTorch that was built without
/// MKL: MKL has random numbers of its own.
///
/// ```
/// use flow_ddp::{DistributedSampler, WeightedRandomSampler};
///
/// let weights = [0.9, 0.4, 0.05, 0.2, 0.3, 0.1];
/// let draws = WeightedRandomSampler::new(weights, 5)?.seed(3);
/// let mut sampler = DistributedSampler::wrap_replica(draws, 1, 0)?;
/// assert_eq!(sampler.indices(), [0, 0, 3, 0, 3]);
/// sampler.set_epoch(1);
/// assert_ne!(sampler.indices(), [0, 0, 3, 0, 3]);
/// # Ok::<(), flow_ddp::SamplerError>(())
/// ```
///
/// While an epoch's order is made, it takes eight bytes for each weight and each draw; without
/// replacement, 24 for each weight.
#[derive(Clone, Debug)]
pub struct WeightedRandomSampler {
    weights: Vec<f64>,
    digest: u64,
    num_samples: usize,
    replacement: bool,
    seed: u64,
}

impl WeightedRandomSampler {
    /// Makes an order of `num_samples` draws in each epoch, of all ranks together. Sample `i` is
    /// drawn with probability `weights[i]` over the sum of the weights, each time.
    ///
    /// # Errors
    /// When a weight is negative, infinite or NaN, or there are draws and no weight is above 0.
    pub fn new(weights: impl Into<Vec<f64>>, num_samples: usize) -> Result<Self, SamplerError> {
        let weights = weights.into();
        let drawable = check(&weights)?;
        if drawable == 0 && num_samples > 0 {
            return Err(SamplerError::Draws { num_samples, drawable });
        }
        Ok(Self::of(weights, num_samples, true))
    }

    /// Makes an order of `num_samples` draws in which none comes twice in an epoch: each draw is
    /// among the samples that are left.
    ///
    /// # Errors
    /// When a weight is negative, infinite or NaN, or fewer than `num_samples` are above 0.
    pub fn without_replacement(
        weights: impl Into<Vec<f64>>,
        num_samples: usize,
    ) -> Result<Self, SamplerError> {
        let weights = weights.into();
        let drawable = check(&weights)?;
        if drawable < num_samples {
            return Err(SamplerError::Draws { num_samples, drawable });
        }
        Ok(Self::of(weights, num_samples, false))
    }

    fn of(weights: Vec<f64>, num_samples: usize, replacement: bool) -> Self {
        let bits: Vec<u64> = weights.iter().map(|weight| weight.to_bits()).collect();
        Self { weights, digest: digest(&bits), num_samples, replacement, seed: 0 }
    }

    /// Sets the seed, the same on all ranks (default: 0). The low 32 bits of seed + epoch are used.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    fn draw_with_replacement(&self, random: &mut Mt) -> Vec<usize> {
        let mut sum = 0.0;
        let mut cumulative = Vec::with_capacity(self.weights.len());
        for weight in &self.weights {
            sum += weight;
            cumulative.push(sum);
        }
        for weight in &mut cumulative {
            *weight /= sum;
        }
        if let Some(last) = cumulative.last_mut() {
            *last = 1.0; // whatever the rounding
        }
        let mut draws = Vec::with_capacity(self.num_samples);
        for _ in 0..self.num_samples {
            let mass = uniform(random);
            draws.push(cumulative.partition_point(|&below| below < mass));
        }
        draws
    }

    /// Draws by exponential clocks: that of a sample rings at a rate of its weight, and those that
    /// ring first are drawn.
    fn draw_without_replacement(&self, random: &mut Mt) -> Vec<usize> {
        let mut draws = Vec::with_capacity(self.weights.len());
        for (index, weight) in self.weights.iter().enumerate() {
            let exponential = -(-uniform(random)).ln_1p();
            if *weight > 0.0 {
                draws.push((weight / exponential, index));
            }
        }
        draws.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        draws.truncate(self.num_samples);
        draws.into_iter().map(|(_, index)| index).collect()
    }
}

impl Sampler for WeightedRandomSampler {
    type Item = usize;

    fn samples(&self) -> usize {
        self.weights.len()
    }

    fn places(&self) -> usize {
        self.num_samples
    }

    fn order(&self, epoch: u64) -> Order<usize> {
        let mut random = Mt::new(self.seed.wrapping_add(epoch) as u32);
        if self.replacement {
            Order::list(self.draw_with_replacement(&mut random))
        } else {
            Order::list(self.draw_without_replacement(&mut random))
        }
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    fn shuffle(&self) -> Shuffle {
        let Self { num_samples, digest, .. } = self;
        let replacement = if self.replacement { "with" } else { "without" };
        Shuffle::Other(format!(
            "{num_samples} weighted draws {replacement} replacement (weights {digest:016x})"
        ))
    }
}

/// Returns how many weights are above 0.
fn check(weights: &[f64]) -> Result<usize, SamplerError> {
    let mut sum = 0.0;
    for (index, &weight) in weights.iter().enumerate() {
        sum += weight;
        if weight < 0.0 || !sum.is_finite() {
            return Err(SamplerError::Weight { index, weight });
        }
    }
    Ok(weights.iter().filter(|&&weight| weight > 0.0).count())
}

/// Draws from [0, 1) as PyTorch does on a CPU.
fn uniform(random: &mut Mt) -> f64 {
    const BITS: u32 = f64::MANTISSA_DIGITS;
    (draw_64(random) & ((1 << BITS) - 1)) as f64 / (1u64 << BITS) as f64
}
