//! `DataLoader`: order, bounds, failures, and nothing left behind.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use flow_ddp::{DataLoader, Dataset, DistributedSampler, LoaderError, SamplerState};

/// Gives a batch's indices back, and records what the loader does to it.
#[derive(Default)]
struct Numbers {
    len: usize,
    /// Delay batches by a few milliseconds that depend on their first index.
    slow: bool,
    /// Index whose batch fails, and whether by a panic.
    bad: Option<(usize, bool)>,
    /// Index whose batch waits for this lock.
    stuck: (Option<usize>, Mutex<()>),
    /// Batches begun.
    begun: AtomicUsize,
    /// `/proc` folders of the threads that have made batches.
    threads: Mutex<Vec<PathBuf>>,
    /// One reference by each batch that is alive.
    alive: Arc<()>,
}

struct Batch {
    indices: Vec<usize>,
    _alive: Arc<()>,
}

impl Dataset for Numbers {
    type Batch = Batch;

    fn len(&self) -> usize {
        self.len
    }

    fn batch(&self, indices: &[usize]) -> Result<Batch, Box<dyn Error + Send + Sync>> {
        self.begun.fetch_add(1, SeqCst);
        let task = std::fs::read_link("/proc/thread-self")?;
        self.threads.lock().unwrap().push(Path::new("/proc").join(task));
        if self.slow {
            thread::sleep(Duration::from_millis((indices[0] as u64 * 7919) % 5));
        }
        if self.stuck.0.is_some_and(|stuck| indices.contains(&stuck)) {
            drop(self.stuck.1.lock());
        }
        match self.bad {
            Some((bad, false)) if indices.contains(&bad) => {
                return Err(format!("sample {bad} is corrupt").into());
            }
            Some((bad, true)) if indices.contains(&bad) => panic!("sample {bad} is cursed"),
            _ => {}
        }
        Ok(Batch { indices: indices.to_vec(), _alive: Arc::clone(&self.alive) })
    }
}

fn numbers(len: usize) -> Numbers {
    Numbers { len, ..Numbers::default() }
}

fn sampler(len: usize) -> DistributedSampler {
    DistributedSampler::with_replicas(len, 1, 0).unwrap().seed(3)
}

/// The first failure of a run over all batches, with the number of batches before it.
fn failure(loader: DataLoader<Numbers>) -> (usize, LoaderError) {
    let mut batches = loader.into_iter();
    let mut good = 0;
    loop {
        match batches.next().expect("a failure") {
            Ok(_) => good += 1,
            Err(error) => {
                assert!(batches.next().is_none() && batches.next().is_none());
                return (good, error);
            }
        }
    }
}

/// Waits until `condition` holds.
fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// No thread of the loader and no batch is left.
fn nothing_is_left(dataset: &Arc<Numbers>) {
    assert_eq!(Arc::strong_count(dataset), 1);
    assert_eq!(Arc::strong_count(&dataset.alive), 1);
    let threads = dataset.threads.lock().unwrap();
    assert!(!threads.is_empty());
    // A joined thread's entry goes a moment after the join.
    eventually("a loader thread survives", || threads.iter().all(|task| !task.exists()));
}

#[test]
fn batches_come_in_the_samplers_order() {
    for (workers, prefetch) in [(0, 2), (1, 1), (1, 2), (3, 1), (4, 3), (200, 2)] {
        let dataset = Arc::new(Numbers { slow: true, ..numbers(203) });
        let sampler = sampler(203);
        let loader = DataLoader::new(&dataset, &sampler, 10).workers(workers).prefetch(prefetch);
        assert_eq!(loader.len(), 21);
        let batches: Vec<Vec<usize>> =
            loader.into_iter().map(|batch| batch.unwrap().indices).collect();
        assert_eq!(batches.len(), 21);
        assert!(batches[..20].iter().all(|batch| batch.len() == 10));
        assert_eq!(batches.concat(), sampler.indices());
    }
}

#[test]
fn drop_last_leaves_out_the_short_batch() {
    let (dataset, sampler) = (Arc::new(numbers(23)), sampler(23));
    let loader = || DataLoader::new(&dataset, &sampler, 5).drop_last(true);
    assert_eq!(loader().len(), 4);
    let seen: Vec<usize> = loader().into_iter().flat_map(|batch| batch.unwrap().indices).collect();
    assert_eq!(seen, sampler.indices()[..20]);
}

#[test]
fn an_empty_data_set_gives_no_batch() {
    let (dataset, sampler) = (Arc::new(numbers(0)), sampler(0));
    let loader = DataLoader::new(&dataset, &sampler, 5);
    assert!(loader.is_empty());
    assert_eq!(loader.into_iter().count(), 0);
}

#[test]
fn settings_that_cannot_work_are_the_first_item() {
    let (dataset, sampler) = (Arc::new(numbers(10)), sampler(10));
    let (_, error) = failure(DataLoader::new(&dataset, &sampler, 0));
    assert_eq!(error.to_string(), "batch size 0, it should be at least 1");

    let dataset = Arc::new(numbers(9));
    let (good, error) = failure(DataLoader::new(&dataset, &sampler, 5));
    assert!(matches!(error, LoaderError::Length { sampler: 10, dataset: 9 }), "{error}");
    assert_eq!((good, dataset.begun.load(SeqCst)), (0, 0));
}

#[test]
fn settings_that_cannot_work_do_not_lose_the_position() {
    let (dataset, mut sampler) = (Arc::new(numbers(10)), sampler(10).shuffle(false));
    let state = SamplerState { taken: 7, ..sampler.state() };
    sampler.resume(&state).unwrap();
    failure(DataLoader::new(&dataset, &sampler, 0));
    let rest = DataLoader::new(&dataset, &sampler, 5).into_iter().next().unwrap().unwrap();
    assert_eq!(rest.indices, [7, 8, 9]);
}

#[test]
fn an_error_reaches_the_caller_in_its_place() {
    for workers in [0, 1, 3] {
        let sampler = DistributedSampler::with_replicas(100, 2, 1).unwrap().shuffle(false);
        let dataset = Arc::new(Numbers { bad: Some((55, false)), slow: true, ..numbers(100) });
        let (good, error) = failure(DataLoader::new(&dataset, &sampler, 10).workers(workers));
        assert_eq!(good, 2);
        assert_eq!(
            error.to_string(),
            "cannot load batch 2 of rank 1 (positions 20 to 30 of its epoch, data set indices 41 \
             ... 59): sample 55 is corrupt"
        );
        assert_eq!(sampler.state().taken, 40);
        let LoaderError::Dataset { batch, .. } = error else { panic!("{error}") };
        assert_eq!((batch.positions, batch.indices), (20..30, sampler.indices()[20..30].to_vec()));
        if workers > 0 {
            nothing_is_left(&dataset);
        }
    }
}

#[test]
fn a_panic_reaches_the_caller_as_an_error() {
    for workers in [0, 1, 3] {
        let sampler = sampler(100).shuffle(false);
        let dataset = Arc::new(Numbers { bad: Some((99, true)), ..numbers(100) });
        let (good, error) = failure(DataLoader::new(&dataset, &sampler, 7).workers(workers));
        assert_eq!(good, 14);
        assert_eq!(
            error.to_string(),
            "the data set panicked in batch 14 of rank 0 (positions 98 to 100 of its epoch, data \
             set indices 98 ... 99): sample 99 is cursed"
        );
        if workers > 0 {
            nothing_is_left(&dataset);
        }
    }
}

#[test]
fn a_data_set_that_hangs_is_an_error() {
    let dataset = Arc::new(Numbers { stuck: (Some(5), Mutex::default()), ..numbers(12) });
    let held = dataset.stuck.1.lock().unwrap();
    let sampler = sampler(12).shuffle(false);
    // The worker has made the first batch when it begins the second.
    let next_begins = |batches| eventually("no batch", || dataset.begun.load(SeqCst) == batches);
    let timeout = Duration::from_millis(500);
    let mut batches = DataLoader::new(&dataset, &sampler, 4).timeout(timeout).into_iter();
    next_begins(2);
    assert!(batches.next().unwrap().is_ok());
    let error = batches.next().unwrap().err().unwrap();
    assert!(matches!(error, LoaderError::Timeout { .. }), "{error}");
    assert!(error.to_string().starts_with("batch 1 of rank 0 (positions 4 to 8"), "{error}");
    assert!(batches.next().is_none());
    drop(batches); // waits for nobody

    // Nor does one that is dropped while the data set hangs wait for ever.
    let mut batches = DataLoader::new(&dataset, &sampler, 4).timeout(timeout).into_iter();
    next_begins(4);
    assert!(batches.next().unwrap().is_ok());
    drop(batches);
    drop(held);
    eventually("the worker goes on for ever", || Arc::strong_count(&dataset) == 1);
    nothing_is_left(&dataset);
}

#[test]
fn dropping_half_way_leaves_nothing_behind() {
    for taken in [0, 1, 5] {
        let (dataset, sampler) = (Arc::new(Numbers { slow: true, ..numbers(1000) }), sampler(1000));
        let mut batches = DataLoader::new(&dataset, &sampler, 4).workers(3).prefetch(2).into_iter();
        assert!(batches.by_ref().take(taken).all(|batch| batch.is_ok()));
        eventually("every worker has started", || dataset.begun.load(SeqCst) >= taken + 3);
        drop(batches);
        nothing_is_left(&dataset);
        assert_eq!(sampler.state().taken, 4 * taken);
    }
}

#[test]
fn a_finished_iteration_leaves_nothing_behind() {
    let (dataset, sampler) = (Arc::new(numbers(100)), sampler(100));
    assert_eq!(DataLoader::new(&dataset, &sampler, 10).workers(2).into_iter().count(), 10);
    nothing_is_left(&dataset);
}

#[test]
fn prefetches_as_much_as_it_may_and_no_more() {
    for (workers, prefetch) in [(1, 1), (1, 3), (3, 2)] {
        let (dataset, sampler) = (Arc::new(numbers(400)), sampler(400));
        let ahead = workers * prefetch;
        let loader = DataLoader::new(&dataset, &sampler, 10).workers(workers).prefetch(prefetch);
        for (taken, _batch) in loader.into_iter().enumerate() {
            let most = 40.min(taken + 1 + ahead);
            eventually("too little is prefetched", || dataset.begun.load(SeqCst) >= most);
            thread::sleep(Duration::from_millis(2));
            assert_eq!(dataset.begun.load(SeqCst), most);
        }
    }
}

#[test]
fn without_workers_nothing_is_prefetched() {
    let (dataset, sampler) = (Arc::new(numbers(100)), sampler(100));
    for (taken, _batch) in
        DataLoader::new(&dataset, &sampler, 10).workers(0).into_iter().enumerate()
    {
        assert_eq!(dataset.begun.load(SeqCst), taken + 1);
    }
    let here = Path::new("/proc").join(std::fs::read_link("/proc/thread-self").unwrap());
    assert!(dataset.threads.lock().unwrap().iter().all(|task| *task == here));
}

#[test]
fn continues_in_mid_epoch() {
    let dataset = Arc::new(numbers(103));
    let make = || DistributedSampler::with_replicas(103, 2, 1).unwrap().keyed_shuffle();
    let mut before = make();
    before.set_epoch(2);
    let mut seen = Vec::new();
    for batch in DataLoader::new(&dataset, &before, 8).workers(2).prefetch(4).into_iter().take(3) {
        seen.extend(batch.unwrap().indices);
    }
    // Prefetched batches do not count as seen.
    let state = before.state();
    assert_eq!((state.epoch, state.taken), (2, 48));

    let mut after = make();
    after.resume(&state).unwrap();
    // Another batch size will do.
    let loader = DataLoader::new(&dataset, &after, 5);
    assert_eq!(loader.len(), 6);
    seen.extend(loader.into_iter().flat_map(|batch| batch.unwrap().indices));
    assert_eq!(seen, before.indices());
    assert_eq!(after.state().taken, 103);
}
