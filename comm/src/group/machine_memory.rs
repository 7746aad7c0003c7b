//! Memory that ranks of one machine have in common.

use std::sync::atomic::Ordering;

use super::ProcessGroup;
use super::split::exchange_words;
use crate::error::{Error, Result};
use crate::shm::arena::no_room;
use crate::shm::machine_buffer::{HEADER, MachineBuffer, users};

/// A number in place of the offset of a buffer: this rank allocates none.
const NOT_FIRST: u64 = u64::MAX;
/// A number in place of that offset: this rank's memory has no room for it.
const FULL: u64 = u64::MAX - 1;

impl ProcessGroup {
    /// Allocates `bytes` zeros that the group's ranks of a machine have in common, once on each machine.
    /// All ranks call this, with the same number.
    ///
    /// ```
    /// # use flow_comm::ProcessGroup;
    /// let group = ProcessGroup::from_env()?; // alone: a group of one
    /// let buffer = group.alloc_on_machine(4)?;
    /// buffer.part(1..3).as_mut().copy_from_slice(&[5, 6]);
    /// assert_eq!(buffer.part(0..4).as_mut(), [0, 5, 6, 0]);
    /// # Ok::<(), flow_comm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// On all ranks: they give different numbers, or the shared memory of one is full.
    pub fn alloc_on_machine(&self, bytes: usize) -> Result<MachineBuffer> {
        let parts = self.parts(&"alloc_on_machine")?;
        let core = &parts.core;
        let first = core.locals[0];
        let block = if first == core.rank {
            bytes.checked_add(HEADER).and_then(|bytes| core.world.arena.allocate_zeroed(bytes))
        } else {
            None
        };
        let offset = match &block {
            Some(block) => {
                let locals = core.locals.len() as u32;
                users(&core.world.arena, block.offset()).store(locals, Ordering::SeqCst);
                block.offset() as u64
            }
            None if first == core.rank => FULL,
            None => NOT_FIRST,
        };
        let words = exchange_words(self, &[offset, bytes as u64])?;
        if let Some(other) = words.iter().position(|words| words[1] != bytes as u64) {
            let detail = format!(
                "rank {} called alloc_on_machine with {bytes} bytes, rank {} with {}",
                core.world.rank, core.ranks[other], words[other][1]
            );
            return Err(parts.failure.fail(Error::Mismatch { rank: core.world.rank, detail }));
        }
        if let Some(full) = words.iter().position(|words| words[0] == FULL) {
            let what = format!("{bytes} bytes for all ranks of a machine");
            return Err(self.system("alloc_on_machine", no_room(&what, core.ranks[full])));
        }
        let offset = words[first][0] as usize;
        Ok(MachineBuffer::attach(&core.world.retired_buffers, offset, bytes, block))
    }
}
