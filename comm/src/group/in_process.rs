//! Groups whose ranks are threads of one process.

use std::sync::Arc;

use super::cuda::Cuda;
use super::parts::{NewGroup, Parts};
use super::{ProcessGroup, group_of, timeout_from_env};
use crate::error::Result;
use crate::world::World;

impl ProcessGroup {
    /// Makes a group of `world_size` ranks in this process, one handle for each: for tests of what
    /// is built on collectives, without starting processes. Each rank belongs on a thread of its
    /// own. All operations work as they do between the processes of a node, by the same code.
    /// [`ProcessGroup::nccl`] does not: a GPU takes one rank of a process.
    ///
    /// Each rank has a flight recorder. The timeline of `FLOW_TRACE`, which is one process' and one
    /// rank's, leaves these groups out.
    ///
    /// A rank that drops its handle, as a thread that panics does, has left the group: ranks that
    /// wait for it get an error.
    ///
    /// ```
    /// use flow_comm::{ProcessGroup, ReduceOp};
    ///
    /// let groups = ProcessGroup::in_process(3)?;
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             let mut sum = [group.rank() as i64];
    ///             group.all_reduce(&mut sum, ReduceOp::Sum).expect("all ranks call it");
    ///             assert_eq!(sum, [3]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), flow_comm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// No ranks, or more than 724, as each maps the memory of all; no memory for them.
    pub fn in_process(world_size: usize) -> Result<Vec<Self>> {
        let timeout = timeout_from_env(0)?;
        let worlds = World::in_process(world_size)?;
        let mut groups = Vec::with_capacity(world_size);
        for (rank, world) in worlds.into_iter().enumerate() {
            let parts = Parts::new(NewGroup::of_world(Arc::new(world), timeout), "join")?;
            groups.push(group_of(parts, rank, Cuda::default()));
        }
        Ok(groups)
    }
}
