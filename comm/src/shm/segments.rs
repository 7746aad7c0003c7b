//! Pieces of the arena that are reduced as one: a bucket of gradients.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use flow_kernels::{DType, ReduceOp, digest};

use super::arena::{Arena, Block};
use crate::descriptor::{Location, OpDescriptor};
use crate::kind::Kind;
use crate::trace;
use crate::virtual_ranks::NodeTree;

/// Pieces of shared memory that are reduced as one: a bucket of gradients, each where it was
/// allocated.
///
/// Every rank has as many pieces of the same lengths; where they lie may differ.
pub struct Segments {
    pub(crate) bucket: u32,
    pub(crate) dtype: DType,
    /// Elements of each piece, and of all together.
    pub(crate) lengths: Vec<usize>,
    pub(crate) total: usize,
    /// The elements of each piece that this rank gets reduced, if each rank gets others; all get all
    /// otherwise.
    parts: Option<Vec<Range<usize>>>,
    /// How virtual ranks are added up, if that is what ranks add up.
    pub(crate) tree: Option<NodeTree>,
    /// A digest of the lengths, and of the number of virtual ranks.
    digest: u64,
    /// The step in which the bucket is reduced, the same on all ranks.
    step: AtomicU32,
    /// The time at which the next reduction was asked for, in ticks; 0: when it is launched.
    queued: AtomicU64,
    /// Offsets of the pieces, readable by all ranks.
    table: Block,
    pieces: Mutex<PlacedPieces>,
}

struct PlacedPieces {
    /// Keep the pieces' memory until it is reduced.
    owners: Vec<Option<Owner>>,
    /// The memory of this rank's parts, if it gets parts, and its address.
    destinations: Vec<Option<(Owner, usize)>>,
    under_way: bool,
    /// The time at which this rank saw that the last reduction was over.
    finished: Option<Instant>,
}

type Owner = Box<dyn AsMut<[u8]> + Send>;

impl PlacedPieces {
    /// Lets go of all memory.
    fn clear(&mut self) {
        self.owners.fill_with(|| None);
        self.destinations.fill_with(|| None);
    }
}

impl Segments {
    /// Pieces of these lengths, in elements, which have no place yet; None if this rank's region is
    /// full. `parts`: the elements of each piece that this rank gets, unless all ranks get all.
    pub(crate) fn new(
        arena: &Arc<Arena>,
        bucket: u32,
        dtype: DType,
        lengths: Vec<usize>,
        parts: Option<Vec<Range<usize>>>,
    ) -> Option<Self> {
        let total = lengths.iter().try_fold(0usize, |total, &length| total.checked_add(length))?;
        total.checked_mul(dtype.size())?;
        let table = arena.allocate_zeroed(lengths.len() * 8)?;
        let pieces = Mutex::new(PlacedPieces {
            owners: lengths.iter().map(|_| None).collect(),
            destinations: lengths.iter().map(|_| None).collect(),
            under_way: false,
            finished: None,
        });
        Some(Self {
            bucket,
            dtype,
            total,
            parts,
            tree: None,
            digest: digest(&lengths),
            lengths,
            step: AtomicU32::new(0),
            queued: AtomicU64::new(0),
            table,
            pieces,
        })
    }

    /// Has the pieces added up in a tree of virtual ranks.
    pub(crate) fn in_tree(mut self, tree: NodeTree) -> Self {
        self.digest = digest(&(self.digest, tree.count));
        self.tree = Some(tree);
        self
    }

    /// Says in which step, from 1 on, the bucket is launched next: ranks whose steps differ get an
    /// error that names both.
    pub fn set_step(&self, step: u32) {
        self.step.store(step, Ordering::Relaxed);
    }

    /// Says that the program asks for the next reduction now, and launches the bucket later: the
    /// record of it has this time.
    pub fn queue(&self) {
        self.queued.store(trace::ticks(), Ordering::Relaxed);
    }

    /// Returns when the reduction that begins was asked for, in ticks; None for now.
    pub(crate) fn take_queued(&self) -> Option<u64> {
        Some(self.queued.swap(0, Ordering::Relaxed)).filter(|&at| at > 0)
    }

    /// Says that piece `index` lies in `memory` now, whose address must not change. The memory is
    /// dropped when the piece has been reduced; its `Drop` must not call the group. False if there
    /// is no such piece, or the memory is too short or badly aligned for it. Also false if not all
    /// ranks can reach it there, or the bucket is being reduced.
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
        let mut pieces = self.placed();
        if pieces.under_way || memory.len() < bytes || offset % self.dtype.size() != 0 {
            return false;
        }
        // SAFETY: the table is this bucket's own.
        unsafe { self.entry(self.table.offset(), index) }.store(offset as u64, Ordering::Relaxed);
        pieces.owners[index] = Some(owner);
        pieces.finished = None;
        true
    }

    /// Says that this rank's part of piece `index` is reduced into `memory`, which no other rank uses,
    /// and whose address must not change. The memory is dropped as that of a piece. False if there is
    /// no such part, or the memory is not as long; also false if the bucket is being reduced.
    pub fn set_destination(&self, index: usize, memory: impl AsMut<[u8]> + Send + 'static) -> bool {
        let part = self.parts.as_ref().and_then(|parts| parts.get(index));
        let Some(part) = part else { return false };
        let mut owner: Owner = Box::new(memory);
        let memory = (*owner).as_mut();
        let address = memory.as_mut_ptr().expose_provenance();
        let is_aligned = address.is_multiple_of(self.dtype.size());
        let mut pieces = self.placed();
        if pieces.under_way || memory.len() != part.len() * self.dtype.size() || !is_aligned {
            return false;
        }
        pieces.destinations[index] = Some((owner, address));
        true
    }

    /// Lets go of the memory of all pieces, unless they are being reduced.
    pub fn clear(&self) {
        let mut pieces = self.placed();
        if !pieces.under_way {
            pieces.clear();
        }
    }

    /// Returns when this rank saw that the last reduction was over; None if there was none, or if
    /// pieces have been placed since.
    pub fn finished(&self) -> Option<Instant> {
        self.placed().finished
    }

    /// Returns the number of bytes of all pieces together.
    pub fn bytes(&self) -> usize {
        self.total * self.dtype.size()
    }

    /// Returns the reduction of the pieces, as all ranks must agree on it.
    pub(crate) fn operation(&self, reduce: ReduceOp) -> OpDescriptor {
        let kind = if self.parts.is_some() { Kind::ReduceScatterV } else { Kind::AllReduce };
        OpDescriptor {
            bucket: Some(self.bucket),
            step: self.step.load(Ordering::Relaxed),
            digest: self.digest,
            ..OpDescriptor::new(kind, self.dtype, self.total).reduce(reduce)
        }
    }

    /// Returns where this rank's pieces lie; they stay there while a reduction is under way.
    pub(crate) fn pieces(&self) -> Vec<*mut u8> {
        (0..self.lengths.len())
            .map(|index| {
                // SAFETY: the table is this bucket's own.
                let offset = unsafe { self.offset_of_piece(self.table.offset(), index) };
                self.arena().at(offset)
            })
            .collect()
    }

    /// Returns the parts of all pieces that this rank gets, and where; None if all ranks get all.
    pub(crate) fn destinations(&self) -> Option<Vec<(Range<usize>, *mut u8)>> {
        let parts = self.parts.as_ref()?;
        let pieces = self.placed();
        let mut destinations = Vec::with_capacity(parts.len());
        for (part, destination) in parts.iter().zip(&pieces.destinations) {
            let address = destination.as_ref().map_or(0, |&(_, address)| address);
            destinations.push((part.clone(), std::ptr::with_exposed_provenance_mut(address)));
        }
        Some(destinations)
    }

    /// Returns where all ranks read the offsets of the pieces.
    pub(crate) fn location(&self) -> Location {
        Location::Shared(self.table.offset())
    }

    /// Returns the offset of a piece of the rank whose offsets are at `table`.
    ///
    /// # Safety
    ///
    /// The arena holds an offset for each piece there, which only that rank writes.
    pub(crate) unsafe fn offset_of_piece(&self, table: usize, index: usize) -> usize {
        // SAFETY: the caller's promise.
        unsafe { self.entry(table, index) }.load(Ordering::Relaxed) as usize
    }

    /// Returns the memory that the pieces lie in.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        self.table.arena()
    }

    /// Begins a reduction: the pieces stay where they are. False if one is under way, or not all
    /// pieces are in place.
    pub(crate) fn begin(&self) -> bool {
        let mut pieces = self.placed();
        let parts = self.parts.iter().flatten().zip(&pieces.destinations);
        let have_places = parts.into_iter().all(|(part, place)| part.is_empty() || place.is_some());
        if pieces.under_way || !have_places || !pieces.owners.iter().all(Option::is_some) {
            return false;
        }
        pieces.under_way = true;
        pieces.finished = None;
        true
    }

    /// Notes that the reduction was not launched: the pieces are in place as before
    /// [`Segments::begin`].
    pub(crate) fn cancel(&self) {
        self.placed().under_way = false;
    }

    /// Notes that the pieces have been reduced: lets go of their memory.
    pub(crate) fn finish(&self) {
        let mut pieces = self.placed();
        pieces.under_way = false;
        pieces.finished = Some(Instant::now());
        pieces.clear();
    }

    fn placed(&self) -> MutexGuard<'_, PlacedPieces> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Safety
    ///
    /// As for [`Segments::offset_of_piece`].
    unsafe fn entry(&self, table: usize, index: usize) -> &AtomicU64 {
        let entry = self.arena().at(table + index * 8);
        // SAFETY: the caller's promise; tables are cache line aligned.
        unsafe { &*entry.cast::<AtomicU64>() }
    }
}
