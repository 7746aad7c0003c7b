//! Operations that run beside the caller.

use std::fmt;

use flow_comm::nccl::{CudaGroup, DeviceError, Event, Stream};
use flow_comm::ProcessGroup;
use tch::Tensor;

use crate::error::{failed, Result};
use crate::operation::Call;
use crate::tensors::current_stream;

/// An operation on tensors that was started.
///
/// Its tensors must not be used until [`Work::wait`] has returned. On a GPU the operation overlaps
/// with the work that the program enqueues meanwhile, and `wait` does not block the host: it lets
/// libtorch's stream wait. Dropping a `Work` loses the result; the operation still runs, as the
/// other ranks need it.
#[must_use = "the result comes from wait()"]
pub struct Work<T = Tensor> {
    group: ProcessGroup,
    pending: Pending,
    result: fn(Tensor) -> T,
}

enum Pending {
    Host(flow_comm::Work<Call>),
    Cuda(Enqueued),
}

impl<T> Work<T> {
    /// Starts `call`. `result` makes the caller's result of the output.
    pub(crate) fn start(group: &ProcessGroup, call: Call, result: fn(Tensor) -> T) -> Result<Self> {
        let pending = match call.cuda(group)? {
            Some(cuda) => Pending::Cuda(Enqueued::new(group, &cuda, call)?),
            None => Pending::Host(group.start(call.lane(), call.operation.name(), |group| {
                call.run_on_host(group).map(|()| call)
            })?),
        };
        Ok(Self { group: group.clone(), pending, result })
    }

    /// Waits for the operation and returns its result.
    ///
    /// # Errors
    ///
    /// The operation failed, or the group's timeout is over.
    pub fn wait(self) -> Result<T> {
        let call = match self.pending {
            Pending::Host(work) => work.wait()?,
            Pending::Cuda(enqueued) => enqueued.join(&self.group)?,
        };
        call.finish(&self.group).map(self.result)
    }
}

impl<T> fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

/// An operation that runs on a stream of its own, beside libtorch's.
struct Enqueued {
    /// None once libtorch's stream waits for it.
    call: Option<Call>,
    stream: Stream,
    done: Event,
}

impl Enqueued {
    fn new(group: &ProcessGroup, cuda: &CudaGroup, call: Call) -> Result<Self> {
        let current = current_stream(group, cuda)?;
        let failed = failed(group, call.operation.name());
        let failed = |error: DeviceError| failed(error.to_string());
        let stream = Stream::high_priority(cuda.device()).map_err(failed)?;
        let event = Event::new(cuda.device()).map_err(failed)?;
        // The operation begins when what libtorch has enqueued is done.
        event.record(&current).and_then(|()| stream.wait(&event)).map_err(failed)?;
        call.enqueue(group, cuda, &stream)?;
        event.record(&stream).map_err(failed)?;
        Ok(Self { call: Some(call), stream, done: event })
    }

    /// Lets libtorch's stream wait for the operation.
    fn join(mut self, group: &ProcessGroup) -> Result<Call> {
        let failed = failed(group, "Work::wait");
        let call = self.call.take().ok_or_else(|| failed("the operation is joined".into()))?;
        self.let_libtorch_wait().map_err(failed)?;
        Ok(call)
    }

    fn let_libtorch_wait(&self) -> Result<(), String> {
        let current = flow_autograd::current_stream(self.stream.device());
        current.map_err(|e| e.to_string())?.wait(&self.done).map_err(|e| e.to_string())
    }
}

impl Drop for Enqueued {
    /// libtorch may give the tensors' memory to others only after the operation.
    fn drop(&mut self) {
        if self.call.is_some() {
            if let Err(error) = self.let_libtorch_wait() {
                log::debug!("{error}");
            }
        }
    }
}
