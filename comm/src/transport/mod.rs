//! What connects nodes: the ranks that carry data between them, and how.
//!
//! | file | subject |
//! |---|---|
//! | `tcp` | connections between two ranks: how they are made, and how bytes go over them |
//! | `acceptor` | accepts connections, and authenticates them |
//! | `mpi` | the same over MPI, with the feature of that name |
//! | `queue` | what is still to be moved to, or from, a member |
//! | `registry` | the transports by name, and which one is used |
//!
//! Inside a node ranks share memory (`shm`). Between nodes the first member of a group on each
//! node, its *leader*, sends and receives for all; for `send` and `recv` any two ranks are linked.

mod acceptor;
#[cfg(feature = "mpi")]
pub mod mpi;
mod queue;
mod registry;
pub mod tcp;
#[cfg(test)]
mod toy;

use std::time::Duration;

use crate::bootstrap::PeerInfo;
use crate::error::Result;
use crate::shm::io_segment::IoSegment;
use queue::QueuePair;
pub use registry::open;

/// Connects ranks.
pub trait Transport: Send + Sync {
    /// Its name in traces, that of the table.
    fn name(&self) -> &'static str;

    /// Where other ranks reach this one, in a form that only this transport knows.
    fn address(&self) -> Vec<u8>;

    /// Takes all ranks' addresses, by rank, before the first [`Transport::connect`].
    ///
    /// # Errors
    /// A rank cannot be reached at its address.
    fn set_peers(&mut self, peers: &[PeerInfo], own: &PeerInfo) -> Result<(), String>;

    /// Connects `members`, given by their ranks in the job; `own` is this rank's position among them.
    /// All of them call this with the same channel, which no other connections have. The last member does
    /// not wait for the others.
    ///
    /// `cancel_check` is called again and again with the positions of those that are missing; it ends
    /// the wait by an error.
    fn connect(
        &self,
        channel: &str,
        members: &[usize],
        own: usize,
        cancel_check: CancelCheck,
    ) -> Result<Box<dyn Connections>, ConnectError>;

    /// Whether the members after this one have begun to connect, so that [`Transport::connect`] need not
    /// wait for them.
    fn have_connected(&self, channel: &str, members: &[usize], own: usize) -> bool;
}

/// See [`Transport::connect`].
pub type CancelCheck<'a> = &'a mut dyn FnMut(&[usize]) -> Result<()>;

/// Why there are no connections.
pub enum ConnectError {
    /// A member cannot be reached.
    PeerDown(PeerDown),
    /// The cancel check ended the wait.
    Cancelled(crate::Error),
}

/// Moves bytes between members, each of which is named by its position among them. Bytes reach a
/// member in the order in which they were sent to it.
pub trait Connections: Send {
    /// How many members there are, this one among them.
    fn size(&self) -> usize;

    /// What is still to be moved between this rank and another member; None for this rank itself.
    fn queues(&self, member: usize) -> Option<&QueuePair>;

    /// See [`Connections::queues`].
    fn queues_mut(&mut self, member: usize) -> Option<&mut QueuePair>;

    /// Has a segment sent. Returns a number that [`Connections::sent`] comes to when it is.
    fn send(&mut self, to: usize, part: IoSegment) -> u64 {
        self.queues_mut(to).expect("no member talks to itself").sending.push(part)
        // invariant
    }

    /// Has a segment filled with what `from` sends next. Returns a number that
    /// [`Connections::received`] comes to when it is.
    fn receive(&mut self, from: usize, part: IoSegment) -> u64 {
        self.queues_mut(from).expect("no member talks to itself").receiving.push(part)
        // invariant
    }

    /// How many segments to a member have been sent.
    fn sent(&self, to: usize) -> u64 {
        self.queues(to).map_or(0, |queues| queues.sending.done)
    }

    /// How many segments from a member have been filled.
    fn received(&self, from: usize) -> u64 {
        self.queues(from).map_or(0, |queues| queues.receiving.done)
    }

    /// Whether all segments are sent and received.
    fn is_idle(&self) -> bool {
        (0..self.size()).filter_map(|member| self.queues(member)).all(QueuePair::is_empty)
    }

    /// Moves what can be moved now, or else as soon as something can, at most for `time`.
    fn progress(&mut self, time: Duration) -> Result<(), PeerDown>;

    /// How a member has gone, if the connection to it is known to have ended.
    fn disconnect_reason(&mut self, member: usize) -> Option<DisconnectReason>;

    /// Forgets all segments, and ends the connections. The others get `why` as the reason.
    fn abort(&mut self, why: &str);

    /// Tells the others that this member closes its side in good order.
    fn shutdown(&mut self);
}

/// A member that is no longer there.
#[derive(Clone, Debug)]
pub struct PeerDown {
    /// Its position among the members.
    pub member: usize,
    pub how: DisconnectReason,
}

/// How a member went.
#[derive(Clone, Debug)]
pub enum DisconnectReason {
    /// It has said so.
    Left,
    /// It has said why.
    Failed(String),
    /// Its end of the connection is closed, as when a process ends.
    Ended,
    /// Something between it and this rank.
    OutOfReach(String),
}
