//! All-reduce over several nodes: in each node to its leader, between the leaders, and in each node from its leader.
//!
//! Between nodes: the data is cut into blocks, and a block into a slice for each node. Every leader sends each other
//! leader that one's slice of its node's sum, adds up its own in the order of nodes, and sends the result to all. Each
//! node sends and receives 2N bytes whatever their number, as in a ring, but in two steps; it always has the slices of
//! the next block and the results of the last under way. All nodes hold the same bits.
//!
//! In a node: while the leader carries one piece, the other members reduce the next.

use std::ops::Range;

use flow_kernels::{DType, ReduceOp};

use super::carrying::Load;
use super::control::CHUNK;
use super::engine::{Engine, State};
use super::exchange::Raw;
use super::operation::{Location, Operation};
use super::reduction::{slice, Cargo};
use super::Part;
use crate::error::Result;

/// Bytes of a slice: enough for the calls to the kernel to be few, few enough to stay in the second-level cache.
const SLICE: usize = 256 << 10;
/// Bytes of memory in place that go from the members of a node to its leader at once.
const PIECE: usize = 1 << 20;

/// Memory that is reduced as one, in the order of its pieces: where each begins, and how many elements it has.
struct Span {
    pieces: Vec<(*mut u8, usize)>,
    /// The elements before each piece.
    starts: Vec<usize>,
    total: usize,
    element: usize,
}

impl Span {
    fn new(pieces: Vec<(*mut u8, usize)>, dtype: DType) -> Self {
        let mut total = 0;
        let mut starts = Vec::with_capacity(pieces.len());
        for &(_, count) in &pieces {
            starts.push(total);
            total += count;
        }
        Self { pieces, starts, total, element: dtype.size() }
    }

    /// The memory of some elements, in order.
    fn parts(&self, range: Range<usize>) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        let first = self.starts.partition_point(|&start| start <= range.start).saturating_sub(1);
        let pieces = self.starts.iter().zip(&self.pieces).skip(first);
        pieces.take_while(move |(&start, _)| start < range.end).filter_map(move |(&start, &(data, count))| {
            let (low, high) = (range.start.max(start), range.end.min(start + count));
            (low < high).then(|| (data.wrapping_add((low - start) * self.element), high - low))
        })
    }
}

impl Engine {
    /// Reduces `data` of all ranks, who have agreed on it; `locations` are theirs.
    pub fn reduce_between_nodes(
        &self,
        state: &mut State,
        operation: &Operation,
        data: Raw,
        own: Location,
        locations: &[Location],
    ) -> Result<()> {
        let element = operation.dtype.size();
        if self.locals.len() == 1 {
            let (_, mut load) = self.load()?;
            self.carry_sum(&mut load, operation, &Span::new(vec![(data.data, data.bytes / element)], operation.dtype))?;
            load.delivered();
            return Ok(());
        }
        let local = self.on_this_node(operation);
        let in_place = self.locals.iter().all(|&rank| locations[rank] != Location::Staged);
        let piece = if in_place { PIECE } else { CHUNK };
        let range = |index: usize| index * piece..((index + 1) * piece).min(data.bytes);
        let at = |rank: usize, index: usize| match locations[rank] {
            Location::Shared(offset) => self.world.arena.at(offset + index * piece),
            Location::Staged => self.control.staging(rank, index % 2),
        };
        let home = |index| at(self.locals[0], index);
        let count = data.bytes.div_ceil(piece);
        let mut homeward = [0; 2];
        for index in 0..=count {
            if index < count {
                let range = range(index);
                let (round, back) = (self.open(state, operation)?, self.open(state, operation)?);
                homeward[index % 2] = back;
                if own == Location::Staged {
                    let staging = self.stage_in(state, index % 2, back, operation)?;
                    // SAFETY: the range is inside the caller's memory and fits the buffer, which nobody reads now.
                    unsafe { super::copy(data.data.add(range.start), staging, range.len()) };
                }
                self.arrive(round);
                self.arrive(back);
                self.wait_locals_arrived(round, operation)?;
                if self.leads() {
                    self.others_arrive(round);
                } else {
                    let slice = slice(range.len() / element, self.locals.len() - 1, self.local - 1, element);
                    let from: Vec<_> =
                        self.locals.iter().map(|&rank| at(rank, index).wrapping_add(slice.start * element)).collect();
                    self.combine_places(&local, &from, &mut [from[0]], slice.len());
                }
                self.done(round);
            }
            let Some(last) = index.checked_sub(1) else { continue };
            let (range, back) = (range(last), homeward[last % 2]);
            if self.leads() {
                self.wait_done(back - 1, operation)?;
                let (_, mut load) = self.load()?;
                let span = Span::new(vec![(home(last), range.len() / element)], operation.dtype);
                self.carry_sum(&mut load, operation, &span)?;
                load.delivered();
                self.others_arrive(back);
            }
            self.wait_all_arrived(back, operation)?;
            if home(last) != data.data.wrapping_add(range.start) {
                // SAFETY: the range is inside the caller's memory; the leader's is as long, final, and not the same.
                unsafe { super::copy(home(last), data.data.add(range.start), range.len()) };
            }
            self.done(back);
        }
        // Until then others read the leader's memory, and this rank's has been read.
        self.wait_done(homeward[(count - 1) % 2], operation)
    }

    /// Reduces a bucket between nodes, once it is reduced on this one. In the leader, beside what that computes.
    pub fn carry_bucket(&self, cargo: &Cargo) -> Result<()> {
        let Cargo { round, homeward, operation, segments } = cargo;
        self.wait_locals_arrived(*round, operation)?;
        self.done(*round);
        self.wait_done(*round, operation)?;
        self.exchange_posts(*round, operation, 0)?;
        self.others_arrive(*round);
        if !self.all_agree(*round, operation) {
            // Each rank says so itself when it takes the result home.
            self.others_arrive(*homeward);
            return Ok(());
        }
        let places = self.pieces_of_all(*round, operation, segments)?;
        let pieces = places.iter().zip(&segments.lengths).map(|(places, &length)| (places[0], length)).collect();
        let (_, mut load) = self.load()?;
        self.carry_sum(&mut load, operation, &Span::new(pieces, operation.dtype))?;
        load.delivered();
        self.others_arrive(*homeward);
        Ok(())
    }

    /// What is done in a node for an operation over all: an average is a sum there.
    pub fn on_this_node(&self, operation: &Operation) -> Operation {
        match operation.reduce {
            ReduceOp::Avg if self.abroad.is_some() => Operation { reduce: ReduceOp::Sum, ..*operation },
            _ => *operation,
        }
    }

    /// Reduces what the leaders have, in place.
    fn carry_sum(&self, load: &mut Load, operation: &Operation, span: &Span) -> Result<()> {
        let Some(abroad) = &self.abroad else { return Ok(()) };
        let (nodes, here, element) = (abroad.leaders.len(), abroad.here, span.element);
        let most = SLICE / element;
        let each = span.total.div_ceil(nodes).next_multiple_of((64 / element).max(1)).min(most);
        let blocks = span.total.div_ceil((each * nodes).max(1));
        let slice = |block: usize, node: usize| {
            let start = (block * nodes + node) * each;
            start.min(span.total)..(start + each).min(span.total)
        };
        load.carrier.scratch.resize((2 * nodes * each * element).div_ceil(8), 0);
        let scratch = load.carrier.scratch.as_mut_ptr().cast::<u8>();
        let incoming = |block: usize, node: usize| scratch.wrapping_add((block % 2 * nodes + node) * each * element);
        // SAFETY: nobody but this rank uses the memory until the sum is there, and it touches no slice that is under way.
        let part = |(data, count): (*mut u8, usize)| unsafe { Part::new(data, count * element) };
        let mut due = [vec![0; nodes], vec![0; nodes]];
        let send_slices = |load: &mut Load, block: usize, due: &mut Vec<u64>| {
            for node in abroad.others() {
                span.parts(slice(block, node)).for_each(|piece| load.carrier.wire.send(node, part(piece)));
                due[node] = load.carrier.wire.receive(node, part((incoming(block, node), slice(block, here).len())));
            }
        };
        if blocks > 0 {
            send_slices(load, 0, &mut due[0]);
        }
        for block in 0..blocks {
            if block + 1 < blocks {
                send_slices(load, block + 1, &mut due[(block + 1) % 2]);
            }
            self.drive(load, operation, &due[block % 2], false)?;
            let mut offset = 0;
            for (own, count) in span.parts(slice(block, here)) {
                let source = |node| if node == here { own } else { incoming(block, node).wrapping_add(offset) };
                let sources: Vec<*const u8> = (0..nodes).map(|node| source(node).cast_const()).collect();
                // SAFETY: this node's part and what has come from the others are that long, and nobody else uses them.
                unsafe {
                    match operation.reduce {
                        ReduceOp::Avg => {
                            flow_kernels::average(operation.dtype, &sources, &[own], count, self.size());
                        }
                        reduce => flow_kernels::reduce(operation.dtype, reduce, &sources, &[own], count),
                    }
                }
                offset += count * element;
            }
            for node in abroad.others() {
                span.parts(slice(block, here)).for_each(|piece| load.carrier.wire.send(node, part(piece)));
                for piece in span.parts(slice(block, node)) {
                    load.carrier.wire.receive(node, part(piece));
                }
            }
        }
        self.drive(load, operation, &vec![0; nodes], true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_span_cover_it_in_order() {
        let mut memory = [0_f32; 100];
        let base = memory.as_mut_ptr().cast::<u8>();
        let at = |index: usize| base.wrapping_add(4 * index);
        // With gaps, and with empty pieces.
        let span =
            Span::new(vec![(at(0), 3), (at(0), 0), (at(10), 20), (at(40), 1), (at(50), 0), (at(60), 6)], DType::F32);
        assert_eq!(span.total, 30);
        for begin in 0..=30 {
            for end in begin..=30 {
                let elements = |range| -> Vec<*mut u8> {
                    span.parts(range)
                        .flat_map(|(data, count)| (0..count).map(move |i| data.wrapping_add(4 * i)))
                        .collect()
                };
                assert_eq!(elements(begin..end), elements(0..30)[begin..end], "{begin}..{end}");
            }
        }
    }
}
