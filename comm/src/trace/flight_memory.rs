//! The memory that flow-launch has made for this process's flight recorders, and reads:
//! [`flow_store::flight`] says what is where. Without flow-launch there is none.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use flow_store::flight::{self, header};
use flow_store::fork::PerProcess;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::retry_on_intr;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};

use super::slot::{CAPACITY, RecordSlot};
use crate::kind::Kind;
use crate::liveness;
use flow_store::clock;

/// A word has eight bytes.
const WORD: usize = size_of::<u64>();

/// The memory, mapped as long as the process lives.
pub struct FlightMemory {
    file: File,
    base: NonNull<u8>,
    /// Which rings are in use.
    rings: Mutex<[bool; flight::RINGS]>,
    /// The next step is the first since the job's ranks have changed.
    has_changed: AtomicBool,
}

// SAFETY: all that is done with the mapping is done with atomics, but for rings, each of which has one
// owner; and it is never unmapped.
unsafe impl Send for FlightMemory {}
// SAFETY: as above.
unsafe impl Sync for FlightMemory {}

/// Returns this process's memory, if flow-launch has made one and no other process has it.
pub fn memory() -> Option<&'static FlightMemory> {
    static MEMORY: PerProcess<OnceLock<Option<FlightMemory>>> = PerProcess::empty();
    MEMORY.get().get_or_init(FlightMemory::open).as_ref()
}

/// Notes that a step is over: a backward that has reduced gradients.
pub fn end_step() {
    if let Some(memory) = memory() {
        memory.end_step(clock::now());
    }
}

/// Notes that the ranks of the job have changed: what follows up to the end of the next step is what that
/// has cost.
pub fn ranks_have_changed() {
    if let Some(memory) = memory() {
        memory.has_changed.store(true, Ordering::Relaxed);
    }
}

impl FlightMemory {
    fn open() -> Option<FlightMemory> {
        let path = std::env::var_os(flight::VARIABLE).filter(|path| !path.is_empty())?;
        let path = PathBuf::from(path);
        match FlightMemory::map(&path) {
            Ok(memory) => memory.claim().then_some(memory),
            // It costs nothing but what flow-launch could show.
            Err(error) => {
                log::debug!("no flight recorder in {}: {error}", path.display());
                None
            }
        }
    }

    fn map(path: &Path) -> io::Result<FlightMemory> {
        // In a container with other processes the path may lead to a file of theirs.
        let target = std::fs::read_link(path)?;
        if target != Path::new(&format!("/memfd:{} (deleted)", flight::NAME)) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let file = File::options().read(true).write(true).open(path)?;
        if file.metadata()?.len() < flight::BYTES as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if !flight::is_allowed() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        reserve(&file, FallocateFlags::empty(), 0, flight::RINGS_AT)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base =
            unsafe { mmap(ptr::null_mut(), flight::BYTES, access, MapFlags::SHARED, &file, 0) }?;
        // SAFETY: the range was just mapped; that it is in no core dump does not change what is there.
        let _ = unsafe { madvise(base, flight::BYTES, Advice::LinuxDontDump) };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let rings = Mutex::new([false; flight::RINGS]);
        Ok(FlightMemory { file, base, rings, has_changed: AtomicBool::new(true) })
    }

    /// Takes the memory for this process, and what is in it from one that has ended. False if another
    /// process has it.
    fn claim(&self) -> bool {
        let pid = self.word(0, header::PID);
        let before = pid.load(Ordering::Acquire);
        let is_free = before == 0 || u32::try_from(before).is_ok_and(liveness::has_ended);
        let own = u64::from(std::process::id());
        if !is_free
            || pid.compare_exchange(before, own, Ordering::AcqRel, Ordering::Acquire).is_err()
        {
            return false;
        }
        for number in [header::STEPS, header::STEP_END, header::STEP_TIME, header::RESUMED] {
            self.word(0, number).store(0, Ordering::Relaxed);
        }
        if before != 0 {
            let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let length = flight::RINGS * flight::RING_BYTES;
            if reserve(&self.file, holes, flight::RINGS_AT, length).is_err() {
                return false;
            }
        }
        let zero = clock::zero().map_or(0, |zero| zero.as_nanos() as u64 + 1);
        self.word(0, header::ZERO).store(zero, Ordering::Relaxed);
        for code in 0..flight::NAMES {
            let name = Kind::from_code(code as u8).map_or("", Kind::name);
            self.write_name(flight::NAMES_AT + code * flight::NAME_BYTES, name);
        }
        self.word(0, header::LAYOUT).store(flight::LAYOUT, Ordering::Release);
        true
    }

    fn end_step(&self, now: u64) {
        let last = self.word(0, header::STEP_END).swap(now, Ordering::Relaxed);
        let time = if last == 0 { 0 } else { now.saturating_sub(last) };
        self.word(0, header::STEP_TIME).store(time, Ordering::Relaxed);
        self.word(0, header::STEPS).fetch_add(1, Ordering::Relaxed);
        if self.has_changed.load(Ordering::Relaxed)
            && self.has_changed.swap(false, Ordering::Relaxed)
        {
            let count = self.word(0, header::RESUMED);
            let number = count.load(Ordering::Relaxed);
            let place = header::RESUMED_AT + number as usize % flight::RESUMED;
            self.word(0, place).store(now, Ordering::Relaxed);
            count.store(number + 1, Ordering::Relaxed);
        }
    }

    /// Takes an empty ring for the group of this name, if one is left.
    pub fn take_ring(&'static self, group: &str) -> Option<SharedSlots> {
        let mut rings = self.rings();
        let number = rings.iter().position(|is_used| !is_used)?;
        let at = ring_at(number);
        reserve(&self.file, FallocateFlags::empty(), at, flight::RING_BYTES).ok()?;
        rings[number] = true;
        let ring = SharedSlots { memory: self, number };
        for slot in ring.iter() {
            slot.clear();
        }
        self.write_name(at + WORD, group);
        self.word(at, 0).store(1, Ordering::Release);
        Some(ring)
    }

    fn rings(&self) -> MutexGuard<'_, [bool; flight::RINGS]> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a name, or as much of it as there is room for.
    fn write_name(&self, at: usize, name: &str) {
        let mut bytes = [0; flight::NAME_BYTES];
        let length = name.len().min(bytes.len());
        bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
        for (number, word) in bytes.as_chunks::<WORD>().0.iter().enumerate() {
            self.word(at, number).store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
    }

    /// Returns this word of those that are `at` so many bytes.
    fn word(&self, at: usize, number: usize) -> &AtomicU64 {
        let offset = at + number * WORD;
        assert!(offset + WORD <= flight::BYTES && offset.is_multiple_of(WORD));
        // SAFETY: it is inside the mapping, which stays, and aligned; all access is atomic.
        unsafe { self.base.add(offset).cast::<AtomicU64>().as_ref() }
    }
}

/// Gets pages for this part of a file, or takes them from it. A write to a page for which there is no
/// memory would kill the process.
fn reserve(file: &File, flags: FallocateFlags, at: usize, length: usize) -> io::Result<()> {
    Ok(retry_on_intr(|| fallocate(file, flags, at as u64, length as u64))?)
}

/// Returns at which byte a ring begins.
fn ring_at(number: usize) -> usize {
    flight::RINGS_AT + number * flight::RING_BYTES
}

/// The slots of a ring in the memory, until dropped.
pub struct SharedSlots {
    memory: &'static FlightMemory,
    number: usize,
}

impl Deref for SharedSlots {
    type Target = [RecordSlot; CAPACITY];

    #[inline]
    fn deref(&self) -> &[RecordSlot; CAPACITY] {
        let at = ring_at(self.number) + flight::RING_HEAD;
        // SAFETY: it is inside the mapping, which stays, and aligned as a page is plus a multiple of 64;
        // slots consist of atomics, for which any bits will do.
        unsafe { self.memory.base.add(at).cast::<[RecordSlot; CAPACITY]>().as_ref() }
    }
}

impl Drop for SharedSlots {
    fn drop(&mut self) {
        self.memory.word(ring_at(self.number), 0).store(0, Ordering::Release);
        self.memory.rings()[self.number] = false;
    }
}
