//! A group's flight recorder: a ring of its last operations.
//!
//! Recording an operation takes two readings of the clock and writes to one cache line, so it is
//! always on. Threads that record at the same time take different slots. A reader that meets a
//! slot while it is written, or written anew, leaves it out.
//!
//! An operation keeps its slot until it is over. One that begins while as many as there are slots are
//! under way is not recorded, and counts as lost in the timeline.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use flow_store::clock::{self, Scale};
use flow_store::flight::slot;

use super::record::Record;
use super::ring::{Ring, Slots, name};
use super::slot::{FAILED, RecordId, RecordSlot, WRITING};
use super::{registry, timeline};
use crate::error::Result;
use crate::kind::Kind;
use crate::operation_context::{OperationContext, QueuedCall};

/// The facts of an operation that are known when it begins.
#[derive(Debug, Clone, Copy)]
pub struct Start {
    pub kind: Kind,
    pub sequence: u64,
    pub bytes: u64,
    pub bucket: Option<u32>,
    /// Its buffers are on a GPU.
    pub is_cuda: bool,
    /// The time at which the program asked for it, in ticks; None for now.
    pub queued: Option<u64>,
}

/// The last operations of one group.
pub struct Recorder {
    ring: Arc<Ring>,
    collectives: AtomicU64,
    messages: AtomicU64,
    /// An operation has failed, so that the timeline is in its file.
    has_failed: AtomicBool,
}

impl Recorder {
    /// Returns the recorder of the group of this name, whose collectives on the host `host_backend`
    /// does.
    pub fn new(group: String, host_backend: &'static str, is_in_timeline: bool) -> Self {
        clock::start();
        timeline::enter_group();
        let slots = Slots::new(&group);
        let ring =
            Arc::new(Ring { group, host_backend, is_in_timeline, next: AtomicU64::new(1), slots });
        registry::register(&ring);
        Self {
            ring,
            collectives: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
        }
    }

    /// Takes the number of the group's next collective.
    pub fn next_collective(&self) -> u64 {
        self.collectives.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the number of the collective that this thread begins, and when the program asked for
    /// it, if that was earlier.
    #[inline]
    pub fn begin_collective(&self) -> (u64, Option<u64>) {
        match OperationContext::queued() {
            Some(QueuedCall { sequence, at }) => (sequence, Some(at)),
            None => (self.next_collective(), None),
        }
    }

    /// Takes the number of this rank's next message.
    pub fn next_message(&self) -> u64 {
        self.messages.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes that an operation is asked for: a collective, or a message. [`QueuedCall::run`] runs
    /// it.
    pub fn queue(&self, is_collective: bool) -> QueuedCall {
        let sequence = if is_collective { self.next_collective() } else { self.next_message() };
        QueuedCall { sequence, at: clock::now() }
    }

    /// Runs an operation on the host, which [`Recorder::begin`] begins. It is over when `operation`
    /// returns, and has failed if that is an error or a panic.
    #[inline]
    pub fn run<T>(&self, operation: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut end = End { recorder: self, is_ok: false };
        let result = operation();
        end.is_ok = result.is_ok();
        result
    }

    /// Notes that an operation of this thread begins on the host, in [`Recorder::run`].
    #[inline]
    pub fn begin(&self, start: &Start) {
        OperationContext::set_record(self.start(start));
    }

    /// Notes that a message of this thread begins on the host, as [`Recorder::begin`] has it.
    pub fn begin_message(&self, kind: Kind, bytes: usize) {
        let queued = OperationContext::queued();
        let sequence = queued.map_or_else(|| self.next_message(), |queued| queued.sequence);
        self.begin(&Start {
            kind,
            sequence,
            bytes: bytes as u64,
            bucket: None,
            is_cuda: false,
            queued: queued.map(|queued| queued.at),
        });
    }

    /// Notes that the operation that this thread has begun, if any, is over, or has failed.
    #[inline]
    fn end(&self, is_ok: bool) {
        match OperationContext::take_record() {
            Some(id) if is_ok => self.finish(id),
            Some(id) => self.fail([id]),
            None => {}
        }
    }

    /// Notes that an operation begins now.
    #[inline]
    pub fn start(&self, start: &Start) -> RecordId {
        let id = self.ring.take_slot();
        if id == RecordId::NONE {
            return id;
        }
        let now = clock::now();
        let slot = self.ring.slot(id);
        slot.stamp.store(WRITING, Ordering::Relaxed);
        fence(Ordering::Release);
        let bucket = start.bucket.map_or(0, |bucket| u64::from(bucket) + 1);
        let message = if start.kind.is_message() { slot::MESSAGE } else { 0 };
        let what = start.kind as u64 | u64::from(start.is_cuda) << 8 | message | bucket << 16;
        slot.sequence.store(start.sequence, Ordering::Relaxed);
        slot.bytes.store(start.bytes, Ordering::Relaxed);
        slot.what.store(what, Ordering::Relaxed);
        slot.queued.store(start.queued.unwrap_or(now), Ordering::Relaxed);
        slot.started.store(now, Ordering::Relaxed);
        slot.stamp.store(id.0, Ordering::Release);
        id
    }

    /// Notes that the operation is over.
    #[inline]
    pub fn finish(&self, id: RecordId) {
        let is_end = self.slot(id).finish(id, clock::now());
        self.add_to_timeline(id, is_end);
    }

    /// Notes that these operations have failed. The timeline is written at once, as the program may
    /// not come to its end, but for one failure of the group only.
    pub fn fail(&self, ids: impl IntoIterator<Item = RecordId>) {
        let mut any = false;
        for id in ids {
            any = true;
            let is_end = self.slot(id).finish(id, FAILED | clock::now());
            self.add_to_timeline(id, is_end);
        }
        if any && timeline::is_on() && !self.has_failed.swap(true, Ordering::Relaxed) {
            timeline::write();
        }
    }

    /// Notes that the operation is over, and began and ended at these times, in ticks.
    pub fn finish_at(&self, id: RecordId, started: u64, done: u64) {
        let is_end = self.slot(id).finish_at(id, started, done);
        self.add_to_timeline(id, is_end);
    }

    /// Returns the records that are kept, the oldest first.
    pub fn records(&self) -> Vec<Record> {
        self.ring.records()
    }

    /// Says which operations this rank is in, and which was its last, for errors of operations that
    /// take too long.
    pub fn summary(&self) -> String {
        let records = self.records();
        let now = clock::monotonic_of(Instant::now());
        let under_way = records.iter().filter(|record| record.done.is_none()).map(|record| {
            let time = now.saturating_sub(record.started).as_secs_f64();
            format!("{} for {time:.1} s", name(record))
        });
        let under_way = under_way.collect::<Vec<_>>().join("; ");
        let completed = records.iter().filter(|record| record.done.is_some() && !record.has_failed);
        match completed.max_by_key(|last| last.done) {
            Some(last) => format!("in {under_way}; last completed {}", name(last)),
            None => format!("in {under_way}; has completed nothing before"),
        }
    }

    /// Adds an operation to the timeline when it ends; one without a slot counts as lost.
    #[inline]
    fn add_to_timeline(&self, id: RecordId, is_end: bool) {
        if timeline::is_on() && (is_end || id == RecordId::NONE) {
            self.add_event(id);
        }
    }

    #[cold]
    fn add_event(&self, id: RecordId) {
        if self.ring.is_in_timeline {
            timeline::add_operation(self.ring.read(id, Scale::now()));
        }
    }

    /// Returns the slot of this operation. [`RecordId::NONE`] gets some slot, which it cannot
    /// change.
    #[inline]
    fn slot(&self, id: RecordId) -> &RecordSlot {
        self.ring.slot(id)
    }
}

/// Ends the operation that a thread runs, also when it panics.
struct End<'a> {
    recorder: &'a Recorder,
    is_ok: bool,
}

impl Drop for End<'_> {
    #[inline]
    fn drop(&mut self) {
        self.recorder.end(self.is_ok);
    }
}

/// Returns how long it takes to record this many operations, for benches.
pub fn record_cost(operations: u32) -> Duration {
    let recorder = Recorder::new("bench".into(), "shm", false);
    let begin = Instant::now();
    for _ in 0..operations {
        let start = Start {
            kind: Kind::AllReduce,
            sequence: recorder.next_collective(),
            bytes: 4,
            bucket: None,
            is_cuda: false,
            queued: None,
        };
        let recorded = recorder.run(|| {
            recorder.begin(&start);
            Ok(())
        });
        std::hint::black_box(recorded.is_ok());
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
    use super::super::slot::CAPACITY;
    use super::*;

    fn start(sequence: u64, bucket: Option<u32>) -> Start {
        let kind = Kind::AllReduce;
        Start { kind, sequence, bytes: 4000, bucket, is_cuda: true, queued: None }
    }

    #[test]
    fn a_record_says_what_was_done_and_when() {
        let recorder = Recorder::new("0.1".into(), "shm", true);
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
            has_failed: false,
        };
        assert_eq!(under_way, expected);
        recorder.finish(id);
        let [over] = recorder.records().try_into().expect("one record");
        assert!(over.queued <= over.started && over.started <= over.done.expect("it is over"));
        assert!(!over.has_failed);
        assert_eq!(recorder.next_collective(), 1);
        assert_eq!(recorder.next_message(), 0);
    }

    #[test]
    fn the_last_operations_are_kept() {
        let recorder = Recorder::new("0".into(), "shm", true);
        for n in 0..CAPACITY as u64 + 10 {
            recorder.finish(recorder.start(&start(n, None)));
        }
        let records = recorder.records();
        assert_eq!((records.len(), records[0].sequence), (CAPACITY, 10));
        assert!(records.windows(2).all(|pair| pair[0].sequence + 1 == pair[1].sequence));
    }

    #[test]
    fn operations_under_way_are_kept_until_they_are_over() {
        let recorder = Recorder::new("0".into(), "shm", true);
        let first = recorder.start(&start(0, None));
        for n in 1..3 * CAPACITY as u64 {
            recorder.finish(recorder.start(&start(n, None)));
        }
        let records = recorder.records();
        assert_eq!((records.len(), records[0].sequence, records[0].done), (CAPACITY, 0, None));
        recorder.finish(first);
        let ids: Vec<RecordId> =
            (0..CAPACITY as u64).map(|n| recorder.start(&start(n, None))).collect();
        let none = recorder.start(&start(1000, None));
        assert_eq!(none, RecordId::NONE, "all slots are taken");
        recorder.finish(none);
        recorder.finish_at(none, 1, 2);
        assert!(recorder.records().iter().all(|record| record.done.is_none()));
        recorder.finish_at(ids[7], 1, 2);
        assert_eq!(recorder.start(&start(2000, None)).0 % CAPACITY as u64, ids[7].0 % 256);
    }

    #[test]
    fn failed_operations_are_no_longer_under_way() {
        let recorder = Recorder::new("0".into(), "shm", true);
        recorder.finish(recorder.start(&start(0, None)));
        let failed = recorder.start(&start(1, None));
        recorder.fail([failed]);
        let [done, failed] = recorder.records().try_into().expect("two records");
        assert_eq!((done.has_failed, failed.has_failed), (false, true));
        assert!(failed.started <= failed.done.expect("it is over"));
        assert!(recorder.summary().ends_with("last completed all_reduce #0"));
    }

    #[test]
    fn an_operation_ends_once() {
        let recorder = Recorder::new("0".into(), "shm", true);
        let first = recorder.start(&start(0, None));
        recorder.fail([first]);
        recorder.finish(first);
        recorder.finish_at(first, 1, 2);
        let [failed] = recorder.records().try_into().expect("one record");
        assert!(failed.has_failed && failed.started <= failed.done.expect("it is over"));
        // The slot's next operation is another one.
        let rest = (1..=CAPACITY as u64).map(|n| recorder.start(&start(n, None)));
        let next = rest.last().expect("some");
        assert_eq!(next.0, first.0 + CAPACITY as u64);
        recorder.finish(first);
        assert!(!recorder.slot(first).finish(first, 3));
        assert!(recorder.records().iter().all(|record| record.done.is_none()));
        assert!(recorder.slot(next).finish(next, 3));
    }

    #[test]
    fn a_slot_that_is_claimed_has_no_record() {
        let recorder = Recorder::new("0".into(), "shm", true);
        for n in 0..CAPACITY as u64 {
            recorder.finish(recorder.start(&start(n, None)));
        }
        assert_eq!(recorder.records().len(), CAPACITY);
        let claimed = recorder.ring.take_slot();
        let records = recorder.records();
        assert_eq!((records.len(), records[0].sequence), (CAPACITY - 1, 1));
        // A whole round later its slot is still taken.
        let later: Vec<RecordId> = (0..CAPACITY).map(|_| recorder.ring.take_slot()).collect();
        let index = |id: &RecordId| id.0 % CAPACITY as u64;
        assert!(later.iter().all(|id| index(id) != index(&claimed) || *id == RecordId::NONE));
    }

    #[test]
    fn the_last_completed_operation_is_the_one_that_ended_last() {
        let recorder = Recorder::new("0".into(), "shm", true);
        let [first, second] = [0, 1].map(|n| recorder.start(&start(n, None)));
        recorder.finish(second);
        std::thread::sleep(Duration::from_micros(10));
        recorder.finish(first);
        let summary = recorder.summary();
        assert!(summary.ends_with("last completed all_reduce #0"), "{summary}");
    }

    #[test]
    fn an_operation_that_panics_has_failed() {
        let recorder = Recorder::new("0".into(), "shm", true);
        let run = |is_panic: bool| {
            let operation = || {
                recorder.begin(&start(0, None));
                if is_panic {
                    std::panic::resume_unwind(Box::new(()));
                }
                Ok(())
            };
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| recorder.run(operation)))
        };
        assert!(run(true).is_err());
        assert!(matches!(run(false), Ok(Ok(()))));
        let [panicked, completed] = recorder.records().try_into().expect("two records");
        assert!(panicked.done.is_some() && panicked.has_failed);
        assert!(completed.done.is_some() && !completed.has_failed);
    }

    #[test]
    fn what_runs_as_one_queued_operation_has_its_number() {
        let recorder = Recorder::new("0".into(), "shm", true);
        let (first, second) = (recorder.queue(true), recorder.queue(true));
        let numbers = || [recorder.begin_collective().0, recorder.begin_collective().0];
        assert_eq!(second.run(numbers), [1, 1]);
        assert_eq!(first.run(numbers), [0, 0]);
        assert_eq!(numbers(), [2, 3]);
    }

    #[test]
    fn threads_record_at_the_same_time() {
        let recorder = Recorder::new("0".into(), "shm", true);
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
