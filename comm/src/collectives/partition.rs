//! The memory of an all-reduce over several nodes, and how it is cut: into blocks, and a block into a
//! slice for each node.

use std::ops::Range;

use flow_kernels::DType;

/// Memory that is reduced as one, in the order of its pieces: where each begins, and how many
/// elements it has.
pub struct ScatteredMemory {
    pub pieces: Vec<(*mut u8, usize)>,
    /// The elements before each piece.
    starts: Vec<usize>,
    total: usize,
    /// Bytes of an element.
    pub element: usize,
}

impl ScatteredMemory {
    /// Returns the memory that has these pieces.
    pub fn new(pieces: Vec<(*mut u8, usize)>, dtype: DType) -> Self {
        let mut total = 0;
        let mut starts = Vec::with_capacity(pieces.len());
        for &(_, count) in &pieces {
            starts.push(total);
            total += count;
        }
        Self { pieces, starts, total, element: dtype.size() }
    }

    /// Returns the memory of some elements, in order.
    pub fn parts(&self, range: Range<usize>) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        let first = self.starts.partition_point(|&start| start <= range.start).saturating_sub(1);
        let pieces = self.starts.iter().zip(&self.pieces).skip(first);
        pieces.take_while(move |(start, _)| **start < range.end).filter_map(
            move |(&start, &(data, count))| {
                let low = range.start.max(start);
                let high = range.end.min(start + count);
                (low < high).then(|| (data.wrapping_add((low - start) * self.element), high - low))
            },
        )
    }
}

/// The cut of `total` elements: into blocks, and a block into a slice for each node.
pub struct Partition {
    nodes: usize,
    total: usize,
    /// The most elements of a slice.
    pub slice: usize,
    /// The number of blocks.
    pub count: usize,
}

impl Partition {
    /// Cuts memory into slices of at most `slice` bytes. Memory that fits one block is cut evenly.
    pub fn new(memory: &ScatteredMemory, slice: usize, nodes: usize) -> Self {
        let even = memory.total.div_ceil(nodes).next_multiple_of(64 / memory.element);
        let fits = memory.total * memory.element <= slice * nodes;
        let slice = if fits { even } else { slice / memory.element };
        let count = memory.total.div_ceil((slice * nodes).max(1));
        Self { nodes, total: memory.total, slice, count }
    }

    /// Returns the elements of a block that the node `node` adds up.
    pub fn slice(&self, block: usize, node: usize) -> Range<usize> {
        let start = (block * self.nodes + node) * self.slice;
        start.min(self.total)..(start + self.slice).min(self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_scattered_memory_cover_it_in_order() {
        let mut numbers = [0_f32; 100];
        let base = numbers.as_mut_ptr().cast::<u8>();
        let at = |index: usize| base.wrapping_add(4 * index);
        // With gaps, and with empty pieces.
        let memory = ScatteredMemory::new(
            vec![(at(0), 3), (at(0), 0), (at(10), 20), (at(40), 1), (at(50), 0), (at(60), 6)],
            DType::F32,
        );
        assert_eq!(memory.total, 30);
        for begin in 0..=30 {
            for end in begin..=30 {
                let elements = |range| -> Vec<*mut u8> {
                    memory
                        .parts(range)
                        .flat_map(|(data, count)| (0..count).map(move |i| data.wrapping_add(4 * i)))
                        .collect()
                };
                assert_eq!(elements(begin..end), elements(0..30)[begin..end], "{begin}..{end}");
            }
        }
    }
}
