//! What the ranks of one join share on a node while they come together, and the control block of
//! the group of all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::thread::CpuSet;

use super::arena::{Arena, Block};
use super::control::{Control, Counter, Note};

/// The beginning of the memory. A [`LocalRank`] for each rank of the node follows, and from the next
/// whole [`ALIGNMENT`] on the control block.
#[repr(C, align(64))]
pub struct JoinHeader {
    pub attached: Counter,
    /// Why the ranks cannot come together, as the first of them found out.
    pub failure: Note,
    /// The processors that some rank may run on, a bit each.
    processors: [AtomicU64; CpuSet::MAX_CPU / 64],
}

/// A rank of the node.
#[repr(C)]
pub struct LocalRank {
    /// Its process; 0 until it has attached.
    pub pid: AtomicU32,
    /// Set when the rank uses nothing of this join any more.
    pub left: AtomicU32,
}

impl LocalRank {
    /// Returns the rank with this index in the memory of a join at `offset`.
    pub fn of(arena: &Arena, offset: usize, index: usize) -> &Self {
        let first = arena.at(offset + size_of::<JoinHeader>()).cast::<LocalRank>();
        // SAFETY: the header is followed by an entry for each of them, of atomics; the memory lies in
        // the mapping.
        unsafe { &*first.add(index) }
    }
}

const ALIGNMENT: usize = 4096;

/// The memory of a join of `size` ranks, `locals` of them on this node, at an offset of the arena.
pub struct JoinMemory {
    pub arena: Arc<Arena>,
    pub offset: usize,
    size: usize,
    pub locals: usize,
}

impl JoinMemory {
    /// Makes the memory, in the first rank of the node, which keeps the block until all have left: see
    /// [`Tenancy`](super::tenancy::Tenancy).
    pub fn create(arena: &Arc<Arena>, size: usize, locals: usize) -> Result<(Self, Block), String> {
        let block = arena
            .allocate_zeroed(control_offset(locals) + Control::bytes(size, locals))
            .ok_or_else(|| format!("no shared memory for the control block of {size} ranks"))?;
        let memory = Self { arena: Arc::clone(arena), offset: block.offset(), size, locals };
        memory.control().header().attached.store(locals as u32, Ordering::SeqCst);
        Ok((memory, block))
    }

    /// Opens the memory that another rank has made.
    ///
    /// # Errors
    /// It does not lie in the arena.
    pub fn open(
        arena: &Arc<Arena>,
        offset: usize,
        size: usize,
        locals: usize,
    ) -> Result<Self, String> {
        let memory = Self { arena: Arc::clone(arena), offset, size, locals };
        if arena.contains(offset, memory.bytes()) {
            Ok(memory)
        } else {
            Err(format!("there is no control block at {offset} of the shared memory"))
        }
    }

    /// Returns its size.
    pub fn bytes(&self) -> usize {
        control_offset(self.locals) + Control::bytes(self.size, self.locals)
    }

    /// Returns its beginning.
    pub fn header(&self) -> &JoinHeader {
        // SAFETY: the memory begins with the header, cache line aligned and zero at first; it
        // consists of atomics.
        unsafe { &*self.arena.at(self.offset).cast() }
    }

    /// Returns the rank with this index among those of the node.
    pub fn local(&self, index: usize) -> &LocalRank {
        LocalRank::of(&self.arena, self.offset, index)
    }

    /// Returns the control block of the group of all ranks.
    pub fn control(&self) -> Control {
        let offset = self.offset + control_offset(self.locals);
        Control::attach(Arc::clone(&self.arena), offset, self.size, self.locals)
    }
}

/// Returns the bytes before the control block.
fn control_offset(locals: usize) -> usize {
    (size_of::<JoinHeader>() + locals * size_of::<LocalRank>()).next_multiple_of(ALIGNMENT)
}

impl JoinHeader {
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
