//! Samples by weight and by length, and batches, against stored results of PyTorch's and
//! transformers', and their own promises.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use flow_ddp::{
    BatchSampler, BoxError, DataLoader, Dataset, DistributedSampler, LengthGroupedSampler,
    MaxTokensBatchSampler, RandomSampler, Sampler, SamplerError, SamplerItem,
    WeightedRandomSampler,
};
use proptest::prelude::*;
use serde::Deserialize;

/// What `scripts/parity/draws.py` stores.
#[derive(Deserialize)]
struct Parity {
    weighted: Vec<Weighted>,
    grouped: Vec<Grouped>,
}

#[derive(Debug, Deserialize)]
struct Weighted {
    n: usize,
    seed: u64,
    replacement: bool,
    draws: Vec<usize>,
}

#[derive(Debug, Deserialize)]
struct Grouped {
    n: usize,
    batch_size: usize,
    replicas: usize,
    rank: usize,
    seed: u64,
    drop_last: bool,
    indices: Vec<usize>,
}

fn parity() -> Parity {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/draws.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The numbers of `scripts/parity/draws.py`.
fn numbers(n: usize) -> Vec<usize> {
    (0..n).map(|i| i * 7919 % 1009 % 1000).collect()
}

pub fn alone<S: Sampler>(sampler: S) -> DistributedSampler<S> {
    DistributedSampler::wrap_replica(sampler, 1, 0).unwrap()
}

#[test]
fn weighted_draws_are_pytorchs() {
    let cases = parity().weighted;
    assert!(cases.len() > 100);
    for case in cases {
        let weights: Vec<f64> = numbers(case.n).iter().map(|&n| n as f64 / 8.0 + 0.125).collect();
        let draws = case.draws.len();
        let sampler = if case.replacement {
            WeightedRandomSampler::new(weights, draws)
        } else {
            WeightedRandomSampler::without_replacement(weights, draws)
        };
        assert_eq!(alone(sampler.unwrap().seed(case.seed)).indices(), case.draws, "{case:?}");
    }
}

#[test]
fn samples_of_like_length_are_those_of_transformers() {
    let cases = parity().grouped;
    assert!(cases.len() > 100);
    for case in cases {
        let sampler = LengthGroupedSampler::new(numbers(case.n), case.batch_size).unwrap();
        let sampler = sampler.seed(case.seed);
        let sampler = DistributedSampler::wrap_replica(sampler, case.replicas, case.rank).unwrap();
        let mut sampler = sampler.drop_last(case.drop_last);
        sampler.set_epoch(1);
        assert_eq!(sampler.indices(), case.indices, "{case:?}");
    }
}

#[test]
fn what_cannot_be_drawn_is_an_error_of_one_line() {
    let error = WeightedRandomSampler::new([1.0, -0.5], 3).unwrap_err();
    assert_eq!(
        error.to_string(),
        "sample 1 has weight -0.5, it should be at least 0, and the sum of all finite"
    );
    for weights in [[0.0, f64::NAN], [0.0, f64::INFINITY], [f64::MAX, f64::MAX]] {
        let error = WeightedRandomSampler::new(weights, 3).unwrap_err();
        assert!(matches!(error, SamplerError::Weight { index: 1, .. }), "{error}");
    }
    let error = WeightedRandomSampler::new([0.0, 0.0], 3).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot draw 3 samples: 0 have a weight above 0; give some a weight"
    );
    let error = WeightedRandomSampler::without_replacement([0.0, 1.0, 2.0], 3).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot draw 3 samples: 2 have a weight above 0; ask for fewer, or draw with replacement"
    );
    let error = MaxTokensBatchSampler::new([4, 11, 3], 10).unwrap_err();
    assert_eq!(
        error.to_string(),
        "sample 1 has 11 tokens, it should have at most the 10 of a batch: leave it out, cut it, \
         or raise max_tokens"
    );
    let zero = "batch size 0, it should be at least 1";
    assert_eq!(LengthGroupedSampler::new([4], 0).unwrap_err().to_string(), zero);
    assert_eq!(BatchSampler::new(RandomSampler::new(4), 0).unwrap_err().to_string(), zero);
}

#[test]
fn nothing_is_drawn_of_nothing() {
    assert!(alone(WeightedRandomSampler::new([], 0).unwrap()).is_empty());
    assert!(alone(LengthGroupedSampler::new([], 3).unwrap()).indices().is_empty());
    assert!(alone(MaxTokensBatchSampler::new([], 3).unwrap()).indices().is_empty());
    assert!(alone(BatchSampler::new(RandomSampler::new(0), 3).unwrap()).indices().is_empty());
}

#[test]
fn the_weights_are_the_shares() {
    let draws = WeightedRandomSampler::new([1.0, 0.0, 3.0], 40_000).unwrap();
    let mut counts = [0; 3];
    alone(draws).iter().for_each(|index| counts[index] += 1);
    assert!(counts[1] == 0 && (9_500..10_500).contains(&counts[0]), "{counts:?}");
}

#[test]
fn epochs_and_seeds_have_other_orders() {
    fn differ<T: SamplerItem + Debug + PartialEq>(
        make: fn(usize, usize, u64) -> Box<dyn Sampler<Item = T>>,
        kinds: &[usize],
    ) {
        for &kind in kinds {
            let mut sampler = alone(make(kind, 200, 7));
            let first = sampler.indices();
            assert_ne!(alone(make(kind, 200, 8)).indices(), first, "{kind}");
            sampler.set_epoch(1);
            assert_ne!(sampler.indices(), first, "{kind}");
            sampler.set_epoch(0);
            assert_eq!(sampler.indices(), first, "{kind}");
        }
    }
    differ(samples, &[0, 1, 2, 3]);
    differ(batches, &[0, 2, 3]); // 1 is not shuffled
}

#[test]
fn another_order_is_not_resumed() {
    let state = alone(WeightedRandomSampler::new([1.0, 2.0], 5).unwrap()).state();
    let refuse = |weights: [f64; 2], draws: usize| {
        let mut other = alone(WeightedRandomSampler::new(weights, draws).unwrap());
        other.resume(&state).unwrap_err().to_string()
    };
    for error in [refuse([1.0, 2.5], 5), refuse([1.0, 2.0], 6)] {
        let expected = "cannot resume: the state was saved with shuffle 5 weighted draws with \
                        replacement (weights ";
        assert!(error.starts_with(expected) && error.lines().count() == 1, "{error}");
    }
}

/// Numbers of batches that fill no run of neighbours, and of ranks that divide one.
#[test]
fn ranks_have_batches_of_like_length_in_a_step() {
    let lengths = numbers(4000);
    let make = || MaxTokensBatchSampler::new(lengths.clone(), 4000).unwrap();
    let sorted = alone(make().max_batch_size(5).shuffle(false)).indices();
    assert!(sorted.len() > 800, "{}", sorted.len());
    let sizes = |batches: &[Vec<usize>]| -> Vec<usize> {
        batches.iter().map(|batch| batch.iter().map(|&i| lengths[i]).max().unwrap()).collect()
    };
    let longest = sizes(&sorted);
    let shuffled = sizes(&alone(make().max_batch_size(5)).indices());
    assert_ne!(shuffled, longest);
    for replicas in [2, 8, 64] {
        let whole = shuffled.len() / 64 * 64;
        for step in shuffled[..whole].chunks(replicas) {
            assert!(longest.windows(replicas).any(|neighbours| neighbours == step), "{step:?}");
        }
    }
}

pub struct Numbers(pub usize);

impl Dataset for Numbers {
    type Batch = Vec<usize>;

    fn len(&self) -> usize {
        self.0
    }

    fn batch(&self, indices: &[usize]) -> Result<Vec<usize>, BoxError> {
        Ok(indices.to_vec())
    }
}

fn samples(kind: usize, n: usize, seed: u64) -> Box<dyn Sampler<Item = usize>> {
    let lengths = numbers(n);
    let weights: Vec<f64> = lengths.iter().map(|&length| length as f64 + 1.0).collect();
    match kind {
        0 => Box::new(RandomSampler::new(n).seed(seed)),
        1 => Box::new(WeightedRandomSampler::new(weights, n * 3 / 2).unwrap().seed(seed)),
        2 => {
            let draws = WeightedRandomSampler::without_replacement(weights, n / 2);
            Box::new(draws.unwrap().seed(seed))
        }
        _ => Box::new(LengthGroupedSampler::new(lengths, 3).unwrap().seed(seed)),
    }
}

fn batches(kind: usize, n: usize, seed: u64) -> Box<dyn Sampler<Item = Vec<usize>>> {
    let max_tokens = || MaxTokensBatchSampler::new(numbers(n), 2500).unwrap().seed(seed);
    match kind {
        0 => Box::new(max_tokens()),
        1 => Box::new(max_tokens().max_batch_size(3).shuffle(false)),
        2 => Box::new(BatchSampler::new(RandomSampler::new(n).seed(seed), 4).unwrap()),
        _ => Box::new(BatchSampler::new(samples(1, n, seed), 4).unwrap().drop_last(true)),
    }
}

/// A sampler of any kind, in some epoch.
#[derive(Clone, Debug)]
struct Any {
    kind: usize,
    n: usize,
    seed: u64,
    epoch: u64,
}

fn any_sampler() -> impl Strategy<Value = Any> {
    (0usize..4, 0usize..300, any::<u64>(), any::<u64>()).prop_map(|(kind, n, seed, epoch)| Any {
        kind,
        n,
        seed,
        epoch,
    })
}

impl Any {
    fn dealt<T: SamplerItem>(
        &self,
        make: fn(usize, usize, u64) -> Box<dyn Sampler<Item = T>>,
        replicas: usize,
    ) -> Vec<DistributedSampler<Box<dyn Sampler<Item = T>>>> {
        let dealt = |rank| {
            let sampler = make(self.kind, self.n, self.seed);
            let mut sampler = DistributedSampler::wrap_replica(sampler, replicas, rank).unwrap();
            sampler.set_epoch(self.epoch);
            sampler
        };
        (0..replicas).map(dealt).collect()
    }
}

/// The first item of each rank, the second of each, and so on.
fn in_turn<T: Clone>(ranks: &[Vec<T>]) -> Vec<T> {
    let longest = ranks.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest).flat_map(|i| ranks.iter().filter_map(move |rank| rank.get(i).cloned())).collect()
}

/// Together ranks have the order of one rank: once, or padded, or without its end. Whatever the
/// number of ranks that go on with it.
fn is_dealt<T: SamplerItem + Debug + PartialEq>(
    any: &Any,
    make: fn(usize, usize, u64) -> Box<dyn Sampler<Item = T>>,
    replicas: usize,
    stages: &[(usize, usize)],
) -> Result<(), TestCaseError> {
    let all = any.dealt(make, 1)[0].indices();
    prop_assert_eq!(&all, &any.dealt(make, 1)[0].indices());

    let once: Vec<_> =
        any.dealt(make, replicas).into_iter().map(|s| s.pad(false).indices()).collect();
    prop_assert_eq!(in_turn(&once), all.clone());
    let padded: Vec<_> = any.dealt(make, replicas).iter().map(|s| s.indices()).collect();
    let places = all.len().next_multiple_of(replicas);
    let expected: Vec<T> = all.iter().cycle().take(places).cloned().collect();
    prop_assert!(padded.iter().all(|items| items.len() == places / replicas));
    prop_assert_eq!(in_turn(&padded), expected);
    let cut: Vec<_> =
        any.dealt(make, replicas).into_iter().map(|s| s.drop_last(true).indices()).collect();
    prop_assert!(cut.iter().all(|items| items.len() == all.len() / replicas));
    prop_assert_eq!(in_turn(&cut), all[..all.len() / replicas * replicas].to_vec());

    let one = any.dealt(make, 1).remove(0);
    let taken = one.iter().take(7 * stages.len()).count();
    let mut rest = Vec::new();
    for mut sampler in any.dealt(make, replicas) {
        sampler.resume(&one.state()).unwrap();
        rest.push(sampler.iter().collect::<Vec<T>>());
    }
    let places = (all.len() - taken).next_multiple_of(replicas);
    let expected: Vec<T> = all.iter().cycle().skip(taken).take(places).cloned().collect();
    prop_assert!(rest.iter().all(|items| items.len() == places / replicas));
    prop_assert_eq!(in_turn(&rest), expected);

    let mut state = any.dealt(make, 1).remove(0).pad(false).state();
    let mut seen = Vec::new();
    for &(replicas, each) in stages.iter().chain(&[(replicas, usize::MAX)]) {
        let elsewhere = Any { epoch: 0, ..any.clone() };
        let mut taken = Vec::new();
        let mut last = state.clone();
        for (rank, sampler) in elsewhere.dealt(make, replicas).into_iter().enumerate() {
            let mut sampler = sampler.pad(false);
            sampler.resume(&state).unwrap();
            taken.push(sampler.iter().take(each).collect());
            if rank == 0 {
                last = sampler.state();
            }
        }
        seen.extend(in_turn(&taken));
        state = last;
    }
    prop_assert_eq!(seen, all);
    Ok(())
}

fn any_stages() -> impl Strategy<Value = Vec<(usize, usize)>> {
    prop::collection::vec((1usize..9, 0usize..40), 0..5)
}

proptest! {
    #[test]
    fn samples_are_dealt_however_often_the_ranks_change(
        any in any_sampler(), replicas in 1usize..9, stages in any_stages(),
    ) {
        is_dealt(&any, samples, replicas, &stages)?;
    }

    #[test]
    fn batches_are_dealt_however_often_the_ranks_change(
        any in any_sampler(), replicas in 1usize..9, stages in any_stages(),
    ) {
        is_dealt(&any, batches, replicas, &stages)?;
    }

    #[test]
    fn each_sample_comes_once_and_in_a_batch_of_its_size(
        n in 0usize..400, seed: u64, epoch: u64, max_tokens in 1000usize..5000, most in 1usize..9,
    ) {
        let lengths = numbers(n);
        let grouped = LengthGroupedSampler::new(lengths.clone(), most).unwrap().seed(seed);
        let batched = MaxTokensBatchSampler::new(lengths.clone(), max_tokens).unwrap();
        let batched = batched.seed(seed).max_batch_size(most);
        let mut grouped = alone(grouped);
        let mut batched = alone(batched);
        grouped.set_epoch(epoch);
        batched.set_epoch(epoch);
        for batch in batched.iter() {
            let longest = batch.iter().map(|&index| lengths[index]).max().unwrap();
            prop_assert!(batch.len() <= most && batch.len() * longest <= max_tokens, "{:?}", batch);
        }
        for all in [grouped.indices(), batched.indices().concat()] {
            prop_assert_eq!(all.len(), n);
            prop_assert_eq!(BTreeSet::from_iter(all), BTreeSet::from_iter(0..n));
        }
    }

    #[test]
    fn draws_without_replacement_differ(n in 0usize..300, seed: u64) {
        let draws = alone(samples(2, n, seed)).indices();
        prop_assert_eq!(BTreeSet::from_iter(draws.iter().copied()).len(), draws.len());
    }

    #[test]
    fn a_loader_has_their_order_whatever_its_workers(
        any in any_sampler(),
        replicas in 1usize..4,
        workers in 0usize..4,
        batch_size in 1usize..9,
        taken in 0usize..20,
    ) {
        let dataset = Arc::new(Numbers(any.n));
        let by_samples = any.dealt(samples, replicas).pop().unwrap();
        let loader = DataLoader::new(&dataset, &by_samples, batch_size).workers(workers);
        let loaded: Result<Vec<_>, _> = loader.into_iter().collect();
        prop_assert_eq!(loaded.unwrap().concat(), by_samples.indices());

        let by_batches = any.dealt(batches, replicas).pop().unwrap();
        let loader = || DataLoader::with_batch_sampler(&dataset, &by_batches).workers(workers);
        prop_assert_eq!(loader().len(), by_batches.len());
        let mut loaded: Vec<_> =
            loader().into_iter().take(taken).map(|batch| batch.unwrap()).collect();
        let mut resumed = any.dealt(batches, replicas).pop().unwrap();
        resumed.resume(&by_batches.state()).unwrap();
        let rest = DataLoader::with_batch_sampler(&dataset, &resumed).workers(workers);
        loaded.extend(rest.into_iter().map(|batch| batch.unwrap()));
        prop_assert_eq!(loaded, by_batches.indices());
    }
}
