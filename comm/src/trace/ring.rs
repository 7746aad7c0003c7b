//! The ring in which a group's last operations are kept.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use flow_store::clock::Scale;

use super::flight_memory::{SharedSlots, memory};
use super::record::Record;
use super::slot::{CAPACITY, FAILED, RecordId, RecordSlot, UNDER_WAY, WRITING};
use crate::bucket_name::bucket_name;
use crate::kind::Kind;

/// The back-end of operations on GPUs.
const NCCL: &str = "nccl";

/// The slots of a ring.
pub enum Slots {
    /// In the memory that flow-launch reads.
    Shared(SharedSlots),
    /// Of this process alone: there is no such memory, or it is full.
    Own(Box<[RecordSlot; CAPACITY]>),
}

impl Slots {
    /// Returns empty slots for the group of this name.
    pub fn new(group: &str) -> Self {
        match memory().and_then(|memory| memory.take_ring(group)) {
            Some(slots) => Slots::Shared(slots),
            None => Slots::Own(Box::new(std::array::from_fn(|_| RecordSlot::default()))),
        }
    }
}

impl Deref for Slots {
    type Target = [RecordSlot; CAPACITY];

    #[inline]
    fn deref(&self) -> &[RecordSlot; CAPACITY] {
        match self {
            Slots::Shared(slots) => slots,
            Slots::Own(slots) => slots,
        }
    }
}

/// The last operations of one group.
pub struct Ring {
    pub group: String,
    pub host_backend: &'static str,
    /// Whether its operations belong in this process' timeline.
    pub is_in_timeline: bool,
    pub next: AtomicU64,
    pub slots: Slots,
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
