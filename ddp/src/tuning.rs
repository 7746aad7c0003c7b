//! Which size of buckets is the fastest: tried in the first steps.

use std::time::{Duration, Instant};

use crate::bucket::assignment::Caps;

/// Sizes that are tried beside the builder's, in MiB.
const SIZES: [&[f64]; 6] = [&[1.0], &[4.0], &[10.0], &[1.0, 25.0], &[50.0], &[200.0]];
/// Steps of a size in a row, after one that is not counted.
const IN_A_ROW: u32 = 5;
/// Another size must take less than this share of the time of the builder's.
const WORTH_IT: f64 = 0.98;

/// The trial of sizes: they take turns, so that what slows the machine down for a while slows down
/// all of them.
pub(crate) struct Tuning {
    sizes: Vec<Size>,
    /// The steps of each size that are counted.
    steps: u32,
    current: usize,
    /// The steps of this turn.
    taken: u32,
    last_end: Instant,
}

struct Size {
    caps: Caps,
    times: Vec<Duration>,
}

/// What follows a step of the trial.
pub(crate) enum Next {
    /// More steps of this size.
    Stay,
    /// Steps of another size.
    Try(Caps),
    /// All sizes have been tried: what each takes, in seconds.
    Decide(Vec<f64>),
}

impl Tuning {
    /// Begins with the first of these sizes, so many steps of each.
    pub fn new(sizes: Vec<Caps>, steps: u32) -> Self {
        let sizes = sizes.into_iter().map(|caps| Size { caps, times: Vec::new() }).collect();
        Self { sizes, steps, current: 0, taken: 0, last_end: Instant::now() }
    }

    /// Returns whether there are several sizes.
    pub fn has_a_choice(&self) -> bool {
        self.sizes.len() > 1
    }

    /// Returns the builder's size, and those that are tried beside it.
    pub fn candidates(own: &Caps) -> Vec<Caps> {
        let mut candidates = vec![own.clone()];
        candidates.extend(SIZES.iter().map(|caps| Caps::mib(caps)));
        candidates
    }

    /// Counts a step that ends now.
    pub fn end_step(&mut self) -> Next {
        let time = self.last_end.elapsed();
        self.last_end = Instant::now();
        let size = &mut self.sizes[self.current];
        if self.taken > 0 {
            size.times.push(time);
        }
        self.taken += 1;
        let is_full = size.times.len() >= self.steps as usize;
        if self.taken <= IN_A_ROW && !is_full {
            return Next::Stay;
        }
        self.taken = 0;
        self.current = (self.current + 1) % self.sizes.len();
        let next = &self.sizes[self.current];
        if next.times.len() >= self.steps as usize {
            return Next::Decide(self.sizes.iter_mut().map(Size::median).collect());
        }
        Next::Try(next.caps.clone())
    }

    /// Returns the size to keep, given what each takes on all ranks.
    pub fn best(&self, seconds: &[f64]) -> &Caps {
        let mut best = 0;
        for (index, &time) in seconds.iter().enumerate() {
            if time < seconds[0] * WORTH_IT && time < seconds[best] {
                best = index;
            }
        }
        &self.sizes[best].caps
    }
}

impl Size {
    fn median(&mut self) -> f64 {
        let middle = self.times.len() / 2;
        self.times.select_nth_unstable(middle).1.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(count: usize) -> Vec<Caps> {
        (1..=count).map(|mib| Caps::mib(&[mib as f64])).collect()
    }

    #[test]
    fn each_size_has_as_many_steps_in_turns() {
        let mut tuning = Tuning::new(sizes(3), 7);
        let mut turns = vec![1.0];
        let mut steps = 0;
        let times = loop {
            steps += 1;
            match tuning.end_step() {
                Next::Stay => {}
                Next::Try(caps) => turns.push(caps.in_mib()[0]),
                Next::Decide(times) => break times,
            }
        };
        assert_eq!(turns, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
        // One in each turn is not counted.
        assert_eq!(steps, 3 * (7 + 2));
        assert_eq!(times.len(), 3);
    }

    #[test]
    fn another_size_must_be_faster() {
        let tuning = Tuning::new(sizes(3), 1);
        assert_eq!(tuning.best(&[1.0, 0.99, 1.5]).in_mib(), [1.0]);
        assert_eq!(tuning.best(&[1.0, 0.9, 0.8]).in_mib(), [3.0]);
        assert_eq!(tuning.best(&[1.0, 0.8, 0.9]).in_mib(), [2.0]);
    }
}
