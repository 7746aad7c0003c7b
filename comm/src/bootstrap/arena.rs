//! The arena of a node: the first rank makes it, the others map it.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use flow_store::Error as StoreError;
use serde::{Deserialize, Serialize};

use super::json::{from_json, to_json};
use super::monitor::{BootstrapMonitor, POLL_INTERVAL};
use crate::error::{Error, Result};
use crate::liveness::has_ended;
use crate::shm::arena::Arena;
use crate::shm::arena_header::ArenaHeader;
use crate::shm::control::{sleep_on, Control};
use crate::world::LIVENESS_INTERVAL;

/// Where on this node the arena's memory is.
#[derive(Serialize, Deserialize)]
struct ArenaPlace {
    /// Of the first rank, which made it, and the file descriptor there.
    pid: u32,
    fd: i32,
    /// The bytes of each rank's region.
    region: usize,
}

/// The arena of this node, once all its ranks have mapped it.
pub fn attach_arena(
    rank: usize,
    size: usize,
    locals: &[usize],
    mut monitor: Option<&mut BootstrapMonitor>,
) -> Result<Arc<Arena>> {
    let fail = |reason: String| Error::Join { rank, reason };
    let (first, count) = (locals[0], locals.len());
    let key = monitor
        .as_ref()
        .map(|monitor| format!("{}arena/{first}", monitor.prefix))
        .unwrap_or_default();
    let (arena, file) = if rank == first {
        let (file, region) = Arena::create_file(count, 1).map_err(fail)?;
        let arena =
            Arc::new(Arena::map(&file, count, region, 0, ArenaHeader::bytes(count)).map_err(fail)?);
        let block = arena.allocate_zeroed(Control::bytes(size, count)).ok_or_else(|| {
            fail(format!("no shared memory for the control block of {size} ranks"))
        })?;
        let root = Control::attach(Arc::clone(&arena), block.offset(), size, count);
        root.header().attached.store(count as u32, Ordering::SeqCst);
        ArenaHeader::of(&arena).root.store(block.offset() as u64, Ordering::Release);
        // Nobody can know when every rank has left the job: this block goes with the arena.
        block.leak();
        if let Some(monitor) = &monitor {
            let place = ArenaPlace { pid: std::process::id(), fd: file.as_raw_fd(), region };
            monitor.store.set(&key, &to_json(&place)).map_err(|e| fail(e.to_string()))?;
        }
        (arena, Some(file))
    } else {
        let Some(monitor) = &mut monitor else {
            return Err(fail("there is no rendezvous store".into()));
        };
        let place = loop {
            match monitor.store.get(&key, monitor.left(POLL_INTERVAL)) {
                Ok(place) => break place,
                Err(StoreError::Timeout { .. }) => {
                    monitor.check(&|| vec![first], &|_| 0).map_err(fail)?
                }
                Err(error) => return Err(fail(format!("rank {first} has not joined: {error}"))),
            }
        };
        let ArenaPlace { pid, fd, region } =
            from_json(&place, &format!("arena of rank {first}")).map_err(fail)?;
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = std::fs::File::options().read(true).write(true).open(&path).map_err(|e| {
            fail(match monitor.cancel_reason() {
                Some(reason) => reason,
                None if has_ended(pid) => {
                    format!("rank {first} (pid {pid}) died before all ranks had joined")
                }
                None => format!(
                    "cannot open rank {first}'s shared memory at {path}: {e}; all ranks of a node \
                     must run on one machine as one user"
                ),
            })
        })?;
        let index = locals.iter().position(|&local| local == rank).unwrap_or_default();
        (Arc::new(Arena::map(&file, count, region, index, 0).map_err(fail)?), None)
    };

    let own = std::process::id();
    let header = ArenaHeader::of(&arena);
    header.publish_processors();
    let index = |rank: usize| locals.iter().position(|&local| local == rank);
    let pid_of = |rank: usize| {
        index(rank).map_or(0, |index| ArenaHeader::pid(&arena, index).load(Ordering::Acquire))
    };
    ArenaHeader::pid(&arena, index(rank).unwrap_or_default()).store(own, Ordering::Release);
    let attached = &header.attached;
    attached.raise(count as u32);
    let missing = || -> Vec<usize> { locals.iter().copied().filter(|&r| pid_of(r) == 0).collect() };
    let failure = &header.failure;
    while let (Some(monitor), false, None) = (&mut monitor, missing().is_empty(), failure.read()) {
        sleep_on(attached, count as u32, monitor.left(LIVENESS_INTERVAL));
        if let Err(reason) = monitor.check(&missing, &pid_of) {
            // Only if it is the first: what this rank found out may be a consequence of that.
            failure.write(0, &reason);
            let reason = failure.read().map_or(reason, |(_, first)| first);
            monitor.cancel(&reason);
            return Err(fail(reason));
        }
    }
    if let Some((_, reason)) = failure.read() {
        return Err(fail(reason));
    }
    // All have it mapped: from here on it lives only as long as they do.
    drop(file);
    Ok(arena)
}
