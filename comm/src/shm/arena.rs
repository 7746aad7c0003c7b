//! Memory that every local rank maps: one sparse memfd, a region of it for each rank to allocate
//! from.
//!
//! The file is far larger than the machine's memory. Pages come into being when they are touched,
//! so growing needs no protocol between ranks. An offset means the same bytes in every process. A
//! memfd has no name and is not bound by the size of `/dev/shm`. When the last process that maps it
//! ends, however it ends, it is gone.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_store::fork::ForkSafe;
use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::block_allocator::BlockAllocator;
use crate::liveness::has_ended;

/// The most that a process maps, all mappings together: a quarter of the address space.
const ADDRESS_SPACE: usize = 1 << 45;
/// The least shared memory of a rank.
const MIN_REGION: usize = 64 << 20;
/// The number of ranks that one process can have if each maps the memory of all.
pub const MAX_MAPPINGS: usize = (ADDRESS_SPACE / MIN_REGION).isqrt();
/// Freed blocks keep their pages up to this many bytes, or as many as are in use: allocations of a
/// training step then never fault. Beyond that, those that were freed longest ago give theirs back.
const MIN_CACHE: usize = 256 << 20;

/// The shared mapping, and the allocator of this process' region.
///
/// A process that is forked from this one may read and write what it has inherited, which stays
/// shared: it is not copied on write. The allocator is its parent's: it has no blocks for the
/// child, and takes none back from it.
pub struct Arena {
    base: NonNull<u8>,
    len: usize,
    /// The part that this process allocates from.
    region: Range<usize>,
    /// None for memory of this process alone.
    file: Option<Arc<OwnedFd>>,
    blocks: ForkSafe<Mutex<BlockAllocator>>,
    /// Whether the system takes pages back. qemu's user mode says that it does, and does nothing.
    takes_pages: bool,
    /// Raised when a collective failed: a peer may still write into blocks that were in use then,
    /// so these are not used again.
    quarantine: AtomicU32,
    /// The quarantine that is over: no peer writes into blocks of before any more.
    lifted: AtomicU32,
    retired: Mutex<Vec<RetiredBlocks>>,
}

/// Blocks that are free when their condition holds; without the arena, which they must not keep.
struct RetiredBlocks {
    is_unused: Box<dyn Fn(&Arena) -> bool + Send>,
    /// Offsets, sizes, and the quarantine in which they were born.
    blocks: Vec<(usize, usize, u32)>,
}

// SAFETY: `base` is a plain shared mapping, valid in all threads until `Arena` is dropped; the
// allocator is locked.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Makes the memfd for `regions` ranks, which a process maps `mappings` times. Its size is what
    /// the address space and the file size limit allow, some times the machine's memory for each
    /// rank.
    pub fn create_file(regions: usize, mappings: usize) -> Result<(OwnedFd, usize), String> {
        let memory = {
            let info = rustix::system::sysinfo();
            (info.totalram as usize).saturating_mul(info.mem_unit.max(1) as usize)
        };
        let wanted = memory.saturating_mul(4).max(64 << 30);
        let wanted = wanted.min(ADDRESS_SPACE / regions / mappings);
        let file_limit = rustix::process::getrlimit(rustix::process::Resource::Fsize)
            .current
            .unwrap_or(u64::MAX);
        let space_limit =
            rustix::process::getrlimit(rustix::process::Resource::As).current.unwrap_or(u64::MAX);
        let space = space_limit / 2 / mappings as u64;
        let limit = file_limit.min(space) as usize / regions;
        let region = wanted.min(limit) / (1 << 20) * (1 << 20);
        if region < MIN_REGION {
            return Err(format!(
                "only {} MiB of shared memory per rank is allowed by the limits on file size \
                 (ulimit -f) and address space (ulimit -v); at least {} MiB are needed: raise \
                 them; `flow-launch doctor` says more",
                region >> 20,
                MIN_REGION >> 20
            ));
        }
        let file = rustix::fs::memfd_create(c"flow-arena", MemfdFlags::CLOEXEC)
            .map_err(|e| format!("memfd_create failed: {e}; `flow-launch doctor` says more"))?;
        rustix::fs::ftruncate(&file, (region * regions) as u64).map_err(|e| {
            format!("cannot size the shared memory to {} bytes: {e}", region * regions)
        })?;
        Ok((file, region))
    }

    /// Maps all of `file`, and allocates from region number `index`, which no other process that
    /// lives does.
    pub fn map(
        file: &Arc<OwnedFd>,
        regions: usize,
        region: usize,
        index: usize,
    ) -> Result<Self, String> {
        let len = regions * region;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file.as_fd(),
                0,
            )
        }
        .map_err(|e| {
            format!(
                "cannot map {len} bytes of shared memory: {e} (is the address space limited? \
                 ulimit -v)"
            )
        })?;
        // SAFETY: the range was just mapped. Without this a core dump would walk the whole sparse
        // mapping.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxDontDump) };
        let base = NonNull::new(base.cast()).ok_or("mmap returned a null address")?;
        let mut arena =
            Self::over(base, len, index * region..(index + 1) * region, Some(Arc::clone(file)));
        let page = rustix::param::page_size();
        let marks = arena.marks(index);
        let before = marks.base.load(Ordering::SeqCst);
        let mut base = first_offset(index, region, regions).next_multiple_of(page);
        if before != 0 {
            // What the process before has handed out may still be in use.
            let end = marks.end.load(Ordering::SeqCst).max(before + arena.head_bytes());
            base = end.next_multiple_of(page);
        }
        let start = base + arena.head_bytes();
        if !arena.holds(index, base, arena.head_bytes()) {
            return Err(no_room("another process", index));
        }
        if before != 0 {
            // First: whoever frees what was there before looks at this last.
            arena.head(before).next.store(base, Ordering::SeqCst);
        }
        marks.base.store(base, Ordering::SeqCst);
        marks.end.store(start, Ordering::SeqCst);
        let blocks = BlockAllocator::new(start, page);
        arena.blocks = ForkSafe::new(Mutex::new(blocks));
        Ok(arena)
    }

    fn over(
        base: NonNull<u8>,
        len: usize,
        region: Range<usize>,
        file: Option<Arc<OwnedFd>>,
    ) -> Self {
        let blocks = BlockAllocator::new(region.start, rustix::param::page_size());
        let mut arena = Self {
            base,
            len,
            region,
            file,
            blocks: ForkSafe::new(Mutex::new(blocks)),
            takes_pages: true,
            quarantine: AtomicU32::new(0),
            lifted: AtomicU32::new(0),
            retired: Mutex::default(),
        };
        arena.takes_pages = arena.finds_pages_taken();
        arena
    }

    /// Tries it with the last page of this process' region, which nobody uses yet.
    fn finds_pages_taken(&self) -> bool {
        let page = rustix::param::page_size();
        let offset = self.region.end - page;
        let byte = self.at(offset);
        // SAFETY: the byte is in the mapping, and no other process allocates from this region.
        unsafe { byte.write_volatile(1) };
        // SAFETY: as above.
        self.discard(offset, page) && unsafe { byte.read_volatile() == 0 }
    }

    /// Returns an arena for each of `regions` threads, over memory of this process alone, which stays
    /// for good: Miri knows no memfd.
    #[cfg(test)]
    pub fn of_threads(regions: usize, region: usize) -> Vec<Arc<Self>> {
        let len = regions * region;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as in `map`.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE)
        };
        let base = NonNull::new(base.unwrap().cast()).unwrap();
        let arena = |index| Self::over(base, len, index * region..(index + 1) * region, None);
        let arenas: Vec<_> = (0..regions).map(arena).map(Arc::new).collect();
        // An arena that is dropped takes the memory of all with it.
        arenas.iter().for_each(|arena| std::mem::forget(Arc::clone(arena)));
        arenas
    }

    /// Returns the file that it maps; None for memory of this process alone.
    pub fn file(&self) -> Option<&Arc<OwnedFd>> {
        self.file.as_ref()
    }

    /// Returns the size in bytes of each region.
    pub fn region_bytes(&self) -> usize {
        self.region.len()
    }

    /// Returns the number of regions.
    pub fn regions(&self) -> usize {
        self.len / self.region.len()
    }

    /// Returns the number of this process' region.
    pub fn own_region(&self) -> usize {
        self.region.start / self.region.len()
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
            let (pid, count) = ((held >> 32) as u32, held as u32);
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

    /// Frees blocks when nobody uses them any more.
    pub fn retire(&self, blocks: Vec<Block>, is_unused: impl Fn(&Arena) -> bool + Send + 'static) {
        let parts = blocks.iter().map(|block| (block.offset, block.size, block.born)).collect();
        blocks.into_iter().for_each(Block::leak);
        let retired = RetiredBlocks { is_unused: Box::new(is_unused), blocks: parts };
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).push(retired);
    }

    /// Frees the retired blocks that nobody uses any more.
    pub fn free_retired(&self) {
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|retired| {
            let is_unused = (retired.is_unused)(self);
            if is_unused {
                retired
                    .blocks
                    .iter()
                    .for_each(|&(offset, size, born)| self.free(offset, size, born));
            }
            !is_unused
        });
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

    /// Returns the address of `offset`, which must be inside the mapping.
    pub fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.len);
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Whether `bytes` bytes from `offset` lie inside the mapping.
    pub fn contains(&self, offset: usize, bytes: usize) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.len)
    }

    /// Whether `bytes` bytes from `offset` can be a block of region number `index`. None begins at
    /// 0, which is what is read where a rank gave its memory back after a failure.
    pub fn holds(&self, index: usize, offset: usize, bytes: usize) -> bool {
        let start = index * self.region.len();
        offset != 0
            && offset >= start
            && self.contains(offset, bytes)
            && offset + bytes <= start + self.region.len()
    }

    /// Returns the offset of the memory at `pointer`, if all of it lies in this process' region.
    pub fn offset_of(&self, pointer: *const u8, bytes: usize) -> Option<usize> {
        let offset = (pointer as usize).checked_sub(self.base.as_ptr() as usize)?;
        (offset >= self.region.start && offset.checked_add(bytes)? <= self.region.end)
            .then_some(offset)
    }

    /// Allocates a block of at least `bytes` bytes with unspecified contents; `None` when the
    /// region is full, and in a forked child.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Option<Block> {
        if bytes > self.region.len() {
            return None;
        }
        let mut blocks = self.blocks()?;
        let size = blocks.size_class(bytes);
        // A block up to a quarter larger serves as well: close sizes share their memory.
        let (size, offset) = blocks
            .take_free(size..=size + size / 4)
            .or_else(|| blocks.take_unused(size, self.region.end))
            .or_else(|| self.split_free(&mut blocks, size))?;
        blocks.live_bytes += size;
        if self.file.is_some() {
            let end = &self.marks(self.own_region()).end;
            end.store(blocks.used, Ordering::SeqCst);
        }
        drop(blocks);
        let born = self.quarantine.load(Ordering::Acquire);
        Some(Block { arena: Arc::clone(self), offset, size, born })
    }

    /// Takes the beginning of free blocks that lie side by side; the rest stays free.
    fn split_free(&self, blocks: &mut BlockAllocator, size: usize) -> Option<(usize, usize)> {
        let size = size.next_multiple_of(blocks.page);
        let runs = blocks.free_runs();
        let &(length, offset) = runs.iter().filter(|&&(length, _)| length >= size).min()?;
        blocks.forget_pages();
        for &(length, offset) in &runs {
            self.discard(offset, length);
        }
        let others = runs.into_iter().filter(|&(_, other)| other != offset);
        for (length, offset) in others.chain([(length - size, offset + size)]) {
            if length > 0 {
                blocks.add_cold(length, offset);
            }
        }
        Some((size, offset))
    }

    /// Allocates as [`Arena::allocate`] does, all bytes zero.
    pub fn allocate_zeroed(self: &Arc<Self>, bytes: usize) -> Option<Block> {
        let block = self.allocate(bytes)?;
        self.clear(block.offset, block.size);
        Some(block)
    }

    /// Keeps the blocks that are in use now from being used again: see `quarantine`.
    pub fn quarantine(&self) {
        self.quarantine.fetch_add(1, Ordering::AcqRel);
    }

    /// Has the blocks be used again that [`Arena::quarantine`] keeps from that: nothing that failed is
    /// under way on any rank.
    pub fn lift_quarantine(&self) {
        let Some(mut blocks) = self.blocks() else { return };
        self.lifted.store(self.quarantine.load(Ordering::Acquire), Ordering::Release);
        blocks.release_quarantined();
    }

    /// Returns the bytes handed out and not yet freed, and the bytes of freed blocks whose pages
    /// are kept; none of a forked child.
    pub fn usage(&self) -> (usize, usize) {
        self.blocks().map_or((0, 0), |blocks| (blocks.live_bytes, blocks.warm_free_bytes))
    }

    fn free(&self, offset: usize, size: usize, born: u32) {
        let Some(mut blocks) = self.blocks() else { return };
        blocks.live_bytes -= size;
        let quarantine = self.quarantine.load(Ordering::Acquire);
        if born != quarantine && quarantine != self.lifted.load(Ordering::Acquire) {
            self.clear(offset, size);
            blocks.add_quarantined(size, offset);
            return;
        }
        blocks.add_warm(size, offset);
        while blocks.warm_free_bytes > MIN_CACHE.max(blocks.live_bytes) {
            let Some((size, offset)) = blocks.cool_oldest() else { break };
            // Under the lock: nobody can be handed the block while its pages go.
            self.discard(offset, size);
        }
    }

    /// Makes all bytes of an unused block zero.
    fn clear(&self, offset: usize, size: usize) {
        if !self.discard(offset, size) {
            // SAFETY: the range is inside the mapping, and in this process' region.
            unsafe { std::ptr::write_bytes(self.at(offset), 0, size) };
        }
    }

    /// Gives the pages of a block back to the system: they read as zeros afterwards. False where it
    /// has no pages of its own, or the system does not take them.
    fn discard(&self, offset: usize, size: usize) -> bool {
        let start = self.at(offset).cast::<c_void>();
        // SAFETY: the range is of whole pages (blocks of a page and more are), inside the mapping and
        // unused.
        self.takes_pages
            && size >= rustix::param::page_size()
            && unsafe { rustix::mm::madvise(start, size, Advice::LinuxRemove) }.is_ok()
    }

    /// Returns None in a forked child.
    fn blocks(&self) -> Option<MutexGuard<'_, BlockAllocator>> {
        self.blocks.is_ours().then(|| self.blocks.lock().unwrap_or_else(PoisonError::into_inner))
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

/// Returns where the first block of a region can begin: the first one begins with all marks.
fn first_offset(index: usize, region: usize, regions: usize) -> usize {
    let marks = if index == 0 { regions * size_of::<RegionMarks>() } else { 0 };
    index * region + marks
}

/// Says that a rank's region is full, for the error of an operation that needs memory for `what`.
pub fn no_room(what: &str, rank: usize) -> String {
    format!(
        "no room for {what} in the shared memory of rank {rank}: drop shared buffers and groups \
         that are no longer used"
    )
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.blocks.is_ours() {
            // SAFETY: every block holds an `Arc` of the arena, so nothing points into the mapping
            // any more.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        }
    }
}

/// A block of the arena, freed when dropped.
pub struct Block {
    arena: Arc<Arena>,
    offset: usize,
    size: usize,
    born: u32,
}

impl Block {
    /// Returns where the block begins in the mapping, the same in all processes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the address of the block in this process.
    pub fn as_ptr(&self) -> *mut u8 {
        self.arena.at(self.offset)
    }

    /// Returns the arena the block came from.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Gives the block up without freeing it: peers may still use it.
    pub fn leak(mut self) {
        self.size = 0;
    }

    /// Returns the usable bytes: at least as many as were asked for.
    pub fn size(&self) -> usize {
        self.size
    }
}

impl AsMut<[u8]> for Block {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block is that long, is initialized as all mapped memory is, and is borrowed
        // mutably.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.size) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.size != 0 {
            self.arena.free(self.offset, self.size, self.born);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> Arc<Arena> {
        let (file, region) = Arena::create_file(1, 1).unwrap();
        Arc::new(Arena::map(&Arc::new(file), 1, region, 0).unwrap())
    }

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

    #[test]
    fn freed_blocks_serve_again() {
        let arena = arena();
        let first = arena.allocate(100_000).unwrap();
        let offset = first.offset();
        drop(first);
        let second = arena.allocate(99_000).unwrap();
        assert_eq!(second.offset(), offset);
        assert_ne!(arena.allocate(100_000).unwrap().offset(), offset);
    }

    #[test]
    fn blocks_do_not_overlap() {
        let arena = arena();
        let mut blocks: Vec<Block> = Vec::new();
        for round in 0..4 {
            for i in 0..200 {
                let block = arena.allocate(1 + (i * 7919 + round * 104_729) % 300_000).unwrap();
                for other in &blocks {
                    assert!(
                        block.offset() + block.size() <= other.offset()
                            || other.offset() + other.size() <= block.offset()
                    );
                }
                blocks.push(block);
            }
            let mut index = 0;
            blocks.retain(|_| {
                index += 1;
                index % 2 == 0
            });
        }
        drop(blocks);
        assert_eq!(arena.usage().0, 0);
    }

    #[test]
    fn zeroed_blocks_are_zero_after_use() {
        let arena = arena();
        for bytes in [100, 5_000, 2 << 20] {
            let block = arena.allocate(bytes).unwrap();
            // SAFETY: the block is ours and at least `bytes` long.
            unsafe { std::ptr::write_bytes(block.as_ptr(), 0xAB, bytes) };
            drop(block);
            let block = arena.allocate_zeroed(bytes).unwrap();
            // SAFETY: as above.
            let content = unsafe { std::slice::from_raw_parts(block.as_ptr(), bytes) };
            assert!(content.iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn quarantined_blocks_are_not_used_again() {
        let arena = arena();
        let block = arena.allocate(100_000).unwrap();
        let offset = block.offset();
        arena.quarantine();
        drop(block);
        let other = arena.allocate(100_000).unwrap();
        assert_ne!(other.offset(), offset);
        arena.lift_quarantine();
        assert_eq!(arena.allocate(100_000).unwrap().offset(), offset);
        // Nor do those of before matter any more.
        let offset = other.offset();
        drop(other);
        assert_eq!(arena.allocate(100_000).unwrap().offset(), offset);
    }

    #[test]
    fn a_full_region_says_so() {
        let arena = arena();
        assert!(arena.allocate(usize::MAX / 4).is_none());
        assert!(arena.allocate(arena.len + 1).is_none());
    }

    #[test]
    fn a_large_free_block_serves_small_ones_when_the_region_is_full() {
        let arena = arena();
        let large = arena.allocate(arena.len / 16 * 13).unwrap();
        assert!(arena.allocate(arena.len / 4).is_none());
        drop(large);
        let blocks: Vec<Block> = (0..3).map(|_| arena.allocate(arena.len / 4).unwrap()).collect();
        let offsets: Vec<usize> = blocks.iter().map(Block::offset).collect();
        assert!(offsets.windows(2).all(|pair| pair[0] + blocks[0].size() <= pair[1]));
        assert!(arena.allocate(arena.len / 4).is_none());
        assert!(arena.allocate(100).is_some());
        // And the small ones a large one again, when they are free.
        drop(blocks);
        assert!(arena.allocate(arena.len / 4 * 3).is_some());
    }

    #[test]
    fn pages_beyond_the_cache_are_given_back() {
        let arena = arena();
        let bytes = MIN_CACHE / 4;
        let blocks: Vec<Block> = (0..8).map(|_| arena.allocate(bytes).unwrap()).collect();
        drop(blocks);
        let (live, warm) = arena.usage();
        assert_eq!(live, 0);
        assert!(warm <= MIN_CACHE, "{warm} bytes kept");
    }

    #[test]
    fn blocks_freed_long_ago_make_room_in_the_cache() {
        let arena = arena();
        let write = |block: &Block| {
            // SAFETY: the block is ours.
            unsafe { block.as_ptr().write(7) };
        };
        let small: Vec<Block> =
            (0..2 * MIN_CACHE / (512 << 10)).map(|_| arena.allocate(512 << 10).unwrap()).collect();
        small.iter().for_each(write);
        drop(small);
        assert!(arena.usage().1 <= MIN_CACHE);
        let large = arena.allocate(MIN_CACHE / 4).unwrap();
        write(&large);
        drop(large);
        assert!(arena.usage().1 <= MIN_CACHE);
        let large = arena.allocate(MIN_CACHE / 4).unwrap();
        // SAFETY: the block is ours. Had it given its pages back, they would read as zeros.
        assert_eq!(unsafe { large.as_ptr().read() }, 7);
    }
}
