//! Groups of several joins in one memory: a program that joins its job again has another arena,
//! while what it keeps there, such as tensors, can come from one only.

use std::sync::Arc;

use super::ProcessGroup;
use crate::error::Result;
use crate::shm::arena::Arena;
use crate::world::World;

/// The memory of a join, which it keeps: what [`ProcessGroup::duplicate_in`] makes groups in.
pub struct ArenaHandle(Arc<World>);

impl ArenaHandle {
    /// The memory that all ranks of the machine map.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.0.arena
    }
}

impl ProcessGroup {
    /// Where the group's shared memory is.
    pub fn arena_handle(&self) -> ArenaHandle {
        ArenaHandle(Arc::clone(&self.core().world))
    }

    /// Whether its ranks are threads of one process, which has one allocator for all of them.
    pub fn is_in_process(&self) -> bool {
        self.core().world.is_in_process()
    }

    /// As [`ProcessGroup::duplicate`], in the memory of `handle` if that is the same on all ranks,
    /// of whatever join of the same processes. All ranks call this.
    pub fn duplicate_in(&self, handle: Option<&ArenaHandle>) -> Result<Self> {
        const NONE: u64 = 0;
        let own = handle.filter(|handle| handle.0.has_ranks_of(&self.core().world));
        let mark = own.map_or(NONE, |handle| handle.0.mark());
        let marks = self.exchange_words(&[mark])?;
        let all: Vec<usize> = (0..self.world_size()).collect();
        let group = match own.filter(|_| marks.iter().all(|other| other[0] == mark)) {
            Some(handle) => self.new_group_in(&handle.0, &all)?,
            None => self.new_group(&all)?,
        };
        group.ok_or_else(|| self.system("duplicate", "this rank is not a member".into()))
    }
}
