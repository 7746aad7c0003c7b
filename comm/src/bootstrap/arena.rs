//! The arena of a node: the first rank makes it, the others map it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use flow_store::Error as StoreError;
use rustix::fs::fstat;
use serde::{Deserialize, Serialize};

use super::join_error::JoinError;
use super::lineage::MemoryPlace;
use super::monitor::BootstrapMonitor;
use crate::json::{from_json, to_json};
use crate::liveness::has_ended;
use crate::shm::arena::{Arena, Block};
use crate::shm::control::sleep_on;
use crate::shm::join_memory::JoinMemory;
use crate::shm::tenancy::Tenancy;
use crate::world::LIVENESS_INTERVAL;

/// The place of the join's memory on this node.
#[derive(Serialize, Deserialize)]
struct JoinPlace {
    /// The process of the first rank, and the file descriptor of the arena there.
    pid: u32,
    fd: i32,
    /// The arena's, which no other file has.
    inode: u64,
    /// The bytes of each rank's region, and how many regions there are.
    region: usize,
    regions: usize,
    /// Where the memory of the join is in the arena.
    offset: usize,
}

/// The arena that the ranks of a node use.
pub enum ArenaSource {
    /// The first rank makes it.
    New,
    /// This process has it already.
    Own(Arc<Arena>),
    /// This process, a newcomer, maps it where another has it.
    Of { pid: u32, place: MemoryPlace },
}

/// Makes or maps the arena of this node, and returns this rank's use of it once all its ranks have
/// mapped it. `regions` are those of the ranks of the node.
pub fn attach_arena(
    rank: usize,
    size: usize,
    locals: &[usize],
    source: ArenaSource,
    regions: &[usize],
    mut monitor: Option<&mut BootstrapMonitor>,
) -> Result<Arc<Tenancy>, JoinError> {
    let first = locals[0];
    let index = locals.iter().position(|&local| local == rank).unwrap_or_default();
    let mut block = None;
    let memory = if rank == first {
        let arena = match source {
            ArenaSource::New => create_arena(locals.len())?,
            ArenaSource::Own(arena) => arena,
            ArenaSource::Of { pid, place } => {
                let MemoryPlace { inode, fd, regions: count, region_bytes, .. } = place;
                let file = open_arena(pid, fd, inode).map_err(|error| no_arena(pid, fd, &error))?;
                Arc::new(Arena::map(&file, count, region_bytes, regions[index])?)
            }
        };
        let (memory, own) = make_memory(&arena, size, locals, monitor.as_deref())?;
        block = Some(own);
        memory
    } else {
        let Some(monitor) = monitor.as_deref_mut() else {
            return Err(JoinError::Failed("there is no rendezvous store".into()));
        };
        let place = place_of(first, monitor)?;
        let arena = match source {
            ArenaSource::Own(arena) => arena,
            _ => map_arena_of(first, &place, regions[index], monitor)?,
        };
        JoinMemory::open(&arena, place.offset, size, locals.len())?
    };
    let header = memory.header();
    header.publish_processors();
    memory.local(index).pid.store(std::process::id(), Ordering::Release);
    header.attached.raise(locals.len() as u32);
    wait_attached(&memory, locals, monitor)?;
    Ok(Arc::new(Tenancy::new(memory, index, regions, block)))
}

/// Returns the key under which the first rank of a node says where the join's memory is.
fn place_key(monitor: &BootstrapMonitor, first: usize) -> String {
    format!("{}arena/{first}", monitor.prefix)
}

/// Makes an arena for `count` ranks, in the first of them.
fn create_arena(count: usize) -> Result<Arc<Arena>, String> {
    let (file, region) = Arena::create_file(count, 1)?;
    Ok(Arc::new(Arena::map(&Arc::new(file), count, region, 0)?))
}

/// Makes the join's memory, with the control block of the group of all `size` ranks, and publishes
/// where it is.
fn make_memory(
    arena: &Arc<Arena>,
    size: usize,
    locals: &[usize],
    monitor: Option<&BootstrapMonitor>,
) -> Result<(JoinMemory, Block), String> {
    let (memory, block) = JoinMemory::create(arena, size, locals.len())?;
    if let Some((monitor, file)) = monitor.zip(arena.file()) {
        let place = JoinPlace {
            pid: std::process::id(),
            fd: file.as_raw_fd(),
            inode: fstat(file).map_err(|error| error.to_string())?.st_ino,
            region: arena.region_bytes(),
            regions: arena.regions(),
            offset: memory.offset,
        };
        monitor
            .store
            .set(&place_key(monitor, locals[0]), &to_json(&place))
            .map_err(|error| error.to_string())?;
    }
    Ok((memory, block))
}

/// Waits until the first rank of this node says where the join's memory is.
fn place_of(first: usize, monitor: &mut BootstrapMonitor) -> Result<JoinPlace, JoinError> {
    let key = place_key(monitor, first);
    let place = loop {
        match monitor.store.get(&key, monitor.left(monitor.poll_interval())) {
            Ok(place) => break place,
            Err(StoreError::Timeout { .. }) => monitor.check(&|| vec![first], &|_| 0)?,
            Err(error) => return Err(format!("rank {first} has not joined: {error}").into()),
        }
    };
    Ok(from_json(&place, &format!("arena of rank {first}"))?)
}

/// Maps the arena that the first rank of this node has; this process takes one of its regions.
fn map_arena_of(
    first: usize,
    place: &JoinPlace,
    region: usize,
    monitor: &BootstrapMonitor,
) -> Result<Arc<Arena>, JoinError> {
    let JoinPlace { pid, fd, inode, .. } = *place;
    let file = open_arena(pid, fd, inode).map_err(|error| match monitor.cancel_reason() {
        Some(reason) => reason,
        None if has_ended(pid) => {
            format!("rank {first} (pid {pid}) died before all ranks had joined")
        }
        None => no_arena(pid, fd, &error),
    })?;
    Ok(Arc::new(Arena::map(&file, place.regions, place.region, region)?))
}

/// Opens the file of an arena where another process has it.
fn open_arena(pid: u32, fd: i32, inode: u64) -> io::Result<Arc<OwnedFd>> {
    let file = File::options().read(true).write(true).open(arena_path(pid, fd))?;
    if fstat(&file)?.st_ino != inode {
        return Err(io::Error::other("the process has ended, and another has its number"));
    }
    Ok(Arc::new(file.into()))
}

fn arena_path(pid: u32, fd: i32) -> String {
    format!("/proc/{pid}/fd/{fd}")
}

fn no_arena(pid: u32, fd: i32, error: &io::Error) -> String {
    format!(
        "cannot open the shared memory of process {pid} at {}: {error}; all ranks of a node must \
         run on one machine as one user",
        arena_path(pid, fd)
    )
}

/// Waits until all ranks of this node have mapped the arena.
fn wait_attached(
    memory: &JoinMemory,
    locals: &[usize],
    mut monitor: Option<&mut BootstrapMonitor>,
) -> Result<(), JoinError> {
    let header = memory.header();
    let missing = || -> Vec<usize> {
        locals.iter().copied().filter(|&rank| pid_of(memory, locals, rank) == 0).collect()
    };
    while let Some(monitor) = &mut monitor {
        if missing().is_empty() || header.failure.is_set() {
            break;
        }
        sleep_on(
            &header.attached,
            locals.len() as u32,
            monitor.left(LIVENESS_INTERVAL.min(monitor.poll_interval())),
        );
        if let Err(error) = monitor.check(&missing, &|rank| pid_of(memory, locals, rank)) {
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
fn pid_of(memory: &JoinMemory, locals: &[usize], rank: usize) -> u32 {
    match locals.iter().position(|&local| local == rank) {
        Some(index) => memory.local(index).pid.load(Ordering::Acquire),
        None => 0,
    }
}
