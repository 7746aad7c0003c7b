//! Collectives.

use std::ffi::c_int;

use crate::arguments::{list, reduce_op};
use crate::group::{Group, member, on};
use crate::memory::Memory;

/// Does what `flow_comm.h` says.
///
/// # Safety
///
/// The group is null or lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_barrier(group: *const Group) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { member(group) };
    on("flow_barrier", group, |group| Ok(group.barrier()?))
}

/// Defines functions of a group that move data: their names, what C passes, and the method that
/// each calls.
macro_rules! collectives {
    ($($name:ident($($argument:ident: $type:ty),*) |$group:ident| $call:expr;)*) => {$(
        /// Does what `flow_comm.h` says.
        ///
        /// # Safety
        ///
        /// The pointers are null or as the header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(group: *const Group, $($argument: $type),*) -> c_int {
            // SAFETY: the caller's promise.
            let group = unsafe { member(group) };
            // SAFETY: the caller's promise.
            on(stringify!($name), group, |$group| Ok(unsafe { $call }?))
        }
    )*};
}

collectives! {
    flow_all_reduce(data: Memory, op: u32)
        |group| group.all_reduce(&mut data.elements()?, reduce_op(op)?);
    flow_reduce(data: Memory, op: u32, root: usize)
        |group| group.reduce(&mut data.elements()?, reduce_op(op)?, root);
    flow_broadcast(data: Memory, root: usize)
        |group| group.broadcast(&mut data.elements()?, root);
    flow_all_gather(input: Memory, output: Memory)
        |group| group.all_gather(&input.elements()?, &mut output.elements()?);
    flow_gather(input: Memory, output: Memory, root: usize)
        |group| {
            let mut output = (group.rank() == root).then(|| output.elements()).transpose()?;
            group.gather(&input.elements()?, output.as_mut(), root)
        };
    flow_scatter(input: Memory, output: Memory, root: usize)
        |group| {
            let input = (group.rank() == root).then(|| input.elements()).transpose()?;
            group.scatter(input.as_ref(), &mut output.elements()?, root)
        };
    flow_reduce_scatter(input: Memory, output: Memory, op: u32)
        |group| group.reduce_scatter(&input.elements()?, &mut output.elements()?, reduce_op(op)?);
    flow_all_to_all(input: Memory, output: Memory)
        |group| group.all_to_all(&input.elements()?, &mut output.elements()?);
    flow_all_gather_v(input: Memory, output: Memory, counts: *const usize)
        |group| {
            let counts = list(counts, group.world_size(), "counts")?;
            group.all_gather_v(&input.elements()?, &mut output.elements()?, counts)
        };
    flow_reduce_scatter_v(input: Memory, output: Memory, counts: *const usize, op: u32)
        |group| {
            let counts = list(counts, group.world_size(), "counts")?;
            let input = input.elements()?;
            let mut output = output.elements()?;
            group.reduce_scatter_v(&input, &mut output, counts, reduce_op(op)?)
        };
    flow_all_to_all_v(
        input: Memory, input_counts: *const usize, output: Memory, output_counts: *const usize
    )
        |group| {
            let sent = list(input_counts, group.world_size(), "input_counts")?;
            let received = list(output_counts, group.world_size(), "output_counts")?;
            group.all_to_all_v(&input.elements()?, sent, &mut output.elements()?, received)
        };
}
