//! The processes that have a region of the arena, one after the other, and who holds their memory.
//!
//! A process that takes a region over begins behind what the one before has handed out, as others may
//! still use that. Each process' memory begins with a head, which all can read: where the next one's
//! begins, and which processes hold it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::{Arena, no_room};
use crate::liveness::has_ended;

impl Arena {
    /// Takes the region for this process. Returns where its blocks begin.
    pub(super) fn take_region(&self, index: usize) -> Result<usize, String> {
        let page = rustix::param::page_size();
        let marks = self.marks(index);
        let before = marks.base.load(Ordering::SeqCst);
        let mut base = self.first_offset(index).next_multiple_of(page);
        if before != 0 {
            // What the process before has handed out may still be in use.
            let end = marks.end.load(Ordering::SeqCst).max(before + self.head_bytes());
            base = end.next_multiple_of(page);
        }
        let start = base + self.head_bytes();
        if !self.holds(index, base, self.head_bytes()) {
            return Err(no_room("another process", index));
        }
        if before != 0 {
            // First: whoever frees what was there before looks at this last.
            self.head(before).next.store(base, Ordering::SeqCst);
        }
        marks.base.store(base, Ordering::SeqCst);
        marks.end.store(start, Ordering::SeqCst);
        Ok(start)
    }

    /// Lets all processes know where the part of this region ends that was ever handed out.
    pub(super) fn publish_end(&self, end: usize) {
        if self.file.is_some() {
            self.marks(self.own_region()).end.store(end, Ordering::SeqCst);
        }
    }

    /// Returns the offset at which the memory of the process begins that has a region now.
    pub fn base(&self, index: usize) -> usize {
        match &self.file {
            Some(_) => self.marks(index).base.load(Ordering::SeqCst),
            None => index * self.region.len(),
        }
    }

    /// Whether a newcomer has room in the region of a process that has ended: half of it.
    pub fn has_room(&self, index: usize) -> bool {
        let end = self.marks(index).end.load(Ordering::SeqCst);
        end - index * self.region.len() <= self.region.len() / 2
    }

    /// Notes that this process uses what the process whose memory begins at `base` may have shared, or
    /// for the last time that it does not.
    pub fn hold(&self, base: usize, change: i32) {
        if self.file.is_none() {
            return;
        }
        let holder = self.holder(base, self.own_region());
        let pid = std::process::id();
        let _ = holder.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |held| {
            // Another process has had this one's region.
            let count = if (held >> 32) as u32 == pid { held as u32 } else { 0 };
            let count = count.saturating_add_signed(change);
            Some(u64::from(pid) << 32 | u64::from(count))
        });
    }

    /// Gives the pages of a process that has ended back to the system, if no process that lives holds
    /// them. Its memory began at `base`.
    pub fn free_ended(&self, index: usize, base: usize) {
        if self.file.is_none() {
            return;
        }
        for region in 0..self.regions() {
            let held = self.holder(base, region).load(Ordering::SeqCst);
            let pid = (held >> 32) as u32;
            let count = held as u32;
            if count > 0 && region != index && !has_ended(pid) {
                return;
            }
        }
        // In this order: a process that takes the region over and is not seen by `next` has not raised
        // this mark either.
        let end = self.marks(index).end.load(Ordering::SeqCst);
        let next = self.head(base).next.load(Ordering::SeqCst);
        let end = if next == 0 { end } else { next };
        let page = rustix::param::page_size();
        let start = base + self.head_bytes();
        if start + page <= end {
            self.discard(start, (end - start) / page * page);
        }
    }

    /// Returns the bytes before the blocks of each process that has a region: whole pages.
    fn head_bytes(&self) -> usize {
        let bytes = size_of::<MemoryHead>() + self.regions() * size_of::<AtomicU64>();
        bytes.next_multiple_of(rustix::param::page_size())
    }

    /// Returns the head of the memory that begins at `base`.
    fn head(&self, base: usize) -> &MemoryHead {
        // SAFETY: each process' memory begins with a head, page aligned and zeros at first, which
        // consists of atomics; it lies in the mapping.
        unsafe { &*self.at(base).cast() }
    }

    /// Returns which process holds the memory that begins at `base`, of those that have had this
    /// region, and how often.
    fn holder(&self, base: usize, region: usize) -> &AtomicU64 {
        let first = self.at(base + size_of::<MemoryHead>()).cast::<AtomicU64>();
        // SAFETY: the head is followed by a word for each region.
        unsafe { &*first.add(region) }
    }

    /// Returns what all processes see of a region.
    fn marks(&self, index: usize) -> &RegionMarks {
        // SAFETY: the file begins with the marks of its regions, zeros at first, which consist of
        // atomics. An arena without a file has none, and does not come here.
        unsafe { &*self.base.as_ptr().cast::<RegionMarks>().add(index) }
    }

    /// Returns where the first memory of a region can begin: the first region begins with all marks.
    fn first_offset(&self, index: usize) -> usize {
        let marks = if index == 0 { self.regions() * size_of::<RegionMarks>() } else { 0 };
        index * self.region_bytes() + marks
    }
}

/// The state of a region.
#[repr(C)]
struct RegionMarks {
    /// The offset at which the memory begins of the process that has it.
    base: AtomicUsize,
    /// The end of what that process has ever handed out.
    end: AtomicUsize,
}

/// The beginning of the memory of a process that has, or has had, a region. A word for each region
/// follows: who holds this memory.
#[repr(C, align(64))]
struct MemoryHead {
    /// Where the memory of the next process begins that has this region; 0 while there is none.
    next: AtomicUsize,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// A process of this number that has ended: that of no process.
    const ENDED: u64 = (i32::MAX as u64) << 32;

    /// Region 1 has one process after the other; each writes, or not, and ends.
    #[test]
    fn a_region_is_taken_over_behind_what_was_used() {
        let (file, region) = Arena::create_file(2, 1).unwrap();
        let file = Arc::new(file);
        let map = |index| Arc::new(Arena::map(&file, 2, region, index).unwrap());
        let survivor = map(0);
        let read = |offset| {
            // SAFETY: it lies in the mapping, and nobody writes there.
            unsafe { *survivor.at(offset) }
        };
        let mut ended = Vec::new();
        for value in 1..7 {
            let process = map(1);
            let base = survivor.base(1);
            let mut offset = None;
            if value % 3 != 0 {
                let mut block = process.allocate(100_000).unwrap();
                block.as_mut().fill(value);
                offset = Some(block.offset());
                block.leak();
            }
            assert!(ended.iter().all(|&(_, other, _)| other < base), "{ended:?} {base}");
            ended.push((value, base, offset));
        }
        let check = |freed: &[u8]| {
            for &(value, _, offset) in &ended {
                let Some(offset) = offset else { continue };
                let is_free = freed.contains(&value) && survivor.takes_pages;
                assert_eq!(read(offset), if is_free { 0 } else { value }, "{freed:?}");
            }
        };
        check(&[]);
        for freed in [4, 1, 3, 2] {
            survivor.free_ended(1, ended[freed - 1].1);
            let all = [4, 1, 3, 2];
            let count = all.iter().position(|&other| other == freed).unwrap() + 1;
            check(&all.map(|value| value as u8)[..count]);
        }
        // The last is there still: another process would come behind it.
        survivor.free_ended(1, ended[5].1);
        check(&[1, 2, 3, 4]);
        assert!(survivor.has_room(1));
    }

    #[test]
    fn memory_that_a_process_holds_is_not_freed() {
        let (file, region) = Arena::create_file(3, 1).unwrap();
        let file = Arc::new(file);
        let map = |index| Arc::new(Arena::map(&file, 3, region, index).unwrap());
        let [zero, one, two] = [0, 1, 2].map(map);
        let base = zero.base(2);
        let mut block = two.allocate(100_000).unwrap();
        block.as_mut().fill(7);
        let offset = block.offset();
        block.leak();
        // SAFETY: it lies in the mapping, and nobody writes there.
        let read = || unsafe { *zero.at(offset) };
        zero.hold(base, 1);
        one.hold(base, 2);
        // That process has ended, and holds it as often.
        zero.holder(base, 2).store(ENDED | 1, Ordering::SeqCst);
        for (arena, change) in [(&zero, -1), (&one, -1)] {
            arena.hold(base, change);
            zero.free_ended(2, base);
            assert_eq!(read(), 7);
        }
        one.hold(base, -1);
        zero.free_ended(2, base);
        assert_eq!(read(), if zero.takes_pages { 0 } else { 7 });
    }
}
