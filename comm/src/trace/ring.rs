//! The ring in which a group's last operations are kept.

use std::sync::atomic::{fence, AtomicU64, Ordering};

use super::clock::Scale;
use super::record::Record;
use crate::kind::Kind;

/// How many operations a group keeps.
pub const CAPACITY: usize = 256;
/// The back-end of operations on GPUs.
const NCCL: &str = "nccl";
/// Instead of the time at which an operation was over: it is under way. The operation's number in
/// the ring goes with it, so that [`Slot::finish`] does not end another operation.
pub const UNDER_WAY: u64 = 1 << 63;
/// The stamp of a slot that is being written.
pub const WRITING: u64 = 0;

/// An operation under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordId(pub u64);

/// One cache line.
#[derive(Default)]
#[repr(align(64))]
pub struct Slot {
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
    pub next: AtomicU64,
    pub slots: [Slot; CAPACITY],
}

impl Slot {
    /// Operation `id` is over. False if a later operation has taken the slot.
    pub fn finish(&self, id: RecordId, done: u64) -> bool {
        let under_way = UNDER_WAY | id.0;
        self.done.compare_exchange(under_way, done, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl Ring {
    pub fn records(&self) -> Vec<Record> {
        let next = self.next.load(Ordering::Acquire);
        let first = next.saturating_sub(CAPACITY as u64).max(1);
        let scale = Scale::now();
        (first..next).filter_map(|id| self.read(RecordId(id), scale)).collect()
    }

    pub fn read(&self, id: RecordId, scale: Scale) -> Option<Record> {
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
            done: (done & UNDER_WAY == 0).then(|| scale.monotonic(done)),
        })
    }
}

/// As errors and reports name it.
pub fn name(record: &Record) -> String {
    let bucket = record.bucket.map_or(String::new(), |bucket| format!(" (bucket {bucket})"));
    format!("{} #{}{bucket}", record.operation, record.sequence)
}
