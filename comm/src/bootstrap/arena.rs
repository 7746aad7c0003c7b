//! The arena of a node, which its ranks map, and the memory of a join in it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::fs::fstat;

use super::attach::{JoinPlace, LocalJoin, NodeArena};
use super::lineage::MemoryPlace;
use crate::shm::arena::{Arena, Block};
use crate::shm::control::sleep_on;
use crate::shm::join_memory::JoinMemory;

/// The arena that the ranks of a node use.
pub enum ArenaSource {
    /// The first rank makes it.
    New,
    /// This process has it already.
    Own(Arc<Arena>),
    /// This process, a newcomer, maps it where another has it.
    Of { pid: u32, place: MemoryPlace },
}

/// The arena of a join.
pub struct JoinArena {
    pub source: ArenaSource,
    /// The number of ranks in the join, and of those on this node.
    pub size: usize,
    pub locals: usize,
    /// The region of this rank.
    pub region: usize,
    /// That of the join's memory, in the rank that has made it.
    pub block: Option<Block>,
}

impl NodeArena for JoinArena {
    type Join = JoinMemory;

    fn make(&mut self) -> Result<(JoinMemory, Option<JoinPlace>), String> {
        let arena = match &self.source {
            ArenaSource::New => create_arena(self.locals)?,
            ArenaSource::Own(arena) => Arc::clone(arena),
            ArenaSource::Of { pid, place } => {
                let MemoryPlace { inode, fd, regions, region_bytes, .. } = *place;
                let file = open_arena(*pid, fd, inode)?;
                Arc::new(Arena::map(&file, regions, region_bytes, self.region)?)
            }
        };
        let (memory, block) = JoinMemory::create(&arena, self.size, self.locals)?;
        self.block = Some(block);
        let Some(file) = arena.file() else { return Ok((memory, None)) };
        let place = JoinPlace {
            pid: std::process::id(),
            fd: file.as_raw_fd(),
            inode: fstat(file).map_err(|error| error.to_string())?.st_ino,
            region: arena.region_bytes(),
            regions: arena.regions(),
            offset: memory.offset,
        };
        Ok((memory, Some(place)))
    }

    fn map(&mut self, place: &JoinPlace) -> Result<JoinMemory, String> {
        let JoinPlace { pid, fd, inode, region, regions, offset } = *place;
        let arena = match &self.source {
            ArenaSource::Own(arena) => Arc::clone(arena),
            ArenaSource::New | ArenaSource::Of { .. } => {
                let file = open_arena(pid, fd, inode)?;
                Arc::new(Arena::map(&file, regions, region, self.region)?)
            }
        };
        JoinMemory::open(&arena, offset, self.size, self.locals)
    }
}

impl LocalJoin for JoinMemory {
    fn attach(&self, index: usize) {
        let header = self.header();
        header.publish_processors();
        self.local(index).pid.store(std::process::id(), Ordering::Release);
        header.attached.raise(self.locals as u32);
    }

    fn pid(&self, index: usize) -> u32 {
        self.local(index).pid.load(Ordering::Acquire)
    }

    fn failure(&self) -> Option<String> {
        self.header().failure.read().map(|(_, reason)| reason)
    }

    fn fail(&self, reason: &str) -> String {
        self.header().failure.write(0, reason);
        self.failure().unwrap_or_else(|| reason.to_owned())
    }

    fn sleep(&self, time: Duration) {
        sleep_on(&self.header().attached, self.locals as u32, time);
    }
}

/// Makes an arena for `count` ranks, in the first of them.
fn create_arena(count: usize) -> Result<Arc<Arena>, String> {
    let (file, region) = Arena::create_file(count, 1)?;
    Ok(Arc::new(Arena::map(&Arc::new(file), count, region, 0)?))
}

/// Opens the file of an arena where another process has it.
fn open_arena(pid: u32, fd: i32, inode: u64) -> Result<Arc<OwnedFd>, String> {
    let path = format!("/proc/{pid}/fd/{fd}");
    let opened = File::options().read(true).write(true).open(&path);
    let checked = opened.and_then(|file| {
        if fstat(&file)?.st_ino == inode {
            return Ok(file);
        }
        Err(io::Error::other("the process has ended, and another has its number"))
    });
    let file = checked.map_err(|error| {
        format!(
            "cannot open the shared memory of process {pid} at {path}: {error}; all ranks of a node must run on \
             one machine as one user"
        )
    })?;
    Ok(Arc::new(file.into()))
}
