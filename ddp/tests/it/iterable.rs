//! Streams: dealt to ranks and workers, each item once, whatever their numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use flow_ddp::{
    BatchId, BoxError, DataLoader, DistributedSampler, ItemStream, IterableDataset, LoaderError,
    SamplerError, SamplerState, StreamSampler,
};
use proptest::prelude::*;
use tch::{Device, Tensor};

/// The numbers from 1000 times the epoch on.
#[derive(Default)]
struct Numbers {
    len: usize,
    /// The item that is an error.
    bad: Option<usize>,
    /// The item at which the stream panics.
    cursed: Option<usize>,
    /// The stream of this epoch cannot be opened.
    shut: Option<u64>,
    /// Items that were made into batches.
    batched: AtomicUsize,
}

impl IterableDataset for Numbers {
    type Item = usize;
    type Batch = Vec<usize>;

    fn stream(&self, epoch: u64) -> Result<ItemStream<usize>, BoxError> {
        if self.shut == Some(epoch) {
            return Err("no such file".into());
        }
        let (bad, cursed) = (self.bad, self.cursed);
        let items = (0..self.len).map(move |item| {
            assert_ne!(Some(item), cursed, "the stream is cursed");
            if Some(item) == bad {
                return Err(format!("item {item} is corrupt").into());
            }
            Ok(1000 * epoch as usize + item)
        });
        Ok(Box::new(items))
    }

    fn batch(&self, items: Vec<usize>) -> Result<Vec<usize>, BoxError> {
        self.batched.fetch_add(items.len(), Relaxed);
        Ok(items)
    }
}

fn numbers(len: usize) -> Arc<Numbers> {
    Arc::new(Numbers { len, ..Numbers::default() })
}

fn sampler(replicas: usize, rank: usize) -> StreamSampler {
    StreamSampler::with_replicas(replicas, rank).unwrap()
}

fn all(loader: DataLoader<Numbers, &StreamSampler>) -> Vec<Vec<usize>> {
    loader.into_iter().map(|batch| batch.unwrap()).collect()
}

#[test]
fn ranks_take_items_in_turn() {
    let dataset = numbers(14);
    let load = |rank| all(DataLoader::iterable(&dataset, &sampler(3, rank), 2));
    assert_eq!(load(0), [[0, 3], [6, 9]]);
    assert_eq!(load(1), [[1, 4], [7, 10]]);
    assert_eq!(load(2), [[2, 5], [8, 11]]);
    let load = |rank| all(DataLoader::iterable(&dataset, &sampler(3, rank), 2).drop_last(false));
    assert_eq!(load(0), [vec![0, 3], vec![6, 9], vec![12]]);
    assert_eq!(load(1), [vec![1, 4], vec![7, 10], vec![13]]);
    assert_eq!(load(2), [[2, 5], [8, 11]]);
}

#[test]
fn each_epoch_has_its_stream() {
    let mut sampler = sampler(1, 0);
    sampler.set_epoch(3);
    assert_eq!(all(DataLoader::iterable(&numbers(4), &sampler, 2)), [[3000, 3001], [3002, 3003]]);
    assert_eq!((sampler.epoch(), sampler.state().taken), (3, 4));
    sampler.set_epoch(4);
    assert_eq!(sampler.state().taken, 0);
}

#[test]
fn a_worker_makes_batches_of_its_own_items_only() {
    let dataset = numbers(60);
    assert_eq!(all(DataLoader::iterable(&dataset, &sampler(3, 1), 5).workers(3)).len(), 4);
    assert_eq!(dataset.batched.load(Relaxed), 20);
}

#[test]
fn what_fails_is_an_error_on_all_ranks() {
    for workers in [0, 1, 3] {
        let dataset = Arc::new(Numbers { len: 40, bad: Some(21), ..Numbers::default() });
        for rank in 0..2 {
            let sampler = sampler(2, rank);
            let loader = DataLoader::iterable(&dataset, &sampler, 4).workers(workers);
            let batches: Vec<_> = loader.into_iter().collect();
            assert_eq!(batches.len(), 3);
            let error = batches[2].as_ref().unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "cannot load batch 2 of rank {rank} (positions 8 to 12 of its epoch): item 21 \
                     is corrupt"
                )
            );
        }

        let dataset = Arc::new(Numbers { len: 40, cursed: Some(9), ..Numbers::default() });
        let sampler = sampler(1, 0);
        let loader = DataLoader::iterable(&dataset, &sampler, 4).workers(workers);
        let batches: Vec<_> = loader.into_iter().collect();
        let error = batches.last().unwrap().as_ref().unwrap_err();
        assert!(matches!(error, LoaderError::Panic { batch: BatchId { number: 2, .. }, .. }));

        let dataset = Arc::new(Numbers { len: 40, shut: Some(0), ..Numbers::default() });
        let loader = DataLoader::iterable(&dataset, &sampler, 4).workers(workers);
        let error = loader.into_iter().next().unwrap().unwrap_err().to_string();
        assert!(error.ends_with("(positions 0 to 4 of its epoch): no such file"), "{error}");
    }
}

#[test]
fn settings_that_cannot_work_are_errors() {
    let dataset = numbers(4);
    let mut sampler = sampler(1, 0);
    sampler.resume(&SamplerState { taken: 2, ..sampler.state() }).unwrap();
    let mut batches = DataLoader::iterable(&dataset, &sampler, 0).into_iter();
    assert!(matches!(batches.next(), Some(Err(LoaderError::BatchSize))));
    assert!(batches.next().is_none());
    assert_eq!(all(DataLoader::iterable(&dataset, &sampler, 2)), [[2, 3]], "the position is lost");

    assert_eq!(StreamSampler::with_replicas(0, 0).unwrap_err(), SamplerError::Replicas);
    let error = StreamSampler::with_replicas(2, 2).unwrap_err();
    assert_eq!(error.to_string(), "invalid rank 2, it should be in the interval [0, 1]");
    let state = DistributedSampler::with_replicas(0, 1, 0).unwrap().state();
    let error = StreamSampler::with_replicas(1, 0).unwrap().resume(&state).unwrap_err();
    let expected = "cannot resume: the state was saved with shuffle Torch, this sampler has \
                    shuffle stream";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn one_batch_has_all_items() {
    let dataset = numbers(4);
    for (rank, items) in [[0, 2], [1, 3]].into_iter().enumerate() {
        let mut sampler = sampler(2, rank);
        let load = |sampler: &_| {
            all(DataLoader::iterable(&dataset, sampler, usize::MAX).drop_last(false).workers(2))
        };
        assert_eq!(load(&sampler), [items]);
        sampler.resume(&sampler.state()).unwrap();
        assert!(load(&sampler).is_empty());
    }
}

/// A stream of its own kind for each test.
struct Stream(fn() -> ItemStream<usize>);

impl IterableDataset for Stream {
    type Item = usize;
    type Batch = Vec<usize>;

    fn stream(&self, _epoch: u64) -> Result<ItemStream<usize>, BoxError> {
        Ok(self.0())
    }

    fn batch(&self, items: Vec<usize>) -> Result<Vec<usize>, BoxError> {
        Ok(items)
    }
}

/// The item that cannot be read is another rank's, or was taken before: a stream that ends there is
/// not at its end.
#[test]
fn an_error_that_ends_the_stream_is_not_its_end() {
    let stream =
        Arc::new(Stream(|| Box::new((0..5).map(Ok).chain([Err("cannot read on".into())]))));
    for (workers, drop_last) in [(0, true), (1, false), (3, true)] {
        let load = |sampler: &_| {
            let loader = DataLoader::iterable(&stream, sampler, 1).drop_last(drop_last);
            loader.workers(workers).into_iter().map(|batch| batch.is_ok()).collect::<Vec<_>>()
        };
        let mut sampler = sampler(2, 0);
        assert_eq!(load(&sampler).last(), Some(&false), "{workers} workers");
        sampler.resume(&SamplerState { taken: 8, ..sampler.state() }).unwrap();
        assert_eq!(load(&sampler), [false], "{workers} workers");
    }
}

#[test]
fn a_stream_that_begins_anew_after_its_end_is_read_once() {
    let stream = Arc::new(Stream(|| {
        let mut item = 0;
        Box::new(std::iter::from_fn(move || {
            item = (item + 1) % 6;
            (item > 0).then_some(Ok(item))
        }))
    }));
    for workers in 0..3 {
        let mut sampler = sampler(1, 0);
        let load = |sampler: &_| -> Vec<usize> {
            let loader = DataLoader::iterable(&stream, sampler, 3).drop_last(false);
            loader.workers(workers).into_iter().flat_map(|batch| batch.unwrap()).collect()
        };
        assert_eq!(load(&sampler), [1, 2, 3, 4, 5]);
        sampler.resume(&sampler.state()).unwrap();
        assert!(load(&sampler).is_empty());
    }
}

/// A stream that need not read what it skips, and cannot.
struct Skips;

impl IterableDataset for Skips {
    type Item = i64;
    type Batch = Tensor;

    fn stream(&self, _epoch: u64) -> Result<ItemStream<i64>, BoxError> {
        Err("it is read from its beginning".into())
    }

    fn stream_from(&self, epoch: u64, skipped: usize) -> Result<ItemStream<i64>, BoxError> {
        let first = 100 * epoch as i64 + skipped as i64;
        Ok(Box::new((first..first + 4).map(Ok)))
    }

    fn batch(&self, items: Vec<i64>) -> Result<Tensor, BoxError> {
        Ok(Tensor::f_from_slice(&items)?)
    }
}

#[test]
fn a_data_set_that_can_skip_items_does() {
    let stream = Arc::new(Skips.to_device(Device::Cpu));
    let mut sampler = sampler(2, 1);
    sampler.resume(&SamplerState { epoch: 2, taken: 15, ..sampler.state() }).unwrap();
    let loaded: Result<Vec<_>, _> =
        DataLoader::iterable(&stream, &sampler, 2).workers(2).into_iter().collect();
    let [batch] = &loaded.unwrap()[..] else { panic!("one batch") };
    assert_eq!(Vec::<i64>::try_from(batch).unwrap(), [216, 218]);
}

#[test]
fn what_is_prefetched_is_not_taken() {
    let (dataset, sampler) = (numbers(100), sampler(2, 1));
    let mut batches =
        DataLoader::iterable(&dataset, &sampler, 3).workers(2).prefetch(4).into_iter();
    assert_eq!(batches.next().unwrap().unwrap(), [1, 3, 5]);
    assert_eq!(sampler.state().taken, 6);
}

proptest! {
    /// However often the number of ranks, workers and the batch size change.
    #[test]
    fn each_item_is_seen_once(
        len in 0usize..300,
        epoch in 0u64..3,
        stages in prop::collection::vec((1usize..5, 0usize..4, 1usize..6, 0usize..8), 0..4),
        last in (1usize..5, 0usize..4, 1usize..6),
    ) {
        let dataset = numbers(len);
        let mut start = sampler(1, 0);
        start.set_epoch(epoch);
        let mut state = start.state();
        let mut seen = Vec::new();
        let (replicas, workers, batch_size) = last;
        let last = (replicas, workers, batch_size, usize::MAX);
        for (n, (replicas, workers, batch_size, steps)) in
            stages.iter().copied().chain([last]).enumerate()
        {
            let mut counts = Vec::new();
            let mut next = state.clone();
            for rank in 0..replicas {
                let mut sampler = sampler(replicas, rank);
                sampler.resume(&state).unwrap();
                sampler.set_epoch(epoch); // as the usual loop over epochs does
                let loader = DataLoader::iterable(&dataset, &sampler, batch_size)
                    .workers(workers)
                    .drop_last(n < stages.len());
                let batches: Vec<_> =
                    loader.into_iter().take(steps).map(|batch| batch.unwrap()).collect();
                counts.push(batches.len());
                seen.extend(batches.concat());
                if rank == 0 {
                    next = sampler.state();
                }
            }
            if n < stages.len() {
                prop_assert!(counts.iter().all(|&count| count == counts[0]), "{:?}", counts);
            }
            state = next;
        }
        seen.sort_unstable();
        let first = 1000 * epoch as usize;
        prop_assert_eq!(seen, (first..first + len).collect::<Vec<_>>());
    }

    #[test]
    fn the_order_is_the_same_whatever_the_workers(
        len in 0usize..200, replicas in 1usize..4, batch_size in 1usize..9, workers in 1usize..5,
        drop_last: bool,
    ) {
        let dataset = numbers(len);
        let sampler = sampler(replicas, replicas - 1);
        let loader = || DataLoader::iterable(&dataset, &sampler, batch_size).drop_last(drop_last);
        prop_assert_eq!(all(loader().workers(workers)), all(loader().workers(0)));
    }
}
