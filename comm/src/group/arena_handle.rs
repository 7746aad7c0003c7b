//! The memory of a join of a job. A program that joins its job again gets another arena, while its
//! tensors lie in the first. The functions here make groups of the new join there.

use std::sync::Arc;

use super::ProcessGroup;
use super::member::Member;
use super::split::{exchange_words, new_group_in};
use crate::error::Result;
use crate::shm::arena::Arena;
use crate::world::World;

/// The shared memory of one join, which it keeps. [`ProcessGroup::duplicate_in`] makes groups in it.
pub struct ArenaHandle(Arc<World>);

impl ArenaHandle {
    /// Returns the memory that all ranks of the machine map.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.0.arena
    }
}

impl Member {
    /// Returns a handle of the group's shared memory.
    pub fn arena_handle(&self) -> ArenaHandle {
        ArenaHandle(Arc::clone(&self.core().world))
    }
}

impl ProcessGroup {
    /// Makes a group as [`ProcessGroup::duplicate`] does, in the memory of `handle` if that is the
    /// same on all ranks. It may be of any join of the same processes. All ranks call this.
    pub fn duplicate_in(&self, handle: Option<&ArenaHandle>) -> Result<Self> {
        const NONE: u64 = 0;
        let world = &self.core().world;
        // Groups of this join are in the memory of the job's epochs before already.
        let other = handle.filter(|handle| !Arc::ptr_eq(handle.arena(), &world.arena));
        let own = other.filter(|handle| handle.0.has_ranks_of(world));
        let digest = own.map_or(NONE, |handle| handle.0.digest());
        let digests = exchange_words(self, &[digest])?;
        let all: Vec<usize> = (0..self.world_size()).collect();
        let group = match own.filter(|_| digests.iter().all(|other| other[0] == digest)) {
            Some(handle) => new_group_in(self, &handle.0, &all)?,
            None => self.new_group(&all)?,
        };
        group.ok_or_else(|| self.system("duplicate", "this rank is not a member".into()))
    }
}
