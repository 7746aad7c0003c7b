//! Transports: they connect the ranks that carry data between nodes.
//!
//! | file | subject |
//! |---|---|
//! | `tcp` | one connection between two processes, which all their groups share |
//! | `acceptor` | accepts connections, and authenticates them |
//! | `mpi` | the same over MPI, with the feature of that name |
//! | `queue` | what is still to be moved to, or from, a member |
//! | `registry` | the transports by name, and which one is used |
//!
//! Inside a node ranks share memory (`shm`). Between nodes the first member of a group on each
//! node, its *leader*, sends and receives for all. For `send` and `recv` any two ranks are
//! connected.

mod acceptor;
#[cfg(feature = "mpi")]
pub mod mpi;
mod queue;
mod registry;
pub mod tcp;

use std::time::Duration;

use crate::peer_info::PeerInfo;
use crate::shm::io_segment::IoSegment;
use queue::QueuePair;
pub use registry::open;

/// Connects ranks.
pub trait Transport: Send + Sync {
    /// Returns its name in traces, that of the table.
    fn name(&self) -> &'static str;

    /// Returns where other ranks reach this one, in a form that only this transport knows.
    fn address(&self) -> Vec<u8>;

    /// Takes all ranks' addresses, by rank, before the first [`Transport::connect`].
    ///
    /// # Errors
    /// A rank cannot be reached at its address.
    fn set_peers(&mut self, peers: &[PeerInfo], own: &PeerInfo) -> Result<(), String>;

    /// Notes that this rank agrees to make a group of this name. From here on it counts as a
    /// member, until it calls [`Transport::leave_group`]. All members call this before any of them
    /// has the group.
    fn join_group(&self, _group: &str) {}

    /// Notes that this rank has left the group, or has not made it after all. A member that uses a
    /// channel of the group with this rank learns that, even if this rank has never used the
    /// channel.
    fn leave_group(&self, _group: &str) {}

    /// Connects `members`, given by their ranks in the job; `own` is this rank's position among
    /// them. All of them call this with the same channel of their group, which no other connections
    /// have. It does not wait for them: a connection is made when it is first used.
    ///
    /// # Errors
    /// A member cannot be reached.
    fn connect(
        &self,
        group: &str,
        channel: &str,
        members: &[usize],
        own: usize,
    ) -> Result<Box<dyn Connections>, PeerDown>;
}

/// Moves bytes between members, each named by its position among them. Bytes reach a
/// member in the order in which they were sent to it.
pub trait Connections: Send {
    /// Shows `action` what is still to be moved between this rank and another member.
    fn with_queues(&mut self, member: usize, action: &mut dyn FnMut(&mut QueuePair));

    /// Queues a segment to be sent. Returns the number that the first of [`Connections::moved`]
    /// reaches when the segment has gone.
    fn send(&mut self, to: usize, part: IoSegment) -> u64 {
        let mut part = Some(part);
        let mut number = 0;
        self.with_queues(to, &mut |queues| {
            number = part.take().map_or(0, |part| queues.sending.push(part));
        });
        number
    }

    /// Queues a segment to be filled with what `from` sends next. Returns the number that the
    /// second of [`Connections::moved`] comes to when it is.
    fn receive(&mut self, from: usize, part: IoSegment) -> u64 {
        let mut part = Some(part);
        let mut number = 0;
        self.with_queues(from, &mut |queues| {
            number = part.take().map_or(0, |part| queues.receiving.push(part));
        });
        number
    }

    /// Returns how many segments to a member have been sent, and how many from it have been filled.
    fn moved(&mut self, member: usize) -> (u64, u64) {
        let mut moved = (0, 0);
        self.with_queues(member, &mut |queues| {
            moved = (queues.sending.done, queues.receiving.done);
        });
        moved
    }

    /// Whether all segments to and from a member are moved.
    fn is_idle(&mut self, member: usize) -> bool {
        let mut is_idle = true;
        self.with_queues(member, &mut |queues| is_idle = queues.is_empty());
        is_idle
    }

    /// Moves what can be moved now, or else as soon as something can, at most for `time`.
    fn progress(&mut self, time: Duration) -> Result<(), PeerDown>;

    /// Returns how a member has gone, if that is known, and nothing more of it is to be received.
    /// Connects to it without waiting, so that this becomes known.
    fn disconnect_reason(&mut self, member: usize) -> Option<DisconnectReason>;

    /// Forgets all segments, and ends the connections. The others get `why` as the reason.
    fn abort(&mut self, why: &str);

    /// Announces to the others that this member closes its side in good order.
    fn shutdown(&mut self);
}

/// A member that is no longer there.
#[derive(Clone, Debug)]
pub struct PeerDown {
    /// Its position among the members.
    pub member: usize,
    pub how: DisconnectReason,
}

/// The way in which a member went.
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
    /// It cannot be connected to: it has left all groups, its process has ended, well or not, or a
    /// firewall lies between.
    Refused(String),
}
