//! The part of the arena through which the ranks of one group coordinate: counters,
//! descriptors, staging memory.
//!
//! A group works in *rounds*. In a round every rank publishes what it does and where its data lies,
//! and raises `arrived`. When it has read (and written) what it needed from the others, it raises
//! `done`. The counters only grow, so that a slot serves again every [`SLOTS`] rounds without being
//! reset.
//!
//! Every member of the group has its place here, those on other nodes too. This node's leader
//! writes down what they publish, and raises the counters for them. Only `send` and `recv` are for
//! members on this node alone.
//!
//! Everything here is atomics over zeroed memory: a peer that was killed half-way leaves values,
//! never broken locks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use super::arena::Arena;
use crate::descriptor::DescriptorWords;

/// Rounds that may be under way at once.
pub const SLOTS: u64 = 64;
/// Data up to this many bytes travels in the round's own payload: one synchronisation instead of
/// two.
pub const PAYLOAD: usize = 4096;
/// Staging buffer for ordinary memory: two of them per rank stay in the second-level cache.
pub const CHUNK: usize = 256 << 10;
/// The same for two ranks that are far apart.
pub const FAR_CHUNK: usize = 512 << 10;
/// The largest number of ranks: with more, each would have less than a cache line of a staging
/// buffer.
pub const MAX_RANKS: usize = CHUNK / 64;

/// A counter that ranks wait on. In a round the last rank that raises it wakes them. In a mailbox
/// every rank that raises it does, and so does a rank that rings a doorbell.
#[repr(C, align(64))]
pub struct Counter {
    pub value: AtomicU32,
    pub waiters: AtomicU32,
}

impl Counter {
    /// Whether the counter has come to `target`; counters may wrap around.
    pub fn reached(&self, target: u32) -> bool {
        self.value.load(Ordering::Acquire).wrapping_sub(target) as i32 >= 0
    }

    /// Adds one and wakes all who wait if that makes it `target`.
    pub fn raise(&self, target: u32) {
        self.raise_by(1, &[target]);
    }

    /// Adds `count` and wakes all who wait if that makes it one of `targets`.
    pub fn raise_by(&self, count: u32, targets: &[u32]) {
        let value = self.value.fetch_add(count, Ordering::SeqCst).wrapping_add(count);
        if targets.contains(&value) {
            self.wake();
        }
    }

    /// Wakes all who wait.
    pub fn wake(&self) {
        if self.waiters.load(Ordering::SeqCst) != 0 {
            let _ = rustix::thread::futex::wake(
                &self.value,
                rustix::thread::futex::Flags::empty(),
                i32::MAX as u32,
            );
        }
    }

    /// Rings a doorbell: wakes those who sleep by [`Counter::sleep_unless`]. It costs nothing while
    /// nobody does.
    pub fn ring(&self) {
        if self.waiters.load(Ordering::SeqCst) != 0 {
            self.value.fetch_add(1, Ordering::SeqCst);
            self.wake();
        }
    }

    /// Sleeps until the doorbell is rung, at most for `time`; not at all if `is_due` says that
    /// something has happened already. From then on no ring is missed.
    pub fn sleep_unless(&self, time: Duration, is_due: impl FnOnce() -> bool) {
        use rustix::thread::futex;
        self.waiters.fetch_add(1, Ordering::SeqCst);
        // Either `is_due` sees what was done before the bell was rung, or whoever rings sees the
        // sleeper.
        fence(Ordering::SeqCst);
        let seen = self.value.load(Ordering::SeqCst);
        if !is_due() {
            let time = futex::Timespec {
                tv_sec: time.as_secs() as i64,
                tv_nsec: i64::from(time.subsec_nanos()),
            };
            // Rung, timed out, interrupted: the caller looks in any case.
            let _ = futex::wait(&self.value, futex::Flags::empty(), seen, Some(&time));
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Text that one rank writes once and others read.
#[repr(C, align(64))]
pub struct Note {
    /// 0: none; 1: being written; 2: readable.
    state: AtomicU32,
    kind: AtomicU32,
    len: AtomicU32,
    text: [AtomicU8; 2036],
}

impl Note {
    /// Writes the note if there is none yet.
    pub fn write(&self, kind: u32, text: &str) -> bool {
        if self.state.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return false;
        }
        let mut len = text.len().min(self.text.len());
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        for (to, from) in self.text.iter().zip(&text.as_bytes()[..len]) {
            to.store(*from, Ordering::Relaxed);
        }
        self.len.store(len as u32, Ordering::Relaxed);
        self.kind.store(kind, Ordering::Relaxed);
        self.state.store(2, Ordering::SeqCst);
        true
    }

    /// Whether the note can be read.
    pub fn is_set(&self) -> bool {
        self.state.load(Ordering::SeqCst) == 2
    }

    /// Kind and text, once written.
    pub fn read(&self) -> Option<(u32, String)> {
        if !self.is_set() {
            return None;
        }
        let len = (self.len.load(Ordering::Relaxed) as usize).min(self.text.len());
        let bytes: Vec<u8> = self.text[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        Some((self.kind.load(Ordering::Relaxed), String::from_utf8_lossy(&bytes).into_owned()))
    }
}

/// The state that a rank shows the others.
#[repr(C, align(64))]
pub struct RankState {
    /// 1 more than the last round in which this rank arrived, and in which it was done, for each
    /// slot. The rank writes these in every round; for a rank on another node, this node's leader
    /// writes `arrived_in`. Others read them only to find out who is missing, so that the cache
    /// lines stay with the writer.
    arrived_in: [AtomicU64; SLOTS as usize],
    done_in: [AtomicU64; SLOTS as usize],
    /// Rounds this rank has arrived in.
    pub arrived: AtomicU64,
    /// Set when the rank has dropped its group.
    pub left: AtomicU32,
    /// Rung for the threads of this rank that wait for a message from any rank, or for their turn.
    pub doorbell: Counter,
    /// This rank's details about a failure.
    pub error_detail: Note,
}

/// The beginning of a control block.
#[repr(C, align(64))]
pub struct ControlHeader {
    /// Ranks that still use this memory.
    pub attached: AtomicU32,
    /// The first failure.
    pub poison: Note,
}

/// The counters of a round.
#[repr(C)]
pub struct RoundSlot {
    pub arrived: Counter,
    pub done: Counter,
}

/// One direction between two ranks for `send` and `recv`.
#[repr(C)]
pub struct Mailbox {
    pub sent: Counter,
    pub taken: Counter,
    pub descriptor: DescriptorWords,
}

/// The places of the parts, in bytes from the beginning of the control block.
#[derive(Clone, Copy)]
struct ControlLayout {
    ranks: usize,
    slots: usize,
    descriptors: usize,
    payloads: usize,
    staging: usize,
    staging_bytes: usize,
    mailboxes: usize,
    fragments: usize,
    fragment: usize,
    total: usize,
}

impl ControlLayout {
    fn of(size: usize, locals: usize) -> Self {
        let ranks = std::mem::size_of::<ControlHeader>();
        let slots = ranks + size * std::mem::size_of::<RankState>();
        let descriptors = slots + SLOTS as usize * std::mem::size_of::<RoundSlot>();
        let payloads = (descriptors
            + SLOTS as usize * size * std::mem::size_of::<DescriptorWords>())
        .next_multiple_of(4096);
        let staging = payloads + SLOTS as usize * size * PAYLOAD;
        let staging_bytes = if size == 2 { FAR_CHUNK } else { CHUNK };
        let mailboxes = staging + size * 2 * staging_bytes;
        let fragments =
            (mailboxes + locals * locals * std::mem::size_of::<Mailbox>()).next_multiple_of(4096);
        let fragment = ((1 << 30) / (locals * locals * 2)).clamp(4096, 128 << 10) / 4096 * 4096;
        let total = fragments + locals * locals * 2 * fragment;
        Self {
            ranks,
            slots,
            descriptors,
            payloads,
            staging,
            staging_bytes,
            mailboxes,
            fragments,
            fragment,
            total,
        }
    }
}

/// A group's control block, mapped in this process.
pub struct Control {
    arena: Arc<Arena>,
    offset: usize,
    size: usize,
    locals: usize,
    layout: ControlLayout,
}

impl Control {
    /// Returns the number of bytes of the control block of a group of `size` ranks, `locals` of
    /// them on this node. All are zero at first.
    pub fn bytes(size: usize, locals: usize) -> usize {
        ControlLayout::of(size, locals).total
    }

    /// Opens the control block at `offset` of the arena.
    pub fn attach(arena: Arc<Arena>, offset: usize, size: usize, locals: usize) -> Self {
        assert!(
            arena.contains(offset, Self::bytes(size, locals)),
            "a control block lies inside the arena"
        );
        Self { arena, offset, size, locals, layout: ControlLayout::of(size, locals) }
    }

    fn at<T>(&self, start: usize, index: usize) -> &T {
        let pointer = self.arena.at(self.offset + start + index * std::mem::size_of::<T>());
        // SAFETY: `start` and `index` are inside the layout, which is inside the mapping; the types
        // consist of atomics only, for which any bytes are valid; alignment: the block is page
        // aligned, the parts 64.
        unsafe { &*pointer.cast::<T>() }
    }

    /// Returns the beginning of the block.
    pub fn header(&self) -> &ControlHeader {
        self.at(0, 0)
    }

    /// Returns the state that a member shows the others.
    pub fn rank(&self, rank: usize) -> &RankState {
        debug_assert!(rank < self.size);
        self.at(self.layout.ranks, rank)
    }

    /// Returns the counters of a round.
    pub fn slot(&self, round: u64) -> &RoundSlot {
        self.at(self.layout.slots, (round % SLOTS) as usize)
    }

    /// Returns the descriptor that a member publishes in a round.
    pub fn descriptor(&self, round: u64, rank: usize) -> &DescriptorWords {
        debug_assert!(rank < self.size);
        self.at(self.layout.descriptors, (round % SLOTS) as usize * self.size + rank)
    }

    /// Notes that a rank has arrived in a round. That need not be in the order of rounds.
    pub fn set_arrived(&self, round: u64, rank: usize) {
        self.rank(rank).arrived_in[(round % SLOTS) as usize].store(round + 1, Ordering::Release);
        // This number is only for error messages: it does no harm if another thread's store
        // overwrites it.
        let arrived = &self.rank(rank).arrived;
        if arrived.load(Ordering::Relaxed) <= round {
            arrived.store(round + 1, Ordering::Relaxed);
        }
    }

    /// Whether a member has arrived in a round.
    pub fn has_arrived(&self, round: u64, rank: usize) -> bool {
        self.rank(rank).arrived_in[(round % SLOTS) as usize].load(Ordering::Acquire) == round + 1
    }

    /// Notes that a rank is done with a round.
    pub fn set_done(&self, round: u64, rank: usize) {
        self.rank(rank).done_in[(round % SLOTS) as usize].store(round + 1, Ordering::Release);
    }

    /// Whether a member is done with a round.
    pub fn is_done(&self, round: u64, rank: usize) -> bool {
        self.rank(rank).done_in[(round % SLOTS) as usize].load(Ordering::Acquire) == round + 1
    }

    /// Returns the value of `arrived` or `done` when all ranks have raised it in `round`.
    pub fn target(&self, round: u64) -> u32 {
        (self.size as u64 * (round / SLOTS + 1)) as u32
    }

    /// Returns the value of `arrived` when all members on this node have arrived. The leader
    /// arrives for the others after that.
    pub fn local_target(&self, round: u64) -> u32 {
        self.target(round).wrapping_sub((self.size - self.locals) as u32)
    }

    /// Returns a rank's [`PAYLOAD`] bytes in a round.
    pub fn payload(&self, round: u64, rank: usize) -> *mut u8 {
        debug_assert!(rank < self.size);
        let index = (round % SLOTS) as usize * self.size + rank;
        self.arena.at(self.offset + self.layout.payloads + index * PAYLOAD)
    }

    /// Returns a rank's staging buffer number 0 or 1, of [`CHUNK`] bytes, or of [`FAR_CHUNK`] in a
    /// group of two.
    pub fn staging(&self, rank: usize, which: usize) -> *mut u8 {
        debug_assert!(rank < self.size && which < 2);
        self.arena
            .at(self.offset + self.layout.staging + (rank * 2 + which) * self.layout.staging_bytes)
    }

    /// Returns the mailbox of two members, numbered among those on this node.
    pub fn mailbox(&self, from: usize, to: usize) -> &Mailbox {
        debug_assert!(from < self.locals && to < self.locals);
        self.at(self.layout.mailboxes, from * self.locals + to)
    }

    /// Returns the memory for part `part` of a message between two ranks, and its size: two parts
    /// may be on their way.
    pub fn fragment(&self, from: usize, to: usize, part: u32) -> (*mut u8, usize) {
        debug_assert!(from < self.locals && to < self.locals);
        let index = (from * self.locals + to) * 2 + (part % 2) as usize;
        (
            self.arena.at(self.offset + self.layout.fragments + index * self.layout.fragment),
            self.layout.fragment,
        )
    }

    /// Wakes every rank that waits for anything in this group.
    pub fn wake_all(&self) {
        for round in 0..SLOTS {
            self.slot(round).arrived.wake();
            self.slot(round).done.wake();
        }
        for from in 0..self.locals {
            for to in 0..self.locals {
                self.mailbox(from, to).sent.wake();
                self.mailbox(from, to).taken.wake();
            }
        }
        (0..self.size).for_each(|rank| self.rank(rank).doorbell.ring());
    }
}

/// Sleeps until `counter` may have come to `target`, at most for `time`.
pub fn sleep_on(counter: &Counter, target: u32, time: Duration) {
    use rustix::thread::futex;
    counter.waiters.fetch_add(1, Ordering::SeqCst);
    let seen = counter.value.load(Ordering::SeqCst);
    if (seen.wrapping_sub(target) as i32) < 0 {
        // A time that the kernel cannot count is for ever.
        let time = futex::Timespec::try_from(time).ok();
        // Woken, timed out, interrupted: the caller looks at the counter in any case.
        let _ = futex::wait(&counter.value, futex::Flags::empty(), seen, time.as_ref());
    }
    counter.waiters.fetch_sub(1, Ordering::SeqCst);
}
