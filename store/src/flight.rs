//! The memory of a worker's flight recorders. flow-launch makes it, as a memfd, and reads it whenever
//! somebody wants to know what the worker does; the worker writes there what it would have written
//! elsewhere, and its steps. So nothing is sent, and a worker that hangs or has died tells as much.
//!
//! Everything is a word of eight bytes, written whole. The worker has no lock: a reader may find a record
//! half written, and drops one that cannot be.
//!
//! | at | what |
//! |---|---|
//! | 0 | the header: the words of [`header`], [`RESUMED`] times, [`NAMES`] |
//! | [`RINGS_AT`] | [`RINGS`] rings, [`RING_BYTES`] each |
//! | in a ring | one word: whether it is in use; the group's name, of [`NAME_BYTES`] at most, ended by a zero |
//! | 64 bytes on | [`SLOTS`] records: the words of [`slot`], [`SLOT_BYTES`] each |
//!
//! Times are in ticks: see [`clock`](crate::clock).

use rustix::process::{Resource, getrlimit};

/// The variable with the path of a worker's memory, which flow-launch sets.
pub const VARIABLE: &str = "FLOW_FLIGHT_RECORDER";
/// The name of the memfd.
pub const NAME: &str = "flow-flight-recorder";
/// What is in [`header::LAYOUT`] when all else is as described here.
pub const LAYOUT: u64 = u64::from_le_bytes(*b"FLOWREC1");

/// The words of the header, by number.
pub mod header {
    /// [`LAYOUT`](super::LAYOUT), once the worker has come.
    pub const LAYOUT: usize = 0;
    /// The process that writes here; 0 if none does.
    pub const PID: usize = 1;
    /// Where ticks begin on the machine's monotonic clock, in nanoseconds, plus one; 0 if ticks are the
    /// processor's counts.
    pub const ZERO: usize = 2;
    /// How many steps the process has done.
    pub const STEPS: usize = 3;
    /// The end of the last step.
    pub const STEP_END: usize = 4;
    /// The time from the end of the step before to that.
    pub const STEP_TIME: usize = 5;
    /// How often the process has done a first step: after its start, and after each change of the job's
    /// ranks.
    pub const RESUMED: usize = 6;
    /// The end of that first step; the last ones, in turn.
    pub const RESUMED_AT: usize = 8;
}

/// How many times of first steps are kept.
pub const RESUMED: usize = 16;
/// The bytes from which on the header has the names of operations, by their code in a record.
pub const NAMES_AT: usize = 1024;
/// How many names there are.
pub const NAMES: usize = 64;
/// The bytes of a name, and of a group's; those that are too many are zero.
pub const NAME_BYTES: usize = 40;

/// The bytes from which on there are rings.
pub const RINGS_AT: usize = 4096;
/// How many rings there are. Groups beyond that have theirs elsewhere.
pub const RINGS: usize = 32;
/// The number of operations that a group keeps.
pub const SLOTS: usize = 256;
/// The bytes of a record.
pub const SLOT_BYTES: usize = 64;
/// The bytes of a ring before its records.
pub const RING_HEAD: usize = 64;
/// The bytes of a ring.
pub const RING_BYTES: usize = RING_HEAD + SLOTS * SLOT_BYTES;
/// All bytes.
pub const BYTES: usize = RINGS_AT + RINGS * RING_BYTES;

/// Whether this process may have a file of [`BYTES`]. The kernel kills a process that makes one beyond its
/// limit (`ulimit -f`).
pub fn is_allowed() -> bool {
    getrlimit(Resource::Fsize).current.is_none_or(|limit| limit >= BYTES as u64)
}

/// The words of a record, by number.
pub mod slot {
    /// The operation's number in the ring, from 1 on; 0 while the record is written, or if there is none.
    pub const STAMP: usize = 0;
    /// Its number in the group.
    pub const SEQUENCE: usize = 1;
    /// The operation's code, its bucket's number plus one from bit 16 on, and [`MESSAGE`].
    pub const WHAT: usize = 3;
    /// The time at which it began.
    pub const STARTED: usize = 5;
    /// The time at which it was over, with [`UNDER_WAY`] or [`FAILED`].
    pub const DONE: usize = 6;
    /// In place of the time at which an operation was over: it is under way. The operation's number in
    /// the ring goes with it.
    pub const UNDER_WAY: u64 = 1 << 63;
    /// A bit beside the time at which an operation was over: it has failed.
    pub const FAILED: u64 = 1 << 62;
    /// A bit of [`WHAT`]: it is between two ranks, and no collective.
    pub const MESSAGE: u64 = 1 << 9;
}
