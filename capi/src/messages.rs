//! Send and receive.

use std::ffi::c_int;

use crate::arguments::Place;
use crate::group::{on, Group};
use crate::memory::Memory;

/// See `flow_comm.h`.
///
/// # Safety
///
/// The group is null or lives, and the buffer is as the header says.
#[no_mangle]
pub unsafe extern "C" fn flow_send(
    group: *const Group,
    data: Memory,
    to: usize,
    tag: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on("flow_send", group, |group| Ok(group.send_with_tag(&data.elements()?, to, tag)?)) }
}

/// See `flow_comm.h`.
///
/// # Safety
///
/// The group is null or lives, and the buffer is as the header says.
#[no_mangle]
pub unsafe extern "C" fn flow_recv(
    group: *const Group,
    data: Memory,
    from: usize,
    tag: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on("flow_recv", group, |group| Ok(group.recv_with_tag(&mut data.elements()?, from, tag)?))
    }
}

/// See `flow_comm.h`.
///
/// # Safety
///
/// The group is null or lives, and the buffer is as the header says; `from` is null or can be
/// written.
#[no_mangle]
pub unsafe extern "C" fn flow_recv_any(
    group: *const Group,
    data: Memory,
    tag: u32,
    from: *mut usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on("flow_recv_any", group, |group| {
            let from = Place::new(from, "from")?;
            from.set(group.recv_any(&mut data.elements()?, tag)?);
            Ok(())
        })
    }
}
