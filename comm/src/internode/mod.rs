//! Members on other nodes: what their leaders exchange, descriptors and blocks of data.
//!
//! A leader, the first member on its node, sends and receives for all members there, over
//! connections (`connect`) to the other leaders. What is rare (the group's first failure, how far
//! a rank is that waits long) goes through the store: see `failure::remote`.

pub mod connect;
pub mod leaders;
pub mod presence;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use connect::{Connector, progress};
use leaders::{LeaderConnections, LeaderState};

use crate::descriptor::{DescriptorWords, Location, OpDescriptor};
use crate::error::Result;
use crate::failure::Failure;
use crate::group::core::GroupCore;
use crate::shm::bytes;
use crate::shm::contribution::{AddressOf, Contribution, Readers};
use crate::shm::control::Control;
use crate::shm::io_segment::IoSegment;
use crate::shm::rounds::{RoundState, Rounds};
use crate::transport::Connections;

/// A group's part between nodes.
pub struct InterNode {
    pub core: Arc<GroupCore>,
    failure: Arc<Failure>,
    control: Arc<Control>,
    rounds: Arc<Rounds>,
    /// The connections, in a leader.
    connections: Option<Arc<LeaderConnections>>,
}

/// Exclusive use of the leader's connections. Unless [`ConnectionsGuard::complete`] is called,
/// dropping it discards queued transfers and aborts the connections.
pub struct ConnectionsGuard<'a> {
    failure: &'a Failure,
    connections: MutexGuard<'a, LeaderState>,
    is_complete: bool,
}

impl ConnectionsGuard<'_> {
    /// Returns the connections to the leaders of other nodes.
    pub fn leaders(&mut self) -> &mut dyn Connections {
        &mut *self.connections.leaders
    }

    /// Returns memory for `bytes` bytes that arrive, which the connections keep.
    pub fn scratch(&mut self, bytes: usize) -> *mut u8 {
        self.connections.scratch.resize(bytes.div_ceil(8), 0);
        self.connections.scratch.as_mut_ptr().cast()
    }

    /// Returns a frame of descriptors, with room for `bytes` bytes, which the connections keep as
    /// well.
    fn frame(&mut self, node: usize, bytes: usize) -> &mut [u8] {
        let frames = &mut self.connections.frames;
        if frames.len() <= node {
            frames.resize_with(node + 1, Vec::new);
        }
        frames[node].resize(bytes, 0);
        &mut frames[node]
    }

    /// Ends the use of the connections in good order.
    pub fn complete(mut self) {
        self.is_complete = true;
    }
}

impl Drop for ConnectionsGuard<'_> {
    fn drop(&mut self) {
        if !self.is_complete {
            self.failure.abort_connections(&mut *self.connections.leaders);
        }
    }
}

/// Per node: how many segments must have been sent to it, and received from it.
pub type TransferTargets = [(u64, u64)];

/// The segments that nodes send each other in a round, in the order in which they are sent.
#[derive(Default)]
pub struct TransferPlan {
    receives: Vec<(usize, IoSegment)>,
    sends: Vec<(usize, IoSegment)>,
    /// The node must receive before it sends: it passes on what it receives.
    is_chain: bool,
}

impl InterNode {
    /// Connects the leaders. `operation` makes the group.
    pub fn new(rounds: &Arc<Rounds>, operation: &str) -> Result<Self> {
        let core = Arc::clone(&rounds.core);
        let failure = Arc::clone(&rounds.failure);
        let mut connections = None;
        if core.is_leader() {
            let operation = format!("{operation}, which connects the nodes,");
            let own = core.nodes[core.rank];
            let connector = Connector::new(&failure);
            let mut leaders = connector.connect("leaders", &core.leaders, own, &operation)?;
            // Leaders see each other end from here on: the transport connects, without waiting, to
            // know this.
            for node in (0..core.leaders.len()).filter(|&node| node != own) {
                let _ = leaders.disconnect_reason(node);
            }
            let connected = Arc::new(LeaderConnections::new(leaders));
            failure.watch_connections(Arc::clone(&connected));
            connections = Some(connected);
        }
        Ok(Self {
            core,
            failure,
            control: Arc::clone(&rounds.control),
            rounds: Arc::clone(rounds),
            connections,
        })
    }

    /// Returns this node.
    pub fn node(&self) -> usize {
        self.core.nodes[self.core.rank]
    }

    /// Returns the other nodes.
    pub fn remote_nodes(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        (0..self.core.leaders.len()).filter(|&node| node != self.node())
    }

    /// Locks the connections, in a leader.
    pub fn lock(&self, operation: &OpDescriptor) -> Result<ConnectionsGuard<'_>> {
        let Some(connections) = &self.connections else {
            let reason = "this rank does not lead its node".into();
            return Err(self.core.caller().argument(&operation.to_string(), reason));
        };
        let connections = connections.lock();
        Ok(ConnectionsGuard { failure: &self.failure, connections, is_complete: false })
    }

    /// Sends and receives until the targets are reached, and, for `all`, until nothing is left to
    /// move.
    pub fn transfer(
        &self,
        guard: &mut ConnectionsGuard,
        operation: &OpDescriptor,
        targets: &TransferTargets,
        all: bool,
    ) -> Result<()> {
        let late = RefCell::new(Vec::new());
        let missing = || {
            let late = late.borrow();
            self.core.ranks_where(|rank| late.contains(&self.core.nodes[rank]))
        };
        self.failure.wait_until(operation, &missing, &|| None, &mut |time| {
            progress(guard.leaders(), time, &mut |leaders| {
                let mut late = late.borrow_mut();
                late.clear();
                late.extend(self.remote_nodes().filter(|&node| is_late(leaders, targets, node)));
                late.is_empty() && (!all || self.remote_nodes().all(|node| leaders.is_idle(node)))
            })
        })
    }

    /// Waits until all ranks have arrived in a round with `payload` bytes each.
    pub fn wait_arrived(&self, round: u64, operation: &OpDescriptor, payload: usize) -> Result<()> {
        if self.core.is_leader() {
            self.rounds.wait_locals_arrived(round, operation)?;
            let mut guard = self.lock(operation)?;
            self.exchange_descriptors(&mut guard, round, operation, payload, &|_| {})?;
            guard.complete();
        }
        self.rounds.wait_all_arrived(round, operation)
    }

    /// Sends the other nodes, in a leader, the descriptors of the members on this one, with
    /// `payload` bytes each. Writes down theirs: they have arrived. What `send` queues follows the
    /// descriptors at once; the other nodes take it when they have found that all agree.
    pub fn exchange_descriptors(
        &self,
        guard: &mut ConnectionsGuard,
        round: u64,
        operation: &OpDescriptor,
        payload: usize,
        send: &dyn Fn(&mut dyn Connections),
    ) -> Result<()> {
        let own = self.node();
        self.write_frame(guard, round, payload);
        let mut targets = vec![(0, 0); self.core.leaders.len()];
        for node in self.remote_nodes() {
            let layout = self.frame_layout(node, payload);
            let sent = segment(guard.frame(own, self.frame_layout(own, payload).bytes));
            let received = segment(&mut guard.frame(node, layout.bytes)[..layout.data]);
            let leaders = guard.leaders();
            targets[node] = (leaders.send(node, sent), leaders.receive(node, received));
        }
        send(guard.leaders());
        self.transfer(guard, operation, &targets, false)?;
        // A different byte count means a different operation; the descriptors will report it. Stop
        // here.
        let is_equal = self.remote_nodes().all(|node| {
            let frame = guard.frame(node, self.frame_layout(node, payload).bytes);
            frame[..FrameLayout::COUNT] == (payload as u64).to_le_bytes()
        });
        if payload > 0 && is_equal {
            for node in self.remote_nodes() {
                let layout = self.frame_layout(node, payload);
                let data = segment(&mut guard.frame(node, layout.bytes)[layout.data..]);
                targets[node].1 = guard.leaders().receive(node, data);
            }
            self.transfer(guard, operation, &targets, false)?;
        }
        for node in self.remote_nodes() {
            self.read_frame(guard, round, node, payload);
        }
        self.rounds.arrive_for_remote(round);
        Ok(())
    }

    /// Returns how the members of a node share a frame.
    fn frame_layout(&self, node: usize, payload: usize) -> FrameLayout {
        let members = self.core.nodes.iter().filter(|&&other| other == node).count();
        let data = FrameLayout::COUNT + members * DescriptorWords::BYTES;
        FrameLayout { data, bytes: data + members * payload }
    }

    /// Writes what the members on this node contribute to a round into this node's frame.
    fn write_frame(&self, guard: &mut ConnectionsGuard, round: u64, payload: usize) {
        let own = self.node();
        let layout = self.frame_layout(own, payload);
        let (head, data) = guard.frame(own, layout.bytes).split_at_mut(layout.data);
        let (count, descriptors) = head.split_at_mut(FrameLayout::COUNT);
        count.copy_from_slice(&(payload as u64).to_le_bytes());
        let descriptors = descriptors.chunks_exact_mut(DescriptorWords::BYTES);
        for (&rank, bytes) in self.core.locals.iter().zip(descriptors) {
            let words = &self.control.descriptor(round, rank).0;
            for (word, bytes) in words.iter().zip(bytes.chunks_exact_mut(8)) {
                bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
            }
        }
        for (index, &rank) in self.core.locals.iter().enumerate() {
            let from = self.control.payload(round, rank);
            // SAFETY: the rank has arrived: it leaves its payload alone until the round is over.
            let from = unsafe { std::slice::from_raw_parts(from, payload) };
            data[index * payload..][..payload].copy_from_slice(from);
        }
    }

    /// Writes down what the members on another node contribute to a round, from that node's frame.
    fn read_frame(&self, guard: &mut ConnectionsGuard, round: u64, node: usize, payload: usize) {
        let layout = self.frame_layout(node, payload);
        let (head, data) = guard.frame(node, layout.bytes).split_at(layout.data);
        let ranks = (0..self.core.size()).filter(|&rank| self.core.nodes[rank] == node);
        let descriptors = head[FrameLayout::COUNT..].chunks_exact(DescriptorWords::BYTES);
        for (index, (rank, descriptor)) in ranks.zip(descriptors).enumerate() {
            let words = &self.control.descriptor(round, rank).0;
            for (word, bytes) in words.iter().zip(descriptor.chunks_exact(8)) {
                let value = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
                word.store(value, Ordering::Relaxed);
            }
            let data = &data[index * payload..][..payload];
            // SAFETY: the payload of a member on another node is the leader's to write until it
            // arrives for it.
            unsafe { bytes::copy(data.as_ptr(), self.control.payload(round, rank), data.len()) };
        }
    }

    /// Makes all ranks agree on an operation in a round without data. Returns where each has its
    /// own.
    pub fn agree(
        &self,
        state: &mut RoundState,
        operation: &OpDescriptor,
        own: Location,
        bytes: &dyn Fn(usize) -> usize,
    ) -> Result<Vec<Location>> {
        let round = self.rounds.acquire(state, operation)?;
        self.rounds.publish(round, operation, own);
        self.rounds.arrive(round);
        self.wait_arrived(round, operation, 0)?;
        let locations = self.rounds.locations(round, operation, bytes)?;
        self.rounds.done(round);
        Ok(locations)
    }

    /// Data of remote members is received into their staging buffers on this node, wherever it is
    /// on theirs.
    pub fn mark_remote_staged(&self, mut locations: Vec<Location>) -> Vec<Location> {
        for rank in self.core.ranks_where(|rank| !self.core.locals.contains(&rank)) {
            locations[rank] = Location::Staged;
        }
        locations
    }

    /// Waits until all have arrived in a round of an operation on which all have agreed. The leader
    /// first transfers what `plan` says.
    pub fn wait_transferred(
        &self,
        round: u64,
        operation: &OpDescriptor,
        plan: impl FnOnce() -> TransferPlan,
    ) -> Result<()> {
        if self.core.is_leader() {
            self.rounds.wait_locals_arrived(round, operation)?;
            let mut guard = self.lock(operation)?;
            let TransferPlan { receives, sends, is_chain } = plan();
            let mut targets = vec![(0, 0); self.core.leaders.len()];
            for (node, segment) in receives {
                targets[node].1 = guard.leaders().receive(node, segment);
            }
            if is_chain {
                // What is passed on must first be here.
                self.transfer(&mut guard, operation, &targets, true)?;
            }
            for (node, segment) in sends {
                guard.leaders().send(node, segment);
            }
            self.transfer(&mut guard, operation, &targets, true)?;
            guard.complete();
            self.rounds.arrive_for_remote(round);
        }
        self.rounds.wait_all_arrived(round, operation)
    }

    /// Plans what nodes send each other of a range of all blocks: `at(rank, block)` is where it is,
    /// or goes, on this node.
    pub fn plan_transfers(
        &self,
        contribution: &Contribution,
        range: &Range<usize>,
        at: AddressOf,
    ) -> TransferPlan {
        let nodes = &self.core.nodes;
        let own = self.node();
        let segment = |rank, block| {
            let count = contribution.clip(rank, block, range).len();
            // SAFETY: ranks leave alone what they contribute, and the leader what it has for
            // others, until the round is over; what members on other nodes contribute is the
            // leader's to write until it arrives for them.
            unsafe { IoSegment::new(at(rank, block).cast_mut(), count) }
        };
        let mut plan = TransferPlan::default();
        if let Some(root) = contribution.chain_root() {
            let count = self.core.leaders.len();
            let position = (own + count - nodes[root]) % count;
            if position > 0 {
                plan.receives.push(((own + count - 1) % count, segment(root, 0)));
            }
            if position + 1 < count {
                plan.sends.push(((own + 1) % count, segment(root, 0)));
            }
            plan.is_chain = true;
            return plan;
        }
        for rank in self.core.ranks_where(|rank| contribution.from.includes(rank)) {
            for block in 0..contribution.blocks {
                if nodes[rank] != own {
                    if self.is_needed(contribution.to, block, own) {
                        plan.receives.push((nodes[rank], segment(rank, block)));
                    }
                    continue;
                }
                for node in self.remote_nodes() {
                    if self.is_needed(contribution.to, block, node) {
                        plan.sends.push((node, segment(rank, block)));
                    }
                }
            }
        }
        plan
    }

    /// Whether a member on this node reads the block.
    fn is_needed(&self, readers: Readers, block: usize, node: usize) -> bool {
        match readers {
            Readers::All => true,
            Readers::Root(root) => self.core.nodes[root] == node,
            Readers::OwnerOfBlock => self.core.nodes[block] == node,
        }
    }
}

/// The layout of a node's frame of descriptors, in bytes: first the number of bytes of each member,
/// then the members' descriptors, then those bytes.
struct FrameLayout {
    /// The place where the members' bytes begin.
    data: usize,
    /// The length of the frame.
    bytes: usize,
}

impl FrameLayout {
    /// Bytes of the number that comes first.
    const COUNT: usize = size_of::<u64>();
}

/// Returns the memory of a frame, which is sent or filled.
fn segment(frame: &mut [u8]) -> IoSegment {
    // SAFETY: nobody touches the frames until they are transferred, or the guard is dropped.
    unsafe { IoSegment::new(frame.as_mut_ptr(), frame.len()) }
}

/// Whether segments to or from a node have yet to be moved.
fn is_late(leaders: &mut dyn Connections, targets: &TransferTargets, node: usize) -> bool {
    let (sent, received) = leaders.moved(node);
    sent < targets[node].0 || received < targets[node].1
}
