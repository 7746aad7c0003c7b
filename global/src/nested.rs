//! Tensors in vectors, maps and tuples, all made global or local.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use tch::Tensor;

use crate::error::Result;
use crate::placement::Placement;
use crate::sbp::Sbp;
use crate::tensor::GlobalTensor;

/// A tensor, or tensors in a container, or containers in containers.
pub trait Nested: Sized {
    /// Returns the same container with what `change` makes of each tensor. Maps go in the order of
    /// their keys, which is the same on all ranks.
    ///
    /// # Errors
    /// Those of `change`.
    fn try_map(&self, change: &mut impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl Nested for Tensor {
    fn try_map(&self, change: &mut impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        change(self)
    }
}

impl<T: Nested> Nested for Option<T> {
    fn try_map(&self, change: &mut impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.as_ref().map(|value| value.try_map(change)).transpose()
    }
}

impl<T: Nested> Nested for Vec<T> {
    fn try_map(&self, change: &mut impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.iter().map(|value| value.try_map(change)).collect()
    }
}

impl<T: Nested, U: Nested> Nested for (T, U) {
    fn try_map(&self, change: &mut impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((self.0.try_map(change)?, self.1.try_map(change)?))
    }
}

impl<K: Clone + Ord, T: Nested> Nested for BTreeMap<K, T> {
    fn try_map(&self, change: &mut impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.iter().map(|(key, value)| Ok((key.clone(), value.try_map(change)?))).collect()
    }
}

impl<K: Clone + Eq + Hash + Ord, T: Nested> Nested for HashMap<K, T> {
    fn try_map(&self, change: &mut impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let mut entries: Vec<(&K, &T)> = self.iter().collect();
        entries.sort_by_key(|(key, _)| *key);
        let changed =
            entries.into_iter().map(|(key, value)| Ok((key.clone(), value.try_map(change)?)));
        changed.collect()
    }
}

/// Calls [`GlobalTensor::to_global`] on all tensors in a container: `sbp` says the SBP of each.
///
/// # Errors
/// As of [`GlobalTensor::to_global`].
pub fn to_global<T: AsRef<[Sbp]>, N: Nested>(
    values: &N,
    placement: &Placement,
    mut sbp: impl FnMut(&Tensor) -> T,
) -> Result<N> {
    values.try_map(&mut |tensor| tensor.to_global(placement, sbp(tensor)))
}

/// Calls [`GlobalTensor::to_local`] on all tensors in a container.
///
/// # Errors
/// A tensor is plain.
pub fn to_local<N: Nested>(values: &N) -> Result<N> {
    values.try_map(&mut |tensor| tensor.to_local())
}
