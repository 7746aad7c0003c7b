//! Elements that belong to the caller, and blocks of shared memory.

use std::ffi::{c_int, c_void};

use flow_comm::{Block, Buffer, DType};

use crate::arguments::{self, Place, dtype};
use crate::group::{Group, member};
use crate::status::{Failure, Result, call};

/// The C type `flow_buffer`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Memory {
    data: *mut c_void,
    count: usize,
    dtype: u32,
}

/// A buffer that was checked, for the length of a call.
pub struct Elements {
    data: *mut u8,
    bytes: usize,
    dtype: DType,
}

impl Memory {
    /// # Safety
    ///
    /// Null, or so many elements that stay for as long as the result is used. Nobody else uses them
    /// meanwhile, but as a collective allows it.
    pub unsafe fn elements(self) -> Result<Elements> {
        let dtype = dtype(self.dtype)?;
        let bytes =
            self.count.checked_mul(dtype.size()).filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| {
            Failure::argument(format!(
                "{} elements of {dtype} are more than any memory",
                self.count
            ))
        })?;
        if self.data.is_null() && bytes > 0 {
            return Err(Failure::argument(format!("a buffer of {bytes} bytes is null")));
        }
        Ok(Elements { data: self.data.cast(), bytes, dtype })
    }
}

impl Elements {
    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub fn count(&self) -> usize {
        self.bytes / self.dtype.size()
    }
}

// flow-comm makes pointers of what it gets here at once: of an input and an output that overlap, as
// C may pass them, there are never two references at a time.
impl Buffer for Elements {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn bytes(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: whoever made this has promised that the memory is there.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: as above, and that nobody else uses it.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl AsMut<[u8]> for Elements {
    fn as_mut(&mut self) -> &mut [u8] {
        self.bytes_mut()
    }
}

// SAFETY: the promise of `Memory::elements` is about all threads.
unsafe impl Send for Elements {}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The pointers are null or as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_alloc(
    handle: *const Group,
    bytes: usize,
    made: *mut *mut Block,
    data: *mut *mut c_void,
) -> c_int {
    call("flow_alloc", None, || {
        // SAFETY: the caller's promise.
        let group = unsafe { member(handle) }?;
        // SAFETY: the caller's promise.
        let made = unsafe { Place::new(made, "block") }?;
        // SAFETY: the caller's promise.
        let data = unsafe { Place::new(data, "data") }?;
        group.check_process("alloc")?;
        let block = group.arena().allocate(bytes).ok_or_else(|| {
            let rank = group.ranks()[group.rank()];
            Failure::system(format!(
                "rank {rank}: no room for {bytes} bytes of shared memory: free blocks that are no \
                 longer used"
            ))
        })?;
        data.set(block.as_ptr().cast());
        made.set(Box::into_raw(Box::new(block)));
        Ok(())
    })
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The block came from `flow_alloc`, and is not used any more; or it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_free(block: *mut Block) {
    if !block.is_null() {
        // SAFETY: the caller's promise.
        let block = unsafe { Box::from_raw(block) };
        call("flow_free", None, || {
            drop(block);
            Ok(())
        });
    }
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The group is null or lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_is_shared(
    group: *const Group,
    data: *const c_void,
    bytes: usize,
) -> bool {
    // SAFETY: the caller's promise.
    let group = unsafe { arguments::reference(group, "group") };
    group.is_ok_and(|group| group.group.arena().offset_of(data.cast(), bytes).is_some())
}
