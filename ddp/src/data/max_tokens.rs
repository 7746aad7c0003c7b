//! Batches of like length whose tokens are bounded.

use std::sync::{Arc, OnceLock};

use flow_comm::digest;

use super::order::{Order, Sampler};
use super::permutation::randperm;
use super::sampler_state::SamplerError;
use super::shuffle::Shuffle;

/// Makes batches of samples of like length with at most `max_tokens` tokens, padding counted: the
/// number of samples times the longest. This is fairseq's `--max-tokens`.
///
/// The batches are the same in all epochs; each epoch has another order of them. Up to 64 batches
/// that are neighbours by length stay neighbours in the order. So ranks that take batches in turn
/// have batches of like length in the same step, and none waits long for another.
/// [`DataLoader::with_batch_sampler`](crate::DataLoader::with_batch_sampler) has an example.
///
/// It takes 16 bytes for each sample.
#[derive(Clone, Debug)]
pub struct MaxTokensBatchSampler {
    lengths: Vec<usize>,
    digest: u64,
    max_tokens: usize,
    max_batch_size: usize,
    shuffle: bool,
    seed: u64,
    /// Made when they are asked for.
    batches: OnceLock<Arc<Sorted>>,
}

/// The samples as batches, the shortest first.
#[derive(Debug)]
struct Sorted {
    samples: Vec<usize>,
    /// Where each batch begins in `samples`, and where the last one ends.
    bounds: Vec<usize>,
}

/// The most batches that stay neighbours. A power of two, so that numbers of ranks divide it.
const RUN: usize = 64;
/// There are so many runs at least.
const RUNS: usize = 8;

impl MaxTokensBatchSampler {
    /// Makes batches of samples that have these lengths.
    ///
    /// # Errors
    /// When a sample is longer than `max_tokens`.
    pub fn new(lengths: impl Into<Vec<usize>>, max_tokens: usize) -> Result<Self, SamplerError> {
        let lengths = lengths.into();
        if let Some(index) = lengths.iter().position(|&length| length > max_tokens) {
            return Err(SamplerError::TooLong { index, length: lengths[index], max_tokens });
        }
        Ok(Self {
            digest: digest(&lengths),
            lengths,
            max_tokens,
            max_batch_size: usize::MAX,
            shuffle: true,
            seed: 0,
            batches: OnceLock::new(),
        })
    }

    /// Sets the most samples of a batch, one at least (default: no limit).
    pub fn max_batch_size(mut self, samples: usize) -> Self {
        self.max_batch_size = samples.max(1);
        self.batches.take();
        self
    }

    /// Sets whether to shuffle samples of one length, and batches (default: true). If not, batches
    /// come sorted, the shortest samples first.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self.batches.take();
        self
    }

    /// Sets the seed, the same on all ranks (default: 0).
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self.batches.take();
        self
    }

    fn batches(&self) -> &Arc<Sorted> {
        self.batches.get_or_init(|| Arc::new(self.sorted()))
    }

    /// Sorts the samples and cuts them into batches.
    fn sorted(&self) -> Sorted {
        let mut samples = if self.shuffle {
            randperm(self.lengths.len(), self.seed)
        } else {
            (0..self.lengths.len()).collect()
        };
        samples.sort_by_key(|&index| self.lengths[index]);
        let mut bounds = vec![0];
        let mut begin = 0;
        for (place, &index) in samples.iter().enumerate() {
            let size = place + 1 - begin;
            let tokens = size.saturating_mul(self.lengths[index]); // this one is the longest
            if tokens > self.max_tokens || size > self.max_batch_size {
                bounds.push(place);
                begin = place;
            }
        }
        if !samples.is_empty() {
            bounds.push(samples.len());
        }
        Sorted { samples, bounds }
    }

    /// Returns an order of the batches: runs of neighbours, shuffled. A run that is shorter than the
    /// others comes last, where it moves no other off the steps of the ranks.
    fn shuffled(&self, seed: u64) -> Vec<usize> {
        let batches = self.places();
        let run = largest_power_of_two(batches / RUNS).min(RUN);
        let runs: Vec<usize> = randperm(batches.div_ceil(run), seed);
        let short = runs.last().copied().unwrap_or(0);
        let lacks = runs.len() * run - batches;
        let mut order = Vec::with_capacity(batches);
        for n in runs {
            // What comes after the short run begins earlier by what that lacks.
            let begin = if n > short { n * run - lacks } else { n * run };
            let len = if n == short { run - lacks } else { run };
            order.extend(begin..begin + len);
        }
        order
    }
}

/// Returns the largest power of two that is at most `n`; 1 for 0.
fn largest_power_of_two(n: usize) -> usize {
    1 << n.max(1).ilog2()
}

impl Sampler for MaxTokensBatchSampler {
    type Item = Vec<usize>;

    fn samples(&self) -> usize {
        self.lengths.len()
    }

    fn places(&self) -> usize {
        self.batches().bounds.len() - 1
    }

    fn order(&self, epoch: u64) -> Order<Vec<usize>> {
        let order = if self.shuffle {
            self.shuffled(self.seed.wrapping_add(epoch))
        } else {
            (0..self.places()).collect()
        };
        let batches = Arc::clone(self.batches());
        Order::computed(move |place| {
            let batch = order[place];
            let Sorted { samples, bounds } = &*batches;
            samples[bounds[batch]..bounds[batch + 1]].to_vec()
        })
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    fn shuffle(&self) -> Shuffle {
        let shuffled = if self.shuffle { "shuffled" } else { "sorted" };
        let Self { max_tokens, digest, .. } = self;
        let samples = match self.max_batch_size {
            usize::MAX => String::new(),
            samples => format!(" and {samples} samples"),
        };
        Shuffle::Other(format!(
            "{shuffled} batches of {max_tokens} tokens{samples} at most (lengths {digest:016x})"
        ))
    }
}
