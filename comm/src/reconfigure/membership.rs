//! This process as a member of an epoch, and the join of its members.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::fstat;

use crate::bootstrap::lineage::{Lineage, Members, MemoryPlace, NodeMemory, Process, Seat};
use crate::bootstrap::{ArenaSource, JoinError, JoinPlan, join};
use crate::env::Membership;
use crate::peer_info::PeerInfo;
use crate::shm::arena::Arena;
use crate::world::World;

/// The name of the operation in errors.
pub const OPERATION: &str = "reconfigure";

/// Describes this process, which has this memory.
pub fn own_process(lineage: &Lineage, seat: Seat, arena: Option<&Arc<Arena>>) -> Process {
    let info = PeerInfo::own(&lineage.membership, Vec::new());
    Process::of(seat, info, arena.and_then(|arena| memory_place(arena)))
}

/// Returns the place of an arena; None if there is none that others can map.
fn memory_place(arena: &Arena) -> Option<MemoryPlace> {
    let file = arena.file()?;
    let inode = fstat(file).ok()?.st_ino;
    Some(MemoryPlace {
        inode,
        fd: file.as_raw_fd(),
        regions: arena.regions(),
        region_bytes: arena.region_bytes(),
        own_region: arena.own_region(),
        roomy: (0..arena.regions()).filter(|&region| arena.has_room(region)).collect(),
    })
}

/// Returns the membership of the process `own` among `members`, and the memory of its node.
///
/// # Errors
/// It is none of them.
pub fn place_of(
    lineage: &Lineage,
    members: &Members,
    own: &Process,
) -> Result<(Membership, NodeMemory), JoinError> {
    let Some(rank) = members.processes.iter().position(|process| process.is(own)) else {
        return Err(format!("process {} is no member any more", own.seat.number).into());
    };
    let locals: Vec<&Process> =
        members.processes.iter().filter(|process| process.node == own.node).collect();
    let membership = Membership {
        rank,
        world_size: members.processes.len(),
        local_rank: locals.iter().position(|process| process.is(own)).unwrap_or_default(),
        local_world_size: locals.len(),
        ..lineage.membership.clone()
    };
    Ok((membership, NodeMemory::of(&locals)))
}

/// Joins as the member of `members` that this process is.
pub fn join_members(
    lineage: &Lineage,
    members: &Members,
    own: &Process,
    arena: Option<&Arc<Arena>>,
    deadline: Instant,
) -> Result<World, JoinError> {
    let (membership, memory) = place_of(lineage, members, own)?;
    let (source, regions) = match (memory, arena) {
        (NodeMemory::New, _) => (ArenaSource::New, (0..membership.local_world_size).collect()),
        (NodeMemory::Kept { regions, .. }, Some(arena)) => {
            (ArenaSource::Own(Arc::clone(arena)), regions)
        }
        (NodeMemory::Kept { pid, place, regions }, None) => {
            (ArenaSource::Of { pid, place }, regions)
        }
    };
    let plan = JoinPlan {
        membership,
        name: format!("epoch {}", members.epoch),
        prefix: lineage.epoch_key(members.epoch, ""),
        launched: lineage.launched,
        seats: members.processes.iter().map(|process| process.seat).collect(),
        source,
        regions,
        epoch: Some((lineage.prefix.clone(), members.clone())),
    };
    join(plan, deadline.saturating_duration_since(Instant::now()))
}
