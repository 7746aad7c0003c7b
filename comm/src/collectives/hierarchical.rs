//! All-reduce over several nodes: in each node to its leader, between the leaders, and in each node
//! from its leader.
//!
//! Between nodes: the data is cut into blocks, and a block into a slice for each node. Every leader
//! sends each other leader that one's slice of its node's sum. It adds up its own in the order of
//! nodes, and sends the result to all. Each node sends and receives 2N bytes whatever their number,
//! as in a ring, but in two steps. It always has the slices of the next block and the results of
//! the last under way. All nodes hold the same bits.
//!
//! In a node: while the leader transfers one block, the other members reduce the next.

use std::ops::Range;
use std::sync::Arc;

use super::addends::Addends;
use super::kernel::{is_divided_first, reduce_on_node, slice};
use super::partition::{Partition, ScatteredMemory};
use super::pieces::pieces_of_locals;
use crate::descriptor::{Location, OpDescriptor};
use crate::error::Result;
use crate::group::core::GroupCore;
use crate::internode::{ConnectionsGuard, InterNode};
use crate::memory::BufferView;
use crate::shm::bytes;
use crate::shm::control::{CHUNK, Control};
use crate::shm::io_segment::IoSegment;
use crate::shm::rounds::{RoundState, Rounds};
use crate::shm::segments::Segments;
use crate::transport::Connections;

/// Bytes of a slice: enough for the calls to the kernel to be few, few enough that what is under
/// way stays in the cache.
const SLICE: usize = 64 << 10;

/// The reductions of a group over several nodes.
pub struct Hierarchical {
    core: Arc<GroupCore>,
    control: Arc<Control>,
    rounds: Arc<Rounds>,
    inter_node: Arc<InterNode>,
}

/// A bucket for a leader to reduce between nodes.
pub struct InterNodeBucket {
    pub round: u64,
    pub result_round: u64,
    pub operation: OpDescriptor,
    pub segments: Arc<Segments>,
}

/// A node's part in an all-reduce, block by block.
struct NodePhase<'a> {
    core: &'a GroupCore,
    control: &'a Control,
    rounds: &'a Rounds,
    state: &'a mut RoundState,
    operation: &'a OpDescriptor,
    data: BufferView,
    locations: &'a [Location],
    /// Bytes of a block.
    block: usize,
    /// For the two blocks under way: the round in which all copy the result from the leader.
    result_round: [u64; 2],
}

impl NodePhase<'_> {
    /// Returns the bytes of a block.
    fn range(&self, block: usize) -> Range<usize> {
        block * self.block..((block + 1) * self.block).min(self.data.bytes)
    }

    /// Returns a member's memory of a block.
    fn at(&self, rank: usize, block: usize) -> *mut u8 {
        match self.locations[rank] {
            Location::Shared(offset) => self.core.world.arena.at(offset + block * self.block),
            Location::Staged => self.control.staging(rank, block % 2),
        }
    }

    /// Returns where the leader has a block.
    fn leader_block(&self, block: usize) -> *mut u8 {
        self.at(self.core.locals[0], block)
    }

    /// Reduces a block of all members to the leader's.
    fn reduce_to_leader(&mut self, block: usize) -> Result<()> {
        let core = self.core;
        let rounds = self.rounds;
        let operation = self.operation;
        let range = self.range(block);
        let element = operation.dtype.size();
        let round = rounds.acquire(self.state, operation)?;
        let result_round = rounds.acquire(self.state, operation)?;
        self.result_round[block % 2] = result_round;
        if self.locations[core.rank] == Location::Staged {
            let staging = rounds.stage_in(self.state, block % 2, result_round, operation)?;
            // SAFETY: the range is inside the caller's memory and fits the buffer, which nobody
            // reads now.
            unsafe { bytes::copy(self.data.data.add(range.start), staging, range.len()) };
        }
        rounds.arrive(round);
        rounds.arrive(result_round);
        rounds.wait_locals_arrived(round, operation)?;
        if core.is_leader() {
            // It has other work than the others.
            rounds.arrive_for_remote(round);
            rounds.done(round);
            return rounds.wait_done(round, operation);
        }
        let slice = slice(range.len() / element, core.locals.len() - 1, core.local - 1, element);
        let offset = slice.start * element;
        let sources: Vec<*const u8> = core
            .locals
            .iter()
            .map(|&rank| self.at(rank, block).wrapping_add(offset).cast_const())
            .collect();
        let leader = self.leader_block(block).wrapping_add(offset);
        // SAFETY: the members on this node have arrived, so their memory is there and holds still;
        // slices do not overlap, so no other rank touches these elements.
        unsafe { reduce_on_node(operation, &sources, &[leader], slice.len(), core.size()) };
        rounds.done(round);
        Ok(())
    }

    /// Copies what the leader has of a block, once it is reduced over all nodes.
    fn copy_from_leader(&mut self, block: usize) -> Result<()> {
        let range = self.range(block);
        let result_round = self.result_round[block % 2];
        if self.core.is_leader() {
            self.rounds.arrive_for_remote(result_round);
        }
        self.rounds.wait_all_arrived(result_round, self.operation)?;
        let from = self.leader_block(block);
        let to = self.data.data.wrapping_add(range.start);
        if from != to {
            // SAFETY: the range is inside the caller's memory; the leader's is as long, final, and
            // not the same.
            unsafe { bytes::copy(from, to, range.len()) };
        }
        self.rounds.done(result_round);
        Ok(())
    }
}

impl Hierarchical {
    /// Returns the reductions of a group whose nodes are connected.
    pub fn new(rounds: &Arc<Rounds>, inter_node: &Arc<InterNode>) -> Self {
        Self {
            core: Arc::clone(&rounds.core),
            control: Arc::clone(&rounds.control),
            rounds: Arc::clone(rounds),
            inter_node: Arc::clone(inter_node),
        }
    }

    /// Reduces `data` over all ranks.
    pub fn all_reduce(
        &self,
        state: &mut RoundState,
        operation: &OpDescriptor,
        data: BufferView,
    ) -> Result<()> {
        let core = &*self.core;
        if core.size() == core.leaders.len() {
            return self.all_reduce_of_leaders(state, operation, data);
        }
        let own = core.locate(data.data, data.bytes);
        let locations = self.inter_node.agree(state, operation, own, &|_| data.bytes)?;
        let element = operation.dtype.size();
        let nodes = core.leaders.len();
        // All nodes cut alike: where any has to stage, a block fits the staging buffers.
        let is_staged = (0..core.size())
            .any(|rank| locations[rank] == Location::Staged && !is_alone_on_node(core, rank));
        let slice = if is_staged { (CHUNK / nodes / 64 * 64).max(64) } else { SLICE };
        if core.locals.len() == 1 {
            let mut guard = self.inter_node.lock(operation)?;
            let memory =
                ScatteredMemory::new(vec![(data.data, data.bytes / element)], operation.dtype);
            let partition = Partition::new(&memory, slice, nodes);
            self.divide_first(operation, &memory);
            let addends = Addends::of_nodes(memory, nodes);
            self.reduce_scatter_all_gather(&mut guard, operation, &addends, &partition, 0, None)?;
            guard.complete();
            return Ok(());
        }
        let block = slice * nodes;
        let blocks = data.bytes.div_ceil(block);
        let mut node = NodePhase {
            core,
            control: &self.control,
            rounds: &self.rounds,
            state,
            operation,
            data,
            locations: &locations,
            block,
            result_round: [0; 2],
        };
        if core.is_leader() {
            let pieces = (0..blocks)
                .map(|block| (node.leader_block(block), node.range(block).len() / element))
                .collect();
            let memory = ScatteredMemory::new(pieces, operation.dtype);
            let mut guard = self.inter_node.lock(operation)?;
            let partition = Partition::new(&memory, slice, nodes);
            let node = Some(&mut node);
            let addends = Addends::of_nodes(memory, nodes);
            self.reduce_scatter_all_gather(&mut guard, operation, &addends, &partition, 0, node)?;
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
        self.rounds.wait_done(last, operation)
    }

    /// Reduces `data` where every rank leads its node. The slices of the first block follow the
    /// descriptors at once: this saves the time that a message is under way.
    fn all_reduce_of_leaders(
        &self,
        state: &mut RoundState,
        operation: &OpDescriptor,
        data: BufferView,
    ) -> Result<()> {
        let rounds = &self.rounds;
        let nodes = self.core.leaders.len();
        let elements = data.bytes / operation.dtype.size();
        let memory = ScatteredMemory::new(vec![(data.data, elements)], operation.dtype);
        // Two blocks would hardly overlap: one is faster.
        let is_short = data.bytes <= 2 * SLICE * nodes;
        let partition = Partition::new(&memory, if is_short { 2 * SLICE } else { SLICE }, nodes);
        let addends = Addends::of_nodes(memory, nodes);
        let round = rounds.acquire(state, operation)?;
        rounds.publish(round, operation, self.core.locate(data.data, data.bytes));
        rounds.arrive(round);
        let mut guard = self.inter_node.lock(operation)?;
        // If ranks do not agree, their data stays as it is.
        let sent = usize::from(!is_divided_first(operation));
        self.inter_node.exchange_descriptors(&mut guard, round, operation, 0, &|leaders| {
            for block in 0..sent {
                self.send_slices(leaders, &addends, &partition, block);
            }
        })?;
        rounds.wait_all_arrived(round, operation)?;
        rounds.locations(round, operation, &|_| data.bytes)?;
        rounds.done(round);
        self.divide_first(operation, addends.result());
        self.reduce_scatter_all_gather(&mut guard, operation, &addends, &partition, sent, None)?;
        guard.complete();
        Ok(())
    }

    /// Reduces a bucket between nodes, in the leader, once it is reduced on this one. This runs
    /// beside what the rank computes.
    pub fn reduce_bucket(&self, bucket: &InterNodeBucket) -> Result<()> {
        let InterNodeBucket { round, result_round, operation, segments } = bucket;
        self.rounds.wait_locals_arrived(*round, operation)?;
        self.rounds.done(*round);
        self.rounds.wait_done(*round, operation)?;
        let mut guard = self.inter_node.lock(operation)?;
        self.inter_node.exchange_descriptors(&mut guard, *round, operation, 0, &|_| {})?;
        guard.complete();
        if !self.rounds.all_agree(*round, operation) {
            // Each rank fails itself when it copies the result.
            self.rounds.arrive_for_remote(*result_round);
            return Ok(());
        }
        let places = pieces_of_locals(segments, &self.rounds, *round, operation)?;
        let addends = Addends::of_bucket(segments, &places, &self.core);
        let mut guard = self.inter_node.lock(operation)?;
        let partition = Partition::new(addends.result(), SLICE, self.core.leaders.len());
        self.divide_first(operation, addends.result());
        self.reduce_scatter_all_gather(&mut guard, operation, &addends, &partition, 0, None)?;
        // Before others may see that a node has left, having done its part.
        self.rounds.arrive_for_remote(*result_round);
        guard.complete();
        Ok(())
    }

    /// Divides what is this rank's alone, where an average is divided before it is summed.
    fn divide_first(&self, operation: &OpDescriptor, memory: &ScatteredMemory) {
        if self.core.locals.len() == 1 && is_divided_first(operation) {
            for &(data, count) in &memory.pieces {
                // SAFETY: the memory is this rank's alone until it is sent.
                unsafe { reduce_on_node(operation, &[data], &[data], count, self.core.size()) };
            }
        }
    }

    /// Queues the slices of a block that belong to other nodes.
    fn send_slices(
        &self,
        leaders: &mut dyn Connections,
        addends: &Addends,
        partition: &Partition,
        block: usize,
    ) {
        for node in self.inter_node.remote_nodes() {
            for memory in &addends.own {
                for part in memory.parts(partition.slice(block, node)) {
                    // SAFETY: the memory is the operation's. It stays as it is until the slice's sum
                    // comes back, and the sum comes only after the slice has been sent.
                    leaders.send(node, unsafe { segment(part, memory.element) });
                }
            }
        }
    }

    /// Reduces what the leaders have, in place; all cut it alike. The slices of the first `sent`
    /// blocks are sent already. The other members of the node take part block by block, if there
    /// is a `node` phase.
    fn reduce_scatter_all_gather(
        &self,
        guard: &mut ConnectionsGuard,
        operation: &OpDescriptor,
        addends: &Addends,
        partition: &Partition,
        sent: usize,
        mut node: Option<&mut NodePhase>,
    ) -> Result<()> {
        let core = &self.core;
        let inter_node = &self.inter_node;
        let memory = addends.result();
        let element = memory.element;
        let nodes = core.leaders.len();
        let here = inter_node.node();
        let bytes = partition.slice * element;
        let count = addends.nodes.len();
        let incoming = IncomingSlices { memory: guard.scratch(2 * count * bytes), count, bytes };
        let mut slices = [vec![(0, 0); nodes], vec![(0, 0); nodes]];
        let mut sums = vec![(0, 0); nodes];
        for block in 0..=partition.count {
            // Before a block begins, the sums of the block before the last have arrived, and their
            // memory is free.
            if let (Some(node), Some(last)) = (&mut node, block.checked_sub(2)) {
                inter_node.transfer(guard, operation, &sums, false)?;
                node.copy_from_leader(last)?;
            }
            if block < partition.count {
                if let Some(node) = &mut node {
                    node.reduce_to_leader(block)?;
                }
                if block >= sent {
                    self.send_slices(guard.leaders(), addends, partition, block);
                }
                let count = partition.slice(block, here).len();
                for (index, &node) in addends.nodes.iter().enumerate().filter(|at| *at.1 != here) {
                    // SAFETY: nobody else uses the scratch memory.
                    let part = unsafe { segment((incoming.slice(block, index), count), element) };
                    slices[block % 2][node].1 = guard.leaders().receive(node, part);
                }
            }
            let Some(block) = block.checked_sub(1) else { continue };
            inter_node.transfer(guard, operation, &slices[block % 2], false)?;
            let here_slice = partition.slice(block, here);
            let mut own: Vec<_> =
                addends.own.iter().map(|memory| memory.parts(here_slice.clone())).collect();
            let mut offset = 0;
            for (to, count) in memory.parts(here_slice) {
                let mut own = own.iter_mut();
                let mut sources: Vec<*const u8> = Vec::with_capacity(addends.nodes.len());
                for (index, &node) in addends.nodes.iter().enumerate() {
                    let own = if node == here { own.next() } else { None };
                    let source = match own.and_then(Iterator::next) {
                        Some((own, _)) => own,
                        None => incoming.slice(block, index).wrapping_add(offset),
                    };
                    sources.push(source.cast_const());
                }
                // SAFETY: this node's parts and what has come from the others are that long, and
                // nobody else uses them.
                unsafe { addends.add(operation, &sources, to, count, core.size()) };
                offset += count * element;
            }
            for node in inter_node.remote_nodes() {
                let leaders = guard.leaders();
                for part in memory.parts(partition.slice(block, here)) {
                    // SAFETY: the sum stays as it is until the operation is over.
                    sums[node].0 = leaders.send(node, unsafe { segment(part, element) });
                }
                for part in memory.parts(partition.slice(block, node)) {
                    // SAFETY: nobody but this rank uses the memory until the sum is there, and the
                    // node that sends it has taken the slice that was there.
                    sums[node].1 = leaders.receive(node, unsafe { segment(part, element) });
                }
            }
        }
        inter_node.transfer(guard, operation, &sums, true)?;
        match (node, partition.count) {
            (Some(node), count @ 1..) => node.copy_from_leader(count - 1),
            _ => Ok(()),
        }
    }
}

/// Whether a rank has no other member of the group on its node.
fn is_alone_on_node(core: &GroupCore, rank: usize) -> bool {
    core.nodes.iter().filter(|&&node| node == core.nodes[rank]).count() == 1
}

/// The memory in which the other nodes' slices of the two blocks under way arrive.
struct IncomingSlices {
    memory: *mut u8,
    /// How many there are of a block, with this node's.
    count: usize,
    /// Bytes of a slice.
    bytes: usize,
}

impl IncomingSlices {
    /// Returns where the slice of addend `index` arrives.
    fn slice(&self, block: usize, index: usize) -> *mut u8 {
        self.memory.wrapping_add((block % 2 * self.count + index) * self.bytes)
    }
}

/// Returns `count` elements of `element` bytes, which are sent or filled.
///
/// # Safety
///
/// As for [`IoSegment::new`].
unsafe fn segment((data, count): (*mut u8, usize), element: usize) -> IoSegment {
    // SAFETY: the caller's promise.
    unsafe { IoSegment::new(data, count * element) }
}
