//! Reductions of shared memory that do not wait.

use std::ffi::c_int;
use std::sync::Arc;

use flow_comm::ProcessGroup;

use crate::arguments::{list, reduce_op, Place};
use crate::group::{on, Group};
use crate::memory::{Elements, Memory};
use crate::status::{Failure, Result};

/// See `flow_comm.h`.
///
/// # Safety
///
/// The group is null or lives; `pieces` is null, or so many buffers as the header says, until they
/// are reduced; `launched` is null or can be written.
#[no_mangle]
pub unsafe extern "C" fn flow_launch_bucket(
    group: *const Group,
    pieces: *const Memory,
    count: usize,
    number: u32,
    op: u32,
    launched: *mut bool,
) -> c_int {
    let body = |group: &ProcessGroup| {
        // SAFETY: the caller's promise.
        let (pieces, launched) =
            unsafe { (list(pieces, count, "pieces")?, Place::new(launched, "launched")?) };
        let refused = |reason: &str| {
            let rank = group.ranks()[group.rank()];
            Failure::argument(format!("rank {rank}: bucket {number}: {reason}"))
        };
        // SAFETY: the caller's promise.
        let pieces = pieces.iter().map(|piece| unsafe { piece.elements() });
        let pieces = pieces.collect::<Result<Vec<_>>>()?;
        let dtype = pieces.first().ok_or_else(|| refused("it has no pieces"))?.dtype();
        if pieces.iter().any(|piece| piece.dtype() != dtype) {
            return Err(refused("its pieces must have one type"));
        }
        let lengths = pieces.iter().map(Elements::count).collect();
        let segments = Arc::new(group.segments(number, dtype, lengths)?);
        for (index, piece) in pieces.into_iter().enumerate() {
            if !segments.set_piece(index, piece) {
                return Err(refused(
                    "the memory is not shared, or not aligned: flow_alloc gives such memory",
                ));
            }
        }
        let op = reduce_op(op)?;
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
