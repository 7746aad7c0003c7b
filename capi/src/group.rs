//! Joining, sub-groups, timeouts.

use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::sync::{Arc, Mutex};

use flow_comm::env::{Membership, Rendezvous};
use flow_comm::{DEFAULT_TIMEOUT, Error, Label, ProcessGroup, Segments};

use crate::arguments::{Place, duration, list, optional_text, reference, text};
use crate::status::{Failure, Result, call};

/// The C type `flow_group`.
pub struct Group {
    pub group: ProcessGroup,
    /// The last bucket of each number.
    pub buckets: Mutex<HashMap<u32, Arc<Segments>>>,
}

/// The C type `flow_membership`.
#[repr(C)]
pub struct Member {
    rank: usize,
    world_size: usize,
    local_rank: usize,
    local_world_size: usize,
    node: i64,
    address: *const c_char,
    token: *const c_char,
}

/// Returns the group that a handle stands for.
///
/// # Safety
///
/// It is null or lives.
pub unsafe fn member<'a>(group: *const Group) -> Result<&'a ProcessGroup> {
    // SAFETY: the caller's promise.
    unsafe { reference(group, "group") }.map(|group| &group.group)
}

/// Runs the body of the C function of this name, with its group.
pub fn on(
    name: &str,
    group: Result<&ProcessGroup>,
    body: impl FnOnce(&ProcessGroup) -> Result<()>,
) -> c_int {
    let rank = group.as_ref().ok().map(|group| group.ranks()[group.rank()]);
    call(name, rank, || body(group?))
}

fn cannot_join(rank: usize, reason: String) -> Failure {
    Failure::argument(format!("rank {rank}: flow_join: {reason}"))
}

fn handle(group: ProcessGroup) -> *mut Group {
    Box::into_raw(Box::new(Group { group, buckets: Mutex::default() }))
}

impl Member {
    /// # Safety
    ///
    /// Its texts are null or end with a zero.
    unsafe fn membership(&self) -> Result<Membership> {
        // SAFETY: the caller's promise.
        let address = unsafe { optional_text(self.address, "address") }?;
        // SAFETY: the caller's promise.
        let token = unsafe { optional_text(self.token, "token") }?;
        let Self { rank, world_size, local_rank, local_world_size, .. } = *self;
        if rank >= world_size {
            return Err(cannot_join(
                rank,
                format!("the rank must be below the world size, {world_size}"),
            ));
        }
        if local_rank >= local_world_size || local_world_size > world_size {
            return Err(cannot_join(
                rank,
                format!(
                    "local rank {local_rank} of {local_world_size}: it must be below that, and \
                     that at most the world size, {world_size}"
                ),
            ));
        }
        let rendezvous = match (address, token) {
            (None, _) if world_size == 1 => Rendezvous::None,
            (Some(address), Some(token)) => {
                let address = address.parse().map_err(|error: flow_comm::store::Error| {
                    cannot_join(rank, error.to_string())
                })?;
                Rendezvous::RankZero { address, token: token.into() }
            }
            _ => {
                return Err(cannot_join(
                    rank,
                    format!("{world_size} ranks need an address and a token"),
                ));
            }
        };
        let node = usize::try_from(self.node).ok();
        Ok(Membership { rank, world_size, local_rank, local_world_size, node, rendezvous })
    }
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The pointers are null or as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_join(
    member: *const Member,
    name: *const c_char,
    timeout: f64,
    joined: *mut *mut Group,
) -> c_int {
    call("flow_join", None, || {
        // SAFETY: the caller's promise.
        let member = unsafe { member.as_ref() };
        // SAFETY: the caller's promise.
        let name = unsafe { optional_text(name, "name") }?;
        // SAFETY: the caller's promise.
        let joined = unsafe { Place::new(joined, "group") }?;
        let name = name.unwrap_or_default();
        let timeout = if timeout == 0.0 { DEFAULT_TIMEOUT } else { duration(timeout)? };
        let group = match member {
            None if name.is_empty() => ProcessGroup::from_env_within(timeout)?,
            None => {
                let membership = Membership::from_env().map_err(Error::from)?;
                ProcessGroup::join_named(&membership, name, timeout)?
            }
            Some(member) => {
                // SAFETY: the caller's promise.
                let membership = unsafe { member.membership() }?;
                ProcessGroup::join_named(&membership, name, timeout)?
            }
        };
        joined.set(handle(group));
        Ok(())
    })
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The group came from this library, and is not used any more; or it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_leave(group: *mut Group) {
    if !group.is_null() {
        // SAFETY: the caller's promise.
        let group = unsafe { Box::from_raw(group) };
        call("flow_leave", None, || {
            drop(group);
            Ok(())
        });
    }
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The pointers are null or as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_new_group_of(
    group: *const Group,
    ranks: *const usize,
    count: usize,
    key: *const c_char,
    made: *mut *mut Group,
) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_new_group_of", group, |group| {
        // SAFETY: the caller's promise.
        let ranks = unsafe { list(ranks, count, "ranks") }?;
        // SAFETY: the caller's promise.
        let key = unsafe { text(key, "key") }?;
        // SAFETY: the caller's promise.
        let made = unsafe { Place::new(made, "made") }?;
        made.set(handle(group.new_group_of(ranks, key)?));
        Ok(())
    })
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The pointers are null or as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_with_timeout(
    group: *const Group,
    seconds: f64,
    made: *mut *mut Group,
) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_with_timeout", group, |group| {
        // SAFETY: the caller's promise.
        let made = unsafe { Place::new(made, "made") }?;
        made.set(handle(group.with_timeout(duration(seconds)?)));
        Ok(())
    })
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The pointers are null or as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_with_label(
    group: *const Group,
    operation: *const c_char,
    elements: *const c_char,
    made: *mut *mut Group,
) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_with_label", group, |group| {
        // SAFETY: the caller's promise.
        let operation = unsafe { text(operation, "operation") }?;
        // SAFETY: the caller's promise.
        let elements = unsafe { text(elements, "elements") }?;
        // SAFETY: the caller's promise.
        let made = unsafe { Place::new(made, "made") }?;
        let label = Label::new(operation, elements).ok_or_else(|| {
            Failure::argument(format!(
                "no label: the operation is one of errors, such as all_reduce, and not \
                 {operation:?}, and the elements have at most {} bytes, and are not {elements:?}",
                Label::LENGTH
            ))
        })?;
        made.set(handle(group.with_label(label)));
        Ok(())
    })
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The group is null or lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_set_timeout(group: *const Group, seconds: f64) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_set_timeout", group, |group| {
        group.set_timeout(duration(seconds)?);
        Ok(())
    })
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The pointers are null or as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_abort(group: *const Group, cause: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_abort", group, |group| {
        // SAFETY: the caller's promise.
        let cause = unsafe { text(cause, "cause") }?;
        group.check_process("abort")?;
        group.abort(cause);
        Ok(())
    })
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The pointers are null or as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_reconfigure(group: *const Group, made: *mut *mut Group) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_reconfigure", group, |group| {
        // SAFETY: the caller's promise.
        let made = unsafe { Place::new(made, "made") }?;
        made.set(handle(group.reconfigure()?));
        Ok(())
    })
}

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The pointers are null or as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_newcomers(group: *const Group, count: *mut usize) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_newcomers", group, |group| {
        // SAFETY: the caller's promise.
        let count = unsafe { Place::new(count, "count") }?;
        count.set(group.newcomers()?);
        Ok(())
    })
}

/// Defines functions that return a number of a group, and 0 for null.
macro_rules! numbers_of_group {
    ($($name:ident => $method:ident;)*) => {$(
        /// Does what `flow_comm.h` says.
        ///
        /// # Safety
        ///
        /// The group is null or lives.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(handle: *const Group) -> usize {
            // SAFETY: the caller's promise.
            unsafe { member(handle) }.map_or(0, |group| group.$method())
        }
    )*};
}

numbers_of_group! {
    flow_rank => rank;
    flow_world_size => world_size;
    flow_local_rank => local_rank;
    flow_local_world_size => local_world_size;
}
