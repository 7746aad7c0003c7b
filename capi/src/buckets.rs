//! Reductions of shared memory that do not wait.

use std::ffi::c_int;
use std::sync::Arc;

use flow_comm::ProcessGroup;

use crate::arguments::{reduce_op, Place};
use crate::group::{on, Group};
use crate::memory::Memory;
use crate::status::Failure;

/// See `flow_comm.h`.
///
/// # Safety
///
/// The group is null or lives; the buffer is as the header says, until it is reduced; `launched` is
/// null or can be written.
#[no_mangle]
pub unsafe extern "C" fn flow_launch_bucket(
    group: *const Group,
    data: Memory,
    number: u32,
    op: u32,
    launched: *mut bool,
) -> c_int {
    let body = |group: &ProcessGroup| {
        // SAFETY: the caller's promise.
        let (data, launched) = unsafe { (data.elements()?, Place::new(launched, "launched")?) };
        let (op, count) = (reduce_op(op)?, data.count());
        let segments = Arc::new(group.segments(number, data.dtype(), vec![count])?);
        if !segments.set_piece(0, data) {
            let rank = group.ranks()[group.rank()];
            let reason = "the memory is not shared, or not aligned: flow_alloc gives such memory";
            return Err(Failure::argument(format!("rank {rank}: bucket {number}: {reason}")));
        }
        launched.set(group.launch_bucket(&segments, op)?);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { on("flow_launch_bucket", group, body) }
}

/// See `flow_comm.h`.
///
/// # Safety
///
/// The group is null or lives.
#[no_mangle]
pub unsafe extern "C" fn flow_progress(group: *const Group) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on("flow_progress", group, |group| Ok(group.progress()?)) }
}

/// See `flow_comm.h`.
///
/// # Safety
///
/// The group is null or lives.
#[no_mangle]
pub unsafe extern "C" fn flow_finish_buckets(group: *const Group) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on("flow_finish_buckets", group, |group| Ok(group.finish_buckets()?)) }
}
