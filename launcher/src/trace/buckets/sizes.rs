//! What other sizes of buckets would make backward wait: a simulation of recorded steps. Pure.

use super::steps::{Backward, GroupSteps, Step};
use crate::trace::intervals::median;

/// The bytes of a MiB.
pub const MIB: f64 = 1024.0 * 1024.0;

/// Sizes that are tried, in MiB.
const SIZES: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0];
/// Sizes of the last buckets.
const TAILS: [f64; 3] = [1.0, 2.0, 4.0];
/// Buckets before the small ones at the end. A list of more caps is hard to read.
const LONGEST_LIST: usize = 6;
/// Steps that are simulated, the last ones.
const SIMULATED: usize = 200;
/// Larger buckets may leave so much more of the wait than the best ones. The fewer there are, the less
/// depends on how well the time of a small one is known.
const AS_GOOD: f64 = 0.1;
/// Buckets of several sizes are at least so many times as large as the smallest one.
const SEVERAL: f64 = 2.0;

/// The rate at which buckets are reduced.
struct Network {
    /// Microseconds for each bucket.
    latency: f64,
    /// Microseconds for each byte.
    per_byte: f64,
}

impl Network {
    /// Fits a line to bytes and times, whose relative errors count alike. None if they are of about one
    /// size, or larger ones do not take longer.
    fn fit(samples: &[(f64, f64)]) -> Option<Network> {
        let sizes = samples.iter().map(|(bytes, _)| *bytes);
        let smallest = sizes.clone().fold(f64::INFINITY, f64::min);
        if sizes.fold(0.0, f64::max) < SEVERAL * smallest.max(1.0) {
            return None;
        }
        let mut sums = [0.0; 5];
        for &(bytes, time) in samples.iter().filter(|(_, time)| *time > 0.0) {
            let weight = 1.0 / (time * time);
            let terms = [1.0, bytes, bytes * bytes, time, bytes * time];
            for (sum, term) in sums.iter_mut().zip(terms) {
                *sum += weight * term;
            }
        }
        let [ones, bytes, squares, times, products] = sums;
        let spread = ones * squares - bytes * bytes;
        if spread <= 1e-6 * ones * squares {
            return None;
        }
        let per_byte = (ones * products - bytes * times) / spread;
        let latency = (times - per_byte * bytes) / ones;
        if latency < 0.0 {
            return Some(Network { latency: 0.0, per_byte: products / squares });
        }
        (per_byte > 0.0).then_some(Network { latency, per_byte })
    }
}

/// The gradients of a step: when each was there on all ranks, and when each rank had all of its own.
struct Gradients {
    ready: Vec<f64>,
    computed: Vec<f64>,
}

/// The recorded steps with other buckets.
pub struct Simulation {
    tensors: Vec<u64>,
    steps: Vec<Gradients>,
    network: Network,
    /// The number of tensors in each bucket, as recorded.
    recorded: Vec<usize>,
    /// The bytes of the smallest recorded bucket.
    smallest: f64,
}

/// Sizes of buckets, and how long ranks would wait for them in a step.
pub struct Choice {
    /// In MiB, as `bucket_cap_mb_list` takes them.
    pub caps: Vec<f64>,
    pub wait: f64,
}

impl Simulation {
    /// None if the timeline does not tell what a bucket of another size takes.
    pub fn new(recorded: &GroupSteps) -> Option<Simulation> {
        let tensors = recorded.tensors.concat();
        let network = Network::fit(&samples(recorded))?;
        let smallest = recorded.bytes.iter().copied().min()? as f64;
        let last = recorded.steps.len().saturating_sub(SIMULATED);
        let steps = recorded.steps[last..].iter().map(|step| gradients(recorded, step)).collect();
        let recorded = recorded.tensors.iter().map(Vec::len).collect();
        (!tensors.is_empty()).then_some(Simulation { tensors, steps, network, recorded, smallest })
    }

    /// Returns how long ranks would wait for the recorded buckets in a step.
    pub fn recorded(&self) -> f64 {
        self.wait(&self.recorded)
    }

    /// Returns the sizes that make ranks wait least, and of sizes that are about as good those of the
    /// fewest buckets.
    pub fn best(&self) -> Option<Choice> {
        let mut choices = Vec::new();
        for caps in self.candidates() {
            let buckets = self.assign(&caps);
            let wait = self.wait(&buckets);
            choices.push((buckets.len() + caps.len(), Choice { caps, wait }));
        }
        choices.sort_by_key(|(parts, _)| *parts);
        let least = choices.iter().map(|(_, choice)| choice.wait).fold(f64::INFINITY, f64::min);
        let enough = least + AS_GOOD * self.recorded();
        let mut choices = choices.into_iter().map(|(_, choice)| choice);
        choices.find(|choice| choice.wait <= enough)
    }

    /// Returns caps in MiB. What buckets take that are much smaller than all recorded ones is not
    /// known.
    fn candidates(&self) -> Vec<Vec<f64>> {
        let mut candidates: Vec<Vec<f64>> = SIZES.iter().map(|&size| vec![size]).collect();
        candidates.extend(SIZES[1..].iter().map(|&size| vec![1.0, size]));
        for size in SIZES {
            let most = self.assign(&[size]).len().min(LONGEST_LIST);
            for tail in TAILS.into_iter().filter(|&tail| tail < size) {
                candidates.extend((1..=most).map(|count| {
                    let mut caps = vec![size; count];
                    caps.push(tail);
                    caps
                }));
            }
        }
        candidates.retain(|caps| caps.iter().all(|cap| SEVERAL * cap * MIB >= self.smallest));
        candidates
    }

    /// Returns the number of tensors in each bucket of these caps, which closes as soon as it holds
    /// its cap or more: flow-ddp's `assign`.
    fn assign(&self, caps: &[f64]) -> Vec<usize> {
        let mut buckets: Vec<usize> = Vec::new();
        let mut bytes = 0;
        let mut count = 0;
        for tensor in &self.tensors {
            bytes += tensor;
            count += 1;
            let cap = caps.get(buckets.len()).or(caps.last()).map_or(0.0, |cap| cap * MIB);
            if bytes as f64 >= cap {
                buckets.push(count);
                bytes = 0;
                count = 0;
            }
        }
        buckets.extend((count > 0).then_some(count));
        buckets
    }

    /// Returns how long ranks wait for buckets of so many tensors: the mean of a step and a rank.
    fn wait(&self, buckets: &[usize]) -> f64 {
        let mut total = 0.0;
        for step in &self.steps {
            let mut free = f64::NEG_INFINITY;
            let mut first = 0;
            for count in buckets {
                let end = first + count;
                let bytes: u64 = self.tensors[first..end].iter().sum();
                let ready = step.ready[first..end].iter().copied().fold(free, f64::max);
                free = ready + self.network.latency + self.network.per_byte * bytes as f64;
                first = end;
            }
            let waits = step.computed.iter().map(|computed| (free - computed).max(0.0));
            total += waits.sum::<f64>() / step.computed.len() as f64;
        }
        total / self.steps.len() as f64
    }
}

/// Returns the bytes of each bucket, and the median time of its reduction.
fn samples(recorded: &GroupSteps) -> Vec<(f64, f64)> {
    let times: Vec<Vec<f64>> = recorded.steps.iter().map(reduction_times).collect();
    let mut samples = Vec::new();
    for (bucket, &bytes) in recorded.bytes.iter().enumerate() {
        samples.push((bytes as f64, median(times.iter().map(|times| times[bucket]).collect())));
    }
    samples
}

/// Returns how long each bucket of a step was reduced: from when all ranks had begun it, and the one
/// before it was over, until the first rank saw its end.
pub fn reduction_times(step: &Step) -> Vec<f64> {
    let mut times = Vec::new();
    let mut free = f64::NEG_INFINITY;
    for bucket in 0..step.ranks[0].reductions.len() {
        let of_ranks = step.ranks.iter().map(|rank| rank.reductions[bucket]);
        let begun = of_ranks.clone().map(|one| one.started).fold(free, f64::max);
        free = of_ranks.map(|one| one.end).fold(f64::INFINITY, f64::min).max(begun);
        times.push(free - begun);
    }
    times
}

/// Finds when each gradient of a step was there.
fn gradients(recorded: &GroupSteps, step: &Step) -> Gradients {
    let count = recorded.tensors.iter().map(Vec::len).sum();
    let mut ready = vec![f64::NEG_INFINITY; count];
    for rank in &step.ranks {
        for (ready, own) in ready.iter_mut().zip(ready_on(rank, recorded)) {
            *ready = ready.max(own);
        }
    }
    Gradients { ready, computed: step.ranks.iter().map(|rank| rank.computed).collect() }
}

/// Returns when each gradient of a rank was there. The times at which buckets were full are those of
/// this step; between them gradients come as they usually do.
fn ready_on(rank: &Backward, recorded: &GroupSteps) -> Vec<f64> {
    let mut usual = recorded.ready.get(&rank.rank).into_iter().flatten();
    let mut ready = Vec::new();
    let mut last = rank.begin;
    let mut last_usual = 0.0;
    for (tensors, reduction) in recorded.tensors.iter().zip(&rank.reductions) {
        let times: Vec<f64> = usual.by_ref().take(tensors.len()).copied().collect();
        let full = times.iter().copied().fold(last_usual, f64::max);
        for time in times {
            let share = (time - last_usual).max(0.0) / (full - last_usual);
            let share = if full > last_usual { share } else { 1.0 };
            ready.push(last + share * (reduction.queued - last));
        }
        last = reduction.queued;
        last_usual = full;
    }
    ready
}
