//! Send and receive.

use std::ffi::c_int;

use crate::arguments::Place;
use crate::group::{Group, member, on};
use crate::memory::Memory;

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The group is null or lives, and the buffer is as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_send(
    group: *const Group,
    data: Memory,
    to: usize,
    tag: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_send", group, |group| {
        // SAFETY: the caller's promise.
        let data = unsafe { data.elements() }?;
        Ok(group.send_with_tag(&data, to, tag)?)
    })
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The group is null or lives, and the buffer is as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_recv(
    group: *const Group,
    data: Memory,
    from: usize,
    tag: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_recv", group, |group| {
        // SAFETY: the caller's promise.
        let mut data = unsafe { data.elements() }?;
        Ok(group.recv_with_tag(&mut data, from, tag)?)
    })
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The group is null or lives, and the buffer is as the header says; `from` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_recv_any(
    group: *const Group,
    data: Memory,
    tag: u32,
    from: *mut usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_recv_any", group, |group| {
        // SAFETY: the caller's promise.
        let from = unsafe { Place::new(from, "from") }?;
        // SAFETY: the caller's promise.
        let mut data = unsafe { data.elements() }?;
        from.set(group.recv_any(&mut data, tag)?);
        Ok(())
    })
}
