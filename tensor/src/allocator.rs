//! libtorch's large CPU tensors in memory that all ranks of the machine map: collectives on them
//! copy nothing.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use flow_autograd::{Block, BlockAllocator};
use flow_comm::{Arena, ArenaHandle};

/// Smaller tensors are left to malloc: copying a small tensor costs less than a block of its own.
const MIN_BYTES: usize = 64 << 10;

/// Has libtorch allocate large CPU tensors from a group's shared memory while it lives, unless
/// another guard is installed later and lives, too. [`Ddp`] installs one itself.
///
/// ```no_run
/// # fn main() -> anyhow::Result<()> {
/// use flow_tensor::{ArenaAllocatorGuard, ProcessGroup, ReduceOp, TensorCollectives};
/// use tch::{Device, Kind, Tensor};
///
/// let group = ProcessGroup::from_env()?;
/// let _guard = ArenaAllocatorGuard::install(group.arena_handle());
/// let mut activations = Tensor::randn([4096, 4096], (Kind::Float, Device::Cpu));
/// group.all_reduce_tensor(&mut activations, ReduceOp::Sum)?; // no copy
/// # Ok(()) }
/// ```
///
/// [`Ddp`]: https://docs.rs/flow-ddp
pub struct ArenaAllocatorGuard {
    handle: ArenaHandle,
}

/// All guards that live, the last one installed last.
static INSTALLED: Mutex<Vec<Weak<ArenaAllocatorGuard>>> = Mutex::new(Vec::new());

impl ArenaAllocatorGuard {
    /// Returns the guard whose memory libtorch allocates from now. There is only one allocator, so
    /// groups of other joins of the job use that memory, too.
    pub fn current() -> Option<Arc<Self>> {
        let installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        installed.iter().rev().find_map(Weak::upgrade)
    }

    /// Returns the memory that it allocates from.
    pub fn handle(&self) -> &ArenaHandle {
        &self.handle
    }

    /// Installs the allocator, or returns the current guard if it allocates from there already.
    /// None if libtorch's allocator cannot be replaced: collectives then copy.
    pub fn install(handle: ArenaHandle) -> Option<Arc<Self>> {
        if let Some(current) =
            Self::current().filter(|current| Arc::ptr_eq(current.handle.arena(), handle.arena()))
        {
            return Some(current);
        }
        let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = allocate_from(Some(&handle)) {
            log::warn!(
                "tensors will be copied into shared memory, as they cannot be allocated there: \
                 {error}"
            );
            return None;
        }
        let own = Arc::new(Self { handle });
        installed.push(Arc::downgrade(&own));
        Some(own)
    }
}

impl Drop for ArenaAllocatorGuard {
    fn drop(&mut self) {
        let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        installed.retain(|other| other.strong_count() > 0);
        let before = installed.iter().rev().find_map(Weak::upgrade);
        if let Err(error) = allocate_from(before.as_ref().map(|before| &before.handle)) {
            log::warn!("{error}");
        }
        drop(installed); // first: `before` may be the last to hold that one
    }
}

fn allocate_from(handle: Option<&ArenaHandle>) -> Result<(), flow_autograd::Error> {
    let allocator = handle.map(|handle| {
        Arc::new(ArenaAllocator(Arc::clone(handle.arena()))) as Arc<dyn BlockAllocator>
    });
    flow_autograd::set_cpu_allocator(allocator, MIN_BYTES)
}

struct ArenaAllocator(Arc<Arena>);

impl BlockAllocator for ArenaAllocator {
    fn allocate(&self, bytes: usize) -> Option<Block> {
        Some(Box::new(self.0.allocate(bytes)?))
    }
}
