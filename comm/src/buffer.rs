//! Memory that collectives work on.

use std::fmt;
use std::ops::{Deref, DerefMut};

use flow_kernels::{DType, Element};

use crate::shm::arena::{Arena, Block};
use std::sync::Arc;

/// Contiguous elements of one type that a collective can read and write.
///
/// Implemented for slices, arrays and vectors of [`Element`]s and for [`SharedBuffer`]. Other
/// owners of memory, such as tensors, implement it by handing out their bytes. The bytes must be
/// aligned for the type and a whole number of elements, and stay where they are between calls.
pub trait Buffer {
    /// Type of the elements.
    fn dtype(&self) -> DType;
    /// Returns the elements' bytes.
    fn bytes(&self) -> &[u8];
    /// Returns the elements' bytes, for writing.
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl<T: Element> Buffer for [T] {
    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn bytes(&self) -> &[u8] {
        crate::shm::bytes::as_bytes(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        crate::shm::bytes::as_bytes_mut(self)
    }
}

macro_rules! buffer_by_slice {
    ($([$($generics:tt)*] $owner:ty),*) => {$(
        impl<T: Element, $($generics)*> Buffer for $owner {
            fn dtype(&self) -> DType {
                T::DTYPE
            }

            fn bytes(&self) -> &[u8] {
                self[..].bytes()
            }

            fn bytes_mut(&mut self) -> &mut [u8] {
                self[..].bytes_mut()
            }
        }
    )*};
}

buffer_by_slice!([] Vec<T>, [const N: usize] [T; N], [] SharedBuffer<T>);

/// Elements in memory that all ranks of the machine can reach: collectives on it copy nothing.
///
/// Made by [`Member::alloc_shared`](crate::Member::alloc_shared), zero at first; use it as a slice.
/// Other ranks write to it during collectives that its owner takes part in, and at no other time.
/// After a failed collective a slow rank may yet write, so the contents are of no use.
pub struct SharedBuffer<T> {
    block: Block,
    len: usize,
    element: std::marker::PhantomData<T>,
}

impl<T: Element> SharedBuffer<T> {
    /// Returns a buffer of `len` zeros; None if this rank's region is full.
    pub(crate) fn new(arena: &Arc<Arena>, len: usize) -> Option<Self> {
        let block = arena.allocate_zeroed(len.checked_mul(std::mem::size_of::<T>())?)?;
        Some(Self { block, len, element: std::marker::PhantomData })
    }
}

impl<T: Element> Deref for SharedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        crate::shm::bytes::block_as_slice(&self.block, self.len)
    }
}

impl<T: Element> DerefMut for SharedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        crate::shm::bytes::block_as_slice_mut(&mut self.block, self.len)
    }
}

impl<T: Element> AsMut<[T]> for SharedBuffer<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for SharedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
