//! The record of an operation while it is written, beside what other threads and flow-launch read.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};

pub use flow_store::flight::SLOTS as CAPACITY;
pub use flow_store::flight::slot::{FAILED, UNDER_WAY};
use flow_store::flight::{SLOT_BYTES, slot};

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
#[repr(C, align(64))]
pub struct RecordSlot {
    /// The operation's number in the ring, from 1 on.
    pub stamp: AtomicU64,
    pub sequence: AtomicU64,
    pub bytes: AtomicU64,
    /// Kind, whether on a GPU, whether between two ranks, and the bucket's number plus one.
    pub what: AtomicU64,
    pub queued: AtomicU64,
    pub started: AtomicU64,
    pub done: AtomicU64,
}

// flow-launch reads them.
const _: () = {
    let words = [
        (offset_of!(RecordSlot, stamp), slot::STAMP),
        (offset_of!(RecordSlot, sequence), slot::SEQUENCE),
        (offset_of!(RecordSlot, what), slot::WHAT),
        (offset_of!(RecordSlot, started), slot::STARTED),
        (offset_of!(RecordSlot, done), slot::DONE),
    ];
    let mut word = 0;
    while word < words.len() {
        assert!(words[word].0 == words[word].1 * size_of::<u64>());
        word += 1;
    }
    assert!(size_of::<RecordSlot>() == SLOT_BYTES);
};

impl RecordSlot {
    /// Makes the slot one that was never written.
    pub fn clear(&self) {
        let Self { stamp, sequence, bytes, what, queued, started, done } = self;
        for word in [stamp, sequence, bytes, what, queued, started, done] {
            word.store(0, Ordering::Relaxed);
        }
    }

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
