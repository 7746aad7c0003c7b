//! What a node's leader carries to and from other nodes: posts with small data, and blocks of
//! larger data.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use super::abroad::{Abroad, Carrier};
use super::control::PostWords;
use super::engine::Engine;
use super::operation::{Kind, Location, Operation};
use super::Part;
use crate::error::Result;
use crate::transport::{Connections, PeerDown};

/// The carrier in use. Unless all went well, what it still was to carry is forgotten, and nothing
/// more is.
pub struct Load<'a> {
    engine: &'a Engine,
    pub carrier: MutexGuard<'a, Carrier>,
    delivered: bool,
}

impl Load<'_> {
    pub fn delivered(mut self) {
        self.delivered = true;
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        if !self.delivered {
            self.engine.abandon(&mut *self.carrier.wire);
        }
    }
}

/// For each node, what the numbers of parts sent to it and received from it must come to.
pub type Due = [(u64, u64)];

/// What goes between this node and others in a round, in the order of going.
#[derive(Default)]
pub struct Pieces {
    receives: Vec<(usize, Part)>,
    sends: Vec<(usize, Part)>,
}

/// Moves what can be moved; if it then is not over, waits for more. A member that has gone may have
/// sent all before.
pub fn drive(
    wire: &mut dyn Connections,
    time: Duration,
    is_over: &mut dyn FnMut(&dyn Connections) -> bool,
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
    pub fn load(&self) -> Result<(&Abroad, Load<'_>)> {
        let carrier =
            self.abroad.as_ref().and_then(|abroad| Some((abroad, abroad.carrier.as_ref()?)));
        let Some((abroad, carrier)) = carrier else {
            return Err(self
                .caller()
                .argument("carrying", "this rank does not lead its node".into()));
        };
        let carrier = carrier.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((abroad, Load { engine: self, carrier, delivered: false }))
    }

    /// Drives the wire until what is due has come, or gone, and, for `all`, until nothing is left
    /// to move.
    pub fn drive(
        &self,
        load: &mut Load,
        operation: &Operation,
        due: &Due,
        all: bool,
    ) -> Result<()> {
        let wire = &mut load.carrier.wire;
        let late = RefCell::new(Vec::new());
        let missing = || {
            let Some(abroad) = &self.abroad else { return Vec::new() };
            self.ranks_where(|rank| late.borrow().contains(&abroad.nodes[rank]))
        };
        let mut is_over = |wire: &dyn Connections| {
            let is_late =
                |&node: &usize| wire.sent(node) < due[node].0 || wire.received(node) < due[node].1;
            late.replace((0..due.len()).filter(is_late).collect());
            late.borrow().is_empty() && (!all || wire.is_idle())
        };
        self.wait_until(operation, &missing, &|| None, &mut |time| {
            drive(&mut **wire, time, &mut is_over)
        })
    }

    /// Shows the other nodes what the members on this one post in a round, each with `payload`
    /// bytes, and writes down what they show: they have arrived.
    pub fn exchange_posts(&self, round: u64, operation: &Operation, payload: usize) -> Result<()> {
        const POST: usize = PostWords::BYTES;
        let Some(abroad) = &self.abroad else { return Ok(()) };
        // First how many bytes each member shows, and the posts, then those bytes.
        let mut frame = (payload as u64).to_le_bytes().to_vec();
        for &rank in &self.locals {
            let words = self.control.post(round, rank).of_post();
            frame.extend(words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()));
        }
        for &rank in &self.locals {
            // SAFETY: the rank has arrived: it leaves its payload alone until the round is over.
            frame.extend(unsafe {
                std::slice::from_raw_parts(self.control.payload(round, rank), payload)
            });
        }
        let count = abroad.leaders.len();
        let members = |node| abroad.nodes.iter().filter(move |&&of| of == node).count();
        let mut frames: Vec<Vec<u8>> =
            (0..count).map(|node| vec![0; 8 + members(node) * (POST + payload)]).collect();
        let mut due = vec![(0, 0); count];
        // After the frames, which thus outlive what it is to carry.
        let (_, mut load) = self.load()?;
        for node in abroad.others() {
            let wire = &mut load.carrier.wire;
            let head = &mut frames[node][..8 + members(node) * POST];
            // SAFETY: the frames outlive what the load has to carry.
            let part = |bytes: &mut [u8]| unsafe { Part::new(bytes.as_mut_ptr(), bytes.len()) };
            due[node] = (wire.send(node, part(&mut frame)), wire.receive(node, part(head)));
        }
        self.drive(&mut load, operation, &due, false)?;
        // Who shows another number of bytes does something else, which the posts tell: there is no
        // way to go on.
        if abroad.others().all(|node| frames[node][..8] == frame[..8]) {
            for node in abroad.others() {
                let data = &mut frames[node][8 + members(node) * POST..];
                // SAFETY: as above.
                due[node].1 = load
                    .carrier
                    .wire
                    .receive(node, unsafe { Part::new(data.as_mut_ptr(), data.len()) });
            }
            self.drive(&mut load, operation, &due, false)?;
        }
        load.delivered();
        for node in abroad.others() {
            let (posts, data) = frames[node][8..].split_at(members(node) * POST);
            let ranks = (0..self.size()).filter(|&rank| abroad.nodes[rank] == node);
            for (index, (rank, post)) in ranks.zip(posts.chunks_exact(POST)).enumerate() {
                for (word, bytes) in
                    self.control.post(round, rank).of_post().iter().zip(post.chunks_exact(8))
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
                    super::copy(data.as_ptr(), self.control.payload(round, rank), data.len())
                };
            }
        }
        self.others_arrive(round);
        Ok(())
    }

    /// Has all ranks agree on an operation before its data is carried: where they have theirs.
    pub fn agree(
        &self,
        state: &mut super::engine::State,
        operation: &Operation,
        own: Location,
        bytes: usize,
    ) -> Result<Vec<Location>> {
        let round = self.open(state, operation)?;
        self.post(round, operation, own);
        self.arrive(round);
        self.wait_arrived(round, operation, 0)?;
        let locations = self.locations(round, operation, bytes)?;
        self.done(round);
        Ok(locations)
    }

    /// What members on other nodes show comes to where they would stage it here, wherever it lies
    /// there.
    pub fn reachable(&self, mut locations: Vec<Location>) -> Vec<Location> {
        for rank in self.ranks_where(|rank| !self.locals.contains(&rank)) {
            locations[rank] = Location::Staged;
        }
        locations
    }

    /// Waits until all have arrived in a round of an operation on which all have agreed. The leader
    /// first carries what `pieces` says.
    pub fn wait_carried(
        &self,
        round: u64,
        operation: &Operation,
        pieces: impl FnOnce() -> Pieces,
    ) -> Result<()> {
        if self.leads() {
            self.wait_locals_arrived(round, operation)?;
            let (abroad, mut load) = self.load()?;
            let Pieces { receives, sends } = pieces();
            let mut due = vec![(0, 0); abroad.leaders.len()];
            for (node, part) in receives {
                due[node].1 = load.carrier.wire.receive(node, part);
            }
            if operation.kind == Kind::Broadcast {
                // What is passed on must first be here.
                self.drive(&mut load, operation, &due, true)?;
            }
            for (node, part) in sends {
                load.carrier.wire.send(node, part);
            }
            self.drive(&mut load, operation, &due, true)?;
            load.delivered();
            self.others_arrive(round);
        }
        self.wait_all_arrived(round, operation)
    }

    /// What is to be carried of a range of all blocks: `at(rank, block)` is where it lies, or is to
    /// lie, on this node.
    pub fn pieces(
        &self,
        operation: &Operation,
        blocks: usize,
        range: &Range<usize>,
        at: super::exchange::At,
    ) -> Pieces {
        let Some(abroad) = &self.abroad else { return Pieces::default() };
        // SAFETY: ranks leave alone what they show, and the leader what it has for others, until
        // the round is over; what members on other nodes show is the leader's to write until it
        // arrives for them.
        let part = |rank, block| unsafe { Part::new(at(rank, block).cast_mut(), range.len()) };
        let mut pieces = Pieces::default();
        let root = operation.root as usize;
        if operation.kind == Kind::Broadcast {
            // Along a chain of nodes, so that each sends it once.
            let (count, first) = (abroad.leaders.len(), abroad.nodes[root]);
            let place = (abroad.here + count - first) % count;
            if place > 0 {
                pieces.receives.push(((abroad.here + count - 1) % count, part(root, 0)));
            }
            if place + 1 < count {
                pieces.sends.push(((abroad.here + 1) % count, part(root, 0)));
            }
            return pieces;
        }
        let is_needed = |from: usize, block: usize, node: usize| match operation.kind {
            Kind::Gather | Kind::Reduce => abroad.nodes[root] == node,
            Kind::Scatter => from == root && abroad.nodes[block] == node,
            Kind::AllToAll | Kind::ReduceScatter => abroad.nodes[block] == node,
            _ => true,
        };
        for rank in 0..self.size() {
            for block in 0..blocks {
                let from = abroad.nodes[rank];
                if from != abroad.here {
                    if is_needed(rank, block, abroad.here) {
                        pieces.receives.push((from, part(rank, block)));
                    }
                    continue;
                }
                let to = abroad.others().filter(|&node| is_needed(rank, block, node));
                pieces.sends.extend(to.map(|node| (node, part(rank, block))));
            }
        }
        pieces
    }
}
