//! Other memory for libtorch's large CPU tensors.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::Error;
use crate::ffi;

/// Memory that frees itself when it is dropped, on whatever thread. The address must stay the same
/// until then.
pub type Block = Box<dyn AsMut<[u8]> + Send>;

/// A source of memory for large CPU tensors.
pub trait BlockAllocator: Send + Sync {
    /// Returns a block of at least `bytes` bytes, aligned to 64, of any content; `None` leaves the
    /// request to libtorch's own allocator (as does a block that is too small or misaligned).
    /// Called by any thread; it must not create tensors.
    fn allocate(&self, bytes: usize) -> Option<Block>;
}

/// libtorch's alignment of CPU memory.
const ALIGNMENT: usize = 64;

static CURRENT: RwLock<Option<Arc<dyn BlockAllocator>>> = RwLock::new(None);

/// Has libtorch take CPU blocks of `min_bytes` and more from `allocator`; with `None`,
/// from its own allocator again. Each block goes back where it came from, however often this is
/// called in between. A forked child begins with libtorch's own allocator.
///
/// The first call should come before other threads use tensors: libtorch does not lock its pointer
/// to the allocator.
///
/// # Errors
///
/// Another allocator than libtorch's default one has been installed, with a higher priority.
pub fn set_cpu_allocator(
    allocator: Option<Arc<dyn BlockAllocator>>,
    min_bytes: usize,
) -> Result<(), Error> {
    static SETTING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = SETTING.lock().unwrap_or_else(PoisonError::into_inner);
    // libtorch asks for 0 bytes as well, and expects null.
    let min_bytes = if allocator.is_some() { min_bytes.max(1) } else { usize::MAX };
    // SAFETY: `take_block` makes the owners that `drop_box` drops; calls do not overlap.
    unsafe {
        let text = ffi::flow_set_cpu_allocator(take_block, ffi::drop_box::<Block>, min_bytes);
        ffi::check("set_cpu_allocator", text)?;
    }
    let previous =
        std::mem::replace(&mut *CURRENT.write().unwrap_or_else(PoisonError::into_inner), allocator);
    drop(previous); // with the lock released: it is the user's code
    Ok(())
}

/// # Safety
///
/// `block` must be writable.
unsafe extern "C" fn take_block(bytes: usize, block: *mut ffi::RawBlock) -> bool {
    let allocator = CURRENT.read().unwrap_or_else(PoisonError::into_inner).clone();
    // An allocator that panics has no block.
    let taken = catch_unwind(AssertUnwindSafe(|| {
        let mut owner = Box::new(allocator?.allocate(bytes)?);
        let memory = (**owner).as_mut();
        let data = memory.as_mut_ptr();
        let fits = memory.len() >= bytes && data.addr().is_multiple_of(ALIGNMENT);
        fits.then(|| ffi::RawBlock {
            data: data.cast::<c_void>(),
            owner: Box::into_raw(owner).cast(),
        })
    }));
    let Ok(Some(taken)) = taken else { return false };
    // SAFETY: the caller's promise.
    unsafe { block.write(taken) };
    true
}
