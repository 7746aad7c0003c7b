//! Views of memory as bytes and as elements, and copies.

use flow_kernels::Element;

use super::arena::Block;
use crate::memory::BufferView;

/// Returns the bytes of a slice of numbers.
pub fn as_bytes<T: Element>(slice: &[T]) -> &[u8] {
    // SAFETY: numbers have no padding, any alignment is right for bytes, and the length is the
    // slice's.
    unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), std::mem::size_of_val(slice)) }
}

/// Returns the bytes of a slice of numbers, for writing.
pub fn as_bytes_mut<T: Element>(slice: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and any bytes are a number.
    unsafe {
        std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), std::mem::size_of_val(slice))
    }
}

/// Returns the first `len` numbers of a block.
pub fn block_as_slice<T: Element>(block: &Block, len: usize) -> &[T] {
    assert!(
        len * std::mem::size_of::<T>() <= block.size(),
        "the block was allocated for the slice"
    );
    // SAFETY: the block holds that many bytes, is cache line aligned, and was zero when made; any
    // bytes are numbers.
    unsafe { std::slice::from_raw_parts(block.as_ptr().cast(), len) }
}

/// Returns the first `len` numbers of a block, for writing.
pub fn block_as_slice_mut<T: Element>(block: &mut Block, len: usize) -> &mut [T] {
    assert!(
        len * std::mem::size_of::<T>() <= block.size(),
        "the block was allocated for the slice"
    );
    // SAFETY: as above; the block is borrowed mutably.
    unsafe { std::slice::from_raw_parts_mut(block.as_ptr().cast(), len) }
}

impl BufferView {
    /// Copies `count` bytes from `from` to position `start`.
    pub fn write(self, start: usize, from: *const u8, count: usize) {
        assert!(start + count <= self.bytes, "{count} bytes at {start} of {}", self.bytes);
        // SAFETY: the range is inside the caller's memory, which no other rank writes in this
        // collective.
        unsafe { copy(from, self.data.add(start), count) };
    }
}

/// Copies as `copy_nonoverlapping` does, past the caches where the processor can: another rank then
/// reads `to` from memory, and this one need not get the cache lines back that the other has read.
///
/// # Safety
///
/// As for `copy_nonoverlapping`.
pub unsafe fn copy_streaming(from: *const u8, to: *mut u8, count: usize) {
    const CACHE_LINE: usize = 64;
    let first = to.align_offset(CACHE_LINE).min(count);
    let whole = if STREAMS { (count - first) / CACHE_LINE * CACHE_LINE } else { 0 };
    let streamed = first + whole;
    // SAFETY: all are parts of the caller's ranges. What is streamed begins at a cache line, by AVX where it is
    // there.
    unsafe {
        copy(from, to, first);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            if is_x86_feature_detected!("avx") {
                stream_256(from.add(first), to.add(first), whole);
            } else {
                stream_128(from.add(first), to.add(first), whole);
            }
            // Others must see these stores before what follows.
            std::arch::x86_64::_mm_sfence();
        }
        copy(from.add(streamed), to.add(streamed), count - streamed);
    }
}

/// # Safety
///
/// As for `copy_nonoverlapping`; the processor has AVX, and `to` is whole cache lines.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx")]
unsafe fn stream_256(from: *const u8, to: *mut u8, count: usize) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    for start in (0..count).step_by(size_of::<__m256i>()) {
        // SAFETY: both are parts of the caller's ranges, and `to` is aligned.
        unsafe {
            let value = _mm256_loadu_si256(from.add(start).cast());
            _mm256_stream_si256(to.add(start).cast(), value);
        }
    }
}

/// # Safety
///
/// As for `copy_nonoverlapping`; `to` is whole cache lines.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn stream_128(from: *const u8, to: *mut u8, count: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    for start in (0..count).step_by(size_of::<__m128i>()) {
        // SAFETY: both are parts of the caller's ranges, and `to` is aligned. Every x86-64 has it.
        unsafe {
            let value = _mm_loadu_si128(from.add(start).cast());
            _mm_stream_si128(to.add(start).cast(), value);
        }
    }
}

/// Whether [`copy_streaming`] goes past the caches.
pub const STREAMS: bool = cfg!(all(target_arch = "x86_64", not(miri)));

/// Copies as `copy_nonoverlapping` does, in pieces small enough for the C library to move them by
/// vector registers. Its `rep movsb` for larger ones takes three times as long on AMD's Zen 3 for
/// addresses that lie badly to each other.
///
/// # Safety
///
/// As for `copy_nonoverlapping`.
pub unsafe fn copy(from: *const u8, to: *mut u8, count: usize) {
    const PIECE: usize = 2048;
    for start in (0..count).step_by(PIECE) {
        // SAFETY: the pieces are parts of the caller's ranges.
        unsafe {
            std::ptr::copy_nonoverlapping(from.add(start), to.add(start), PIECE.min(count - start))
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_streamed_comes_from_anywhere_and_goes_anywhere() {
        let bytes: Vec<u8> = (0..500).map(|at| (at % 251) as u8).collect();
        let starts = [0, 1, 16, 33, 63, 64];
        for (from, to) in starts.iter().flat_map(|&from| starts.map(|to| (from, to))) {
            for length in [0, 5, 63, 64, 65, 127, 128, 400] {
                let mut copied = vec![255; 600];
                let mut expected = copied.clone();
                expected[to..to + length].copy_from_slice(&bytes[from..from + length]);
                // SAFETY: both have the bytes.
                unsafe {
                    copy_streaming(bytes[from..].as_ptr(), copied[to..].as_mut_ptr(), length);
                }
                assert!(copied == expected, "{length} bytes from {from} to {to}");
            }
        }
    }
}
