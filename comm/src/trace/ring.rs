//! The ring in which a group's last operations are kept.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::clock::Scale;
use super::record::Record;
use crate::bucket_name::bucket_name;
use crate::kind::Kind;

/// The number of operations that a group keeps.
pub const CAPACITY: usize = 256;
/// The back-end of operations on GPUs.
const NCCL: &str = "nccl";
/// Instead of the time at which an operation was over: it is under way. The operation's number in
/// the ring goes with it, so that [`RecordSlot::finish`] does not end another operation.
pub const UNDER_WAY: u64 = 1 << 63;
/// A bit beside the time at which an operation was over: it has failed.
pub const FAILED: u64 = 1 << 62;
/// Instead of the time at which an operation was over: [`RecordSlot::finish_at`] is ending it.
const FINISHING: u64 = UNDER_WAY | FAILED;
/// The stamp of a slot that is being written, or was never.
pub const WRITING: u64 = 0;

/// An operation under way, by its number in the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordId(pub u64);

impl RecordId {
    /// The id of an operation for which there was no slot.
    pub const NONE: RecordId = RecordId(0);
}

/// The record of one operation, in a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
pub struct RecordSlot {
    /// The operation's number in the ring, from 1 on.
    pub stamp: AtomicU64,
    pub sequence: AtomicU64,
    pub bytes: AtomicU64,
    /// Kind, whether on a GPU, and the bucket's number plus one.
    pub what: AtomicU64,
    pub queued: AtomicU64,
    pub started: AtomicU64,
    pub done: AtomicU64,
}

/// The last operations of one group.
pub struct Ring {
    pub group: String,
    pub host_backend: &'static str,
    /// Whether its operations belong in this process' timeline.
    pub is_in_timeline: bool,
    pub next: AtomicU64,
    pub slots: [RecordSlot; CAPACITY],
}

impl RecordSlot {
    /// Ends operation `id`. False if it is over already, or has no slot: then nothing was done.
    #[inline]
    pub fn finish(&self, id: RecordId, done: u64) -> bool {
        let under_way = UNDER_WAY | id.0;
        self.done.compare_exchange(under_way, done, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Ends operation `id` as [`RecordSlot::finish`] does, and corrects when it began.
    pub fn finish_at(&self, id: RecordId, started: u64, done: u64) -> bool {
        // Until `started` is written, nobody else ends the operation or takes the slot.
        let is_own = self.finish(id, FINISHING);
        if is_own {
            self.started.store(started, Ordering::Relaxed);
            self.done.store(done, Ordering::Release);
        }
        is_own
    }
}

impl Ring {
    /// Returns the slot of an operation.
    #[inline]
    pub fn slot(&self, id: RecordId) -> &RecordSlot {
        &self.slots[id.0 as usize % CAPACITY]
    }

    /// Claims a slot for an operation that begins: the oldest, but operations under way keep
    /// theirs. If all are under way, it gets none.
    #[inline]
    pub fn take_slot(&self) -> RecordId {
        for _ in 0..CAPACITY {
            let id = RecordId(self.next.fetch_add(1, Ordering::Relaxed));
            let done = &self.slot(id).done;
            let claimed = UNDER_WAY | id.0;
            let last = done.load(Ordering::Relaxed);
            // A thread that is a whole round later may claim the slot first.
            if last & UNDER_WAY == 0
                && done
                    .compare_exchange(last, claimed, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return id;
            }
        }
        RecordId::NONE
    }

    /// Returns the records that are kept, the oldest first.
    pub fn records(&self) -> Vec<Record> {
        let stamps = self.slots.iter().map(|slot| slot.stamp.load(Ordering::Acquire));
        let mut ids: Vec<u64> = stamps.filter(|&stamp| stamp != WRITING).collect();
        ids.sort_unstable();
        let scale = Scale::now();
        ids.into_iter().filter_map(|id| self.read(RecordId(id), scale)).collect()
    }

    /// Returns the record of an operation; None if its slot has another one by now.
    pub fn read(&self, id: RecordId, scale: Scale) -> Option<Record> {
        let slot = self.slot(id);
        if id == RecordId::NONE || slot.stamp.load(Ordering::Acquire) != id.0 {
            return None;
        }
        // Before `started`, which [`RecordSlot::finish_at`] corrects before it says that the operation
        // is over.
        let done = slot.done.load(Ordering::Acquire);
        let [sequence, bytes, what, queued, started] =
            [&slot.sequence, &slot.bytes, &slot.what, &slot.queued, &slot.started]
                .map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_under_way = done & UNDER_WAY != 0;
        // The slot's next operation claims `done` before it writes the stamp.
        let is_claimed = is_under_way && done != UNDER_WAY | id.0;
        if is_claimed || slot.stamp.load(Ordering::Relaxed) != id.0 {
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
            done: (!is_under_way).then(|| scale.monotonic(done & !FAILED)),
            has_failed: !is_under_way && done & FAILED != 0,
        })
    }
}

/// Names an operation, for errors and reports.
pub fn name(record: &Record) -> String {
    let bucket =
        record.bucket.map_or(String::new(), |bucket| format!(" ({})", bucket_name(bucket)));
    format!("{} #{}{bucket}", record.operation, record.sequence)
}
