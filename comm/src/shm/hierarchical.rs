//! All-reduce over several nodes: in each node to its leader, between the leaders, and in each node
//! from its leader.
//!
//! Between nodes: the data is cut into blocks, and a block into a slice for each node. Every leader
//! sends each other leader that one's slice of its node's sum, adds up its own in the order of
//! nodes, and sends the result to all. Each node sends and receives 2N bytes whatever their number,
//! as in a ring, but in two steps; it always has the slices of the next block and the results of
//! the last under way. All nodes hold the same bits.
//!
//! In a node: while the leader carries one piece, the other members reduce the next.

use std::ops::Range;

use flow_kernels::{DType, ReduceOp};

use super::contribution::BufferView;
use super::control::CHUNK;
use super::engine::{Engine, State};
use super::internode_exchange::{LinksGuard, TransferTargets};
use super::io_segment::IoSegment;
use super::reduction::{is_divided_first, slice, InterNodeBucket};
use crate::descriptor::{Location, OpDescriptor};
use crate::error::Result;

/// Bytes of a slice: enough for the calls to the kernel to be few, few enough that what is under
/// way stays in the cache.
const SLICE: usize = 64 << 10;

/// Memory that is reduced as one, in the order of its pieces: where each begins, and how many
/// elements it has.
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
        pieces.take_while(move |(&start, _)| start < range.end).filter_map(
            move |(&start, &(data, count))| {
                let (low, high) = (range.start.max(start), range.end.min(start + count));
                (low < high).then(|| (data.wrapping_add((low - start) * self.element), high - low))
            },
        )
    }
}

/// A node's part in an all-reduce, block by block.
struct NodePhase<'a> {
    engine: &'a Engine,
    state: &'a mut State,
    operation: &'a OpDescriptor,
    data: BufferView,
    locations: &'a [Location],
    /// Bytes of a block.
    block: usize,
    /// The round of each block, of those under way, in which all take the result home.
    result_round: [u64; 2],
}

impl NodePhase<'_> {
    /// The bytes of a block.
    fn range(&self, block: usize) -> Range<usize> {
        block * self.block..((block + 1) * self.block).min(self.data.bytes)
    }

    /// A member's memory of a block.
    fn at(&self, rank: usize, block: usize) -> *mut u8 {
        match self.locations[rank] {
            Location::Shared(offset) => {
                self.engine.core.world.arena.at(offset + block * self.block)
            }
            Location::Staged => self.engine.control.staging(rank, block % 2),
        }
    }

    /// Where the leader has a block.
    fn leader_block(&self, block: usize) -> *mut u8 {
        self.at(self.engine.core.locals[0], block)
    }

    /// Reduces a block of all members to the leader's.
    fn reduce_to_leader(&mut self, block: usize) -> Result<()> {
        let (engine, operation, range) = (self.engine, self.operation, self.range(block));
        let element = operation.dtype.size();
        let (round, result_round) = (
            engine.acquire_slot(self.state, operation)?,
            engine.acquire_slot(self.state, operation)?,
        );
        self.result_round[block % 2] = result_round;
        if self.locations[engine.core.rank] == Location::Staged {
            let staging = engine.stage_in(self.state, block % 2, result_round, operation)?;
            // SAFETY: the range is inside the caller's memory and fits the buffer, which nobody
            // reads now.
            unsafe { super::bytes::copy(self.data.data.add(range.start), staging, range.len()) };
        }
        engine.arrive(round);
        engine.arrive(result_round);
        engine.wait_locals_arrived(round, operation)?;
        if engine.is_leader() {
            // It has other work than the others.
            engine.arrive_for_remote(round);
            engine.done(round);
            return engine.wait_done(round, operation);
        }
        let slice = slice(
            range.len() / element,
            engine.core.locals.len() - 1,
            engine.core.local - 1,
            element,
        );
        let place = |&rank: &usize| self.at(rank, block).wrapping_add(slice.start * element);
        let places: Vec<*mut u8> = engine.core.locals.iter().map(place).collect();
        engine.reduce_local_at(operation, &places, &mut [places[0]], slice.len());
        engine.done(round);
        Ok(())
    }

    /// Takes home what the leader has of a block, once it is reduced over all nodes.
    fn copy_from_leader(&mut self, block: usize) -> Result<()> {
        let (engine, range, result_round) =
            (self.engine, self.range(block), self.result_round[block % 2]);
        if engine.is_leader() {
            engine.arrive_for_remote(result_round);
        }
        engine.wait_all_arrived(result_round, self.operation)?;
        let (from, to) = (self.leader_block(block), self.data.data.wrapping_add(range.start));
        if from != to {
            // SAFETY: the range is inside the caller's memory; the leader's is as long, final, and
            // not the same.
            unsafe { super::bytes::copy(from, to, range.len()) };
        }
        engine.done(result_round);
        Ok(())
    }
}

impl Engine {
    /// Reduces `data` of all ranks, who have agreed on it; `locations` are theirs.
    pub fn reduce_between_nodes(
        &self,
        state: &mut State,
        operation: &OpDescriptor,
        data: BufferView,
        locations: &[Location],
    ) -> Result<()> {
        let element = operation.dtype.size();
        let nodes = self.core.leaders.len();
        // All nodes cut alike: where any has to stage, a block fits the staging buffers.
        let is_alone = |rank: usize| {
            self.core.nodes.iter().filter(|&&node| node == self.core.nodes[rank]).count() == 1
        };
        let staged = (0..self.core.size())
            .any(|rank| locations[rank] == Location::Staged && !is_alone(rank));
        let slice = if staged { (CHUNK / nodes / 64 * 64).max(64) } else { SLICE };
        if self.core.locals.len() == 1 {
            let (_, mut guard) = self.lock_links()?;
            let span = Span::new(vec![(data.data, data.bytes / element)], operation.dtype);
            self.reduce_scatter_all_gather(&mut guard, operation, &span, slice, None)?;
            guard.complete();
            return Ok(());
        }
        let block = slice * nodes;
        let mut node = NodePhase {
            engine: self,
            state,
            operation,
            data,
            locations,
            block,
            result_round: [0; 2],
        };
        let blocks = data.bytes.div_ceil(block);
        if self.is_leader() {
            let pieces = (0..blocks)
                .map(|block| (node.leader_block(block), node.range(block).len() / element))
                .collect();
            let (_, mut guard) = self.lock_links()?;
            self.reduce_scatter_all_gather(
                &mut guard,
                operation,
                &Span::new(pieces, operation.dtype),
                slice,
                Some(&mut node),
            )?;
            guard.complete();
        } else {
            for block in 0..blocks {
                node.reduce_to_leader(block)?;
                if block > 0 {
                    node.copy_from_leader(block - 1)?;
                }
            }
            node.copy_from_leader(blocks - 1)?;
        }
        // Until then others read this rank's memory.
        let last = node.result_round[(blocks - 1) % 2];
        self.wait_done(last, operation)
    }

    /// Reduces a bucket between nodes, once it is reduced on this one. In the leader, beside what
    /// that computes.
    pub fn reduce_bucket_between_nodes(&self, bucket: &InterNodeBucket) -> Result<()> {
        let InterNodeBucket { round, result_round, operation, segments } = bucket;
        self.wait_locals_arrived(*round, operation)?;
        self.done(*round);
        self.wait_done(*round, operation)?;
        self.exchange_between_leaders(*round, operation, 0)?;
        if !self.all_agree(*round, operation) {
            // Each rank says so itself when it takes the result home.
            self.arrive_for_remote(*result_round);
            return Ok(());
        }
        let places = self.pieces_of_all(*round, operation, segments)?;
        let pieces = places
            .iter()
            .zip(&segments.lengths)
            .map(|(places, &length)| (places[0], length))
            .collect();
        let (_, mut guard) = self.lock_links()?;
        self.reduce_scatter_all_gather(
            &mut guard,
            operation,
            &Span::new(pieces, operation.dtype),
            SLICE,
            None,
        )?;
        // Before others may see that a node has left, having done its part.
        self.arrive_for_remote(*result_round);
        guard.complete();
        Ok(())
    }

    /// Reduces what the leaders have, in place, in slices of so many bytes; all cut alike. The
    /// other members of the node take part block by block, if they do.
    fn reduce_scatter_all_gather(
        &self,
        guard: &mut LinksGuard,
        operation: &OpDescriptor,
        span: &Span,
        slice: usize,
        mut together: Option<&mut NodePhase>,
    ) -> Result<()> {
        let Some(inter_node) = &self.inter_node else { return Ok(()) };
        let (nodes, here, element) = (self.core.leaders.len(), inter_node.node, span.element);
        if self.core.locals.len() == 1 && is_divided_first(operation) {
            for &(data, count) in &span.pieces {
                self.reduce_local_at(operation, &[data], &mut [data], count);
            }
        }
        // What fits one block is cut evenly.
        let even = span.total.div_ceil(nodes).next_multiple_of(64 / element);
        let each = if span.total * element > slice * nodes { slice / element } else { even };
        let blocks = span.total.div_ceil((each * nodes).max(1));
        let slice = |block: usize, node: usize| {
            let start = (block * nodes + node) * each;
            start.min(span.total)..(start + each).min(span.total)
        };
        guard.links.scratch.resize((2 * nodes * each * element).div_ceil(8), 0);
        let scratch = guard.links.scratch.as_mut_ptr().cast::<u8>();
        let incoming = |block: usize, node: usize| {
            scratch.wrapping_add((block % 2 * nodes + node) * each * element)
        };
        // SAFETY: nobody but this rank uses the memory until the sum is there, and it touches no
        // slice that is under way.
        let part =
            |(data, count): (*mut u8, usize)| unsafe { IoSegment::new(data, count * element) };
        let (mut slices, mut sums) =
            ([vec![(0, 0); nodes], vec![(0, 0); nodes]], vec![(0, 0); nodes]);
        let send_slices = |guard: &mut LinksGuard, block: usize, due: &mut TransferTargets| {
            for node in inter_node.remote_nodes() {
                let wire = &mut guard.links.wire;
                span.parts(slice(block, node)).for_each(|piece| _ = wire.send(node, part(piece)));
                due[node].1 =
                    wire.receive(node, part((incoming(block, node), slice(block, here).len())));
            }
        };
        for block in 0..=blocks {
            // The sums of the block before the last come, and its memory is free, before the next
            // is begun.
            if let (Some(together), Some(last)) = (&mut together, block.checked_sub(2)) {
                self.drive(guard, operation, &sums, false)?;
                together.copy_from_leader(last)?;
            }
            if block < blocks {
                if let Some(together) = &mut together {
                    together.reduce_to_leader(block)?;
                }
                send_slices(guard, block, &mut slices[block % 2]);
            }
            let Some(block) = block.checked_sub(1) else { continue };
            self.drive(guard, operation, &slices[block % 2], false)?;
            let mut offset = 0;
            for (own, count) in span.parts(slice(block, here)) {
                let source = |node| {
                    if node == here {
                        own
                    } else {
                        incoming(block, node).wrapping_add(offset)
                    }
                };
                let sources: Vec<*const u8> =
                    (0..nodes).map(|node| source(node).cast_const()).collect();
                // SAFETY: this node's part and what has come from the others are that long, and
                // nobody else uses them.
                unsafe {
                    match operation.reduce {
                        ReduceOp::Avg if is_divided_first(operation) => {
                            flow_kernels::reduce(
                                operation.dtype,
                                ReduceOp::Sum,
                                &sources,
                                &[own],
                                count,
                            );
                        }
                        ReduceOp::Avg => {
                            flow_kernels::average(
                                operation.dtype,
                                &sources,
                                &[own],
                                count,
                                self.core.size(),
                            );
                        }
                        reduce => {
                            flow_kernels::reduce(operation.dtype, reduce, &sources, &[own], count)
                        }
                    }
                }
                offset += count * element;
            }
            for node in inter_node.remote_nodes() {
                let wire = &mut guard.links.wire;
                for piece in span.parts(slice(block, here)) {
                    sums[node].0 = wire.send(node, part(piece));
                }
                for piece in span.parts(slice(block, node)) {
                    sums[node].1 = wire.receive(node, part(piece));
                }
            }
        }
        self.drive(guard, operation, &sums, true)?;
        match (together, blocks) {
            (Some(together), 1..) => together.copy_from_leader(blocks - 1),
            _ => Ok(()),
        }
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
        let span = Span::new(
            vec![(at(0), 3), (at(0), 0), (at(10), 20), (at(40), 1), (at(50), 0), (at(60), 6)],
            DType::F32,
        );
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
