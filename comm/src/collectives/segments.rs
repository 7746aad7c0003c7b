//! Where a bucket of gradients lies.

use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use flow_kernels::DType;
use fnv::FnvHasher;

use crate::descriptor::{Location, OpDescriptor};
use crate::error::{Error, Result};
use crate::shm::arena::{Arena, Block};
use crate::shm::rounds::Rounds;

/// Pieces of shared memory that are reduced as one: a bucket of gradients, each where it was
/// allocated.
///
/// Every rank has as many pieces of the same lengths; where they lie may differ.
pub struct Segments {
    pub(super) bucket: u32,
    pub(super) dtype: DType,
    pub(super) lengths: Vec<usize>,
    pub(super) total: usize,
    /// Tells buckets apart whose pieces differ in number or lengths.
    pub(super) layout: u64,
    /// Which step the bucket is reduced in, the same on all ranks.
    step: AtomicU32,
    /// Offsets of the pieces, readable by all ranks.
    table: Block,
    pieces: Mutex<PlacedPieces>,
}

struct PlacedPieces {
    /// Keep the pieces' memory until it is reduced.
    owners: Vec<Option<Owner>>,
    under_way: bool,
    /// When this rank saw that the last reduction was over.
    finished: Option<Instant>,
}

type Owner = Box<dyn AsMut<[u8]> + Send>;

impl Segments {
    pub(crate) fn new(
        arena: &Arc<Arena>,
        bucket: u32,
        dtype: DType,
        lengths: Vec<usize>,
    ) -> Option<Self> {
        let total = lengths.iter().try_fold(0usize, |total, &length| total.checked_add(length))?;
        total.checked_mul(dtype.size())?;
        let mut hasher = FnvHasher::default();
        lengths.hash(&mut hasher);
        let table = arena.allocate_zeroed(lengths.len() * 8)?;
        let pieces = Mutex::new(PlacedPieces {
            owners: lengths.iter().map(|_| None).collect(),
            under_way: false,
            finished: None,
        });
        let (layout, step) = (hasher.finish(), AtomicU32::new(0));
        Some(Self { bucket, dtype, lengths, total, layout, step, table, pieces })
    }

    /// Says in which step, from 1 on, the bucket is launched next: ranks whose steps differ get an
    /// error that names both.
    pub fn set_step(&self, step: u32) {
        self.step.store(step, Ordering::Relaxed);
    }

    pub(super) fn step(&self) -> u32 {
        self.step.load(Ordering::Relaxed)
    }

    /// Says where piece `index` lies now: in `memory`, whose address stays the same until it is
    /// dropped, which is when the piece has been reduced; its `Drop` must not call the group. False
    /// if there is no such piece, the memory is too short or badly aligned for it, not all ranks
    /// can reach it there, or the bucket is being reduced.
    pub fn set_piece(&self, index: usize, memory: impl AsMut<[u8]> + Send + 'static) -> bool {
        let Some(length) = self.lengths.get(index) else { return false };
        let bytes = length * self.dtype.size();
        let mut owner: Owner = Box::new(memory);
        let memory = (*owner).as_mut();
        // An empty piece needs no valid address; it is never read.
        let nothing = (bytes == 0).then_some(0);
        let Some(offset) = nothing.or_else(|| self.table.arena().offset_of(memory.as_ptr(), bytes))
        else {
            return false;
        };
        let mut pieces = self.pieces();
        if pieces.under_way || memory.len() < bytes || offset % self.dtype.size() != 0 {
            return false;
        }
        self.entry(self.table.offset(), index).store(offset as u64, Ordering::Relaxed);
        pieces.owners[index] = Some(owner);
        true
    }

    /// Lets go of the memory of all pieces, unless they are being reduced.
    pub fn clear(&self) {
        let mut pieces = self.pieces();
        if !pieces.under_way {
            pieces.owners.fill_with(|| None);
        }
    }

    /// When this rank saw that the last reduction was over; None if there was none, or if it is
    /// under way.
    pub fn finished(&self) -> Option<Instant> {
        self.pieces().finished
    }

    /// Bytes of all pieces together.
    pub fn bytes(&self) -> usize {
        self.total * self.dtype.size()
    }

    /// Where all ranks read the offsets of the pieces.
    pub(super) fn location(&self) -> Location {
        Location::Shared(self.table.offset())
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        self.table.arena()
    }

    /// Whether a reduction may begin: all pieces are in place, and none is under way.
    pub(super) fn is_ready(&self) -> bool {
        let pieces = self.pieces();
        !pieces.under_way && pieces.owners.iter().all(Option::is_some)
    }

    /// A reduction is under way: the pieces stay where they are.
    pub(super) fn begin(&self) {
        let mut pieces = self.pieces();
        (pieces.under_way, pieces.finished) = (true, None);
    }

    /// The pieces have been reduced: lets go of their memory.
    pub(super) fn finish(&self) {
        let mut pieces = self.pieces();
        pieces.under_way = false;
        pieces.finished = Some(Instant::now());
        pieces.owners.fill_with(|| None);
    }

    /// For each piece, where it lies on the members on this node, once these have arrived in the
    /// round.
    pub(super) fn pieces_of_locals(
        &self,
        rounds: &Rounds,
        round: u64,
        operation: &OpDescriptor,
    ) -> Result<Vec<Vec<*mut u8>>> {
        let core = &rounds.core;
        let tables = rounds.local_locations(round, operation, &|_| self.lengths.len() * 8)?;
        let element = self.dtype.size();
        let place = |index: usize, rank: usize, table: Location| {
            let length = self.lengths[index];
            let offset = match table {
                // An empty piece is never read.
                _ if length == 0 => return Ok(std::ptr::null_mut()),
                Location::Shared(table) if table.is_multiple_of(64) => {
                    self.entry(table, index).load(Ordering::Relaxed)
                }
                _ => 0,
            } as usize;
            if !offset.is_multiple_of(element) || !core.is_reachable(rank, offset, length * element)
            {
                return Err(invalid_piece_error(rounds, rank, operation));
            }
            Ok(core.world.arena.at(offset))
        };
        let all = |index| {
            let locals = core.locals.iter().zip(&tables);
            locals.map(|(&rank, &table)| place(index, rank, table)).collect()
        };
        (0..self.lengths.len()).map(all).collect()
    }

    fn pieces(&self) -> MutexGuard<'_, PlacedPieces> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry(&self, table: usize, index: usize) -> &AtomicU64 {
        let entry = self.table.arena().at(table + index * 8);
        // SAFETY: `table` was checked to hold an entry per piece, is cache line aligned, and is
        // written only while its rank has not arrived.
        unsafe { &*entry.cast::<AtomicU64>() }
    }
}

/// The error where a rank that has launched a bucket no longer has its pieces.
fn invalid_piece_error(rounds: &Rounds, rank: usize, operation: &OpDescriptor) -> Error {
    let (core, failure) = (&rounds.core, &rounds.failure);
    if let Err(error) = failure.check_failure(operation, true) {
        return error;
    }
    if failure.has_left(rank) {
        return failure.fail_peer_lost(rank, operation);
    }
    let detail = format!("rank {} placed a gradient outside the shared memory", core.ranks[rank]);
    failure.fail(Error::Mismatch { rank: core.world.rank, detail })
}
