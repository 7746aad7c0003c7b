//! The contributions of ranks to a collective in which each reads from the others.

use std::ops::Range;

/// Address of the range at hand in a rank's block: `at(rank, block)`.
pub type AddressOf<'a> = &'a dyn Fn(usize, usize) -> *const u8;

/// The ranks that contribute.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Contributors {
    All,
    Root(usize),
}

impl Contributors {
    /// Whether a rank contributes.
    pub fn includes(self, rank: usize) -> bool {
        match self {
            Contributors::All => true,
            Contributors::Root(root) => rank == root,
        }
    }
}

/// The ranks that read a block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Readers {
    All,
    Root(usize),
    /// The rank whose number the block has.
    OwnerOfBlock,
}

impl Readers {
    /// Whether a rank reads blocks of all ranks.
    pub fn includes(self, rank: usize) -> bool {
        match self {
            Readers::All | Readers::OwnerOfBlock => true,
            Readers::Root(root) => rank == root,
        }
    }
}

/// Blocks of memory, the same number from each rank.
pub struct Contribution<'a> {
    pub from: Contributors,
    pub to: Readers,
    /// This rank's memory; None if only others contribute.
    pub data: Option<*const u8>,
    pub blocks: usize,
    /// Bytes of the longest block of any rank.
    pub block_bytes: usize,
    /// The place of `extent(rank, block)` in the rank's memory, in bytes: a rank's blocks follow
    /// each other. Every rank knows all extents that it reads, and its own.
    pub extent: &'a dyn Fn(usize, usize) -> Range<usize>,
}

impl Contribution<'_> {
    /// Returns the number of bytes of all blocks of a rank.
    pub fn total(&self, rank: usize) -> usize {
        (self.extent)(rank, self.blocks - 1).end
    }

    /// Returns the root of a block that all ranks read: between nodes it goes along a chain, so
    /// that each node sends it once.
    pub fn chain_root(&self) -> Option<usize> {
        match (self.from, self.to) {
            (Contributors::Root(root), Readers::All) => Some(root),
            _ => None,
        }
    }

    /// Returns the part of a range that a rank's block has.
    pub fn clip(&self, rank: usize, block: usize, range: &Range<usize>) -> Range<usize> {
        let bytes = (self.extent)(rank, block).len();
        range.start.min(bytes)..range.end.min(bytes)
    }
}

/// Returns the extents of blocks of the same length.
pub fn equal_extents(block_bytes: usize) -> impl Fn(usize, usize) -> Range<usize> {
    move |_, block| block * block_bytes..(block + 1) * block_bytes
}

/// Returns where each of several blocks that follow each other lies, in bytes.
pub fn extents_of(counts: &[usize], element: usize) -> Vec<Range<usize>> {
    let mut extents = Vec::with_capacity(counts.len());
    let mut start = 0;
    for count in counts {
        let end = start + count * element;
        extents.push(start..end);
        start = end;
    }
    extents
}

/// Returns the number of bytes of the longest block.
pub fn longest(extents: &[Range<usize>]) -> usize {
    extents.iter().map(Range::len).max().unwrap_or(0)
}
