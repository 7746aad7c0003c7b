//! The ranks of a node come to share memory: the first rank makes it, the others map it.

use std::time::Duration;

use flow_store::Error as StoreError;
use serde::{Deserialize, Serialize};

use super::join_error::JoinError;
use super::monitor::BootstrapMonitor;
use super::system::System;
use crate::json::{from_json, to_json};
use crate::world::LIVENESS_INTERVAL;

/// The shared memory of a node, as a rank makes or maps it: the real one, or that of a simulation.
pub trait NodeArena {
    /// The memory of one join.
    type Join: LocalJoin;

    /// Makes a join's memory, in the first rank. Returns where the others find it; None if they cannot.
    fn make(&mut self) -> Result<(Self::Join, Option<JoinPlace>), String>;

    /// Maps a join's memory that the first rank has.
    fn map(&mut self, place: &JoinPlace) -> Result<Self::Join, String>;
}

/// What the ranks of one join share on a node while they come together. Ranks have their numbers among
/// those of the node.
pub trait LocalJoin {
    /// Notes that a rank, which this process is, has mapped the memory.
    fn attach(&self, index: usize);

    /// Returns the process of a rank that has mapped the memory; 0 of others.
    fn pid(&self, index: usize) -> u32;

    /// Returns why the ranks cannot come together, as the first of them found out.
    fn failure(&self) -> Option<String>;

    /// Notes why the ranks cannot come together, unless a rank has done so. Returns what is noted.
    fn fail(&self, reason: &str) -> String;

    /// Sleeps until all ranks have mapped the memory, at most for `time`.
    fn sleep(&self, time: Duration);
}

/// The place of a join's memory on this node.
#[derive(Serialize, Deserialize)]
pub struct JoinPlace {
    /// The process of the first rank, and the file descriptor of the arena there.
    pub pid: u32,
    pub fd: i32,
    /// The arena's, which no other file has.
    pub inode: u64,
    /// The bytes of each rank's region, and how many regions there are.
    pub region: usize,
    pub regions: usize,
    /// Where the memory of the join is in the arena.
    pub offset: usize,
}

/// Makes or maps the memory that `locals`, the ranks of this node, share in a join. Returns it when all of
/// these have mapped it. A process alone has no `monitor`.
pub fn attach<S: System, A: NodeArena>(
    rank: usize,
    locals: &[usize],
    arena: &mut A,
    mut monitor: Option<&mut BootstrapMonitor<'_, S>>,
) -> Result<A::Join, JoinError> {
    let first = locals[0];
    let index = locals.iter().position(|&local| local == rank).unwrap_or_default();
    let memory = match &mut monitor {
        None => arena.make()?.0,
        Some(monitor) if rank == first => make(first, arena, monitor)?,
        Some(monitor) => map(first, arena, monitor)?,
    };
    memory.attach(index);
    if let Some(monitor) = monitor {
        wait_attached(&memory, locals, monitor)?;
    }
    Ok(memory)
}

/// Makes the memory, and publishes where it is.
fn make<A: NodeArena>(
    first: usize,
    arena: &mut A,
    monitor: &BootstrapMonitor<'_, impl System>,
) -> Result<A::Join, JoinError> {
    let (memory, place) = arena.make()?;
    if let Some(place) = place {
        let key = place_key(monitor, first);
        monitor.system.set(&key, &to_json(&place)).map_err(|error| monitor.failed(error))?;
    }
    Ok(memory)
}

/// Maps the memory as soon as the first rank of this node says where it is.
fn map<A: NodeArena>(
    first: usize,
    arena: &mut A,
    monitor: &mut BootstrapMonitor<'_, impl System>,
) -> Result<A::Join, JoinError> {
    let key = place_key(monitor, first);
    let place = loop {
        match monitor.system.get(&key, monitor.left(monitor.poll_interval())) {
            Ok(place) => break place,
            Err(StoreError::Timeout { .. }) => monitor.check(&|| vec![first], &|_| 0)?,
            Err(error) => return Err(monitor.failed(error)),
        }
    };
    let place: JoinPlace = from_json(&place, &format!("arena of rank {first}"))?;
    let mapped = arena.map(&place).map_err(|error| match monitor.cancel_reason() {
        Some(reason) => reason,
        None if monitor.system.has_ended(place.pid) => {
            format!("rank {first} (pid {}) died before all ranks had joined", place.pid)
        }
        None => error,
    });
    Ok(mapped?)
}

/// Returns the key under which the first rank of a node says where the join's memory is.
fn place_key<S>(monitor: &BootstrapMonitor<'_, S>, first: usize) -> String {
    format!("{}arena/{first}", monitor.prefix)
}

/// Waits until all ranks of this node have mapped the memory.
fn wait_attached(
    memory: &impl LocalJoin,
    locals: &[usize],
    monitor: &mut BootstrapMonitor<'_, impl System>,
) -> Result<(), JoinError> {
    let pid = |rank: usize| {
        let index = locals.iter().position(|&local| local == rank);
        index.map_or(0, |index| memory.pid(index))
    };
    let missing =
        || -> Vec<usize> { locals.iter().copied().filter(|&rank| pid(rank) == 0).collect() };
    while !missing().is_empty() && memory.failure().is_none() {
        memory.sleep(monitor.left(LIVENESS_INTERVAL.min(monitor.poll_interval())));
        if let Err(error) = monitor.check(&missing, &pid) {
            // Only if it is the first: what this rank found out may be a consequence of that.
            let own = match &error {
                JoinError::Interrupted => monitor.interruption(),
                JoinError::Failed(reason) => reason.clone(),
            };
            let first = memory.fail(&own);
            monitor.cancel(&first);
            return Err(match error {
                JoinError::Interrupted => error,
                JoinError::Failed(_) => JoinError::Failed(first),
            });
        }
    }
    match memory.failure() {
        Some(reason) => Err(reason.into()),
        None => Ok(()),
    }
}
