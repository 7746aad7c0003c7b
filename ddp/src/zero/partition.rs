//! Which rank keeps the optimizer's state of which elements.

use std::cmp::Reverse;
use std::ops::Range;

/// Larger parameters, in bytes, are split over all ranks.
const SPLIT_BYTES: usize = 64 << 10;
/// Elements of which none but a parameter's last ones are parted. libtorch computes so many at once or
/// one by one, which may round differently.
const ALIGNMENT: usize = 64;

/// A rank's part of a parameter.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shard {
    pub rank: usize,
    /// Elements, in the order of memory.
    pub elements: Range<usize>,
}

/// Parts parameters, given by the numbers and sizes of their elements, so that all ranks keep as much.
/// Each rank has a part of a large parameter. A small one is a rank's alone: the largest ones first, each
/// goes to the rank that has the fewest bytes, as in PyTorch's `ZeroRedundancyOptimizer`.
pub(crate) fn partition(parameters: &[(usize, usize)], ranks: usize) -> Vec<Vec<Shard>> {
    let mut bytes = vec![0; ranks];
    let mut order: Vec<usize> = (0..parameters.len()).collect();
    order.sort_by_key(|&index| Reverse(parameters[index].0 * parameters[index].1));
    let mut parted = vec![Vec::new(); parameters.len()];
    for index in order {
        let (elements, size) = parameters[index];
        let shards = if elements * size > SPLIT_BYTES {
            split(elements, ranks)
        } else {
            let rank = (0..ranks).min_by_key(|&rank| bytes[rank]).unwrap_or_default();
            vec![Shard { rank, elements: 0..elements }]
        };
        for shard in &shards {
            bytes[shard.rank] += shard.elements.len() * size;
        }
        parted[index] = shards;
    }
    parted
}

/// Splits a parameter into a part for each rank, as equal as the alignment allows.
fn split(elements: usize, ranks: usize) -> Vec<Shard> {
    let units = elements.div_ceil(ALIGNMENT);
    let start = |rank: usize| (units * rank / ranks * ALIGNMENT).min(elements);
    let shards = (0..ranks).map(|rank| Shard { rank, elements: start(rank)..start(rank + 1) });
    shards.filter(|shard| !shard.elements.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_one_ranks_and_ranks_have_as_much() {
        let models: [&[(usize, usize)]; 5] = [
            &[(40_000, 4), (10, 8), (0, 4), (1, 2), (40_001, 2), (7, 16)],
            &[(16_384, 4), (16_385, 4)],
            &[(0, 4)],
            &[],
            &[(1_000_003, 4), (999, 4), (999, 4), (999, 4), (999, 4)],
        ];
        for model in models {
            for ranks in [1, 2, 3, 7] {
                let parted = partition(model, ranks);
                let mut bytes = vec![0; ranks];
                for (shards, &(elements, size)) in parted.iter().zip(model) {
                    assert!(!shards.is_empty(), "an empty parameter has an owner, too");
                    let mut end = 0;
                    for Shard { rank, elements } in shards {
                        assert_eq!(elements.start, end);
                        assert_eq!(elements.start % ALIGNMENT, 0);
                        end = elements.end;
                        bytes[*rank] += elements.len() * size;
                    }
                    assert_eq!(end, elements);
                }
                let least = bytes.iter().min().copied().unwrap_or_default();
                let most = bytes.iter().max().copied().unwrap_or_default();
                assert!(most - least <= SPLIT_BYTES, "{bytes:?} of {model:?}");
            }
        }
    }

    #[test]
    fn small_parameters_go_to_the_rank_with_the_fewest_bytes() {
        let parted = partition(&[(2, 4), (3, 4), (4, 4), (1, 4)], 2);
        let ranks: Vec<usize> = parted.iter().map(|shards| shards[0].rank).collect();
        assert_eq!(ranks, [1, 1, 0, 0]);
    }

    #[test]
    fn large_parameters_are_split_evenly() {
        let split: Vec<_> = partition(&[(20_000, 4)], 3).remove(0);
        let elements: Vec<_> = split.into_iter().map(|shard| shard.elements).collect();
        assert_eq!(elements, [0..6656, 6656..13312, 13312..20_000]);
    }
}
