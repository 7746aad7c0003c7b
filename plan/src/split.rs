//! Dividing layers into stages.

use std::ops::Range;

/// Halvings of an interval until its ends are neighbouring numbers.
const HALVINGS: usize = 100;

/// Divides layers with these costs, of at least 0, into contiguous stages. The largest cost of a stage
/// is as small as it can be: the linear partition problem. Of all such divisions, this is the one whose
/// stages end as close as they can to the ends of equal stages. With fewer layers than stages, some
/// stages are empty.
///
/// ```
/// use flow_plan::split;
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
    let most = smallest_largest(&sums, stages);
    // The earliest begin of each stage, so that no stage from there on costs more than `most`.
    let mut earliest = vec![layers; stages + 1];
    for stage in (0..stages).rev() {
        let end = earliest[stage + 1];
        earliest[stage] = sums[..=end].partition_point(|sum| sums[end] - sum > most);
    }
    let mut ranges = Vec::with_capacity(stages);
    let mut start = 0;
    for (stage, &earliest) in earliest.iter().enumerate().skip(1) {
        let share = sums[layers] * stage as f64 / stages as f64;
        let after = sums.partition_point(|&sum| sum < share).min(layers);
        let is_before_closer = after > 0 && share - sums[after - 1] < sums[after] - share;
        let closest = if is_before_closer { after - 1 } else { after };
        let mut latest = furthest(&sums, start, most);
        let mut first = earliest.max(start);
        if layers >= stages {
            first = first.max(start + 1);
            latest = latest.min(layers - (stages - stage));
        }
        let end = if stage == stages { layers } else { closest.max(first).min(latest.max(start)) };
        ranges.push(start..end);
        start = end;
    }
    ranges
}

/// Returns the largest cost of a stage, as small as it can be.
fn smallest_largest(sums: &[f64], stages: usize) -> f64 {
    let layers = sums.len() - 1;
    let mut too_small = 0.0;
    let mut enough = sums[layers];
    if is_enough(sums, stages, too_small) {
        return too_small;
    }
    for _ in 0..HALVINGS {
        let middle = too_small + (enough - too_small) / 2.0;
        if is_enough(sums, stages, middle) {
            enough = middle;
        } else {
            too_small = middle;
        }
    }
    enough
}

/// Returns whether stages that cost at most `most` can have all layers.
fn is_enough(sums: &[f64], stages: usize, most: f64) -> bool {
    let layers = sums.len() - 1;
    let mut start = 0;
    for _ in 0..stages {
        start = furthest(sums, start, most);
        if start == layers {
            return true;
        }
    }
    layers == 0
}

/// Returns the end of the longest stage that begins at `start` and costs at most `most`.
fn furthest(sums: &[f64], start: usize, most: f64) -> usize {
    let ends = sums[start..].partition_point(|sum| sum - sums[start] <= most);
    start + ends.max(1) - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn blocks_are_dealt_out_evenly() {
        // An embedding, 8 blocks, and logits of a third of a block.
        let costs = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.33];
        assert_eq!(split(&costs, 4), [0..3, 3..5, 5..7, 7..10]);
        assert_eq!(split(&costs, 1), vec![0..10; 1]);
        assert_eq!(split(&costs, 10).len(), 10);
        assert_eq!(split(&[], 2), [0..0, 0..0]);
        assert_eq!(split(&[1.0], 2).iter().filter(|range| range.is_empty()).count(), 1);
    }

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

    proptest! {
        #[test]
        fn no_other_division_is_better(
            costs in prop::collection::vec((0..11u8).prop_map(f64::from), 0..8),
            stages in 1usize..6,
        ) {
            let ranges = split(&costs, stages);
            let of = |range: &Range<usize>| costs[range.clone()].iter().sum::<f64>();
            let largest = ranges.iter().map(of).fold(0.0, f64::max);
            prop_assert_eq!(largest, smallest(&costs, stages));
        }

        #[test]
        fn stages_are_all_layers_in_order(
            costs in prop::collection::vec(0.0..10.0f64, 1..40),
            stages in 1usize..45,
        ) {
            let ranges = split(&costs, stages);
            prop_assert_eq!(ranges.len(), stages);
            prop_assert_eq!(ranges[0].start, 0);
            prop_assert_eq!(ranges[stages - 1].end, costs.len());
            prop_assert!(stages > costs.len() || ranges.iter().all(|range| !range.is_empty()));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }
}
