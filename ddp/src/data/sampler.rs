//! Which samples of a data set each rank sees, in which order: the same as
//! `torch.utils.data.DistributedSampler`.

use std::ops::Range;

use flow_comm::ProcessGroup;

use super::order::{Dealt, Places, RandomSampler, Sampler, SamplerItem};
use super::position::{Position, Taken};
use super::sampler_state::{SamplerError, SamplerState, Stateful, check_rank};
use super::shuffle::Shuffle;

/// Deals the samples `0..len` of a data set out to the ranks: rank `r` of `W` takes places `r`,
/// `r + W`, `r + 2 W`, ... of an order that all ranks share.
///
/// The order is that of a [`Sampler`] `S`, which [`wrap`](Self::wrap) takes: samples by weight
/// ([`WeightedRandomSampler`](crate::WeightedRandomSampler)), of like length
/// ([`LengthGroupedSampler`](crate::LengthGroupedSampler)), whole batches
/// ([`BatchSampler`](crate::BatchSampler),
/// [`MaxTokensBatchSampler`](crate::MaxTokensBatchSampler)), or one of your own. Without one it is
/// a [`RandomSampler`].
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
pub struct DistributedSampler<S = RandomSampler> {
    sampler: S,
    replicas: usize,
    rank: usize,
    drop_last: bool,
    pad: bool,
    position: Position,
}

impl DistributedSampler {
    /// Makes a sampler for this rank of `group` over a data set of `len` samples.
    pub fn new(len: usize, group: &ProcessGroup) -> Self {
        Self::wrap(RandomSampler::new(len), group)
    }

    /// Makes a sampler for `rank` of `replicas` over a data set of `len` samples.
    ///
    /// # Errors
    /// When `replicas` is 0, or `rank` is not below it.
    pub fn with_replicas(len: usize, replicas: usize, rank: usize) -> Result<Self, SamplerError> {
        Self::wrap_replica(RandomSampler::new(len), replicas, rank)
    }

    /// Sets whether to shuffle, with PyTorch's permutation for seed + epoch (default: true).
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.sampler = self.sampler.shuffle(shuffle);
        self
    }

    /// Shuffles by a keyed permutation that is computed for each index when it is asked for. This
    /// is for data sets too large for a vector of their indices. It depends on nothing but length,
    /// seed and epoch, and is another one than PyTorch's. It is a Feistel network over SplitMix64's
    /// mixer, which walks cycles to stay below the length.
    pub fn keyed_shuffle(mut self) -> Self {
        self.sampler.shuffle = Shuffle::Keyed;
        self
    }

    /// Sets the seed, the same on all ranks (default: 0). PyTorch's permutation uses the low 32
    /// bits of seed + epoch.
    pub fn seed(mut self, seed: u64) -> Self {
        self.sampler = self.sampler.seed(seed);
        self
    }
}

impl<S: Sampler> DistributedSampler<S> {
    /// Deals the order of `sampler`, the same on all ranks, out to this rank of `group`.
    pub fn wrap(sampler: S, group: &ProcessGroup) -> Self {
        Self::of(sampler, group.world_size(), group.rank())
    }

    /// Deals the order of `sampler` out to `rank` of `replicas`.
    ///
    /// # Errors
    /// When `replicas` is 0, or `rank` is not below it.
    pub fn wrap_replica(sampler: S, replicas: usize, rank: usize) -> Result<Self, SamplerError> {
        check_rank(replicas, rank)?;
        Ok(Self::of(sampler, replicas, rank))
    }

    fn of(sampler: S, replicas: usize, rank: usize) -> Self {
        let position = Position::default();
        Self { sampler, replicas, rank, drop_last: false, pad: true, position }
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
        self.position.set_epoch(epoch);
    }

    /// Returns the epoch.
    pub fn epoch(&self) -> u64 {
        self.position.epoch()
    }

    /// Returns the number of samples that this rank sees in an epoch, or of batches where `S` is a
    /// batch sampler.
    pub fn len(&self) -> usize {
        self.len_after(self.skipped())
    }

    /// Returns whether this rank sees no sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns this rank's indices in this epoch, all of them; its batches where `S` is a batch
    /// sampler.
    ///
    /// # Panics
    /// If `S` is your own, and lists another number of items than its [`Sampler::places`].
    pub fn indices(&self) -> Vec<S::Item> {
        let items = self.items().unwrap_or_else(|error| panic!("{error}"));
        (0..self.len()).map(|position| items(position)).collect()
    }

    /// Iterates over this rank's indices in this epoch, from the position that
    /// [`resume`](Self::resume) has set or else from the first. It moves the sampler's position on.
    /// One iteration at a time.
    ///
    /// # Panics
    /// If `S` is your own, and lists another number of items than its [`Sampler::places`]; a
    /// [`DataLoader`](crate::DataLoader) returns that as an error.
    pub fn iter(&self) -> Indices<S::Item> {
        self.begin_items().unwrap_or_else(|error| panic!("{error}"))
    }

    fn begin_items(&self) -> Result<Indices<S::Item>, SamplerError> {
        let range = self.range();
        let items = self.items()?;
        let taken = self.position.begin(range.start, self.skipped(), self.replicas);
        Ok(Indices { items, range, taken })
    }

    /// Returns the position of this sampler.
    pub fn state(&self) -> SamplerState {
        SamplerState {
            epoch: self.position.epoch(),
            // The places after the last item are padding.
            taken: self.position.taken().min(self.sampler.places()),
            samples: self.sampler.samples(),
            seed: self.sampler.seed(),
            shuffle: self.sampler.shuffle(),
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
        state.same_settings(&self.state())?;
        let samples = self.sampler.places();
        if state.taken > samples {
            return Err(SamplerError::Taken { taken: state.taken, samples });
        }
        self.position.resume(state.epoch, state.taken);
        Ok(())
    }

    /// Returns the number of places that are not dealt out. Another number of ranks may have come to
    /// where the next iteration starts. The places before that do not make a whole position of every
    /// rank are then skipped, and the others dealt.
    fn skipped(&self) -> usize {
        self.position.start() % self.replicas
    }

    /// Returns this rank's number of items where the first `skipped` places are not dealt out.
    fn len_after(&self, skipped: usize) -> usize {
        let places = self.sampler.places() - skipped;
        if self.drop_last {
            places / self.replicas
        } else if self.pad {
            places.div_ceil(self.replicas)
        } else {
            places.saturating_sub(self.rank).div_ceil(self.replicas)
        }
    }

    /// Maps a position in this rank's items to the item.
    fn items(&self) -> Result<Dealt<S::Item>, SamplerError> {
        let skipped = self.skipped();
        let places = Places {
            first: skipped + self.rank,
            replicas: self.replicas,
            all: self.sampler.places(),
            len: self.len_after(skipped),
        };
        self.sampler.order(self.position.epoch()).deal(places)
    }
}

impl<S: Sampler> Stateful for DistributedSampler<S> {
    fn state(&self) -> SamplerState {
        self.state()
    }

    fn resume(&mut self, state: &SamplerState) -> Result<(), SamplerError> {
        self.resume(state)
    }
}

/// What a loader asks of a sampler.
pub(crate) trait Deal {
    fn samples(&self) -> usize;

    fn rank(&self) -> usize;

    /// Returns the positions in this rank's items that the next iteration goes through.
    fn range(&self) -> Range<usize>;

    /// Begins an iteration.
    fn begin(&self) -> Result<Deals, SamplerError>;
}

/// The items that a rank has in an iteration, as the indices of each.
pub(crate) struct Deals {
    pub append: AppendIndices,
    pub range: Range<usize>,
    pub taken: Taken,
}

impl Deals {
    /// Returns the deals of an iteration that does not begin.
    pub fn none() -> Self {
        Self { append: Box::new(|_, _| ()), range: 0..0, taken: Taken::default() }
    }
}

/// Appends the indices of the item at a position in the rank's items.
pub(crate) type AppendIndices = Box<dyn Fn(usize, &mut Vec<usize>) + Send + Sync>;

impl<S: Sampler> Deal for DistributedSampler<S> {
    fn samples(&self) -> usize {
        self.sampler.samples()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn range(&self) -> Range<usize> {
        self.position.start() / self.replicas..self.len()
    }

    fn begin(&self) -> Result<Deals, SamplerError> {
        let Indices { items, range, taken } = self.begin_items()?;
        let append = Box::new(move |position: usize, indices: &mut Vec<usize>| {
            indices.extend_from_slice(items(position).indices());
        });
        Ok(Deals { append, range, taken })
    }
}

/// A rank's items in one epoch; see [`DistributedSampler::iter`].
pub struct Indices<T = usize> {
    items: Dealt<T>,
    range: Range<usize>,
    taken: Taken,
}

impl<T> Iterator for Indices<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let position = self.range.next()?;
        self.taken.up_to(position + 1);
        Some((self.items)(position))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.range.size_hint()
    }
}

impl<T> ExactSizeIterator for Indices<T> {}
