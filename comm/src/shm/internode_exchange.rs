//! What a node's leader carries to and from other nodes: posts with small data, and blocks of
//! larger data.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use super::contribution::{AddressOf, Contribution, Readers};
use super::engine::Engine;
use super::internode::{InterNode, LeaderLinks};
use super::io_segment::IoSegment;
use crate::descriptor::{DescriptorWords, Location, OpDescriptor};
use crate::error::Result;
use crate::transport::{Connections, PeerDown};

/// The links in use. Unless all went well, what it still was to carry is forgotten, and nothing
/// more is.
pub struct LinksGuard<'a> {
    engine: &'a Engine,
    pub links: MutexGuard<'a, LeaderLinks>,
    is_complete: bool,
}

impl LinksGuard<'_> {
    pub fn complete(mut self) {
        self.is_complete = true;
    }
}

impl Drop for LinksGuard<'_> {
    fn drop(&mut self) {
        if !self.is_complete {
            self.engine.abandon(&mut *self.links.wire);
        }
    }
}

/// For each node, what the numbers of parts sent to it and received from it must come to.
pub type TransferTargets = [(u64, u64)];

/// What goes between this node and others in a round, in the order of going.
#[derive(Default)]
pub struct TransferPlan {
    receives: Vec<(usize, IoSegment)>,
    sends: Vec<(usize, IoSegment)>,
    /// What is sent must have been received first.
    is_chain: bool,
}

/// Moves what can be moved; if it then is not over, waits for more. A member that has gone may have
/// sent all before.
pub fn drive(
    wire: &mut dyn Connections,
    time: Duration,
    is_over: &mut dyn FnMut(&mut dyn Connections) -> bool,
) -> Result<bool, PeerDown> {
    let moved = wire.progress(Duration::ZERO);
    if is_over(wire) {
        return Ok(true);
    }
    moved?;
    if time.is_zero() {
        // The other end may be on the same processor: the kernel likes to put together who talk to
        // each other.
        std::thread::yield_now();
        return Ok(false);
    }
    let moved = wire.progress(time);
    let is_over = is_over(wire);
    moved.map(|()| is_over).or_else(|loss| if is_over { Ok(true) } else { Err(loss) })
}

impl Engine {
    /// In the leader.
    pub fn lock_links(&self) -> Result<(&InterNode, LinksGuard<'_>)> {
        let (inter_node, links) = self.links()?;
        let links = links.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((inter_node, LinksGuard { engine: self, links, is_complete: false }))
    }

    /// Drives the wire until what is due has come, or gone, and, for `all`, until nothing is left
    /// to move.
    pub fn drive(
        &self,
        guard: &mut LinksGuard,
        operation: &OpDescriptor,
        due: &TransferTargets,
        all: bool,
    ) -> Result<()> {
        let wire = &mut guard.links.wire;
        let late = RefCell::new(Vec::new());
        let missing = || {
            let Some(inter_node) = &self.inter_node else { return Vec::new() };
            self.ranks_where(|rank| late.borrow().contains(&inter_node.nodes[rank]))
        };
        let nodes: Vec<usize> = self.inter_node.iter().flat_map(InterNode::remote_nodes).collect();
        let mut is_over = |wire: &mut dyn Connections| {
            let mut is_late = |&&node: &&usize| {
                let (sent, received) = wire.moved(node);
                sent < due[node].0 || received < due[node].1
            };
            late.replace(nodes.iter().filter(&mut is_late).copied().collect());
            late.borrow().is_empty() && (!all || nodes.iter().all(|&node| wire.is_idle(node)))
        };
        self.wait_until(operation, &missing, &|| None, &mut |time| {
            drive(&mut **wire, time, &mut is_over)
        })
    }

    /// Shows the other nodes what the members on this one post in a round, each with `payload`
    /// bytes, and writes down what they show: they have arrived.
    pub fn exchange_between_leaders(
        &self,
        round: u64,
        operation: &OpDescriptor,
        payload: usize,
    ) -> Result<()> {
        const POST: usize = DescriptorWords::BYTES;
        let Some(inter_node) = &self.inter_node else { return Ok(()) };
        // First how many bytes each member contributes, and the posts, then those bytes.
        let mut frame = (payload as u64).to_le_bytes().to_vec();
        for &rank in &self.locals {
            let words = self.control.descriptor(round, rank).descriptor();
            frame.extend(words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()));
        }
        for &rank in &self.locals {
            // SAFETY: the rank has arrived: it leaves its payload alone until the round is over.
            frame.extend(unsafe {
                std::slice::from_raw_parts(self.control.payload(round, rank), payload)
            });
        }
        let count = inter_node.leaders.len();
        let members = |node| inter_node.nodes.iter().filter(move |&&of| of == node).count();
        let mut frames: Vec<Vec<u8>> =
            (0..count).map(|node| vec![0; 8 + members(node) * (POST + payload)]).collect();
        let mut due = vec![(0, 0); count];
        // After the frames, which thus outlive what it is to carry.
        let (_, mut guard) = self.lock_links()?;
        for node in inter_node.remote_nodes() {
            let wire = &mut guard.links.wire;
            let head = &mut frames[node][..8 + members(node) * POST];
            // SAFETY: the frames outlive what the guard has to carry.
            let part =
                |bytes: &mut [u8]| unsafe { IoSegment::new(bytes.as_mut_ptr(), bytes.len()) };
            due[node] = (wire.send(node, part(&mut frame)), wire.receive(node, part(head)));
        }
        self.drive(&mut guard, operation, &due, false)?;
        // Who contributes another number of bytes does something else, which the posts tell: there is no
        // way to go on.
        if inter_node.remote_nodes().all(|node| frames[node][..8] == frame[..8]) {
            for node in inter_node.remote_nodes() {
                let data = &mut frames[node][8 + members(node) * POST..];
                // SAFETY: as above.
                due[node].1 = guard
                    .links
                    .wire
                    .receive(node, unsafe { IoSegment::new(data.as_mut_ptr(), data.len()) });
            }
            self.drive(&mut guard, operation, &due, false)?;
        }
        guard.complete();
        for node in inter_node.remote_nodes() {
            let (posts, data) = frames[node][8..].split_at(members(node) * POST);
            let ranks = (0..self.size()).filter(|&rank| inter_node.nodes[rank] == node);
            for (index, (rank, post)) in ranks.zip(posts.chunks_exact(POST)).enumerate() {
                for (word, bytes) in self
                    .control
                    .descriptor(round, rank)
                    .descriptor()
                    .iter()
                    .zip(post.chunks_exact(8))
                {
                    word.store(
                        u64::from_le_bytes(bytes.try_into().unwrap_or_default()),
                        Ordering::Relaxed,
                    );
                }
                let data = &data[index * payload..][..payload];
                // SAFETY: the payload of a member on another node is the leader's to write until it
                // arrives for it.
                unsafe {
                    super::bytes::copy(data.as_ptr(), self.control.payload(round, rank), data.len())
                };
            }
        }
        self.arrive_for_remote(round);
        Ok(())
    }

    /// Has all ranks agree on an operation before its data is carried: where they have theirs.
    pub fn exchange_descriptors(
        &self,
        state: &mut super::engine::State,
        operation: &OpDescriptor,
        own: Location,
        bytes: &dyn Fn(usize) -> usize,
    ) -> Result<Vec<Location>> {
        let round = self.acquire_slot(state, operation)?;
        self.publish_descriptor(round, operation, own);
        self.arrive(round);
        self.wait_arrived(round, operation, 0)?;
        let locations = self.locations(round, operation, bytes)?;
        self.done(round);
        Ok(locations)
    }

    /// What members on other nodes show comes to where they would stage it here, wherever it lies
    /// there.
    pub fn mark_remote_staged(&self, mut locations: Vec<Location>) -> Vec<Location> {
        for rank in self.ranks_where(|rank| !self.locals.contains(&rank)) {
            locations[rank] = Location::Staged;
        }
        locations
    }

    /// Waits until all have arrived in a round of an operation on which all have agreed. The leader
    /// first carries what `pieces` says.
    pub fn wait_transferred(
        &self,
        round: u64,
        operation: &OpDescriptor,
        pieces: impl FnOnce() -> TransferPlan,
    ) -> Result<()> {
        if self.is_leader() {
            self.wait_locals_arrived(round, operation)?;
            let (inter_node, mut guard) = self.lock_links()?;
            let TransferPlan { receives, sends, is_chain } = pieces();
            let mut due = vec![(0, 0); inter_node.leaders.len()];
            for (node, part) in receives {
                due[node].1 = guard.links.wire.receive(node, part);
            }
            if is_chain {
                // What is passed on must first be here.
                self.drive(&mut guard, operation, &due, true)?;
            }
            for (node, part) in sends {
                guard.links.wire.send(node, part);
            }
            self.drive(&mut guard, operation, &due, true)?;
            guard.complete();
            self.arrive_for_remote(round);
        }
        self.wait_all_arrived(round, operation)
    }

    /// What nodes send each other of a range of all blocks: `at(rank, block)` is where it lies, or
    /// is to lie, on this node.
    pub fn plan_transfers(
        &self,
        contribution: &Contribution,
        range: &Range<usize>,
        at: AddressOf,
    ) -> TransferPlan {
        let Some(inter_node) = &self.inter_node else { return TransferPlan::default() };
        let segment = |rank, block| {
            let count = contribution.clip(rank, block, range).len();
            // SAFETY: ranks leave alone what they contribute, and the leader what it has for
            // others, until the round is over; what members on other nodes contribute is the
            // leader's to write until it arrives for them.
            unsafe { IoSegment::new(at(rank, block).cast_mut(), count) }
        };
        let mut pieces = TransferPlan::default();
        if let Some(root) = contribution.chain_root() {
            let (count, first) = (inter_node.leaders.len(), inter_node.nodes[root]);
            let place = (inter_node.node + count - first) % count;
            if place > 0 {
                pieces.receives.push(((inter_node.node + count - 1) % count, segment(root, 0)));
            }
            if place + 1 < count {
                pieces.sends.push(((inter_node.node + 1) % count, segment(root, 0)));
            }
            pieces.is_chain = true;
            return pieces;
        }
        let is_needed = |block: usize, node: usize| match contribution.to {
            Readers::All => true,
            Readers::Root(root) => inter_node.nodes[root] == node,
            Readers::OwnerOfBlock => inter_node.nodes[block] == node,
        };
        for rank in self.ranks_where(|rank| contribution.from.includes(rank)) {
            for block in 0..contribution.blocks {
                let from = inter_node.nodes[rank];
                if from != inter_node.node {
                    if is_needed(block, inter_node.node) {
                        pieces.receives.push((from, segment(rank, block)));
                    }
                    continue;
                }
                let to = inter_node.remote_nodes().filter(|&node| is_needed(block, node));
                pieces.sends.extend(to.map(|node| (node, segment(rank, block))));
            }
        }
        pieces
    }
}
