//! Single copy: a rank reads ordinary memory of the other ranks of its node where it lies, by `process_vm_readv`, instead
//! of through staging buffers. As MPI's CMA; see also <https://www.kernel.org/doc/html/latest/admin-guide/LSM/Yama.html>.
//!
//! Whether that is allowed depends on the kernel, its security modules and sandboxes. Each rank finds out as it joins, by
//! reading a word of the next one's memory. A rank whose memory could not be read stages its data, and so do all in that
//! operation.

use std::io::IoSliceMut;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::errno::Errno;
use nix::sys::uio::{process_vm_readv, RemoteIoVec};
use nix::unistd::Pid as NixPid;
use rustix::process::PTracer;

use super::engine::{Engine, State};
use super::exchange::Raw;
use super::operation::{Location, Operation};
use super::reduction::slice;
use crate::error::{Error, Result};

/// Smaller data is staged: the calls into the kernel would cost more than they save.
const MIN_BYTES: usize = 256 << 10;
/// What is reduced at once of each peer's memory, together: it stays in the second-level cache.
const SCRATCH: usize = 512 << 10;
/// `0` keeps memory from being read by other ranks.
const SWITCH: &str = "FLOW_SINGLE_COPY";

const WORD: u64 = 0x666c_6f77_5f63_6d61;
static READ_BY_OTHERS: u64 = WORD;

/// A rank's place in the arena.
#[repr(C)]
#[derive(Default)]
pub struct Probe {
    /// Where this rank has [`WORD`]; 0 if others are not to read its memory.
    address: AtomicU64,
    /// 1 once another rank has read it there.
    is_readable: AtomicU32,
}

impl Probe {
    /// This rank lets the others of its job read its memory, before they look.
    pub fn open(&self) {
        if std::env::var_os(SWITCH).is_some_and(|value| value == "0") {
            return;
        }
        // Under Yama only its ancestors may: now also their descendants, among whom the other ranks are. Without Yama this
        // is refused, and not needed.
        let _ = rustix::process::set_ptracer(rustix::process::getppid().map_or(PTracer::None, PTracer::ProcessID));
        self.address.store(std::ptr::from_ref(&READ_BY_OTHERS) as u64, Ordering::Release);
    }

    /// Another rank of the job, process `pid`, finds out whether it can read this one's memory.
    pub fn look(&self, pid: u32) {
        let (address, mut word) = (self.address.load(Ordering::Acquire) as usize, [0; 8]);
        if address != 0 && read(pid, address, &mut word) == Ok(word.len()) && u64::from_ne_bytes(word) == WORD {
            self.is_readable.store(1, Ordering::Release);
        }
    }

    fn is_readable(&self) -> bool {
        self.is_readable.load(Ordering::Acquire) == 1
    }
}

fn read(pid: u32, address: usize, to: &mut [u8]) -> nix::Result<usize> {
    let remote = RemoteIoVec { base: address, len: to.len() };
    process_vm_readv(NixPid::from_raw(pid as i32), &mut [IoSliceMut::new(to)], &[remote])
}

/// How much to read at once of each of `peers` ranks' memory.
pub fn piece_to_read(peers: usize) -> usize {
    (SCRATCH / peers.max(1) / 64 * 64).max(64)
}

impl Engine {
    /// Where the other ranks can find memory of this one, if they are to read it where it lies.
    pub fn locate_to_read(&self, data: *const u8, bytes: usize) -> Location {
        let is_large = bytes >= MIN_BYTES && !data.is_null() && self.size() > 1;
        match self.locate(data, bytes) {
            Location::Staged if is_large && self.abroad.is_none() && self.world.probe().is_readable() => {
                Location::Private(data as usize)
            }
            location => location,
        }
    }

    /// Copies `to.bytes` bytes from `address` of a member's private memory, which holds still.
    pub fn read_private(&self, rank: usize, address: usize, to: Raw, operation: &Operation) -> Result<()> {
        // SAFETY: the caller's memory, of that length, which nobody else uses.
        let to = unsafe { std::slice::from_raw_parts_mut(to.data, to.bytes) };
        let mut start = 0;
        while start < to.len() {
            match read(self.world.peers[self.ranks[rank]].pid, address + start, &mut to[start..]) {
                Ok(count @ 1..) => start += count,
                Err(Errno::EINTR) => {}
                other => return Err(self.unreadable(rank, other.err(), operation)),
            }
        }
        Ok(())
    }

    fn unreadable(&self, rank: usize, errno: Option<Errno>, operation: &Operation) -> Error {
        let reason = errno.map_or("nothing came".into(), |errno| errno.to_string());
        if errno == Some(Errno::ESRCH) || !self.world.ended(&[self.ranks[rank]], std::time::Duration::ZERO).is_empty() {
            return self.lose(rank, operation);
        }
        let reason = format!(
            "cannot read the memory of {}: {reason}; set {SWITCH}=0 on all ranks",
            self.world.describe(self.ranks[rank])
        );
        self.fail(Error::System { rank: self.world.rank, operation: operation.to_string(), reason })
    }

    /// Reduces `data` where all ranks have arrived in `round` with memory that is shared or can be read. Rank r reduces slice
    /// r, in its own memory, whence the others then read it.
    pub fn all_reduce_by_reading(
        &self,
        state: &mut State,
        round: u64,
        operation: &Operation,
        data: Raw,
        locations: &[Location],
    ) -> Result<()> {
        let element = operation.dtype.size();
        let bytes = |rank: usize| {
            let part = slice(data.bytes / element, self.size(), rank, element);
            part.start * element..part.end * element
        };
        let private: Vec<(usize, usize)> = (0..self.size())
            .filter_map(|rank| match locations[rank] {
                Location::Private(address) if rank != self.rank => Some((rank, address)),
                _ => None,
            })
            .collect();
        let piece = piece_to_read(private.len());
        state.scratch.resize(private.len() * piece / 8, 0);
        let scratch = state.scratch.as_mut_ptr().cast::<u8>();

        let own = bytes(self.rank);
        for start in own.clone().step_by(piece) {
            let count = piece.min(own.end - start);
            let mut from: Vec<*mut u8> =
                (0..self.size()).map(|rank| self.mapped(rank, locations, data, start)).collect();
            let mut to: Vec<*mut u8> = from.iter().copied().filter(|place| !place.is_null()).collect();
            for (index, &(rank, address)) in private.iter().enumerate() {
                from[rank] = scratch.wrapping_add(index * piece);
                self.read_private(rank, address + start, Raw { data: from[rank], bytes: count }, operation)?;
            }
            self.combine_places(operation, &from, &mut to, count / element);
        }
        self.done(round);
        self.wait_done(round, operation)?;

        if !matches!(locations[self.rank], Location::Shared(_)) {
            for rank in (0..self.size()).filter(|&rank| rank != self.rank) {
                let part = bytes(rank);
                let to = Raw { data: data.data.wrapping_add(part.start), bytes: part.len() };
                match locations[rank] {
                    Location::Private(address) => self.read_private(rank, address + part.start, to, operation)?,
                    // SAFETY: both are slice `rank`, of the shared memory and of the caller's; it is final.
                    _ => unsafe { super::copy(self.mapped(rank, locations, data, part.start), to.data, to.bytes) },
                }
            }
        }
        // What others read must hold still until they have.
        let last = self.open(state, operation)?;
        self.post(last, operation, Location::Staged);
        self.arrive(last);
        self.wait_all_arrived(last, operation)?;
        self.done(last);
        Ok(())
    }

    /// Where this process has a rank's data from byte `start`; null if it can only be read.
    fn mapped(&self, rank: usize, locations: &[Location], data: Raw, start: usize) -> *mut u8 {
        match locations[rank] {
            _ if rank == self.rank => data.data.wrapping_add(start),
            Location::Shared(offset) => self.world.arena.at(offset + start),
            _ => std::ptr::null_mut(),
        }
    }
}
