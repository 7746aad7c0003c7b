//! The beginning of a node's arena: what its ranks share while they come together.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::thread::CpuSet;

use super::arena::Arena;
use super::control::{Counter, Note};

/// At the beginning of the region of a node's first rank; a word for each rank follows, its pid.
#[repr(C)]
pub struct ArenaHeader {
    pub attached: Counter,
    /// Offset of the control block of the group of all ranks.
    pub root: AtomicU64,
    /// Why the ranks cannot come together, as the first of them found out.
    pub failure: Note,
    /// The processors that some rank may run on, a bit each.
    processors: [AtomicU64; CpuSet::MAX_CPU / 64],
}

impl ArenaHeader {
    /// Returns the size in bytes of the header for this many ranks.
    pub fn bytes(ranks: usize) -> usize {
        std::mem::size_of::<Self>() + ranks * std::mem::size_of::<AtomicU32>()
    }

    /// Returns the header of an arena that was mapped with room for it.
    pub fn of(arena: &Arena) -> &Self {
        // SAFETY: the mapping begins with the header, page aligned and zero at first; it consists
        // of atomics.
        unsafe { &*arena.at(0).cast::<Self>() }
    }

    /// Returns the pid of the rank with this index among those of the node; 0 until it has
    /// attached.
    pub fn pid(arena: &Arena, index: usize) -> &AtomicU32 {
        let pids = arena.at(std::mem::size_of::<Self>()).cast::<AtomicU32>();
        // SAFETY: the header is followed by one word per rank, reserved when the arena was mapped.
        unsafe { &*pids.add(index) }
    }

    /// Adds the processors that this rank may run on.
    pub fn publish_processors(&self) {
        let Ok(own) = rustix::thread::sched_getaffinity(None) else { return };
        for processor in (0..CpuSet::MAX_CPU).filter(|&p| own.is_set(p)) {
            self.processors[processor / 64].fetch_or(1 << (processor % 64), Ordering::Relaxed);
        }
    }

    /// Returns how many processors all ranks have together: each may be bound to its own, or to
    /// less than its share by a quota.
    pub fn processors(&self) -> usize {
        let all: u32 = self.processors.iter().map(|p| p.load(Ordering::Relaxed).count_ones()).sum();
        let bound = rustix::thread::sched_getaffinity(None).map_or(0, |own| own.count() as usize);
        let usable = std::thread::available_parallelism().map_or(1, |n| n.get());
        if usable < bound { usable } else { all as usize }
    }
}
