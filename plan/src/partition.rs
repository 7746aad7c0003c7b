//! Which layers make a stage.

use std::ops::Range;

use crate::model::Model;

/// The layers of each of `stages` stages, which are at most as many as there are layers. Each stage
/// ends where the operations up to there come closest to its share of all. It has a layer at least.
pub(crate) fn partition(model: &Model, stages: usize) -> Vec<Range<usize>> {
    let layers = model.layers.len();
    let mut sums = vec![0.0];
    let mut sum = 0.0;
    for layer in &model.layers {
        sum += layer.flops;
        sums.push(sum);
    }
    let mut ranges = Vec::with_capacity(stages);
    let mut start = 0;
    for stage in 1..stages {
        let latest = layers - (stages - stage);
        let share = sum * stage as f64 / stages as f64;
        let after = sums.partition_point(|&sum| sum < share).min(layers);
        let is_before_closer = after > 0 && share - sums[after - 1] < sums[after] - share;
        let closest = if is_before_closer { after - 1 } else { after };
        let end = closest.clamp(start + 1, latest);
        ranges.push(start..end);
        start = end;
    }
    ranges.push(start..layers);
    ranges
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::Layer;

    fn model(flops: &[f64]) -> Model {
        let layer = |&flops: &f64| Layer { flops, ..Layer::default() };
        Model::new(&flops.iter().map(layer).collect::<Vec<_>>(), 1).unwrap()
    }

    #[test]
    fn blocks_are_dealt_out_evenly() {
        // An embedding, 8 blocks, and logits of a third of a block.
        let flops = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.33];
        assert_eq!(partition(&model(&flops), 4), [0..3, 3..5, 5..7, 7..10]);
        assert_eq!(partition(&model(&flops), 1), vec![0..10; 1]);
        assert_eq!(partition(&model(&flops), 10).len(), 10);
    }

    proptest! {
        #[test]
        fn stages_are_all_layers_in_order(
            mut flops in prop::collection::vec(0.0..10.0f64, 1..40),
            stages in 1usize..40,
        ) {
            flops[0] += 1.0;
            let stages = stages.min(flops.len());
            let ranges = partition(&model(&flops), stages);
            prop_assert_eq!(ranges.len(), stages);
            prop_assert_eq!(ranges[0].start, 0);
            prop_assert_eq!(ranges[stages - 1].end, flops.len());
            prop_assert!(ranges.iter().all(|range| !range.is_empty()));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }
}
