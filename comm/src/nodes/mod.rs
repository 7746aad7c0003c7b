//! What connects nodes: the ranks that carry data between them, and how.
//!
//! | file | subject |
//! |---|---|
//! | `tcp` | connections between two ranks: how they are made, and how bytes go over them |
//! | `lobby` | where connections come in, and how they are admitted |
//! | `mpi` | the same over MPI, with the feature of that name |
//! | `queue` | what is still to be moved to, or from, a member |
//!
//! Inside a node ranks share memory (`shm`). Between nodes the first member of a group on each
//! node, its *leader*, sends and receives for all; for `send` and `recv` any two ranks are linked.

mod lobby;
#[cfg(feature = "mpi")]
pub mod mpi;
mod queue;
pub mod tcp;

use std::time::Duration;

use crate::error::Result;
use crate::shm::Part;

/// Makes wires.
pub trait Network: Send + Sync {
    /// Links `members`, given by their ranks in the job; `own` is this rank's position among them.
    /// All of them call this with the same channel, which no other link has. The last member does
    /// not wait for the others.
    ///
    /// `patience` is called again and again with the positions of those that are missing; it ends
    /// the wait by an error.
    fn link(
        &self,
        channel: &str,
        members: &[usize],
        own: usize,
        patience: Patience,
    ) -> Result<Box<dyn Wire>, Unlinked>;

    /// Whether the members after this one have begun to link, so that [`Network::link`] need not
    /// wait for them.
    fn have_come(&self, channel: &str, members: &[usize], own: usize) -> bool;
}

/// See [`Network::link`].
pub type Patience<'a> = &'a mut dyn FnMut(&[usize]) -> Result<()>;

/// Why there is no link.
pub enum Unlinked {
    /// A member cannot be reached.
    Lost(Loss),
    /// The patience was over.
    GivenUp(crate::Error),
}

/// Moves bytes between the members of a link, each of which is named by its position in it. What is
/// sent to a member comes in the order in which it was sent.
pub trait Wire: Send {
    /// Has `part` sent. Returns a number that [`Wire::sent`] comes to when it is.
    fn send(&mut self, to: usize, part: Part) -> u64;

    /// Has `part` filled with what `from` sends next. Returns a number that [`Wire::received`]
    /// comes to when it is.
    fn receive(&mut self, from: usize, part: Part) -> u64;

    /// How many parts to a member have been sent.
    fn sent(&self, to: usize) -> u64;

    /// How many parts from a member have been filled.
    fn received(&self, from: usize) -> u64;

    /// Whether all parts are sent and received.
    fn is_idle(&self) -> bool;

    /// Moves what can be moved now, or else as soon as something can, at most for `time`.
    fn drive(&mut self, time: Duration) -> Result<(), Loss>;

    /// How a member has gone, if the connection to it is known to have ended.
    fn lost(&mut self, member: usize) -> Option<Departure>;

    /// Forgets all parts, and ends the connections. The others are told why, as the departure of
    /// this member.
    fn abandon(&mut self, why: &str);

    /// Tells the others that this member leaves because it has nothing more to do.
    fn leave(&mut self);
}

/// A member that is no longer there.
#[derive(Clone, Debug)]
pub struct Loss {
    /// Its position in the link.
    pub member: usize,
    pub how: Departure,
}

/// How a member went.
#[derive(Clone, Debug)]
pub enum Departure {
    /// It has said so.
    Left,
    /// It has said why.
    Failed(String),
    /// Its end of the connection is closed, as when a process ends.
    Ended,
    /// Something between it and this rank.
    OutOfReach(String),
}
