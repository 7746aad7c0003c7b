//! A group's flight recorder: a ring of its last operations.
//!
//! Recording an operation takes two readings of the clock and one cache line of plain stores, so it
//! is always on. Threads that record at the same time take different slots. A reader that meets a
//! slot while it is written, or written anew, leaves it out.

use std::cell::Cell;
use std::sync::atomic::{fence, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::clock::{self, Scale};
use super::record::Record;
use super::timeline;
use crate::kind::Kind;

/// How many operations a group keeps.
pub const CAPACITY: usize = 256;
/// The back-end of operations on GPUs.
const NCCL: &str = "nccl";
/// Instead of a number that is not there.
const NONE: u64 = u64::MAX;
/// How many operations that are under way [`activity`] names.
const SHOWN: usize = 4;
/// The stamp of a slot that is being written.
const WRITING: u64 = 0;

/// What is known of an operation when it begins.
#[derive(Debug, Clone, Copy)]
pub struct Start {
    pub kind: Kind,
    pub sequence: u64,
    pub bytes: u64,
    pub bucket: Option<u32>,
    /// Its buffers are on a GPU.
    pub is_cuda: bool,
    /// When the program asked for it, in ticks; None for now.
    pub queued: Option<u64>,
}

/// An operation that the program has asked for, and that begins later on another thread.
#[derive(Debug, Clone, Copy)]
pub struct Queued {
    pub sequence: u64,
    /// When, in ticks.
    pub at: u64,
}

thread_local! {
    static QUEUED: Cell<Option<Queued>> = const { Cell::new(None) };
    static CURRENT: Cell<Option<RecordId>> = const { Cell::new(None) };
}

impl Queued {
    /// Runs the operation: the first that `run` begins.
    pub fn run<T>(self, run: impl FnOnce() -> T) -> T {
        QUEUED.set(Some(self));
        let result = run();
        QUEUED.set(None);
        result
    }

    /// The operation that this thread runs, once.
    pub fn take() -> Option<Queued> {
        QUEUED.take()
    }
}

/// An operation under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordId(u64);

/// One cache line.
#[derive(Default)]
#[repr(align(64))]
struct Slot {
    /// The operation's number in the ring, from 1 on.
    stamp: AtomicU64,
    sequence: AtomicU64,
    bytes: AtomicU64,
    /// Kind, whether on a GPU, and the bucket's number plus one.
    what: AtomicU64,
    queued: AtomicU64,
    started: AtomicU64,
    done: AtomicU64,
}

/// The last operations of one group.
pub struct Recorder {
    ring: Arc<Ring>,
    collectives: AtomicU64,
    messages: AtomicU64,
}

struct Ring {
    group: String,
    host_backend: &'static str,
    next: AtomicU64,
    slots: [Slot; CAPACITY],
}

/// Those of all groups of this process.
static RINGS: Mutex<Vec<Weak<Ring>>> = Mutex::new(Vec::new());

impl Recorder {
    /// For the group of this name, whose collectives on the host `host_backend` does.
    pub fn new(group: String, host_backend: &'static str) -> Self {
        clock::start();
        timeline::enter_group();
        let ring = Arc::new(Ring {
            group,
            host_backend,
            next: AtomicU64::new(1),
            slots: std::array::from_fn(|_| Slot::default()),
        });
        let mut rings = RINGS.lock().unwrap_or_else(PoisonError::into_inner);
        rings.retain(|ring| ring.strong_count() > 0);
        rings.push(Arc::downgrade(&ring));
        Self { ring, collectives: AtomicU64::new(0), messages: AtomicU64::new(0) }
    }

    /// The number of the group's next collective, which takes it.
    pub fn next_collective(&self) -> u64 {
        self.collectives.fetch_add(1, Ordering::Relaxed)
    }

    /// The number of this rank's next message, which takes it.
    pub fn next_message(&self) -> u64 {
        self.messages.fetch_add(1, Ordering::Relaxed)
    }

    /// An operation is asked for: a collective, or a message. [`Queued::run`] runs it.
    pub fn queue(&self, is_collective: bool) -> Queued {
        let sequence = if is_collective { self.next_collective() } else { self.next_message() };
        Queued { sequence, at: clock::now() }
    }

    /// An operation of this thread begins on the host: [`Recorder::end`] is its end.
    #[inline]
    pub fn begin(&self, start: &Start) {
        CURRENT.set(Some(self.start(start)));
    }

    /// A message of this thread begins on the host, as [`Recorder::begin`] has it.
    pub fn begin_message(&self, kind: Kind, bytes: usize) {
        let queued = Queued::take();
        let sequence = queued.map_or_else(|| self.next_message(), |queued| queued.sequence);
        let (bytes, queued) = (bytes as u64, queued.map(|queued| queued.at));
        self.begin(&Start { kind, sequence, bytes, bucket: None, is_cuda: false, queued });
    }

    /// The operation that this thread has begun, if any, is over, or has failed.
    #[inline]
    pub fn end(&self, is_ok: bool) {
        match CURRENT.take() {
            Some(id) if is_ok => self.finish(id),
            Some(id) => self.fail(id),
            None => {}
        }
    }

    /// An operation begins now.
    #[inline]
    pub fn start(&self, start: &Start) -> RecordId {
        let id = self.ring.next.fetch_add(1, Ordering::Relaxed);
        let now = clock::now();
        let slot = &self.ring.slots[id as usize % CAPACITY];
        slot.stamp.store(WRITING, Ordering::Relaxed);
        fence(Ordering::Release);
        let bucket = start.bucket.map_or(0, |bucket| u64::from(bucket) + 1);
        let what = start.kind as u64 | u64::from(start.is_cuda) << 8 | bucket << 16;
        slot.sequence.store(start.sequence, Ordering::Relaxed);
        slot.bytes.store(start.bytes, Ordering::Relaxed);
        slot.what.store(what, Ordering::Relaxed);
        slot.queued.store(start.queued.unwrap_or(now), Ordering::Relaxed);
        slot.started.store(now, Ordering::Relaxed);
        slot.done.store(NONE, Ordering::Relaxed);
        slot.stamp.store(id, Ordering::Release);
        RecordId(id)
    }

    /// The operation is over.
    #[inline]
    pub fn finish(&self, id: RecordId) {
        let Some(slot) = self.slot(id) else { return };
        slot.done.store(clock::now(), Ordering::Relaxed);
        if timeline::is_on() {
            self.add_to_timeline(id);
        }
    }

    /// The operation has failed. It stays as if it were under way.
    pub fn fail(&self, id: RecordId) {
        if timeline::is_on() {
            self.ring.read(id, Scale::now()).into_iter().for_each(timeline::add_failed_operation);
        }
    }

    /// The operation is over, and began and ended at these times, in ticks.
    pub fn finish_at(&self, id: RecordId, started: u64, done: u64) {
        let Some(slot) = self.slot(id) else { return };
        slot.started.store(started, Ordering::Relaxed);
        slot.done.store(done, Ordering::Relaxed);
        if timeline::is_on() {
            self.add_to_timeline(id);
        }
    }

    /// What is kept, the oldest first.
    pub fn records(&self) -> Vec<Record> {
        self.ring.records()
    }

    /// What this rank is in, and what it did last, for errors of operations that take too long.
    pub fn summary(&self) -> String {
        let records = self.records();
        let now = clock::monotonic_of(Instant::now());
        let under_way = records.iter().filter(|record| record.done.is_none()).map(|record| {
            let time = now.saturating_sub(record.started).as_secs_f64();
            format!("{} for {time:.1} s", name(record))
        });
        let under_way = under_way.collect::<Vec<_>>().join("; ");
        match records.iter().rev().find(|record| record.done.is_some()) {
            Some(last) => format!("in {under_way}; last completed {}", name(last)),
            None => format!("in {under_way}; has completed nothing before"),
        }
    }

    #[cold]
    fn add_to_timeline(&self, id: RecordId) {
        if let Some(record) = self.ring.read(id, Scale::now()) {
            timeline::add_operation(record);
        }
    }

    /// Its slot, unless a later operation has taken it.
    fn slot(&self, id: RecordId) -> Option<&Slot> {
        let slot = &self.ring.slots[id.0 as usize % CAPACITY];
        (slot.stamp.load(Ordering::Relaxed) == id.0).then_some(slot)
    }
}

impl Ring {
    fn records(&self) -> Vec<Record> {
        let next = self.next.load(Ordering::Acquire);
        let first = next.saturating_sub(CAPACITY as u64).max(1);
        let scale = Scale::now();
        (first..next).filter_map(|id| self.read(RecordId(id), scale)).collect()
    }

    fn read(&self, id: RecordId, scale: Scale) -> Option<Record> {
        let slot = &self.slots[id.0 as usize % CAPACITY];
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        if slot.stamp.load(Ordering::Acquire) != id.0 {
            return None;
        }
        let [sequence, bytes, what, queued, started, done] =
            [&slot.sequence, &slot.bytes, &slot.what, &slot.queued, &slot.started, &slot.done]
                .map(load);
        fence(Ordering::Acquire);
        if slot.stamp.load(Ordering::Relaxed) != id.0 {
            return None;
        }
        Some(Record {
            group: self.group.clone(),
            sequence,
            operation: Kind::from_code(what as u8)?.name(),
            bytes,
            bucket: ((what >> 16) as u32).checked_sub(1),
            backend: if what >> 8 & 1 == 1 { NCCL } else { self.host_backend },
            queued: scale.monotonic(queued),
            started: scale.monotonic(started),
            done: (done != NONE).then(|| scale.monotonic(done)),
        })
    }
}

/// What this process is in, in all its groups, and what it completed last, for the report of a hang.
/// Empty if nothing is recorded.
pub fn activity() -> String {
    let rings: Vec<_> = {
        let rings = RINGS.lock().unwrap_or_else(PoisonError::into_inner);
        rings.iter().filter_map(Weak::upgrade).collect()
    };
    let mut records: Vec<_> = rings.iter().flat_map(|ring| ring.records()).collect();
    records.sort_by_key(|record| record.started);
    let name = |record: &Record| match rings.len() {
        1 => name(record),
        _ => format!("{} of group {}", name(record), record.group),
    };
    let mut under_way: Vec<_> =
        records.iter().filter(|record| record.done.is_none()).map(name).collect();
    if under_way.len() > SHOWN {
        let more = format!("{} more", under_way.len() - SHOWN);
        under_way.truncate(SHOWN);
        under_way.push(more);
    }
    let last = records.iter().filter(|record| record.done.is_some()).max_by_key(|last| last.done);
    let under_way = Some(under_way.join(", ")).filter(|text| !text.is_empty());
    let under_way = under_way.map(|under_way| format!("under way: {under_way}"));
    let last = last.map(|last| format!("last completed: {}", name(last)));
    under_way.into_iter().chain(last).collect::<Vec<_>>().join("; ")
}

fn name(record: &Record) -> String {
    let bucket = record.bucket.map_or(String::new(), |bucket| format!(" (bucket {bucket})"));
    format!("{} #{}{bucket}", record.operation, record.sequence)
}

/// How long it takes to record this many operations, for benches.
pub fn record_cost(operations: u32) -> Duration {
    let recorder = Recorder::new("bench".into(), "shm");
    let begin = Instant::now();
    for _ in 0..operations {
        let (kind, sequence) = (Kind::AllReduce, recorder.next_collective());
        let start = Start { kind, sequence, bytes: 4, bucket: None, is_cuda: false, queued: None };
        recorder.begin(&start);
        recorder.end(true);
    }
    begin.elapsed()
}

impl Drop for Recorder {
    fn drop(&mut self) {
        timeline::leave_group();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(sequence: u64, bucket: Option<u32>) -> Start {
        let kind = Kind::AllReduce;
        Start { kind, sequence, bytes: 4000, bucket, is_cuda: true, queued: None }
    }

    #[test]
    fn a_record_says_what_was_done_and_when() {
        let recorder = Recorder::new("0.1".into(), "shm");
        let id = recorder.start(&start(recorder.next_collective(), Some(0)));
        let [under_way] = recorder.records().try_into().expect("one record");
        let expected = Record {
            group: "0.1".into(),
            sequence: 0,
            operation: "all_reduce",
            bytes: 4000,
            bucket: Some(0),
            backend: "nccl",
            queued: under_way.queued,
            started: under_way.started,
            done: None,
        };
        assert_eq!(under_way, expected);
        recorder.finish(id);
        let [over] = recorder.records().try_into().expect("one record");
        assert!(over.queued <= over.started && over.started <= over.done.expect("it is over"));
        assert_eq!(recorder.next_collective(), 1);
        assert_eq!(recorder.next_message(), 0);
    }

    #[test]
    fn the_last_operations_are_kept() {
        let recorder = Recorder::new("0".into(), "shm");
        let ids: Vec<RecordId> =
            (0..CAPACITY as u64 + 10).map(|n| recorder.start(&start(n, None))).collect();
        recorder.finish(ids[0]); // its slot is another's now
        let records = recorder.records();
        assert_eq!(records.len(), CAPACITY);
        assert_eq!((records[0].sequence, records[0].done), (10, None));
        assert!(records.windows(2).all(|pair| pair[0].sequence + 1 == pair[1].sequence));
    }

    /// Other tests have groups in this process, too.
    #[test]
    fn the_activity_of_a_process_names_what_all_groups_are_in() {
        let groups = ["first", "second"].map(|name| Recorder::new(name.into(), "shm"));
        groups[0].finish(groups[0].start(&start(6, None)));
        groups[0].start(&start(7, None));
        groups[1].start(&start(3, Some(2)));
        let now = activity();
        assert!(now.starts_with("under way: ") && now.contains("; last completed: "), "{now}");
        let rings = RINGS.lock().unwrap().iter().filter(|ring| ring.strong_count() > 0).count();
        // At most SHOWN are named, those that began first.
        let has_both = ["all_reduce #7 of group first", "all_reduce #3 (bucket 2) of group second"]
            .iter()
            .all(|text| now.contains(text));
        assert!(has_both || rings > 2, "{now}");
        drop(groups);
        assert!(!activity().contains("of group first"));
    }

    #[test]
    fn threads_record_at_the_same_time() {
        let recorder = Recorder::new("0".into(), "shm");
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let recorder = &recorder;
                scope.spawn(move || {
                    for n in 0..10_000 {
                        let start =
                            Start { bytes: thread << 32 | n, ..start(thread << 32 | n, None) };
                        recorder.finish(recorder.start(&start));
                    }
                });
            }
            for _ in 0..100 {
                for record in recorder.records() {
                    assert_eq!(record.sequence, record.bytes, "a torn record");
                }
            }
        });
    }
}
