//! Reductions of shared memory that do not wait.

use std::ffi::c_int;
use std::sync::{Arc, PoisonError};

use flow_comm::{ProcessGroup, Segments};

use crate::arguments::{Place, list, reduce_op};
use crate::group::{Group, member, on};
use crate::memory::{Elements, Memory};
use crate::status::{Failure, Result};

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The group is null or lives; `pieces` is null, or so many buffers as the header says, until they
/// are reduced; `launched` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_launch_bucket(
    group: *const Group,
    pieces: *const Memory,
    count: usize,
    number: u32,
    op: u32,
    launched: *mut bool,
) -> c_int {
    // SAFETY: the caller's promise.
    let handle = unsafe { group.as_ref() };
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_launch_bucket", group, |group| {
        // SAFETY: the caller's promise.
        let pieces = unsafe { list(pieces, count, "pieces") }?;
        // SAFETY: the caller's promise.
        let launched = unsafe { Place::new(launched, "launched") }?;
        // SAFETY: the caller's promise.
        let pieces = pieces.iter().map(|piece| unsafe { piece.elements() });
        let segments = segments(group, number, pieces.collect::<Result<_>>()?)?;
        let op = reduce_op(op)?;
        let is_launched = group.launch_bucket(&segments, op)?;
        launched.set(is_launched);
        if let Some(handle) = handle.filter(|_| is_launched) {
            let mut buckets = handle.buckets.lock().unwrap_or_else(PoisonError::into_inner);
            buckets.insert(number, segments);
        }
        Ok(())
    })
}

/// Makes the bucket that consists of these pieces.
fn segments(group: &ProcessGroup, number: u32, pieces: Vec<Elements>) -> Result<Arc<Segments>> {
    let Some(dtype) = pieces.first().map(Elements::dtype) else {
        return Err(refused(group, number, "it has no pieces"));
    };
    if pieces.iter().any(|piece| piece.dtype() != dtype) {
        return Err(refused(group, number, "its pieces must have one type"));
    }
    let lengths = pieces.iter().map(Elements::count).collect();
    let segments = Arc::new(group.segments(number, dtype, lengths)?);
    for (index, piece) in pieces.into_iter().enumerate() {
        if !segments.set_piece(index, piece) {
            let reason = "the memory is not shared, or not aligned: flow_alloc gives such memory";
            return Err(refused(group, number, reason));
        }
    }
    Ok(segments)
}

fn refused(group: &ProcessGroup, number: u32, reason: &str) -> Failure {
    let rank = group.ranks()[group.rank()];
    Failure::argument(format!("rank {rank}: bucket {number}: {reason}"))
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The group is null or lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_progress(group: *const Group) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_progress", group, |group| Ok(group.progress()?))
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The group is null or lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_finish_buckets(group: *const Group) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_finish_buckets", group, |group| Ok(group.finish_buckets()?))
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The group is null or lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_bucket_age(group: *const Group, number: u32) -> f64 {
    // SAFETY: the caller's promise.
    let Some(group) = (unsafe { group.as_ref() }) else { return -1.0 };
    let buckets = group.buckets.lock().unwrap_or_else(PoisonError::into_inner);
    let reduced = buckets.get(&number).and_then(|segments| segments.finished());
    reduced.map_or(-1.0, |reduced| reduced.elapsed().as_secs_f64())
}

/// Does what `flow_comm.h` says.
#[unsafe(no_mangle)]
pub extern "C" fn flow_end_step() {
    flow_comm::trace::end_step();
}
