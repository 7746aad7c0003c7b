//! Collectives that run beside the caller, each lane on a thread of its own.

use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use flow_kernels::ReduceOp;
use flow_store::fork::ForkSafe;

use super::lane::{Lane, Workers};
use super::parts::Parts;
use super::{Inner, ProcessGroup};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::work::{Work, Worker};

impl ProcessGroup {
    /// Starts [`ProcessGroup::all_reduce`] on `buffer`, which [`Work::wait`] returns.
    pub fn all_reduce_async<B: Buffer + Send + 'static>(
        &self,
        mut buffer: B,
        op: ReduceOp,
    ) -> Result<Work<B>> {
        self.start(Lane::Collectives, "all_reduce", move |group| {
            group.all_reduce(&mut buffer, op).map(|()| buffer)
        })
    }

    /// Starts [`ProcessGroup::reduce`].
    pub fn reduce_async<B: Buffer + Send + 'static>(
        &self,
        mut buffer: B,
        op: ReduceOp,
        root: usize,
    ) -> Result<Work<B>> {
        self.start(Lane::Collectives, "reduce", move |group| {
            group.reduce(&mut buffer, op, root).map(|()| buffer)
        })
    }

    /// Starts [`ProcessGroup::broadcast`].
    pub fn broadcast_async<B: Buffer + Send + 'static>(
        &self,
        mut buffer: B,
        root: usize,
    ) -> Result<Work<B>> {
        self.start(Lane::Collectives, "broadcast", move |group| {
            group.broadcast(&mut buffer, root).map(|()| buffer)
        })
    }

    /// Starts [`ProcessGroup::all_gather`]; both buffers come back.
    pub fn all_gather_async<I, O>(&self, input: I, mut output: O) -> Result<Work<(I, O)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "all_gather", move |group| {
            group.all_gather(&input, &mut output).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::reduce_scatter`]; both buffers come back.
    pub fn reduce_scatter_async<I, O>(
        &self,
        input: I,
        mut output: O,
        op: ReduceOp,
    ) -> Result<Work<(I, O)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "reduce_scatter", move |group| {
            group.reduce_scatter(&input, &mut output, op).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::all_to_all`]; both buffers come back.
    pub fn all_to_all_async<I, O>(&self, input: I, mut output: O) -> Result<Work<(I, O)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "all_to_all", move |group| {
            group.all_to_all(&input, &mut output).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::gather`]; both buffers come back.
    pub fn gather_async<I, O>(
        &self,
        input: I,
        mut output: Option<O>,
        root: usize,
    ) -> Result<Work<(I, Option<O>)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "gather", move |group| {
            group.gather(&input, output.as_mut(), root).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::scatter`]; both buffers come back.
    pub fn scatter_async<I, O>(
        &self,
        input: Option<I>,
        mut output: O,
        root: usize,
    ) -> Result<Work<(Option<I>, O)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "scatter", move |group| {
            group.scatter(input.as_ref(), &mut output, root).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::send`]; the data comes back when it has been sent.
    pub fn send_async<B: Buffer + Send + 'static>(&self, data: B, to: usize) -> Result<Work<B>> {
        self.send_with_tag_async(data, to, 0)
    }

    /// Starts [`ProcessGroup::recv`].
    pub fn recv_async<B: Buffer + Send + 'static>(
        &self,
        buffer: B,
        from: usize,
    ) -> Result<Work<B>> {
        self.recv_with_tag_async(buffer, from, 0)
    }

    /// Starts [`ProcessGroup::send_with_tag`]; the data comes back when it has been sent. Messages
    /// to a rank are sent one after the other, whatever their tags.
    pub fn send_with_tag_async<B: Buffer + Send + 'static>(
        &self,
        data: B,
        to: usize,
        tag: u32,
    ) -> Result<Work<B>> {
        self.start(Lane::To(to), "send", move |group| {
            group.send_with_tag(&data, to, tag).map(|()| data)
        })
    }

    /// Starts [`ProcessGroup::recv_with_tag`]. Receives with other tags, or from other ranks, do
    /// not wait for it.
    pub fn recv_with_tag_async<B: Buffer + Send + 'static>(
        &self,
        mut buffer: B,
        from: usize,
        tag: u32,
    ) -> Result<Work<B>> {
        self.start(Lane::From(from, tag), "recv", move |group| {
            group.recv_with_tag(&mut buffer, from, tag).map(|()| buffer)
        })
    }

    /// Starts [`ProcessGroup::recv_any`]; the sender's rank comes with the buffer.
    pub fn recv_any_async<B: Buffer + Send + 'static>(
        &self,
        mut buffer: B,
        tag: u32,
    ) -> Result<Work<(B, usize)>> {
        self.start(Lane::FromAny(tag), "recv_any", move |group| {
            group.recv_any(&mut buffer, tag).map(|from| (buffer, from))
        })
    }

    /// Starts [`ProcessGroup::barrier`].
    pub fn barrier_async(&self) -> Result<Work<()>> {
        self.start(Lane::Collectives, "barrier", |group| group.barrier())
    }

    /// Runs a blocking operation after the asynchronous ones of its lane that were started before
    /// it.
    pub(super) fn run_in_order<T>(
        &self,
        lane: Lane,
        operation: impl FnOnce(&Parts) -> Result<T>,
    ) -> Result<T> {
        let parts = self.member(&lane)?;
        self.drain(lane);
        parts.core.within(self.timeout, || parts.core.recorder.run(|| operation(parts)))
    }

    /// Waits for the asynchronous operations of a lane that were started.
    pub(super) fn drain(&self, lane: Lane) {
        if let Some(worker) = self.inner.workers.get(lane) {
            worker.drain();
        }
    }

    /// Starts a sequence of blocking operations of one lane, on the lane's thread: for crates that
    /// build on the collectives. `run` gets the same group and must use that.
    pub fn start<T: Send + 'static>(
        &self,
        lane: Lane,
        operation: &'static str,
        run: impl FnOnce(&ProcessGroup) -> Result<T> + Send + 'static,
    ) -> Result<Work<T>> {
        self.member(&operation)?;
        // On the worker's side the group has no workers: its operations run at once, and it keeps
        // no thread alive.
        let group = Self {
            layout: self.layout,
            label: self.label,
            timeout: self.timeout,
            inner: Arc::new(ForkSafe::new(Inner {
                workers: Workers::default(),
                cuda: Mutex::default(),
                parts: self.inner.parts.clone(),
                local_rank: self.inner.local_rank,
            })),
        };
        // Until the work is submitted, so that nobody takes the worker for an idle one.
        let mut workers = self.inner.workers.lock();
        if !lane.is_lasting() && !workers.contains_key(&lane) {
            workers.retain(|lane, worker| lane.is_lasting() || !worker.is_idle());
        }
        let worker = match workers.entry(lane) {
            Entry::Occupied(worker) => worker.into_mut(),
            Entry::Vacant(none) => {
                let started = Worker::start(self.rank());
                let worker = started
                    .map_err(|e| self.system(operation, format!("cannot start a thread: {e}")))?;
                none.insert(Arc::new(worker))
            }
        };
        let queued = self.core().recorder.queue(lane == Lane::Collectives);
        Ok(worker.submit(self.rank(), operation, move || queued.run(|| run(&group))))
    }
}
