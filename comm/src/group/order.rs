//! The order of a group's operations: blocking ones run in the caller, others beside it on the
//! thread of their lane.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::ProcessGroup;
use super::lane::Lane;
use super::parts::Parts;
use crate::collectives::host::Collective;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::memory::Buffers;
use crate::operation_context::OperationContext;
use crate::work::{Work, Worker};

impl ProcessGroup {
    /// Starts blocking operations of one lane on the lane's thread: the asynchronous form of each
    /// of them. `run` gets the same group and must use that. `operation` is for errors of
    /// [`Work::wait`], which returns what `run` does.
    ///
    /// ```
    /// use flow_comm::{Lane, ProcessGroup, ReduceOp};
    ///
    /// let group = ProcessGroup::from_env()?; // alone: a group of one
    /// let mut gradient = vec![1_f32; 3];
    /// let work = group.start(Lane::Collectives, "all_reduce", move |group| {
    ///     group.all_reduce(&mut gradient, ReduceOp::Sum)?;
    ///     Ok(gradient)
    /// })?;
    /// // Compute meanwhile.
    /// assert_eq!(work.wait()?, [1.0; 3]);
    /// # Ok::<(), flow_comm::Error>(())
    /// ```
    pub fn start<T: Send + 'static>(
        &self,
        lane: Lane,
        operation: &'static str,
        run: impl FnOnce(&ProcessGroup) -> Result<T> + Send + 'static,
    ) -> Result<Work<T>> {
        self.parts(&operation)?;
        // On the worker's side the group has no workers: its operations run at once, and it keeps
        // no thread alive.
        let group = Self { member: Arc::new(self.without_workers()), ..self.clone() };
        // Until the work is submitted, so that nobody takes the worker for an idle one.
        let mut workers = self.workers().lock();
        if !lane.is_lasting() && !workers.contains_key(&lane) {
            workers.retain(|lane, worker| lane.is_lasting() || !worker.is_idle());
        }
        let worker = match workers.entry(lane) {
            Entry::Occupied(worker) => worker.into_mut(),
            Entry::Vacant(none) => {
                let worker = Worker::start(self.rank())
                    .map_err(|e| self.system(operation, format!("cannot start a thread: {e}")))?;
                none.insert(Arc::new(worker))
            }
        };
        let queued = self.core().recorder.queue(lane == Lane::Collectives);
        Ok(worker.submit(self.rank(), operation, move || queued.run(|| run(&group))))
    }

    /// Runs a blocking operation after the asynchronous ones of its lane that were started before
    /// it.
    pub(crate) fn run_in_order<T>(
        &self,
        lane: Lane,
        operation: impl FnOnce(&Parts) -> Result<T>,
    ) -> Result<T> {
        let parts = self.parts(&lane)?;
        self.drain(lane);
        OperationContext::within(self.timeout, || parts.core.recorder.run(|| operation(parts)))
    }

    /// Runs a collective after the asynchronous ones that were started before it, and after the
    /// launched buckets.
    pub(crate) fn collective(
        &self,
        mut operation: OpDescriptor,
        buffers: Buffers,
        run: Collective,
    ) -> Result<()> {
        operation.digest = self.digest;
        operation.label = self.label;
        self.run_in_order(Lane::Collectives, |group| {
            group.finish_buckets()?;
            group.begin(&mut operation)?;
            run(&group.host.collectives, operation, buffers)
        })
    }
}
