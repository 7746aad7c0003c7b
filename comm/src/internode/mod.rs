//! Members on other nodes: what their leaders exchange, descriptors and blocks of data.
//!
//! A leader, the first member on its node, sends and receives for all members there, over
//! connections (`connect`) to the other leaders. What is rare (the group's first failure, how far
//! a rank is that waits long) goes through the store: see `failure::remote`.

pub mod connect;
pub mod presence;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use connect::{progress, Connector};

use crate::descriptor::{DescriptorWords, Location, OpDescriptor};
use crate::error::Result;
use crate::failure::remote::WatchedConnections;
use crate::failure::Failure;
use crate::group::core::GroupCore;
use crate::shm::bytes;
use crate::shm::contribution::{AddressOf, Contribution, Readers};
use crate::shm::control::Control;
use crate::shm::io_segment::IoSegment;
use crate::shm::rounds::{RoundState, Rounds};
use crate::transport::{Connections, DisconnectReason};

/// A group's part between nodes.
pub struct InterNode {
    pub core: Arc<GroupCore>,
    failure: Arc<Failure>,
    control: Arc<Control>,
    rounds: Arc<Rounds>,
    /// In the leader.
    connections: Option<Arc<Mutex<LeaderConnections>>>,
}

/// What a leader moves data with.
pub struct LeaderConnections {
    /// To the other leaders, by node.
    pub leaders: Box<dyn Connections>,
    /// Where data arrives that is to be reduced.
    pub scratch: Vec<u64>,
    /// The frames of [`InterNode::exchange_descriptors`], by node.
    frames: Vec<Vec<u8>>,
}

impl WatchedConnections for Mutex<LeaderConnections> {
    fn abort(&self, failure: &str) {
        if let Ok(mut connections) = self.try_lock() {
            connections.leaders.abort(failure);
        }
    }

    fn disconnect_reason(&self, node: usize) -> Option<DisconnectReason> {
        self.try_lock().ok()?.leaders.disconnect_reason(node)
    }

    fn shutdown(&self) {
        if let Ok(mut connections) = self.try_lock() {
            connections.leaders.shutdown();
        }
    }
}

/// Exclusive use of the leader's connections. Unless [`ConnectionsGuard::complete`] is called,
/// dropping it discards queued transfers and aborts the connections.
pub struct ConnectionsGuard<'a> {
    failure: &'a Failure,
    connections: MutexGuard<'a, LeaderConnections>,
    is_complete: bool,
}

impl ConnectionsGuard<'_> {
    pub fn leaders(&mut self) -> &mut dyn Connections {
        &mut *self.connections.leaders
    }

    /// Memory for `bytes` bytes that arrive, which the connections keep.
    pub fn scratch(&mut self, bytes: usize) -> *mut u8 {
        self.connections.scratch.resize(bytes.div_ceil(8), 0);
        self.connections.scratch.as_mut_ptr().cast()
    }

    /// A frame of descriptors, with room for `bytes` bytes, which the connections keep as well.
    fn frame(&mut self, node: usize, bytes: usize) -> &mut [u8] {
        let frames = &mut self.connections.frames;
        if frames.len() <= node {
            frames.resize_with(node + 1, Vec::new);
        }
        frames[node].resize(bytes, 0);
        &mut frames[node]
    }

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

/// For each node, what the numbers of segments sent to it and received from it must come to.
pub type TransferTargets = [(u64, u64)];

/// What nodes send each other in a round, in the order in which it is sent.
#[derive(Default)]
pub struct TransferPlan {
    receives: Vec<(usize, IoSegment)>,
    sends: Vec<(usize, IoSegment)>,
    /// What is sent must have been received first.
    is_chain: bool,
}

impl InterNode {
    /// Connects the leaders. `operation` makes the group.
    pub fn new(rounds: &Arc<Rounds>, operation: &str) -> Result<Self> {
        let (core, failure) = (Arc::clone(&rounds.core), Arc::clone(&rounds.failure));
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
            let connected = Arc::new(Mutex::new(LeaderConnections {
                leaders,
                scratch: Vec::new(),
                frames: Vec::new(),
            }));
            failure.watch_connections(Arc::clone(&connected) as Arc<dyn WatchedConnections>);
            connections = Some(connected);
        }
        let (control, rounds) = (Arc::clone(&rounds.control), Arc::clone(rounds));
        Ok(Self { core, failure, control, rounds, connections })
    }

    /// This node.
    pub fn node(&self) -> usize {
        self.core.nodes[self.core.rank]
    }

    /// The other nodes.
    pub fn remote_nodes(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        (0..self.core.leaders.len()).filter(|&node| node != self.node())
    }

    /// In the leader.
    pub fn lock(&self, operation: &OpDescriptor) -> Result<ConnectionsGuard<'_>> {
        let Some(connections) = &self.connections else {
            let reason = "this rank does not lead its node".into();
            return Err(self.core.caller().argument(&operation.to_string(), reason));
        };
        let connections = connections.lock().unwrap_or_else(PoisonError::into_inner);
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
        let missing = || self.core.ranks_where(|r| late.borrow().contains(&self.core.nodes[r]));
        let mut is_over = |leaders: &mut dyn Connections| {
            let is_late = |&node: &usize| {
                let (sent, received) = leaders.moved(node);
                sent < targets[node].0 || received < targets[node].1
            };
            let mut late = late.borrow_mut();
            late.clear();
            late.extend(self.remote_nodes().filter(is_late));
            late.is_empty() && (!all || self.remote_nodes().all(|n| leaders.is_idle(n)))
        };
        self.failure.wait_until(operation, &missing, &|| None, &mut |time| {
            progress(guard.leaders(), time, &mut is_over)
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

    /// In the leader: sends the other nodes the descriptors of the members on this one, with
    /// `payload` bytes each, and writes down theirs: they have arrived. What `send` queues follows
    /// the descriptors at once; the other nodes take it when they have found that all agree.
    pub fn exchange_descriptors(
        &self,
        guard: &mut ConnectionsGuard,
        round: u64,
        operation: &OpDescriptor,
        payload: usize,
        send: &dyn Fn(&mut dyn Connections),
    ) -> Result<()> {
        const WORDS: usize = DescriptorWords::BYTES;
        let (core, own) = (&self.core, self.node());
        let members = |node| core.nodes.iter().filter(move |&&of| of == node).count();
        let head = |node| 8 + members(node) * WORDS;
        let length = |node| head(node) + members(node) * payload;
        // First how many bytes each member contributes, and the descriptors, then those bytes.
        let frame = guard.frame(own, length(own));
        let (count, rest) = frame.split_at_mut(8);
        count.copy_from_slice(&(payload as u64).to_le_bytes());
        let (descriptors, data) = rest.split_at_mut(head(own) - 8);
        for (&rank, bytes) in core.locals.iter().zip(descriptors.chunks_exact_mut(WORDS)) {
            let words = &self.control.descriptor(round, rank).0;
            for (word, bytes) in words.iter().zip(bytes.chunks_exact_mut(8)) {
                bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
            }
        }
        for (index, &rank) in core.locals.iter().enumerate() {
            let from = self.control.payload(round, rank);
            // SAFETY: the rank has arrived: it leaves its payload alone until the round is over.
            let from = unsafe { std::slice::from_raw_parts(from, payload) };
            data[index * payload..][..payload].copy_from_slice(from);
        }
        // SAFETY: nobody touches the frames until they are transferred, or the guard is dropped.
        let segment = |bytes: &mut [u8]| unsafe { IoSegment::new(bytes.as_mut_ptr(), bytes.len()) };
        let mut targets = vec![(0, 0); core.leaders.len()];
        for node in self.remote_nodes() {
            let sent = segment(guard.frame(own, length(own)));
            let received = segment(&mut guard.frame(node, length(node))[..head(node)]);
            let leaders = guard.leaders();
            targets[node] = (leaders.send(node, sent), leaders.receive(node, received));
        }
        send(guard.leaders());
        self.transfer(guard, operation, &targets, false)?;
        // A different byte count means a different operation; the descriptors will report it. Stop
        // here.
        let mut is_equal =
            |node| guard.frame(node, length(node))[..8] == (payload as u64).to_le_bytes();
        if payload > 0 && self.remote_nodes().all(&mut is_equal) {
            for node in self.remote_nodes() {
                let data = segment(&mut guard.frame(node, length(node))[head(node)..]);
                targets[node].1 = guard.leaders().receive(node, data);
            }
            self.transfer(guard, operation, &targets, false)?;
        }
        for node in self.remote_nodes() {
            let (head, data) = guard.frame(node, length(node)).split_at(head(node));
            let ranks = (0..core.size()).filter(|&rank| core.nodes[rank] == node);
            for (index, (rank, descriptor)) in ranks.zip(head[8..].chunks_exact(WORDS)).enumerate()
            {
                let words = &self.control.descriptor(round, rank).0;
                for (word, bytes) in words.iter().zip(descriptor.chunks_exact(8)) {
                    let value = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
                    word.store(value, Ordering::Relaxed);
                }
                let data = &data[index * payload..][..payload];
                // SAFETY: the payload of a member on another node is the leader's to write until it
                // arrives for it.
                unsafe {
                    bytes::copy(data.as_ptr(), self.control.payload(round, rank), data.len())
                };
            }
        }
        self.rounds.arrive_for_remote(round);
        Ok(())
    }

    /// Has all ranks agree on an operation in a round without data. Returns where each has its own.
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

    /// What nodes send each other of a range of all blocks: `at(rank, block)` is where it is, or
    /// goes, on this node.
    pub fn plan_transfers(
        &self,
        contribution: &Contribution,
        range: &Range<usize>,
        at: AddressOf,
    ) -> TransferPlan {
        let (nodes, own) = (&self.core.nodes, self.node());
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
        let is_needed = |block: usize, node: usize| match contribution.to {
            Readers::All => true,
            Readers::Root(root) => nodes[root] == node,
            Readers::OwnerOfBlock => nodes[block] == node,
        };
        for rank in self.core.ranks_where(|rank| contribution.from.includes(rank)) {
            for block in 0..contribution.blocks {
                if nodes[rank] != own {
                    if is_needed(block, own) {
                        plan.receives.push((nodes[rank], segment(rank, block)));
                    }
                    continue;
                }
                let to = self.remote_nodes().filter(|&node| is_needed(block, node));
                plan.sends.extend(to.map(|node| (node, segment(rank, block))));
            }
        }
        plan
    }
}
