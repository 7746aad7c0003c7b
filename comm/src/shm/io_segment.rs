//! Memory that is lent to a transport between nodes.

use crate::descriptor::DescriptorWords;

/// A piece of memory that is sent or filled.
pub struct IoSegment {
    data: *mut u8,
    bytes: usize,
}

// SAFETY: the maker of a segment promises that nobody else touches the memory meanwhile, whatever
// thread has the segment.
unsafe impl Send for IoSegment {}

impl IoSegment {
    /// # Safety
    ///
    /// Until the segment's bytes are sent or filled, or it is dropped, its memory stays valid and
    /// nobody else writes it. If it is to be filled, nobody reads it either.
    pub unsafe fn new(data: *mut u8, bytes: usize) -> Self {
        Self { data, bytes }
    }

    /// # Safety
    ///
    /// As for [`IoSegment::new`].
    pub unsafe fn of_descriptor(words: &mut DescriptorWords) -> Self {
        // SAFETY: the caller's promise; the words may be any bytes.
        unsafe { Self::new(std::ptr::from_mut(words).cast(), std::mem::size_of_val(words)) }
    }

    /// Returns the bytes that are sent.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the promise of the segment's maker.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    /// Returns the bytes that are filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}
