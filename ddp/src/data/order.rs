//! The order in which an epoch has the samples of a data set, or batches of them: the same on all
//! ranks.

use std::sync::Arc;

use super::permutation::{Index, KeyedPermutation, randperm};
use super::sampler_state::SamplerError;
use super::shuffle::Shuffle;

/// An order of a data set's samples for each epoch, as `torch.utils.data.Sampler` is one. It is the
/// same on all ranks: [`DistributedSampler`](crate::DistributedSampler) deals it out.
///
/// ```
/// use flow_ddp::{DistributedSampler, Order, Sampler, Shuffle};
///
/// /// The last sample first.
/// struct Backwards(usize);
///
/// impl Sampler for Backwards {
///     type Item = usize;
///
///     fn samples(&self) -> usize {
///         self.0
///     }
///
///     fn order(&self, _epoch: u64) -> Order<usize> {
///         Order::list((0..self.0).rev().collect())
///     }
///
///     fn shuffle(&self) -> Shuffle {
///         Shuffle::Other("backwards".into())
///     }
/// }
///
/// let sampler = DistributedSampler::wrap_replica(Backwards(6), 2, 0)?;
/// assert_eq!(sampler.indices(), [5, 3, 1]);
/// # Ok::<(), flow_ddp::SamplerError>(())
/// ```
pub trait Sampler: Send + Sync {
    /// What comes in this order: an index of the data set (`usize`), or a batch of them
    /// (`Vec<usize>`).
    type Item: SamplerItem;

    /// Returns the length of the data set.
    fn samples(&self) -> usize;

    /// Returns the number of items in each epoch (default: as many as samples).
    fn places(&self) -> usize {
        self.samples()
    }

    /// Returns the order of an epoch, which has [`places`](Self::places) items: a list of another
    /// length is [`SamplerError::Order`]. It depends on nothing that differs between ranks.
    fn order(&self, epoch: u64) -> Order<Self::Item>;

    /// Returns the seed (default: 0).
    fn seed(&self) -> u64 {
        0
    }

    /// Names the order and what it depends on besides seed and epoch. A checkpoint can be resumed
    /// where this is the same.
    fn shuffle(&self) -> Shuffle;
}

/// A sampler that is chosen while the program runs.
impl<S: Sampler + ?Sized> Sampler for Box<S> {
    type Item = S::Item;

    fn samples(&self) -> usize {
        (**self).samples()
    }

    fn places(&self) -> usize {
        (**self).places()
    }

    fn order(&self, epoch: u64) -> Order<S::Item> {
        (**self).order(epoch)
    }

    fn seed(&self) -> u64 {
        (**self).seed()
    }

    fn shuffle(&self) -> Shuffle {
        (**self).shuffle()
    }
}

/// An index of a data set, or a batch of them.
pub trait SamplerItem: Clone + Send + Sync + 'static {
    /// Returns the indices.
    fn indices(&self) -> &[usize];
}

impl SamplerItem for usize {
    fn indices(&self) -> &[usize] {
        std::slice::from_ref(self)
    }
}

impl SamplerItem for Vec<usize> {
    fn indices(&self) -> &[usize] {
        self
    }
}

/// The items of an epoch in their order.
pub struct Order<T>(Box<dyn FnOnce(Places) -> Result<Dealt<T>, SamplerError>>);

/// Maps a position in a rank's items to the item.
pub(crate) type Dealt<T> = Arc<dyn Fn(usize) -> T + Send + Sync>;

impl<T: Clone + Send + Sync + 'static> Order<T> {
    /// Makes the order of a list. A rank keeps the items that are dealt to it.
    pub fn list(items: Vec<T>) -> Self {
        Self::list_of(items, T::clone)
    }

    /// Makes an order whose items are computed when they are asked for, from their place.
    pub fn computed(item: impl Fn(usize) -> T + Send + Sync + 'static) -> Self {
        Self(Box::new(move |places| Ok(Arc::new(move |position| item(places.at(position))))))
    }

    /// Makes an order whose items are computed from all items of another.
    pub(super) fn computed_from<I: Clone + Send + Sync + 'static>(
        order: Order<I>,
        all: usize,
        item: impl Fn(&Dealt<I>, usize) -> T + Send + Sync + 'static,
    ) -> Self {
        Self(Box::new(move |places| {
            let items = order.deal(Places { first: 0, replicas: 1, all, len: all })?;
            Self::computed(move |place| item(&items, place)).deal(places)
        }))
    }

    fn list_of<I: Clone + Send + Sync + 'static>(all: Vec<I>, item: fn(&I) -> T) -> Self {
        Self(Box::new(move |places| {
            if all.len() != places.all {
                return Err(SamplerError::Order { items: all.len(), places: places.all });
            }
            let own: Vec<I> =
                (0..places.len).map(|position| all[places.at(position)].clone()).collect();
            Ok(Arc::new(move |position| item(&own[position])))
        }))
    }

    pub(crate) fn deal(self, places: Places) -> Result<Dealt<T>, SamplerError> {
        self.0(places)
    }
}

/// The places of an order that are dealt to a rank.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    pub first: usize,
    pub replicas: usize,
    /// The number of places in the order.
    pub all: usize,
    /// The number of this rank's.
    pub len: usize,
}

impl Places {
    /// Maps a position in the rank's items to a place in the order. Places beyond the last one are
    /// the padding, which starts over from the front.
    fn at(self, position: usize) -> usize {
        (self.first + position * self.replicas) % self.all
    }
}

/// All samples once, in a random order or in that of the data set.
#[derive(Clone, Debug)]
pub struct RandomSampler {
    pub(super) samples: usize,
    pub(super) shuffle: Shuffle,
    pub(super) seed: u64,
}

impl RandomSampler {
    /// Makes the order of `len` samples by PyTorch's permutation for seed + epoch.
    pub fn new(len: usize) -> Self {
        Self { samples: len, shuffle: Shuffle::Torch, seed: 0 }
    }

    /// Sets whether to shuffle (default: true).
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = if shuffle { Shuffle::Torch } else { Shuffle::None };
        self
    }

    /// Sets the seed, the same on all ranks (default: 0).
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}

impl Sampler for RandomSampler {
    type Item = usize;

    fn samples(&self) -> usize {
        self.samples
    }

    fn order(&self, epoch: u64) -> Order<usize> {
        let seed = self.seed.wrapping_add(epoch);
        match self.shuffle {
            Shuffle::Keyed => {
                let permutation = KeyedPermutation::new(self.samples, self.seed, epoch);
                Order::computed(move |place| permutation.get(place))
            }
            Shuffle::Torch if u32::try_from(self.samples).is_ok() => {
                Order::list_of(randperm::<u32>(self.samples, seed), |index| index.get())
            }
            Shuffle::Torch => Order::list(randperm(self.samples, seed)),
            Shuffle::None | Shuffle::Other(_) => Order::computed(|place| place),
        }
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    fn shuffle(&self) -> Shuffle {
        self.shuffle.clone()
    }
}
