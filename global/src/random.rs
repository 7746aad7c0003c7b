//! Random numbers by logical element. An element of a tensor has the same value whatever the
//! placement and the SBP. Its number in the tensor, not the rank, says where in the stream of
//! random bits its own are.
//!
//! The bits are those of ChaCha with 8 rounds, which can be read from any position on (Bernstein:
//! ChaCha, a variant of Salsa20, 2008).

use std::f64::consts::TAU;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::region::Region;
use crate::runtime::Runtime;

/// 32-bit words for an element: two 64-bit numbers.
const WORDS: u128 = 4;

/// Numbers the tensors that are drawn from one seed. All ranks draw the same tensors in the same
/// order, and so have the same generator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Generator {
    seed: u64,
    /// Tensors that were drawn.
    drawn: u64,
}

/// The random bits of one tensor: each element has its own.
#[derive(Clone, Debug)]
pub struct Draw {
    bits: ChaCha8Rng,
}

/// Two numbers of 64 random bits each.
pub type Bits = [u64; 2];

/// Returns the generator of a job's random numbers: the same on all ranks.
pub(crate) fn generator(runtime: &Runtime) -> MutexGuard<'_, Generator> {
    runtime.part::<Mutex<Generator>>().lock().unwrap_or_else(PoisonError::into_inner)
}

impl Generator {
    /// Makes a generator that starts at the beginning of `seed`'s sequence.
    pub fn new(seed: u64) -> Self {
        Self { seed, drawn: 0 }
    }

    /// Returns the seed, and how many tensors were drawn, for a checkpoint.
    pub fn state(&self) -> [u64; 2] {
        [self.seed, self.drawn]
    }

    /// Goes on from [`Generator::state`].
    pub fn from_state([seed, drawn]: [u64; 2]) -> Self {
        Self { seed, drawn }
    }

    /// Begins the next tensor.
    pub fn draw(&mut self) -> Draw {
        let mut bits = ChaCha8Rng::seed_from_u64(self.seed);
        bits.set_stream(self.drawn);
        self.drawn += 1;
        Draw { bits }
    }
}

impl Draw {
    /// Returns the elements of a region of a tensor of this shape, row-major; `value` makes each
    /// from its bits.
    pub fn region<T>(
        &mut self,
        shape: &[usize],
        region: &Region,
        value: impl Fn(Bits) -> T,
    ) -> Vec<T> {
        let mut values = Vec::with_capacity(region.elements());
        for (start, count) in runs(shape, region) {
            self.bits.set_word_pos(start as u128 * WORDS);
            values.extend((0..count).map(|_| value([self.bits.next_u64(), self.bits.next_u64()])));
        }
        values
    }
}

/// Returns the elements of a region, row-major, as runs of elements that follow each other in the
/// tensor: where each begins, and its length.
fn runs(shape: &[usize], region: &Region) -> Vec<(usize, usize)> {
    let mut runs = vec![(0, 1)];
    for (range, &size) in region.0.iter().zip(shape) {
        let mut inner = Vec::new();
        for (start, count) in runs {
            if *range == (0..size) {
                inner.push((start * size, count * size));
            } else {
                let begins = start..start + count;
                inner.extend(begins.map(|begin| (begin * size + range.start, range.len())));
            }
        }
        runs = inner;
    }
    runs.retain(|&(_, count)| count > 0);
    runs
}

/// Draws a number that is evenly distributed in `[0, 1)`, a multiple of 2^-53.
pub fn uniform([bits, _]: Bits) -> f64 {
    (bits >> 11) as f64 * (-53_f64).exp2()
}

/// Draws as [`uniform`] does, a multiple of 2^-24: what f32 can hold.
pub fn uniform_f32([bits, _]: Bits) -> f32 {
    (bits >> 40) as f32 * (-24_f32).exp2()
}

/// Draws a number that is normally distributed with mean 0 and variance 1 (Box and Muller, 1958).
pub fn normal([radius, angle]: Bits) -> f64 {
    // In (0, 1]: the logarithm is finite.
    let radius = 1.0 - uniform([radius, 0]);
    (-2.0 * radius.ln()).sqrt() * (TAU * uniform([angle, 0])).cos()
}

/// Draws a number that is exponentially distributed with mean 1.
pub fn exponential(bits: Bits) -> f64 {
    -(1.0 - uniform(bits)).ln()
}

/// Draws a number that is evenly distributed below `bound`, which is not 0. No number is likelier
/// than another by more than `bound` / 2^64.
pub fn below(bound: u64, [bits, _]: Bits) -> u64 {
    ((u128::from(bits) * u128::from(bound)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::regions;
    use crate::{B, P, Placement, S, Sbp};

    #[test]
    fn runs_are_as_long_as_they_can_be() {
        let runs = |shape: &[usize], ranges: &[std::ops::Range<usize>]| {
            runs(shape, &Region(ranges.to_vec()))
        };
        assert_eq!(runs(&[], &[]), [(0, 1)]);
        assert_eq!(runs(&[4, 3], &[0..4, 0..3]), [(0, 12)]);
        assert_eq!(runs(&[4, 3], &[1..3, 0..3]), [(3, 6)]);
        assert_eq!(runs(&[4, 3], &[1..3, 1..3]), [(4, 2), (7, 2)]);
        assert_eq!(runs(&[2, 2, 5], &[0..2, 1..2, 0..5]), [(5, 5), (15, 5)]);
        assert_eq!(runs(&[4, 3], &[2..2, 0..3]), []);
    }

    #[test]
    fn an_element_has_one_value_whatever_the_sbp() {
        let mesh = Placement::of([[0, 1, 2], [3, 4, 5]]).unwrap();
        let shape = [7, 5, 2];
        let all = Generator::new(3).draw().region(&shape, &Region::all(&shape), uniform);
        let sbps = [S(0), S(1), S(2), B, P];
        let pairs = sbps.iter().flat_map(|&one| sbps.map(|other: Sbp| [one, other]));
        for sbp in pairs {
            for region in regions(&mesh, &sbp, &shape) {
                let part = Generator::new(3).draw().region(&shape, &region, uniform);
                let [i, j, k] = [0, 1, 2].map(|dim| region.0[dim].clone());
                let indices = i.flat_map(|i| {
                    let k = k.clone();
                    j.clone().flat_map(move |j| k.clone().map(move |k| (i * 5 + j) * 2 + k))
                });
                let expected: Vec<f64> = indices.map(|index| all[index]).collect();
                assert_eq!(part, expected, "{sbp:?}");
            }
        }
    }

    #[test]
    fn tensors_and_seeds_differ_and_a_state_goes_on() {
        let numbers = |generator: &mut Generator| {
            generator.draw().region(&[4], &Region::all(&[4]), |[bits, _]| bits)
        };
        let mut generator = Generator::new(1);
        let first = numbers(&mut generator);
        let mut later = Generator::from_state(generator.state());
        let second = numbers(&mut generator);
        assert_ne!(first, second);
        assert_eq!(numbers(&mut later), second);
        assert_ne!(numbers(&mut Generator::new(2)), first);
    }

    /// Mean and variance, of many: within five standard errors of what they should be.
    #[test]
    fn distributions_have_their_moments() {
        let count = 200_000;
        let check = |value: fn(Bits) -> f64, mean: f64, variance: f64, kurtosis: f64| {
            let mut draw = Generator::new(11).draw();
            let values = draw.region(&[count], &Region::all(&[count]), value);
            let measured = values.iter().sum::<f64>() / count as f64;
            let error = (variance / count as f64).sqrt();
            assert!((measured - mean).abs() < 5.0 * error, "{measured} instead of {mean}");
            let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
            let measured = squares / count as f64;
            let error = variance * ((kurtosis - 1.0) / count as f64).sqrt();
            assert!((measured - variance).abs() < 5.0 * error, "{measured} instead of {variance}");
        };
        check(uniform, 0.5, 1.0 / 12.0, 1.8);
        check(|bits| f64::from(uniform_f32(bits)), 0.5, 1.0 / 12.0, 1.8);
        check(normal, 0.0, 1.0, 3.0);
        check(exponential, 1.0, 1.0, 9.0);
        check(|bits| below(6, bits) as f64, 2.5, 35.0 / 12.0, 1.73);
    }

    #[test]
    fn no_value_is_out_of_range() {
        assert_eq!(uniform([0, 0]), 0.0);
        assert!(uniform([u64::MAX, 0]) < 1.0 && uniform_f32([u64::MAX, 0]) < 1.0);
        assert!(normal([u64::MAX, 0]).is_finite() && exponential([u64::MAX, 0]).is_finite());
        assert_eq!((below(10, [u64::MAX, 0]), below(10, [0, 0])), (9, 0));
    }
}
