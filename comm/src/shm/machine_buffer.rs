//! Memory that the ranks of a machine have in common.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use flow_store::fork::ForkSafe;

use super::arena::{Arena, Block};
use super::tenancy::Tenancy;

/// The bytes before the contents: the number of ranks that still use the buffer, in a cache line of its
/// own.
pub const HEADER: usize = 64;

/// Memory that the ranks of a group on one machine have in common, zeros at first: what one writes, all
/// see. [`ProcessGroup::alloc_on_machine`](crate::ProcessGroup::alloc_on_machine) makes it.
///
/// Ranks agree on who writes when, by collectives: none reads what another writes meanwhile. The memory
/// is there until all ranks have dropped the buffer and its parts.
#[derive(Clone)]
pub struct MachineBuffer(Arc<ForkSafe<Attachment>>);

/// Tells of a [`MachineBuffer`] whether this rank still uses it.
pub struct WeakMachineBuffer(Weak<ForkSafe<Attachment>>);

/// A part of a [`MachineBuffer`], which it keeps.
pub struct MachinePart {
    buffer: MachineBuffer,
    range: Range<usize>,
}

/// A rank's share in the buffer.
struct Attachment {
    offset: usize,
    len: usize,
    /// The memory itself, on the first rank of the machine.
    block: Option<Block>,
    retired: Arc<RetiredBuffers>,
}

/// Blocks of dropped buffers that other ranks have not yet left.
pub struct RetiredBuffers {
    blocks: Mutex<Vec<Block>>,
    /// The memory of a buffer may be another rank's, and stays there while this does.
    tenancy: Arc<Tenancy>,
}

impl RetiredBuffers {
    /// Returns none, of the ranks that share this memory.
    pub fn new(tenancy: &Arc<Tenancy>) -> Self {
        Self { blocks: Mutex::default(), tenancy: Arc::clone(tenancy) }
    }

    fn arena(&self) -> &Arena {
        &self.tenancy.memory.arena
    }

    /// Frees the block of a buffer as soon as its last rank has left.
    fn retire(&self, block: Block) {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.push(block);
        blocks.retain(|block| users(block.arena(), block.offset()).load(Ordering::SeqCst) != 0);
    }
}

impl Drop for RetiredBuffers {
    /// A rank that has ended never leaves its buffers.
    fn drop(&mut self) {
        let blocks = self.blocks.get_mut().unwrap_or_else(PoisonError::into_inner);
        blocks.drain(..).for_each(|block| self.tenancy.retire(block));
    }
}

impl MachineBuffer {
    /// Returns this rank's handle of the buffer of `len` bytes whose block begins at `offset`. `block`:
    /// that block, where it is this rank's.
    pub(crate) fn attach(
        retired: &Arc<RetiredBuffers>,
        offset: usize,
        len: usize,
        block: Option<Block>,
    ) -> Self {
        Self(Arc::new(ForkSafe::new(Attachment {
            offset,
            len,
            block,
            retired: Arc::clone(retired),
        })))
    }

    /// Returns how many bytes it has.
    pub fn bytes(&self) -> usize {
        self.0.len
    }

    /// Returns the bytes of `range` as a part, which may be written.
    ///
    /// # Panics
    ///
    /// The range does not lie in the buffer.
    pub fn part(&self, range: Range<usize>) -> MachinePart {
        assert!(range.start <= range.end && range.end <= self.0.len, "{range:?} of {}", self.0.len);
        MachinePart { buffer: self.clone(), range }
    }

    /// Returns a handle that does not keep the memory.
    pub fn downgrade(&self) -> WeakMachineBuffer {
        WeakMachineBuffer(Arc::downgrade(&self.0))
    }
}

impl WeakMachineBuffer {
    /// Whether this rank still uses the buffer.
    pub fn is_used(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// Whether this rank still uses the buffer, and this address is in it.
    pub fn contains(&self, address: usize) -> bool {
        self.0.upgrade().is_some_and(|attachment| {
            let start = attachment.arena().at(attachment.offset + HEADER).addr();
            (start..start + attachment.len).contains(&address)
        })
    }
}

impl AsMut<[u8]> for MachinePart {
    fn as_mut(&mut self) -> &mut [u8] {
        let attachment = &**self.buffer.0;
        let start = attachment.arena().at(attachment.offset + HEADER + self.range.start);
        // SAFETY: the range lies in the block, which stays allocated until this rank has left it, and any
        // bytes are valid. Ranks agree on who writes.
        unsafe { std::slice::from_raw_parts_mut(start, self.range.len()) }
    }
}

/// Returns how many ranks use the buffer whose block this is.
pub(crate) fn users(arena: &Arena, offset: usize) -> &AtomicU32 {
    // SAFETY: the block has a header there, aligned to a cache line, which is used as a counter only, and
    // is mapped as long as the arena lives.
    unsafe { AtomicU32::from_ptr(arena.at(offset).cast()) }
}

impl Attachment {
    fn arena(&self) -> &Arena {
        self.retired.arena()
    }
}

impl Drop for Attachment {
    /// This rank leaves the buffer.
    fn drop(&mut self) {
        users(self.arena(), self.offset).fetch_sub(1, Ordering::SeqCst);
        if let Some(block) = self.block.take() {
            self.retired.retire(block);
        }
    }
}
