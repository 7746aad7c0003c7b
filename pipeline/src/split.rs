//! Which layers make up a stage.

use std::ops::Range;
use std::time::Instant;

use tch::nn::VarStore;
use tch::{Kind, Tensor};

use crate::stage::Layers;

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
/// measures and the others take over its ranges. Leaves no gradients in `vs`, the layers' variables.
pub fn split_by_time(
    layers: &Layers,
    vs: &VarStore,
    input: &Tensor,
    stages: usize,
) -> Vec<Range<usize>> {
    let mut input = input.detach();
    let mut costs = Vec::new();
    for layer in &layers.0 {
        let mut seconds = f64::INFINITY;
        let mut output = Tensor::new();
        for _ in 0..3 {
            let leaf = input.detach().set_requires_grad(input.is_floating_point());
            let began = Instant::now();
            output = layer.forward_t(&leaf, true);
            if output.requires_grad() {
                output.sum(Kind::Float).backward();
            }
            seconds = seconds.min(began.elapsed().as_secs_f64());
        }
        costs.push(seconds);
        input = output.detach();
    }
    for mut variable in vs.trainable_variables() {
        if variable.grad().defined() {
            variable.zero_grad();
        }
    }
    split(&costs, stages)
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
