//! How far an epoch is, counted over all ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// The epoch, and its places that all ranks together have taken.
#[derive(Debug, Default)]
pub(crate) struct Position {
    epoch: u64,
    /// Shared with the iterator.
    taken: Arc<AtomicUsize>,
    /// `taken` was set by `resume` and no iteration has started there yet.
    resumed: AtomicBool,
}

impl Position {
    /// Returns the epoch that is iterated now.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the number of samples that this epoch has given so far.
    pub fn taken(&self) -> usize {
        self.taken.load(Relaxed)
    }

    /// Starts an epoch at its first place. A position that `resume` has just set in this epoch is
    /// kept.
    pub fn set_epoch(&mut self, epoch: u64) {
        if !*self.resumed.get_mut() || epoch != self.epoch {
            *self = Self { epoch, ..Self::default() };
        }
    }

    /// Goes on from a place. An earlier iterator keeps the old counter, so that it no longer moves
    /// this position.
    pub fn resume(&mut self, epoch: u64, taken: usize) {
        let taken = Arc::new(AtomicUsize::new(taken));
        *self = Self { epoch, taken, resumed: AtomicBool::new(true) };
    }

    /// Returns the place where the next iteration starts. Another number of ranks may have come that
    /// far.
    pub fn start(&self) -> usize {
        if self.resumed.load(Relaxed) { self.taken() } else { 0 }
    }

    /// Begins an iteration at the rank's own position `first`, where `skipped` places are not dealt
    /// out.
    pub fn begin(&self, first: usize, skipped: usize, replicas: usize) -> Taken {
        self.resumed.store(false, Relaxed);
        let taken = Taken { places: Arc::clone(&self.taken), skipped, replicas };
        taken.up_to(first);
        taken
    }
}

/// Writes into a [`Position`] how far its iteration is.
#[derive(Default)]
pub(crate) struct Taken {
    places: Arc<AtomicUsize>,
    skipped: usize,
    replicas: usize,
}

impl Taken {
    /// Notes that what each rank has before `position` is taken.
    pub fn up_to(&self, position: usize) {
        let taken = position.saturating_mul(self.replicas).saturating_add(self.skipped);
        self.places.store(taken, Relaxed);
    }
}
