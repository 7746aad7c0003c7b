//! Which samples of a data set each rank sees, in which order: the same as
//! `torch.utils.data.DistributedSampler`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};

use flow_comm::ProcessGroup;

use super::permutation::{Index, KeyedPermutation, randperm};

/// Deals the samples `0..len` of a data set out to the ranks: rank `r` of `W` takes places `r`,
/// `r + W`, `r + 2 W`, ... of an order that all ranks share.
///
/// Shuffling is on, the seed is 0 and the last places are padded unless the builder methods say
/// otherwise. The indices are then those of PyTorch's `DistributedSampler` for the same length,
/// replicas, rank, `shuffle`, `seed`, `drop_last` and epoch. Call [`set_epoch`](Self::set_epoch)
/// before each epoch, or every epoch has the same order.
///
/// ```
/// use flow_ddp::DistributedSampler;
///
/// let mut sampler = DistributedSampler::with_replicas(10, 2, 0)?.seed(0);
/// assert_eq!(sampler.indices(), [4, 7, 3, 0, 6]);
/// sampler.set_epoch(1);
/// assert_eq!(sampler.indices(), [5, 1, 0, 9, 7]);
/// # Ok::<(), flow_ddp::SamplerError>(())
/// ```
///
/// # Memory
///
/// Without a shuffle and with [`keyed_shuffle`](Self::keyed_shuffle): none. With PyTorch's shuffle
/// of `n` samples over `W` ranks: `4 n` bytes while an epoch's order is made; `4 n / W`
/// stay as long as the epoch's iterator lives (twice that where `n` exceeds 2^32).
///
/// # Continuing in mid-epoch
///
/// [`state`](Self::state) counts the samples that were taken from this epoch's iterator; batches
/// that a [`DataLoader`](crate::DataLoader) has prefetched and not yet handed out do not count.
/// After [`resume`](Self::resume), the next iteration starts there; those after it start at 0
/// again. The number of ranks may be another one. The rest of the epoch is then redistributed, and
/// no sample is left out or seen twice but as padding.
#[derive(Debug)]
pub struct DistributedSampler {
    samples: usize,
    replicas: usize,
    rank: usize,
    shuffle: Shuffle,
    seed: u64,
    drop_last: bool,
    pad: bool,
    epoch: u64,
    /// Places of this epoch's order that all ranks together have taken, shared with its iterator.
    taken: Arc<AtomicUsize>,
    /// `taken` was set by `resume` and no iteration has started there yet.
    resumed: AtomicBool,
}

/// The order in which a [`DistributedSampler`] has the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shuffle {
    /// The order of the data set.
    None,
    /// PyTorch's permutation.
    Torch,
    /// The keyed permutation.
    Keyed,
}

/// The position of a [`DistributedSampler`], to be kept in a checkpoint. It is the same on all ranks
/// that took as many samples, so one rank's state serves all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    /// The epoch.
    pub epoch: u64,
    /// Samples that all ranks together have taken in this epoch.
    pub taken: usize,
    /// Length of the data set.
    pub samples: usize,
    /// The seed.
    pub seed: u64,
    /// The kind of shuffle.
    pub shuffle: Shuffle,
    /// Whether the samples that do not fill a place on every rank are dropped.
    pub drop_last: bool,
    /// Whether samples are repeated to fill the last places.
    pub pad: bool,
}

/// Errors of a [`DistributedSampler`].
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SamplerError {
    /// The number of ranks is 0.
    #[error("invalid number of replicas 0, it should be at least 1")]
    Replicas,
    /// The rank is not one of the replicas.
    #[error("invalid rank {rank}, it should be in the interval [0, {}]", .replicas - 1)]
    Rank {
        /// The rank that was given.
        rank: usize,
        /// The number of ranks.
        replicas: usize,
    },
    /// The state to resume from was saved by a sampler with other settings.
    #[error(
        "cannot resume: the state was saved with {field} {saved}, this sampler has {field} {here}"
    )]
    Mismatch {
        /// The setting, as its method or [`SamplerState`] field is called.
        field: &'static str,
        /// Its value in the state.
        saved: String,
        /// Its value here.
        here: String,
    },
    /// The state to resume from has taken more samples than there are.
    #[error("cannot resume: the state has taken {taken} samples of an epoch of {samples}")]
    Taken {
        /// The samples taken in the state.
        taken: usize,
        /// Length of the data set.
        samples: usize,
    },
}

impl DistributedSampler {
    /// Makes a sampler for this rank of `group` over a data set of `len` samples.
    pub fn new(len: usize, group: &ProcessGroup) -> Self {
        Self::of(len, group.world_size(), group.rank())
    }

    /// Makes a sampler for `rank` of `replicas` over a data set of `len` samples.
    ///
    /// # Errors
    /// When `replicas` is 0, or `rank` is not below it.
    pub fn with_replicas(len: usize, replicas: usize, rank: usize) -> Result<Self, SamplerError> {
        if replicas == 0 {
            return Err(SamplerError::Replicas);
        }
        if rank >= replicas {
            return Err(SamplerError::Rank { rank, replicas });
        }
        Ok(Self::of(len, replicas, rank))
    }

    fn of(samples: usize, replicas: usize, rank: usize) -> Self {
        Self {
            samples,
            replicas,
            rank,
            shuffle: Shuffle::Torch,
            seed: 0,
            drop_last: false,
            pad: true,
            epoch: 0,
            taken: Arc::default(),
            resumed: AtomicBool::new(false),
        }
    }

    /// Sets whether to shuffle, with PyTorch's permutation for seed + epoch (default: true).
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = if shuffle { Shuffle::Torch } else { Shuffle::None };
        self
    }

    /// Shuffles by a keyed permutation that is computed for each index when it is asked for. This
    /// is for data sets too large for a vector of their indices. It depends on nothing but length,
    /// seed and epoch, and is another one than PyTorch's. It is a Feistel network over SplitMix64's
    /// mixer, which walks cycles to stay below the length.
    pub fn keyed_shuffle(mut self) -> Self {
        self.shuffle = Shuffle::Keyed;
        self
    }

    /// Sets the seed, the same on all ranks (default: 0). PyTorch's permutation uses the low 32
    /// bits of seed + epoch.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets whether to leave out the last `len % replicas` samples instead of padding (default:
    /// false).
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// Sets whether to repeat samples from the front of the order until all ranks have the same
    /// number (default: true). With `pad(false)`, for evaluation, no sample is seen twice and ranks
    /// may differ by one sample.
    pub fn pad(mut self, pad: bool) -> Self {
        self.pad = pad;
        self
    }

    /// Starts `epoch`, which gives a new order, at its first sample; a position that
    /// [`resume`](Self::resume) has just set in this epoch is kept.
    pub fn set_epoch(&mut self, epoch: u64) {
        if *self.resumed.get_mut() && epoch == self.epoch {
            return;
        }
        self.go_to(epoch, 0, false);
    }

    /// Returns the epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the number of samples that this rank sees in an epoch.
    pub fn len(&self) -> usize {
        self.len_after(self.start() % self.replicas)
    }

    /// Returns whether this rank sees no sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns this rank's indices in this epoch, all of them.
    pub fn indices(&self) -> Vec<usize> {
        let order = self.order(self.start() % self.replicas);
        (0..self.len()).map(|i| order(i)).collect()
    }

    /// Iterates over this rank's indices in this epoch, from the position that
    /// [`resume`](Self::resume) has set or else from the first. It moves the sampler's position on.
    /// One iteration at a time.
    pub fn iter(&self) -> Indices {
        let start = self.start();
        let range = self.range();
        self.resumed.store(false, Ordering::Relaxed);
        let skipped = start % self.replicas;
        let taken = Taken { places: Arc::clone(&self.taken), skipped, replicas: self.replicas };
        taken.up_to(range.start);
        Indices { order: self.order(skipped), range, taken }
    }

    /// Returns the position of this sampler.
    pub fn state(&self) -> SamplerState {
        SamplerState {
            epoch: self.epoch,
            // The places after the samples are padding.
            taken: self.taken.load(Ordering::Relaxed).min(self.samples),
            samples: self.samples,
            seed: self.seed,
            shuffle: self.shuffle,
            drop_last: self.drop_last,
            pad: self.pad,
        }
    }

    /// Goes to the epoch and position of `state`, of whatever number of ranks; the next iteration
    /// starts there.
    ///
    /// # Errors
    /// When `state` was saved by a sampler with other settings, or has taken more samples than
    /// there are. The sampler is then unchanged.
    pub fn resume(&mut self, state: &SamplerState) -> Result<(), SamplerError> {
        let here = self.state();
        same("samples", state.samples, here.samples)?;
        same("seed", state.seed, here.seed)?;
        same("shuffle", state.shuffle, here.shuffle)?;
        same("drop_last", state.drop_last, here.drop_last)?;
        same("pad", state.pad, here.pad)?;
        if state.taken > self.samples {
            return Err(SamplerError::Taken { taken: state.taken, samples: self.samples });
        }
        self.go_to(state.epoch, state.taken, true);
        Ok(())
    }

    /// Moves the sampler. An earlier iterator keeps the old counter, so that it no longer moves this
    /// sampler.
    fn go_to(&mut self, epoch: u64, taken: usize, resumed: bool) {
        self.epoch = epoch;
        self.taken = Arc::new(AtomicUsize::new(taken));
        self.resumed = AtomicBool::new(resumed);
    }

    /// Returns the number of samples in the whole data set.
    pub(crate) fn samples(&self) -> usize {
        self.samples
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the positions in this rank's samples that the next iteration goes through.
    pub(crate) fn range(&self) -> Range<usize> {
        self.start() / self.replicas..self.len()
    }

    /// Returns the place in the order of all ranks where the next iteration starts. Another number
    /// of ranks may have come that far. The places before it that do not make a whole position of
    /// every rank are then skipped, and the others dealt.
    fn start(&self) -> usize {
        if self.resumed.load(Ordering::Relaxed) { self.taken.load(Ordering::Relaxed) } else { 0 }
    }

    /// Returns this rank's number of samples where the first `skipped` places are not dealt out.
    fn len_after(&self, skipped: usize) -> usize {
        let samples = self.samples - skipped;
        if self.drop_last {
            samples / self.replicas
        } else if self.pad {
            samples.div_ceil(self.replicas)
        } else {
            samples.saturating_sub(self.rank).div_ceil(self.replicas)
        }
    }

    /// Maps a position in this rank's samples to an index of the data set.
    fn order(&self, skipped: usize) -> Arc<Order> {
        let places =
            Places { first: skipped + self.rank, replicas: self.replicas, samples: self.samples };
        match self.shuffle {
            Shuffle::None => Arc::new(move |position| places.at(position)),
            Shuffle::Keyed => {
                let permutation = KeyedPermutation::new(self.samples, self.seed, self.epoch);
                Arc::new(move |position| permutation.get(places.at(position)))
            }
            Shuffle::Torch if u32::try_from(self.samples).is_ok() => {
                self.torch_order::<u32>(skipped, places)
            }
            Shuffle::Torch => self.torch_order::<usize>(skipped, places),
        }
    }

    fn torch_order<I: Index>(&self, skipped: usize, places: Places) -> Arc<Order> {
        let all = randperm::<I>(self.samples, self.seed.wrapping_add(self.epoch));
        let of_this_rank: Vec<I> =
            (0..self.len_after(skipped)).map(|position| all[places.at(position)]).collect();
        Arc::new(move |position| of_this_rank[position].get())
    }
}

/// A rank's places in the order of all samples.
#[derive(Clone, Copy)]
struct Places {
    first: usize,
    replicas: usize,
    samples: usize,
}

impl Places {
    /// Maps a position in the rank's samples to a place in the order. Places beyond the last sample
    /// are the padding, which starts over from the front.
    fn at(self, position: usize) -> usize {
        (self.first + position * self.replicas) % self.samples
    }
}

fn same<T: PartialEq + std::fmt::Debug>(
    field: &'static str,
    saved: T,
    here: T,
) -> Result<(), SamplerError> {
    if saved == here {
        return Ok(());
    }
    Err(SamplerError::Mismatch { field, saved: format!("{saved:?}"), here: format!("{here:?}") })
}

/// Maps a position in a rank's samples to an index of the data set.
pub(crate) type Order = dyn Fn(usize) -> usize + Send + Sync;

/// A rank's indices in one epoch; see [`DistributedSampler::iter`].
pub struct Indices {
    pub(crate) order: Arc<Order>,
    pub(crate) range: Range<usize>,
    pub(crate) taken: Taken,
}

/// Writes into a sampler how far its iteration is.
pub(crate) struct Taken {
    places: Arc<AtomicUsize>,
    skipped: usize,
    replicas: usize,
}

impl Taken {
    /// Notes that each rank's samples before `position` are taken.
    pub fn up_to(&self, position: usize) {
        self.places.store(self.skipped + position * self.replicas, Ordering::Relaxed);
    }
}

impl Iterator for Indices {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let position = self.range.next()?;
        self.taken.up_to(position + 1);
        Some((self.order)(position))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.range.size_hint()
    }
}

impl ExactSizeIterator for Indices {}
