//! Large gradients are born where all ranks can reach them: libtorch's large CPU tensors come from the arena.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use flow_autograd::{Block, BlockAllocator};
use flow_comm::Arena;

/// Smaller tensors are left to malloc: copying a small gradient costs less than a block of its own.
const MIN_BYTES: usize = 64 << 10;

/// While this lives, libtorch allocates from the arena.
pub(crate) struct Birthplace {
    number: u64,
}

/// The last one installed: its arena and number, and itself while somebody uses it.
static CURRENT: Mutex<(Weak<Arena>, u64, Weak<Birthplace>)> = Mutex::new((Weak::new(), 0, Weak::new()));

impl Birthplace {
    /// None if libtorch's allocator cannot be replaced; gradients are then copied.
    pub fn install(arena: &Arc<Arena>) -> Option<Arc<Self>> {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if Weak::as_ptr(&current.0) == Arc::as_ptr(arena) {
            if let Some(installed) = current.2.upgrade() {
                return Some(installed);
            }
        }
        if let Err(error) = flow_autograd::set_cpu_allocator(Some(Arc::new(FromArena(Arc::clone(arena)))), MIN_BYTES) {
            log::warn!("gradients will be copied into shared memory, as they cannot be allocated there: {error}");
            return None;
        }
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let installed = Arc::new(Self { number });
        *current = (Arc::downgrade(arena), number, Arc::downgrade(&installed));
        Some(installed)
    }
}

impl Drop for Birthplace {
    fn drop(&mut self) {
        let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if current.1 == self.number {
            if let Err(error) = flow_autograd::set_cpu_allocator(None, MIN_BYTES) {
                log::warn!("{error}");
            }
        }
    }
}

struct FromArena(Arc<Arena>);

impl BlockAllocator for FromArena {
    fn allocate(&self, bytes: usize) -> Option<Block> {
        Some(Box::new(self.0.allocate(bytes)?))
    }
}
