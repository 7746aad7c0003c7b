//! Operations that run beside the caller.

use std::fmt;

use flow_comm::ProcessGroup;
use flow_comm::nccl::{CudaGroup, DeviceError, Event, Stream};
use tch::Tensor;

use crate::error::{Result, failed};
use crate::prepared::Prepared;
use crate::tensors::current_stream;

/// An operation on tensors that was started.
///
/// Its tensors must not be used until [`Work::wait`] has returned. On a GPU the operation overlaps
/// with the work that the program enqueues meanwhile. `wait` does not block the host: it lets
/// libtorch's stream wait. Dropping a `Work` loses the result; the operation still runs, as the
/// other ranks need it.
#[must_use = "the result comes from wait()"]
pub struct Work<T = Tensor> {
    wait: Box<dyn FnOnce() -> Result<T> + Send>,
}

impl<T> Work<T> {
    /// Starts an operation. `result` makes the caller's result of its output.
    pub(crate) fn start<P: Prepared>(
        group: &ProcessGroup,
        prepared: P,
        result: fn(P::Output) -> T,
    ) -> Result<Self>
    where
        T: 'static,
    {
        let group = group.clone();
        let wait: Box<dyn FnOnce() -> Result<T> + Send> = match prepared.cuda(&group)? {
            Some(cuda) => {
                let enqueued = Enqueued::new(&group, &cuda, prepared)?;
                Box::new(move || enqueued.join(&group)?.finish(&group).map(result))
            }
            None => {
                let wait = prepared.start_on_host(&group)?;
                Box::new(move || wait()?.finish(&group).map(result))
            }
        };
        Ok(Self { wait })
    }

    /// Waits for the operation and returns its result.
    ///
    /// # Errors
    ///
    /// The operation failed, or the group's timeout is over.
    pub fn wait(self) -> Result<T> {
        (self.wait)()
    }
}

impl<T> fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

/// An operation that runs on a stream of its own, beside libtorch's.
struct Enqueued<P> {
    /// None once libtorch's stream waits for it.
    prepared: Option<P>,
    stream: Stream,
    done: Event,
}

impl<P: Prepared> Enqueued<P> {
    fn new(group: &ProcessGroup, cuda: &CudaGroup, prepared: P) -> Result<Self> {
        let current = current_stream(group, cuda)?;
        let name = prepared.name();
        let (stream, event) =
            stream_after(&current, cuda).map_err(|error| failed(group, name)(error.to_string()))?;
        prepared.enqueue(group, cuda, &stream)?;
        event.record(&stream).map_err(|error| failed(group, name)(error.to_string()))?;
        Ok(Self { prepared: Some(prepared), stream, done: event })
    }

    /// Lets libtorch's stream wait for the operation.
    fn join(mut self, group: &ProcessGroup) -> Result<P> {
        let failed = failed(group, "Work::wait");
        let joined =
            self.prepared.take().ok_or_else(|| failed("the operation is joined".into()))?;
        self.let_libtorch_wait().map_err(failed)?;
        Ok(joined)
    }
}

impl<P> Enqueued<P> {
    fn let_libtorch_wait(&self) -> Result<(), String> {
        let current = flow_autograd::current_stream(self.stream.device())
            .map_err(|error| error.to_string())?;
        current.wait(&self.done).map_err(|error| error.to_string())
    }
}

/// Makes a stream whose operations begin when what is enqueued in `current` is done, and an event.
fn stream_after(current: &Stream, cuda: &CudaGroup) -> Result<(Stream, Event), DeviceError> {
    let stream = Stream::high_priority(cuda.device())?;
    let event = Event::new(cuda.device())?;
    event.record(current)?;
    stream.wait(&event)?;
    Ok((stream, event))
}

impl<P> Drop for Enqueued<P> {
    /// libtorch may give the tensors' memory to others only after the operation.
    fn drop(&mut self) {
        if self.prepared.is_some()
            && let Err(error) = self.let_libtorch_wait()
        {
            log::debug!("{error}");
        }
    }
}
