//! Learning rates by step.

use std::f64::consts::PI;

/// A learning rate for each step of a training, the first of which is step 0.
#[derive(Clone, Debug, PartialEq)]
pub enum LrScheduler {
    /// One rate for all steps.
    Constant(f64),
    /// `values[i]` up to and with step `boundaries[i]`, then the last value: OneFlow's
    /// `PiecewiseConstantScheduler`. There is one value more than boundaries.
    PiecewiseConstant {
        /// Steps, in order.
        boundaries: Vec<u64>,
        /// Learning rates.
        values: Vec<f64>,
    },
    /// A fall from `base` to `base * alpha` in `steps` steps along half a cosine, which then stays:
    /// OneFlow's `CosineScheduler`; with `alpha` = `eta_min` / `base` torch's `CosineAnnealingLR`.
    Cosine {
        /// The learning rate of step 0.
        base: f64,
        /// Steps until the end.
        steps: u64,
        /// The part of `base` that is left.
        alpha: f64,
    },
    /// `base * gamma` to the power of step / `every`, rounded down: torch's `StepLR`.
    Step {
        /// The learning rate of step 0.
        base: f64,
        /// Steps between two changes.
        every: u64,
        /// The factor.
        gamma: f64,
    },
    /// `base * gamma` to the power of the step: torch's `ExponentialLR`.
    Exponential {
        /// The learning rate of step 0.
        base: f64,
        /// The factor.
        gamma: f64,
    },
    /// A rise in the first `steps` steps, from `start` times what `then` has at step `steps`, in
    /// equal steps up to that. From there on it is `then`.
    LinearWarmUp {
        /// Steps of warming up.
        steps: u64,
        /// The factor of step 0.
        start: f64,
        /// The scheduler that follows.
        then: Box<LrScheduler>,
    },
}

impl LrScheduler {
    /// Returns the learning rate of a step.
    pub fn at(&self, step: u64) -> f64 {
        match self {
            LrScheduler::Constant(rate) => *rate,
            LrScheduler::PiecewiseConstant { boundaries, values } => {
                let index = boundaries.partition_point(|&boundary| boundary < step);
                values.get(index).or(values.last()).copied().unwrap_or_default()
            }
            LrScheduler::Cosine { base, steps, alpha } => {
                let done = step.min(*steps) as f64 / (*steps).max(1) as f64;
                base * (alpha + (1.0 - alpha) * 0.5 * (1.0 + (PI * done).cos()))
            }
            LrScheduler::Step { base, every, gamma } => {
                base * gamma.powf((step / (*every).max(1)) as f64)
            }
            LrScheduler::Exponential { base, gamma } => base * gamma.powf(step as f64),
            LrScheduler::LinearWarmUp { steps, start, then } if step < *steps => {
                let done = step as f64 / *steps as f64;
                then.at(*steps) * (start + (1.0 - start) * done)
            }
            LrScheduler::LinearWarmUp { then, .. } => then.at(step),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is(scheduler: &LrScheduler, expected: &[(u64, f64)]) {
        for &(step, rate) in expected {
            let at = scheduler.at(step);
            assert!((at - rate).abs() < 1e-12, "{scheduler:?} at {step}: {at} instead of {rate}");
        }
    }

    #[test]
    fn rates_are_those_of_the_formulas() {
        is(&LrScheduler::Constant(0.1), &[(0, 0.1), (1000, 0.1)]);
        let pieces = LrScheduler::PiecewiseConstant {
            boundaries: vec![10, 20],
            values: vec![3.0, 2.0, 1.0],
        };
        is(&pieces, &[(0, 3.0), (10, 3.0), (11, 2.0), (20, 2.0), (21, 1.0), (99, 1.0)]);
        let cosine = LrScheduler::Cosine { base: 0.8, steps: 10, alpha: 0.25 };
        is(&cosine, &[(0, 0.8), (5, 0.5), (10, 0.2), (11, 0.2)]);
        let step = LrScheduler::Step { base: 1.0, every: 3, gamma: 0.5 };
        is(&step, &[(0, 1.0), (2, 1.0), (3, 0.5), (8, 0.25)]);
        is(&LrScheduler::Exponential { base: 2.0, gamma: 0.5 }, &[(0, 2.0), (1, 1.0), (3, 0.25)]);
        let warm = LrScheduler::LinearWarmUp { steps: 4, start: 0.5, then: Box::new(step) };
        is(&warm, &[(0, 0.25), (2, 0.375), (4, 0.5), (6, 0.25)]);
    }

    #[test]
    fn odd_values_do_no_harm() {
        is(&LrScheduler::PiecewiseConstant { boundaries: vec![], values: vec![] }, &[(3, 0.0)]);
        is(&LrScheduler::Cosine { base: 1.0, steps: 0, alpha: 0.5 }, &[(0, 1.0), (7, 1.0)]);
        is(&LrScheduler::Step { base: 1.0, every: 0, gamma: 0.5 }, &[(2, 0.25)]);
    }
}
