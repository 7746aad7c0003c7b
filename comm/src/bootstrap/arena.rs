//! The arena of a node: the first rank makes it, the others map it.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use flow_store::Error as StoreError;
use serde::{Deserialize, Serialize};

use super::join_error::JoinError;
use super::monitor::{BootstrapMonitor, POLL_INTERVAL};
use crate::json::{from_json, to_json};
use crate::liveness::has_ended;
use crate::shm::arena::Arena;
use crate::shm::arena_header::ArenaHeader;
use crate::shm::control::{Control, sleep_on};
use crate::world::LIVENESS_INTERVAL;

/// The place of the arena's memory on this node.
#[derive(Serialize, Deserialize)]
struct ArenaPlace {
    /// The process of the first rank, which made it, and the file descriptor there.
    pid: u32,
    fd: i32,
    /// The bytes of each rank's region.
    region: usize,
}

/// Makes or maps the arena of this node, and returns it once all its ranks have mapped it.
pub fn attach_arena(
    rank: usize,
    size: usize,
    locals: &[usize],
    mut monitor: Option<&mut BootstrapMonitor>,
) -> Result<Arc<Arena>, JoinError> {
    let first = locals[0];
    let index = locals.iter().position(|&local| local == rank).unwrap_or_default();
    // Held until all have opened it.
    let mut file = None;
    let arena = if rank == first {
        let (arena, made) = create_arena(size, locals, monitor.as_deref())?;
        file = Some(made);
        arena
    } else {
        let Some(monitor) = monitor.as_deref_mut() else {
            return Err(JoinError::Failed("there is no rendezvous store".into()));
        };
        map_arena_of(first, index, locals, monitor)?
    };
    let header = ArenaHeader::of(&arena);
    header.publish_processors();
    ArenaHeader::pid(&arena, index).store(std::process::id(), Ordering::Release);
    header.attached.raise(locals.len() as u32);
    wait_attached(&arena, locals, monitor)?;
    // From here on it lives only as long as the ranks do.
    drop(file);
    Ok(arena)
}

/// Returns the key under which the first rank of a node says where the arena is.
fn place_key(monitor: &BootstrapMonitor, first: usize) -> String {
    format!("{}arena/{first}", monitor.prefix)
}

/// Makes the arena, with the control block of the group of all `size` ranks, and publishes where it
/// is.
fn create_arena(
    size: usize,
    locals: &[usize],
    monitor: Option<&BootstrapMonitor>,
) -> Result<(Arc<Arena>, OwnedFd), String> {
    let count = locals.len();
    let (file, region) = Arena::create_file(count, 1)?;
    let arena = Arc::new(Arena::map(&file, count, region, 0, ArenaHeader::bytes(count))?);
    let block = arena
        .allocate_zeroed(Control::bytes(size, count))
        .ok_or_else(|| format!("no shared memory for the control block of {size} ranks"))?;
    let root = Control::attach(Arc::clone(&arena), block.offset(), size, count);
    root.header().attached.store(count as u32, Ordering::SeqCst);
    ArenaHeader::of(&arena).root.store(block.offset() as u64, Ordering::Release);
    // Nobody can know when every rank has left the job: this block goes with the arena.
    block.leak();
    if let Some(monitor) = monitor {
        let place = ArenaPlace { pid: std::process::id(), fd: file.as_raw_fd(), region };
        monitor
            .store
            .set(&place_key(monitor, locals[0]), &to_json(&place))
            .map_err(|error| error.to_string())?;
    }
    Ok((arena, file))
}

/// Maps the arena that the first rank of this node makes; this rank is number `index` of its ranks.
fn map_arena_of(
    first: usize,
    index: usize,
    locals: &[usize],
    monitor: &mut BootstrapMonitor,
) -> Result<Arc<Arena>, JoinError> {
    let key = place_key(monitor, first);
    let place = loop {
        match monitor.store.get(&key, monitor.left(POLL_INTERVAL)) {
            Ok(place) => break place,
            Err(StoreError::Timeout { .. }) => monitor.check(&|| vec![first], &|_| 0)?,
            Err(error) => return Err(format!("rank {first} has not joined: {error}").into()),
        }
    };
    let ArenaPlace { pid, fd, region } = from_json(&place, &format!("arena of rank {first}"))?;
    let path = format!("/proc/{pid}/fd/{fd}");
    let file = File::options().read(true).write(true).open(&path).map_err(|error| match monitor
        .cancel_reason()
    {
        Some(reason) => reason,
        None if has_ended(pid) => {
            format!("rank {first} (pid {pid}) died before all ranks had joined")
        }
        None => format!(
            "cannot open rank {first}'s shared memory at {path}: {error}; all ranks of a node \
                 must run on one machine as one user"
        ),
    })?;
    Ok(Arc::new(Arena::map(&file, locals.len(), region, index, 0)?))
}

/// Waits until all ranks of this node have mapped the arena.
fn wait_attached(
    arena: &Arena,
    locals: &[usize],
    mut monitor: Option<&mut BootstrapMonitor>,
) -> Result<(), JoinError> {
    let header = ArenaHeader::of(arena);
    let missing = || -> Vec<usize> {
        locals.iter().copied().filter(|&rank| pid_of(arena, locals, rank) == 0).collect()
    };
    while let Some(monitor) = &mut monitor {
        if missing().is_empty() || header.failure.is_set() {
            break;
        }
        sleep_on(&header.attached, locals.len() as u32, monitor.left(LIVENESS_INTERVAL));
        if let Err(error) = monitor.check(&missing, &|rank| pid_of(arena, locals, rank)) {
            // Only if it is the first: what this rank found out may be a consequence of that.
            let own = match &error {
                JoinError::Interrupted => monitor.interruption(),
                JoinError::Failed(reason) => reason.clone(),
            };
            header.failure.write(0, &own);
            let first = header.failure.read().map_or(own, |(_, first)| first);
            monitor.cancel(&first);
            return Err(match error {
                JoinError::Interrupted => error,
                JoinError::Failed(_) => JoinError::Failed(first),
            });
        }
    }
    match header.failure.read() {
        Some((_, reason)) => Err(reason.into()),
        None => Ok(()),
    }
}

/// Returns the process of a rank of this node that has mapped the arena; 0 of others.
fn pid_of(arena: &Arena, locals: &[usize], rank: usize) -> u32 {
    match locals.iter().position(|&local| local == rank) {
        Some(index) => ArenaHeader::pid(arena, index).load(Ordering::Acquire),
        None => 0,
    }
}
