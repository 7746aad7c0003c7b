//! The places of tensors in a flat buffer, and the blocks of a kernel that move their parts.

use std::ops::Range;

use super::error::{Error, Result};
use crate::types::DType;

/// Tensors begin at multiples of this many bytes, as in libtorch's own allocations, so that kernels
/// may rely on it.
const ALIGNMENT: usize = 512;

/// The part that one block of a kernel moves, in bytes of the flat buffer. With 25 MiB there are 12
/// blocks for each of an H100's processors, so that all stay busy to the end. Each thread has 64
/// bytes on their way at once.
const CHUNK_BYTES: usize = 16 << 10;

/// The most tensors of one launch: their addresses are passed by value, in at most 4 KB of
/// arguments.
pub const TENSORS_PER_LAUNCH: usize = 480;

/// The part of a tensor that one block of a kernel moves; `struct Chunk` of `pack.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Chunk {
    /// The place where it begins in the flat buffer, in elements.
    pub flat_start: u64,
    /// The place where it begins in its tensor, in elements.
    pub tensor_start: u64,
    /// Its elements.
    pub length: u32,
    /// Its tensor, counted from the launch's first.
    pub tensor: u32,
}

/// The work of one launch of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The tensors, [`TENSORS_PER_LAUNCH`] at most.
    pub tensors: Range<usize>,
    /// The chunks that the blocks move. May be empty.
    pub chunks: Vec<Chunk>,
}

/// The places of tensors in a flat buffer: one after the other, each at a multiple of 512 bytes.
/// The memory between them is never touched.
#[derive(Clone, Debug)]
pub struct FlatLayout {
    flat: DType,
    lengths: Vec<usize>,
    places: Vec<usize>,
    bytes: usize,
}

impl FlatLayout {
    /// Places tensors of `lengths` elements in a buffer of type `flat`. A length may be 0.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if that is more than a machine can address.
    pub fn new(lengths: &[usize], flat: DType) -> Result<FlatLayout> {
        let mut places = Vec::with_capacity(lengths.len());
        let mut bytes = 0;
        for &length in lengths {
            let (place, end) = placed(bytes, length, flat.size()).ok_or_else(|| {
                let count = lengths.len();
                Error::Argument(format!("{count} tensors are longer together than an address"))
            })?;
            places.push(place / flat.size());
            bytes = end;
        }
        Ok(FlatLayout { flat, lengths: lengths.to_vec(), places, bytes })
    }

    /// Returns the type of the flat buffer.
    pub fn flat(&self) -> DType {
        self.flat
    }

    /// Returns the elements of each tensor.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Returns where each tensor begins in the flat buffer, in elements.
    pub fn places(&self) -> &[usize] {
        &self.places
    }

    /// Returns the length of the flat buffer in bytes: the place where the last tensor ends.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the launches that move all tensors, in their order.
    pub fn launches(&self) -> impl Iterator<Item = Launch> + '_ {
        (0..self.lengths.len()).step_by(TENSORS_PER_LAUNCH).map(|first| {
            let tensors = first..self.lengths.len().min(first + TENSORS_PER_LAUNCH);
            let chunks = tensors
                .clone()
                .zip(0..)
                .flat_map(|(tensor, number)| self.chunks(tensor, number))
                .collect();
            Launch { tensors, chunks }
        })
    }

    /// Returns the chunks of `tensor`, which is `number` in its launch.
    fn chunks(&self, tensor: usize, number: u32) -> impl Iterator<Item = Chunk> {
        let length = self.lengths[tensor];
        let place = self.places[tensor];
        let step = CHUNK_BYTES / self.flat.size();
        (0..length).step_by(step).map(move |start| Chunk {
            flat_start: (place + start) as u64,
            tensor_start: start as u64,
            length: step.min(length - start) as u32,
            tensor: number,
        })
    }
}

/// Returns where a tensor of `length` elements of `size` bytes begins and ends in a buffer that is
/// full up to `bytes`; None if there is no such address.
fn placed(bytes: usize, length: usize, size: usize) -> Option<(usize, usize)> {
    let place = bytes.checked_next_multiple_of(ALIGNMENT)?;
    let end = place.checked_add(length.checked_mul(size)?)?;
    (end <= isize::MAX as usize).then_some((place, end))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layout(lengths: &[usize], flat: DType) -> FlatLayout {
        FlatLayout::new(lengths, flat).unwrap()
    }

    #[test]
    fn tensors_lie_at_multiples_of_512_bytes() {
        let layout = layout(&[1, 0, 129, 128], DType::F32);
        assert_eq!(layout.places(), [0, 128, 128, 384]);
        assert_eq!(layout.bytes(), 4 * (384 + 128));
    }

    #[test]
    fn nothing_needs_no_launch() {
        assert_eq!(
            (layout(&[], DType::F32).launches().count(), layout(&[], DType::F32).bytes()),
            (0, 0)
        );
        assert!(layout(&[0, 0], DType::BF16).launches().all(|launch| launch.chunks.is_empty()));
    }

    #[test]
    fn many_tensors_take_several_launches() {
        let tensors: Vec<_> =
            layout(&[3; 1000], DType::F16).launches().map(|launch| launch.tensors).collect();
        assert_eq!(tensors, [0..480, 480..960, 960..1000]);
    }

    #[test]
    fn more_than_4_gi_elements() {
        let length = (5 << 30) + 3;
        let layout = layout(&[7, length], DType::BF16);
        assert_eq!(layout.bytes(), 512 + 2 * length);
        let chunks = layout.launches().next().unwrap().chunks;
        let last = chunks.last().unwrap();
        assert_eq!(last.tensor_start + u64::from(last.length), length as u64);
        assert_eq!(last.flat_start, last.tensor_start + 256);
        assert_eq!(
            chunks.iter().map(|chunk| u64::from(chunk.length)).sum::<u64>(),
            7 + length as u64
        );
    }

    #[test]
    fn what_cannot_be_addressed_is_an_error() {
        for lengths in [&[usize::MAX][..], &[usize::MAX / 4], &[1 << 60, 1 << 60]] {
            assert!(
                FlatLayout::new(lengths, DType::F64)
                    .unwrap_err()
                    .to_string()
                    .contains("longer together")
            );
        }
    }

    proptest! {
        #[test]
        fn every_element_x_and_a_place_of_its_own(
            lengths in prop::collection::vec(prop_oneof![0usize..40, 0usize..70_000], 0..30),
            repeat in prop_oneof![Just(1usize), Just(40)],
            flat in prop::sample::select(vec![DType::F32, DType::F64, DType::F16, DType::BF16]),
        ) {
            let lengths = lengths.repeat(repeat);
            let layout = layout(&lengths, flat);
            let mut end = 0;
            for (&place, &length) in layout.places().iter().zip(&lengths) {
                prop_assert!(place >= end && place * flat.size() % ALIGNMENT == 0);
                end = place + length;
            }
            prop_assert_eq!(layout.bytes(), end * flat.size());

            // Chunks come in order, so that each must begin where the one before it ended.
            let mut covered = vec![0; lengths.len()];
            for launch in layout.launches() {
                prop_assert!(launch.tensors.len() <= TENSORS_PER_LAUNCH);
                for chunk in launch.chunks {
                    let tensor = launch.tensors.start + chunk.tensor as usize;
                    prop_assert!(launch.tensors.contains(&tensor) && chunk.length > 0);
                    prop_assert_eq!(chunk.tensor_start, covered[tensor] as u64);
                    let place = layout.places()[tensor] as u64;
                    prop_assert_eq!(chunk.flat_start, place + chunk.tensor_start);
                    covered[tensor] += chunk.length as usize;
                }
            }
            prop_assert_eq!(covered, lengths);
        }
    }
}
