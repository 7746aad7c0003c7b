//! Which layers make up a stage.

use std::ops::Range;
use std::time::Instant;

use flow_autograd::{set_grad, with_rng_state, BoxError, RngState};
use tch::nn::{ModuleT, VarStore};
use tch::Tensor;

use crate::error::{Error, Result};
use crate::executor::caught;
use crate::stage::Layers;

type Outcome<T> = std::result::Result<T, BoxError>;

/// Divides layers with these costs into contiguous stages, so that the largest cost of a stage is
/// as small as it can be: the linear partition problem, by dynamic programming over prefixes. With
/// fewer layers than stages some stages are empty.
///
/// ```
/// use flow_pipeline::split;
///
/// assert_eq!(split(&[1.0, 1.0, 1.0, 3.0], 2), [0..3, 3..4]);
/// ```
pub fn split(costs: &[f64], stages: usize) -> Vec<Range<usize>> {
    let layers = costs.len();
    let mut sums = vec![0.0];
    sums.extend(costs.iter().scan(0.0, |sum, cost| {
        *sum += cost;
        Some(*sum)
    }));
    // best[stages][layers]: the largest cost, and where the last of these stages begins.
    let mut best = vec![vec![(f64::INFINITY, 0); layers + 1]; stages + 1];
    best[0][0].0 = 0.0;
    for stage in 1..=stages {
        for end in 0..=layers {
            for start in 0..=end {
                let largest = best[stage - 1][start].0.max(sums[end] - sums[start]);
                if largest < best[stage][end].0 {
                    best[stage][end] = (largest, start);
                }
            }
        }
    }
    let mut ranges = Vec::new();
    let mut end = layers;
    for stage in (1..=stages).rev() {
        let start = best[stage][end].1;
        ranges.push(start..end);
        end = start;
    }
    ranges.reverse();
    ranges
}

/// Divides layers with these numbers of parameters: [`split`].
pub fn split_by_parameters(parameters: &[usize], stages: usize) -> Vec<Range<usize>> {
    let costs: Vec<f64> = parameters.iter().map(|&count| count as f64).collect();
    split(&costs, stages)
}

/// Divides layers by the time that each takes forward and backward on a micro-batch like `input`,
/// the shortest of three runs, on this rank: [`split`]. Ranks measure differently, so one rank
/// measures and the others take over its ranges. Gradients and buffers in `vs`, the layers'
/// variables, are the same afterwards, and so are libtorch's random numbers.
///
/// # Errors
/// A layer fails, or panics, on what the one before it gives.
pub fn split_by_time(
    layers: &Layers,
    vs: &VarStore,
    input: &Tensor,
    stages: usize,
) -> Result<Vec<Range<usize>>> {
    let failed = |layer| move |source| Error::Layer { layer, source };
    let kept = Kept::of(vs).map_err(failed(0))?;
    let random = RngState::of(input.device()).map_err(|error| failed(0)(error.into()))?;
    let mut input = input.detach();
    let mut costs = Vec::new();
    let measured = layers.0.iter().enumerate().try_for_each(|(number, layer)| {
        let measured = with_rng_state(&random, || caught(|| measure(layer.as_ref(), &input)));
        let measured = measured.map_err(BoxError::from).and_then(|measured| measured);
        let (seconds, output) = measured.map_err(failed(number))?;
        costs.push(seconds);
        input = output;
        Ok(())
    });
    kept.restore().map_err(failed(0))?;
    measured.map(|()| split(&costs, stages))
}

/// The shortest time of a layer, and its output.
fn measure(layer: &dyn ModuleT, input: &Tensor) -> Outcome<(f64, Tensor)> {
    let (mut seconds, mut last) = (f64::INFINITY, Tensor::new());
    for _ in 0..3 {
        let leaf = input.detach().set_requires_grad(input.is_floating_point());
        let began = Instant::now();
        let output = layer.forward_t(&leaf, true);
        if output.requires_grad() {
            output.f_sum(output.kind())?.f_backward()?;
        }
        seconds = seconds.min(began.elapsed().as_secs_f64());
        last = output.detach();
    }
    Ok((seconds, last))
}

/// What forwards and backwards change of a model.
struct Kept {
    gradients: Vec<(Tensor, Tensor)>,
    /// What requires no gradient, with a copy.
    buffers: Vec<(Tensor, Tensor)>,
}

impl Kept {
    /// Takes the gradients away.
    fn of(vs: &VarStore) -> Outcome<Self> {
        let (weights, buffers): (Vec<_>, Vec<_>) =
            vs.variables().into_values().partition(Tensor::requires_grad);
        let gradients = weights.into_iter().map(|weight| {
            let gradient = weight.grad();
            set_grad(&weight, None)?;
            Ok((weight, gradient))
        });
        let gradients = gradients.collect::<Outcome<_>>()?;
        let copied = |buffer: Tensor| {
            let copy = buffer.copy();
            (buffer, copy)
        };
        Ok(Self { gradients, buffers: buffers.into_iter().map(copied).collect() })
    }

    fn restore(self) -> Outcome<()> {
        for (weight, gradient) in self.gradients {
            set_grad(&weight, Some(&gradient).filter(|gradient| gradient.defined()))?;
        }
        let _no_grad = tch::no_grad_guard();
        for (mut buffer, copy) in self.buffers {
            buffer.f_copy_(&copy)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All ways to divide layers.
    fn smallest(costs: &[f64], stages: usize) -> f64 {
        match stages {
            0 if costs.is_empty() => 0.0,
            0 => f64::INFINITY,
            _ => (0..=costs.len())
                .map(|end| {
                    let first: f64 = costs[..end].iter().sum();
                    first.max(smallest(&costs[end..], stages - 1))
                })
                .fold(f64::INFINITY, f64::min),
        }
    }

    #[test]
    fn no_other_division_is_better() {
        for seed in 0..20_usize {
            let cost = |at: usize| ((seed * 31 + at * 17) * 7 % 11) as f64;
            for layers in 0..7 {
                let costs: Vec<f64> = (0..layers).map(cost).collect();
                for stages in 1..5 {
                    let ranges = split(&costs, stages);
                    assert_eq!(ranges.len(), stages);
                    assert_eq!((ranges[0].start, ranges[stages - 1].end), (0, layers));
                    assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
                    let of = |range: &Range<usize>| costs[range.clone()].iter().sum::<f64>();
                    let largest = ranges.iter().map(of).fold(0.0, f64::max);
                    assert_eq!(largest, smallest(&costs, stages), "{costs:?} {stages}");
                }
            }
        }
    }
}
