//! Who reduces buckets while backward runs: the hooks themselves, or a thread where a core is to
//! spare.

use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use flow_comm::nccl::CudaGroup;
use flow_comm::{ProcessGroup, ReduceOp, Result, Segments};

/// Forces one of the two: `hooks` or `thread`.
const CHOICE: &str = "FLOW_DDP_PROGRESS";

/// By what means gradients are reduced.
#[derive(Clone)]
pub(crate) enum ReducePath {
    Cpu(Arc<Progress>),
    /// On the GPU, where reductions are enqueued, and nobody waits for them but libtorch's stream.
    Cuda(Arc<CudaGroup>),
}

impl ReducePath {
    pub fn cuda(&self) -> Option<&Arc<CudaGroup>> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(cuda) => Some(cuda),
        }
    }

    /// Called when a hook has done its own work.
    pub fn advance(&self) -> Result<()> {
        match self {
            Self::Cpu(progress) => progress.advance(),
            Self::Cuda(cuda) => cuda.check(),
        }
    }
}

/// Launches buckets in order, and finishes them.
pub(crate) enum Progress {
    /// A hook posts its bucket and reduces its share of what all ranks have reached, without
    /// waiting; the rest is done at the end of backward.
    Hooks(ProcessGroup),
    Thread(CommunicationThread),
}

impl Progress {
    /// A thread only if every rank's computing threads leave a core for it: otherwise it would
    /// steal from backward.
    pub fn choose(group: &ProcessGroup, local_ranks: usize) -> std::result::Result<Self, String> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let busy = local_ranks * usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1);
        let thread = match std::env::var(CHOICE).as_deref() {
            Ok("hooks") => false,
            Ok("thread") => true,
            Ok(other) => return Err(format!("{CHOICE}={other} must be \"hooks\" or \"thread\"")),
            Err(_) => busy + local_ranks <= cores,
        };
        if thread {
            let thread = CommunicationThread::start(group.clone())
                .map_err(|e| format!("cannot start a thread: {e}"))?;
            Ok(Self::Thread(thread))
        } else {
            Ok(Self::Hooks(group.clone()))
        }
    }

    /// Hands a bucket over; false if that must be tried again later.
    pub fn post(&self, segments: &Arc<Segments>) -> Result<bool> {
        match self {
            Self::Hooks(group) => group.launch_bucket(segments, ReduceOp::Avg),
            Self::Thread(thread) => {
                thread.post(segments);
                Ok(true)
            }
        }
    }

    fn advance(&self) -> Result<()> {
        match self {
            Self::Hooks(group) => group.progress(),
            Self::Thread(_) => Ok(()),
        }
    }

    /// Waits for all buckets handed over; says when each was finished.
    pub fn finish(&self) -> Result<Vec<(u32, Instant)>> {
        match self {
            Self::Hooks(group) => group.finish_buckets(),
            Self::Thread(thread) => thread.finish(),
        }
    }
}

#[derive(Default)]
struct Outcome {
    pending: usize,
    finished: Vec<(u32, Instant)>,
    error: Option<flow_comm::Error>,
}

/// Reduces buckets one after the other, in the order of their coming.
pub(crate) struct CommunicationThread {
    buckets: Option<mpsc::Sender<Arc<Segments>>>,
    outcome: Arc<(Mutex<Outcome>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl CommunicationThread {
    fn start(group: ProcessGroup) -> std::io::Result<Self> {
        let (buckets, incoming) = mpsc::channel::<Arc<Segments>>();
        let outcome = Arc::new((Mutex::new(Outcome::default()), Condvar::new()));
        let shared = Arc::clone(&outcome);
        let run = move || {
            for segments in incoming {
                let done = reduce(&group, &segments);
                let (outcome, change) = &*shared;
                let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
                match done {
                    Ok(finished) => outcome.finished.extend(finished),
                    Err(error) => outcome.error = outcome.error.take().or(Some(error)),
                }
                outcome.pending -= 1;
                change.notify_all();
            }
        };
        let thread = std::thread::Builder::new().name("flow-ddp".into()).spawn(run)?;
        Ok(Self { buckets: Some(buckets), outcome, thread: Some(thread) })
    }

    fn post(&self, segments: &Arc<Segments>) {
        self.outcome.0.lock().unwrap_or_else(PoisonError::into_inner).pending += 1;
        if let Some(buckets) = &self.buckets {
            // The thread ends only when the sender is dropped.
            let _ = buckets.send(Arc::clone(segments));
        }
    }

    fn finish(&self) -> Result<Vec<(u32, Instant)>> {
        let (outcome, change) = &*self.outcome;
        let outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
        // Each reduction is bounded by the group's timeout.
        let mut outcome =
            change.wait_while(outcome, |o| o.pending > 0).unwrap_or_else(PoisonError::into_inner);
        match outcome.error.take() {
            Some(error) => Err(error),
            None => Ok(std::mem::take(&mut outcome.finished)),
        }
    }
}

fn reduce(group: &ProcessGroup, segments: &Arc<Segments>) -> Result<Vec<(u32, Instant)>> {
    let mut finished = Vec::new();
    while !group.launch_bucket(segments, ReduceOp::Avg)? {
        finished.extend(group.finish_buckets()?);
    }
    finished.extend(group.finish_buckets()?);
    Ok(finished)
}

impl Drop for CommunicationThread {
    fn drop(&mut self) {
        self.buckets = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
