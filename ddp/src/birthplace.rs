//! Large gradients are born where all ranks can reach them: libtorch's large CPU tensors come from
//! the arena.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use flow_autograd::{Block, BlockAllocator};
use flow_comm::{Arena, ArenaHandle};

/// Smaller tensors are left to malloc: copying a small gradient costs less than a block of its own.
const MIN_BYTES: usize = 64 << 10;

/// While this lives, libtorch allocates from the arena, unless another is installed later and
/// lives, too.
pub(crate) struct Birthplace {
    home: ArenaHandle,
}

/// All that live, the last one installed last.
static INSTALLED: Mutex<Vec<Weak<Birthplace>>> = Mutex::new(Vec::new());

impl Birthplace {
    /// The one that libtorch allocates from. Models wrapped meanwhile are reduced there, too,
    /// whatever join of the job their group is of: there is only one allocator.
    pub fn current() -> Option<Arc<Self>> {
        let installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        installed.iter().rev().find_map(Weak::upgrade)
    }

    pub fn home(&self) -> &ArenaHandle {
        &self.home
    }

    /// None if libtorch's allocator cannot be replaced; gradients are then copied.
    pub fn install(home: ArenaHandle) -> Option<Arc<Self>> {
        if let Some(current) =
            Self::current().filter(|current| Arc::ptr_eq(current.home.arena(), home.arena()))
        {
            return Some(current);
        }
        let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = allocate_from(Some(&home)) {
            log::warn!("gradients will be copied into shared memory, as they cannot be allocated there: {error}");
            return None;
        }
        let own = Arc::new(Self { home });
        installed.push(Arc::downgrade(&own));
        Some(own)
    }
}

impl Drop for Birthplace {
    fn drop(&mut self) {
        let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        installed.retain(|other| other.strong_count() > 0);
        let before = installed.iter().rev().find_map(Weak::upgrade);
        if let Err(error) = allocate_from(before.as_ref().map(|before| &before.home)) {
            log::warn!("{error}");
        }
        drop(installed); // first: `before` may be the last to hold that one
    }
}

fn allocate_from(home: Option<&ArenaHandle>) -> Result<(), flow_autograd::Error> {
    let allocator =
        home.map(|home| Arc::new(FromArena(Arc::clone(home.arena()))) as Arc<dyn BlockAllocator>);
    flow_autograd::set_cpu_allocator(allocator, MIN_BYTES)
}

struct FromArena(Arc<Arena>);

impl BlockAllocator for FromArena {
    fn allocate(&self, bytes: usize) -> Option<Block> {
        Some(Box::new(self.0.allocate(bytes)?))
    }
}
