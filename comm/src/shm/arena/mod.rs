//! Memory that every local rank maps: one sparse memfd, a region of it for each rank to allocate
//! from.
//!
//! The file is far larger than the machine's memory. Pages come into being when they are touched,
//! so growing needs no protocol between ranks. An offset means the same bytes in every process. A
//! memfd has no name and is not bound by the size of `/dev/shm`. When the last process that maps it
//! ends, however it ends, it is gone.
//!
//! | file | subject |
//! |---|---|
//! | `regions` | the processes that have a region one after the other, and who holds their memory |
//! | `block_allocator` | which blocks of a region are free |

mod block_allocator;
mod regions;

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_store::fork::ForkSafe;
use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use block_allocator::BlockAllocator;

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
        let start = arena.take_region(index)?;
        let blocks = BlockAllocator::new(start, rustix::param::page_size());
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
        self.publish_end(blocks.used);
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

/// Blocks that are free when their condition holds; without the arena, which they must not keep.
struct RetiredBlocks {
    is_unused: Box<dyn Fn(&Arena) -> bool + Send>,
    /// Offsets, sizes, and the quarantine in which they were born.
    blocks: Vec<(usize, usize, u32)>,
}

#[cfg(test)]
mod tests;
