//! `DistributedSampler` against stored results of PyTorch's, and its own promises.

use std::path::Path;

use flow_ddp::{DistributedSampler, SamplerError, SamplerState};
use proptest::prelude::*;
use serde::Deserialize;

/// What `scripts/parity/sampler.py` stores.
#[derive(Deserialize)]
struct Parity {
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Case {
    n: usize,
    replicas: usize,
    shuffle: bool,
    seed: u64,
    epoch: u64,
    drop_last: bool,
    ranks: Vec<Stored>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Stored {
    All(Vec<usize>),
    Parts { len: usize, first: [usize; 3], last: [usize; 3], checksum: String },
}

/// FNV-1a over 64-bit words.
fn checksum(indices: &[usize]) -> String {
    let step = |hash: u64, &index: &usize| (hash ^ index as u64).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", indices.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

fn sampler(n: usize, replicas: usize, rank: usize) -> DistributedSampler {
    DistributedSampler::with_replicas(n, replicas, rank).unwrap()
}

#[test]
fn gives_the_indices_of_pytorch() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/sampler.json");
    let parity: Parity = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(parity.cases.len() > 500);
    for case in parity.cases {
        assert_eq!(case.ranks.len(), case.replicas);
        for (rank, expected) in case.ranks.iter().enumerate() {
            let sampler = sampler(case.n, case.replicas, rank);
            let mut sampler =
                sampler.shuffle(case.shuffle).seed(case.seed).drop_last(case.drop_last);
            sampler.set_epoch(case.epoch);
            let indices: Vec<usize> = sampler.iter().collect();
            assert_eq!(indices.len(), sampler.len(), "rank {rank} of {case:?}");
            let equal = match expected {
                Stored::All(all) => &indices == all,
                Stored::Parts { len, first, last, checksum: sum } => {
                    indices.len() == *len
                        && indices.starts_with(first)
                        && indices.ends_with(last)
                        && checksum(&indices) == *sum
                }
            };
            assert!(equal, "rank {rank} of {case:?}: {:?} ...", &indices[..indices.len().min(10)]);
        }
    }
}

#[test]
fn a_rank_out_of_range_is_a_one_line_error() {
    let error = DistributedSampler::with_replicas(10, 2, 2).unwrap_err();
    assert_eq!(error.to_string(), "invalid rank 2, it should be in the interval [0, 1]");
    let error = DistributedSampler::with_replicas(10, 0, 0).unwrap_err();
    assert_eq!(error.to_string(), "invalid number of replicas 0, it should be at least 1");
}

#[test]
fn shuffles_by_default() {
    assert_eq!(sampler(10, 3, 1).shuffle(false).indices(), [1, 4, 7, 0]);
    assert_eq!(sampler(10, 1, 0).indices(), [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]);
}

#[test]
fn a_later_iteration_starts_over() {
    let sampler = sampler(10, 2, 0);
    assert_eq!(sampler.iter().take(2).collect::<Vec<_>>(), [4, 7]);
    assert_eq!(sampler.state().taken, 4);
    assert_eq!(sampler.iter().collect::<Vec<_>>(), [4, 7, 3, 0, 6]);
    assert_eq!(sampler.state().taken, 10);
}

#[test]
fn a_new_epoch_starts_at_zero_and_leaves_older_iterators_behind() {
    let mut sampler = sampler(10, 2, 0);
    let mut old = sampler.iter();
    old.next();
    sampler.set_epoch(1);
    old.next();
    assert_eq!((sampler.state().epoch, sampler.state().taken), (1, 0));
    assert_eq!(sampler.iter().collect::<Vec<_>>(), [5, 1, 0, 9, 7]);
}

#[test]
fn resume_refuses_the_state_of_another_sampler() {
    let make = || sampler(100, 4, 1).seed(7);
    let state = make().state();
    for (field, mut other) in [
        ("samples", sampler(99, 4, 1).seed(7)),
        ("seed", make().seed(8)),
        ("shuffle", make().keyed_shuffle()),
        ("drop_last", make().drop_last(true)),
        ("pad", make().pad(false)),
    ] {
        let before = other.state();
        let error = other.resume(&state).unwrap_err();
        assert!(
            matches!(error, SamplerError::Mismatch { field: named, .. } if named == field),
            "{error}"
        );
        assert!(
            error.to_string().starts_with("cannot resume: the state was saved with "),
            "{error}"
        );
        assert_eq!(other.state(), before);
    }
    let error = make().resume(&SamplerState { taken: 101, ..state }).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot resume: the state has taken 101 samples of an epoch of 100"
    );
}

#[test]
fn another_number_of_ranks_deals_out_the_rest() {
    let mut two = sampler(10, 2, 0).shuffle(false);
    two.set_epoch(3);
    assert_eq!(two.iter().take(2).collect::<Vec<_>>(), [0, 2]); // and rank 1: 1, 3
    let resumed = |rank| {
        let mut sampler = sampler(10, 3, rank).shuffle(false);
        sampler.resume(&two.state()).unwrap();
        sampler
    };
    let rest = |rank| resumed(rank).iter().collect::<Vec<_>>();
    assert_eq!([rest(0), rest(1), rest(2)], [[4, 7], [5, 8], [6, 9]]);

    let later = resumed(1);
    later.iter().next();
    assert_eq!(later.state().taken, 7);
    assert_eq!(
        later.iter().collect::<Vec<_>>(),
        [1, 4, 7, 0],
        "a later iteration has the whole epoch"
    );
}

#[test]
fn the_usual_epoch_loop_continues_where_it_was() {
    let mut before = sampler(20, 2, 1);
    before.set_epoch(3);
    let expected = before.indices();
    assert_eq!(before.iter().take(4).collect::<Vec<_>>(), expected[..4]);
    let mut after = sampler(20, 2, 1);
    after.resume(&before.state()).unwrap();
    let mut seen = Vec::new();
    for epoch in after.epoch()..5 {
        after.set_epoch(epoch);
        seen.push(after.iter().collect::<Vec<_>>());
    }
    before.set_epoch(4);
    assert_eq!(seen, [expected[4..].to_vec(), before.indices()]);
}

#[derive(Clone, Debug)]
struct Settings {
    n: usize,
    replicas: usize,
    keyed: bool,
    shuffle: bool,
    seed: u64,
    epoch: u64,
}

impl Settings {
    fn sampler(&self, rank: usize) -> DistributedSampler {
        let sampler = sampler(self.n, self.replicas, rank).seed(self.seed).shuffle(self.shuffle);
        let mut sampler = if self.keyed { sampler.keyed_shuffle() } else { sampler };
        sampler.set_epoch(self.epoch);
        sampler
    }

    /// Every rank's indices, sorted together.
    fn together(&self, configure: impl Fn(DistributedSampler) -> DistributedSampler) -> Vec<usize> {
        let of_rank = |rank| configure(self.sampler(rank)).indices();
        let mut all: Vec<usize> = (0..self.replicas).flat_map(of_rank).collect();
        all.sort_unstable();
        all
    }
}

fn any_settings() -> impl Strategy<Value = Settings> {
    let kind = (any::<bool>(), any::<bool>(), any::<u64>(), any::<u64>());
    (0usize..400, 1usize..12, kind).prop_map(|(n, replicas, (keyed, shuffle, seed, epoch))| {
        Settings { n, replicas, keyed, shuffle, seed, epoch }
    })
}

proptest! {
    #[test]
    fn without_padding_every_sample_is_seen_exactly_once(settings in any_settings()) {
        prop_assert_eq!(settings.together(|s| s.pad(false)), (0..settings.n).collect::<Vec<_>>());
        let lengths = |rank| settings.sampler(rank).pad(false).len();
        prop_assert!(lengths(0) - lengths(settings.replicas - 1) <= 1);
    }

    #[test]
    fn with_padding_every_sample_is_seen_and_ranks_are_equal(settings in any_settings()) {
        let mut all = settings.together(|s| s);
        prop_assert_eq!(all.len(), settings.n.div_ceil(settings.replicas) * settings.replicas);
        all.dedup();
        prop_assert_eq!(all, (0..settings.n).collect::<Vec<_>>());
    }

    #[test]
    fn dropping_the_last_repeats_none(settings in any_settings()) {
        let mut all = settings.together(|s| s.drop_last(true));
        prop_assert_eq!(all.len(), settings.n / settings.replicas * settings.replicas);
        all.dedup();
        prop_assert_eq!(all.len(), settings.n / settings.replicas * settings.replicas);
    }

    #[test]
    fn a_resumed_sampler_continues_exactly(
        settings in any_settings(),
        part in 0.0..=1.0,
        rank: prop::sample::Index,
    ) {
        let rank = rank.index(settings.replicas);
        let before = settings.sampler(rank);
        let taken = (before.len() as f64 * part) as usize;
        let mut seen: Vec<usize> = before.iter().take(taken).collect();
        let saved = serde_json::to_string(&before.state()).unwrap();

        let mut after = Settings { epoch: 0, ..settings }.sampler(rank);
        after.resume(&serde_json::from_str(&saved).unwrap()).unwrap();
        prop_assert_eq!(after.state(), before.state());
        seen.extend(after.iter());
        prop_assert_eq!(seen, before.indices());
        prop_assert_eq!(after.iter().collect::<Vec<_>>(), before.indices());
    }

    #[test]
    fn however_often_the_ranks_change_every_sample_is_seen_once(
        settings in any_settings(),
        stages in prop::collection::vec((1usize..12, 0usize..60), 0..5),
    ) {
        let mut state = settings.sampler(0).pad(false).state();
        let mut seen = Vec::new();
        for (replicas, each) in stages.into_iter().chain([(settings.replicas, usize::MAX)]) {
            let settings = Settings { replicas, epoch: 0, ..settings.clone() };
            let samplers: Vec<_> = (0..replicas)
                .map(|rank| {
                    let mut sampler = settings.sampler(rank).pad(false);
                    sampler.resume(&state).unwrap();
                    let taken: Vec<usize> = sampler.iter().take(each).collect();
                    seen.extend(taken);
                    sampler
                })
                .collect();
            state = samplers[0].state();
        }
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..settings.n).collect::<Vec<_>>());
    }

    #[test]
    fn epochs_and_seeds_differ(keyed: bool, n in 50usize..400, seed: u64, epoch in 0..u64::MAX) {
        let settings = Settings { n, replicas: 1, keyed, shuffle: true, seed, epoch };
        let indices = settings.sampler(0).indices();
        let next_epoch = Settings { epoch: epoch + 1, ..settings.clone() };
        prop_assert_ne!(&indices, &next_epoch.sampler(0).indices());
        let other_seed = Settings { seed: seed ^ 1, ..settings.clone() };
        prop_assert_ne!(&indices, &other_seed.sampler(0).indices());
        prop_assert_eq!(&indices, &settings.sampler(0).indices());
    }
}
