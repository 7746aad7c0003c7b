//! The allocator of a rank's region of the arena: which blocks are free, and which of these have
//! their pages. It knows offsets only and touches no memory.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

/// Alignment of blocks of less than a page; others are aligned to a page.
const CACHE_LINE: usize = 64;

/// The blocks of a region, by offset.
pub struct BlockAllocator {
    /// The bytes of a page of memory: 4 KiB, or on some processors 16 or 64 KiB.
    pub page: usize,
    /// Free blocks by size.
    free: BTreeMap<usize, FreeList>,
    /// Freed blocks that nobody may use yet: sizes and offsets.
    quarantined: Vec<(usize, usize)>,
    /// The number of blocks that were ever freed: the time by which they age.
    frees: u64,
    /// End of the part of the region that was ever handed out.
    pub used: usize,
    /// The bytes that are handed out.
    pub live_bytes: usize,
    /// The bytes of free blocks that have their pages.
    pub warm_free_bytes: usize,
}

/// Free blocks of one size, by offset.
#[derive(Default)]
struct FreeList {
    /// The blocks that have their pages, and when they were freed, oldest first.
    warm: VecDeque<(u64, usize)>,
    /// The blocks that gave their pages back.
    cold: Vec<usize>,
}

impl BlockAllocator {
    /// Returns an allocator for the memory from the first whole page after offset `start` on.
    pub fn new(start: usize, page: usize) -> Self {
        Self {
            page,
            free: BTreeMap::new(),
            quarantined: Vec::new(),
            frees: 0,
            used: start.next_multiple_of(page),
            live_bytes: 0,
            warm_free_bytes: 0,
        }
    }

    /// Returns the size of the block for `bytes` bytes. There are eight classes between powers of two,
    /// so that at most an eighth is lost. Sizes of a page and more are whole pages.
    pub fn size_class(&self, bytes: usize) -> usize {
        let bytes = bytes.max(CACHE_LINE);
        let step = (bytes.next_power_of_two() / 16).max(CACHE_LINE);
        let size = bytes.next_multiple_of(step);
        if size >= self.page { size.next_multiple_of(self.page) } else { size }
    }

    /// Takes a free block of one of these sizes, the smallest first: its size and offset.
    pub fn take_free(&mut self, sizes: RangeInclusive<usize>) -> Option<(usize, usize)> {
        for (&size, list) in self.free.range_mut(sizes) {
            if let Some((_, offset)) = list.warm.pop_back() {
                self.warm_free_bytes -= size;
                return Some((size, offset));
            }
            if let Some(offset) = list.cold.pop() {
                return Some((size, offset));
            }
        }
        None
    }

    /// Returns where free blocks of whole pages lie side by side: lengths and offsets.
    pub fn free_runs(&self) -> Vec<(usize, usize)> {
        let mut blocks: Vec<(usize, usize)> = Vec::new();
        for (&size, list) in self.free.range(self.page..) {
            let warm = list.warm.iter().map(|&(_, offset)| offset);
            blocks.extend(warm.chain(list.cold.iter().copied()).map(|offset| (offset, size)));
        }
        blocks.sort_unstable();
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (offset, size) in blocks {
            match runs.last_mut() {
                Some((length, start)) if *start + *length == offset => *length += size,
                _ => runs.push((size, offset)),
            }
        }
        runs
    }

    /// Takes all free blocks of whole pages off the lists.
    pub fn forget_pages(&mut self) {
        for (size, list) in self.free.split_off(&self.page) {
            self.warm_free_bytes -= size * list.warm.len();
        }
    }

    /// Takes a block of the part of the region that was never handed out, which ends at `end`.
    pub fn take_unused(&mut self, size: usize, end: usize) -> Option<(usize, usize)> {
        let offset =
            if size >= self.page { self.used.next_multiple_of(self.page) } else { self.used };
        self.used = offset.checked_add(size).filter(|&used| used <= end)?;
        Some((size, offset))
    }

    /// Keeps a freed block, which has given its pages back, from being used.
    pub fn add_quarantined(&mut self, size: usize, offset: usize) {
        self.quarantined.push((size, offset));
    }

    /// Makes all blocks free that were kept from being used.
    pub fn release_quarantined(&mut self) {
        for (size, offset) in std::mem::take(&mut self.quarantined) {
            self.add_cold(size, offset);
        }
    }

    /// Makes the warm block that was freed longest ago a cold one: its size and offset.
    pub fn cool_oldest(&mut self) -> Option<(usize, usize)> {
        let oldest = self
            .free
            .range(self.page..)
            .filter_map(|(&size, list)| Some((list.warm.front()?.0, size)))
            .min();
        let (_, size) = oldest?;
        let list = self.free.get_mut(&size)?;
        let (_, offset) = list.warm.pop_front()?;
        list.cold.push(offset);
        self.warm_free_bytes -= size;
        Some((size, offset))
    }

    /// Adds a free block that has its pages.
    pub fn add_warm(&mut self, size: usize, offset: usize) {
        self.frees += 1;
        self.free.entry(size).or_default().warm.push_back((self.frees, offset));
        self.warm_free_bytes += size;
    }

    /// Adds a free block that has given its pages back.
    pub fn add_cold(&mut self, size: usize, offset: usize) {
        self.free.entry(size).or_default().cold.push(offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_what_was_asked_for_and_waste_little() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            let blocks = BlockAllocator::new(0, page);
            for bytes in
                (1..10_000).chain([65_536, 65_537, 1 << 20, (1 << 20) + 1, 26_214_400, 123_456_789])
            {
                let size = blocks.size_class(bytes);
                assert!(size >= bytes && size.is_multiple_of(CACHE_LINE));
                assert!(size < page || size.is_multiple_of(page));
                assert!(bytes < 64 * 1024 || size - bytes <= bytes / 8 + page, "{bytes} -> {size}");
            }
        }
    }
}
