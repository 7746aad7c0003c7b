//! A communicator: a group's ranks, as NCCL knows them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use flow_kernels::ReduceOp;
use flow_kernels::cuda::{Device, DeviceMemory, Event, Stream};

use super::library::Library;
use super::result::{CommState, Config, NcclError, UniqueId};
use super::sys::ncclComm_t;
use crate::error::Error;

/// The interval at which a call of NCCL that is under way is checked; it grows from the first to
/// the second.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(5));
/// Ranks sum up so many bytes when they connect: NCCL takes other ways for few than for many.
const CONNECTING_SUMS: [usize; 2] = [4, 4 << 20];
/// The time that an abort waits for the calls of other threads to return.
const ACTIVE_CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// The time that finalizing a communicator may take: all ranks take part.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(10);

/// The reason for which a communicator could not be made or used.
pub enum CommunicatorError {
    /// NCCL reported an error.
    Nccl(NcclError),
    /// The caller's check ended the wait with this error.
    Cancelled(Error),
    /// It has been aborted.
    Aborted,
}

impl From<NcclError> for CommunicatorError {
    fn from(error: NcclError) -> Self {
        CommunicatorError::Nccl(error)
    }
}

/// Called repeatedly during a wait. Its error ends the wait.
pub type CancelCheck<'a> = &'a mut dyn FnMut() -> Result<(), Error>;

/// NCCL's handle of a communicator.
#[derive(Clone, Copy)]
pub(super) struct Handle(pub(super) ncclComm_t);

// SAFETY: NCCL's communicators may be used by any thread, by one at a time; `ncclCommAbort` and
// `ncclCommGetAsyncError` at any time.
unsafe impl Send for Handle {}
// SAFETY: as above; a thread that enqueues operations holds the lock on the calls.
unsafe impl Sync for Handle {}

/// The part of one rank in a communicator. Operations only enqueue work on a stream; callers issue
/// them one at a time.
pub struct Communicator {
    pub(super) library: &'static Library,
    pub(super) device: Arc<Device>,
    /// Made without blocking, so that making it can be given up; it is only ever split.
    root: Handle,
    /// Split off `root`. It blocks the caller until an operation has been enqueued; one that does
    /// not would start a thread for each.
    pub(super) work: Handle,
    pub(super) rank: usize,
    size: usize,
    /// Calls of NCCL that are under way.
    active_calls: AtomicUsize,
    /// Held in all calls but those that NCCL allows beside others.
    calls: Mutex<()>,
    aborted: AtomicBool,
}

impl Communicator {
    /// Meets the ranks that have the same `id`. Every rank calls this.
    pub fn new(
        device: &Arc<Device>,
        id: &UniqueId,
        rank: usize,
        size: usize,
        cancelled: CancelCheck<'_>,
    ) -> Result<Arc<Self>, CommunicatorError> {
        let library = Library::get()
            .map_err(|error| CommunicatorError::Nccl(NcclError::missing(error.to_string())))?;
        if std::env::var_os("NCCL_COMM_BLOCKING").is_some() {
            let reason =
                "NCCL_COMM_BLOCKING is set: unset it, as Flow needs both kinds of communicators";
            return Err(CommunicatorError::Nccl(NcclError::missing(reason.into())));
        }
        bind(device)?;
        // Without shared resources: aborting a part would abort the whole.
        let config = Config::new(false);
        let mut root = std::ptr::null_mut();
        // SAFETY: `root` is writable; the configuration and the id are read before the call
        // returns.
        unsafe { library.comm_init_rank_config(&mut root, size, id, rank, &config)? };
        Self::of(library, device, Handle(root), rank, size, cancelled)
    }

    /// Makes a communicator of the ranks that give the same `color`, numbered in the order of
    /// `key`; None for ranks that give no color. Every rank calls this.
    pub fn split(
        &self,
        color: Option<u32>,
        key: usize,
        cancelled: CancelCheck<'_>,
    ) -> Result<Option<Arc<Self>>, CommunicatorError> {
        bind(&self.device)?;
        let _lock = self.lock_calls()?;
        let config = Config::new(false);
        let root = split(self.library, self.root, color, key, &config, cancelled)?;
        let Some(root) = root else { return Ok(None) };
        // SAFETY: the new communicator is ready, and nobody else has it.
        let rank = unsafe { self.library.comm_user_rank(root.0)? };
        // SAFETY: as above.
        let size = unsafe { self.library.comm_count(root.0)? };
        Self::of(self.library, &self.device, root, rank, size, cancelled).map(Some)
    }

    fn of(
        library: &'static Library,
        device: &Arc<Device>,
        root: Handle,
        rank: usize,
        size: usize,
        cancelled: CancelCheck<'_>,
    ) -> Result<Arc<Self>, CommunicatorError> {
        let config = Config::new(true);
        let work = settle(library, root, cancelled)
            .and_then(|()| split(library, root, Some(0), rank, &config, cancelled))
            .and_then(|work| work.ok_or(CommunicatorError::Aborted));
        let work = match work {
            Ok(work) => work,
            Err(failure) => {
                // SAFETY: the handle is NCCL's, and is not used again.
                let _ = unsafe { library.comm_abort(root.0) };
                return Err(failure);
            }
        };
        let communicator = Self {
            library,
            device: Arc::clone(device),
            root,
            work,
            rank,
            size,
            active_calls: AtomicUsize::new(0),
            calls: Mutex::new(()),
            aborted: AtomicBool::new(false),
        };
        let communicator = Arc::new(communicator);
        if size > 1 {
            communicator.connect(cancelled)?;
        }
        Ok(communicator)
    }

    /// Has NCCL connect the ranks, now that all are here. It does so in the first collectives, on the
    /// caller's thread: were one missing then, the others would wait in a call that nothing can end. If
    /// one fails here, the thread that is in that call is left to the end of the process.
    fn connect(self: &Arc<Self>, cancelled: CancelCheck<'_>) -> Result<(), CommunicatorError> {
        let own = Arc::clone(self);
        let (done, outcome) = mpsc::channel();
        std::thread::Builder::new()
            .name("flow-nccl-join".into())
            .spawn(move || done.send(own.sum_up()))
            .map_err(|error| NcclError::missing(format!("cannot start a thread: {error}")))?;
        loop {
            match outcome.recv_timeout(POLL_INTERVALS.1) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(CommunicatorError::Aborted),
            }
            if let Err(error) = cancelled() {
                self.abort();
                return Err(CommunicatorError::Cancelled(error));
            }
        }
    }

    fn sum_up(&self) -> Result<(), CommunicatorError> {
        let stream = Stream::high_priority(&self.device).map_err(refused)?;
        for bytes in CONNECTING_SUMS {
            let mut memory = DeviceMemory::allocate(&self.device, bytes).map_err(refused)?;
            // SAFETY: the memory is used on this stream only. It is freed when the device is done.
            let enqueued = unsafe { self.all_reduce(&mut memory, ReduceOp::Sum, &stream) };
            let summed = enqueued.and_then(|()| self.wait(&stream));
            if summed.is_err() {
                // Else nothing would free the device, for which the memory waits.
                self.abort();
                return summed;
            }
        }
        Ok(())
    }

    /// Waits until what was enqueued on the stream is over, or the communicator fails or is aborted.
    fn wait(&self, stream: &Stream) -> Result<(), CommunicatorError> {
        let done = Event::new(&self.device).map_err(refused)?;
        done.record(stream).map_err(refused)?;
        poll(|| {
            self.check()?;
            done.is_done().map_err(refused)
        })
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the error of the device, or between ranks, since the last look.
    pub fn check(&self) -> Result<(), CommunicatorError> {
        let _call = self.enter()?;
        // SAFETY: the handle is valid as long as the communicator is not aborted, which waits for
        // us.
        unsafe { self.library.async_error(self.work.0)? };
        Ok(())
    }

    /// Ends whatever is under way, on the device too; every later call fails. May be called by any
    /// thread at any time.
    ///
    /// Returns whether it could. It cannot while another thread is in a call of NCCL's that does
    /// not come back. That call would use the communicator after it is freed. Then only the end of
    /// the process helps.
    pub fn abort(&self) -> bool {
        if self.aborted.swap(true, Ordering::SeqCst) {
            return true;
        }
        let deadline = Instant::now() + ACTIVE_CALL_TIMEOUT;
        while self.active_calls.load(Ordering::SeqCst) > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = bind(&self.device);
        for handle in [self.work, self.root] {
            // SAFETY: the handles are NCCL's, no thread is in a call with them, and none will be.
            if let Err(error) = unsafe { self.library.comm_abort(handle.0) } {
                log::warn!("rank {} of {}: {error}", self.rank, self.size);
            }
        }
        true
    }

    /// For calls that must not be made beside others.
    pub(super) fn lock_calls(
        &self,
    ) -> Result<(MutexGuard<'_, ()>, ActiveCall<'_>), CommunicatorError> {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((calls, self.enter()?))
    }

    fn enter(&self) -> Result<ActiveCall<'_>, CommunicatorError> {
        self.active_calls.fetch_add(1, Ordering::SeqCst);
        let call = ActiveCall(self);
        if self.aborted.load(Ordering::SeqCst) {
            return Err(CommunicatorError::Aborted);
        }
        Ok(call)
    }
}

impl Drop for Communicator {
    /// Finalizes the communicator together with the other ranks. A rank that waits too long for the
    /// last of them leaves the rest to the end of its process.
    fn drop(&mut self) {
        if self.aborted.load(Ordering::SeqCst) {
            return;
        }
        let library = self.library;
        let device = Arc::clone(&self.device);
        let work = self.work;
        let root = self.root;
        let (done, outcome) = mpsc::channel();
        let thread = std::thread::Builder::new().name("flow-nccl-end".into()).spawn(move || {
            let _ = bind(&device);
            // SAFETY: nobody else has the handles any more.
            let _ = done.send(unsafe { finalize(library, work, root) });
        });
        if thread.is_err() {
            return;
        }
        match outcome.recv_timeout(FINALIZE_TIMEOUT) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::warn!("rank {} of {}: {error}", self.rank, self.size),
            Err(_) => log::warn!(
                "rank {} of {}: other ranks have not left NCCL's communicator",
                self.rank,
                self.size
            ),
        }
    }
}

/// Finalizes and frees a communicator together with the other ranks.
///
/// # Safety
///
/// Nobody else has the handles any more.
unsafe fn finalize(library: &Library, work: Handle, root: Handle) -> Result<(), NcclError> {
    // SAFETY: the caller's promise.
    unsafe {
        library.comm_finalize(work.0)?;
        library.comm_destroy(work.0)?;
        library.comm_finalize(root.0)?;
        let begin = Instant::now();
        while matches!(library.async_error(root.0), Ok(CommState::InProgress))
            && begin.elapsed() < FINALIZE_TIMEOUT
        {
            std::thread::sleep(POLL_INTERVALS.1);
        }
        library.comm_destroy(root.0)
    }
}

/// A call of NCCL that a thread is in.
pub(super) struct ActiveCall<'a>(&'a Communicator);

impl Drop for ActiveCall<'_> {
    fn drop(&mut self) {
        self.0.active_calls.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Makes the device the thread's current one.
pub(super) fn bind(device: &Device) -> Result<(), NcclError> {
    device.make_current().map_err(|error| NcclError::missing(error.to_string()))
}

fn refused(error: flow_kernels::cuda::Error) -> CommunicatorError {
    NcclError::missing(error.to_string()).into()
}

/// Waits until what was begun on a non-blocking communicator is over.
fn settle(
    library: &Library,
    comm: Handle,
    cancelled: CancelCheck<'_>,
) -> Result<(), CommunicatorError> {
    poll(|| {
        // SAFETY: the handle is NCCL's, of a communicator that is being made or split by this
        // thread.
        if let CommState::Done = unsafe { library.async_error(comm.0)? } {
            return Ok(true);
        }
        cancelled().map_err(CommunicatorError::Cancelled)?;
        Ok(false)
    })
}

/// Asks again and again, until it is over or fails.
fn poll(
    mut is_over: impl FnMut() -> Result<bool, CommunicatorError>,
) -> Result<(), CommunicatorError> {
    let mut pause = POLL_INTERVALS.0;
    while !is_over()? {
        std::thread::sleep(pause);
        pause = (2 * pause).min(POLL_INTERVALS.1);
    }
    Ok(())
}

fn split(
    library: &Library,
    from: Handle,
    color: Option<u32>,
    key: usize,
    config: &Config,
    cancelled: CancelCheck<'_>,
) -> Result<Option<Handle>, CommunicatorError> {
    // NCCL writes to it when the split is over.
    let child = Box::leak(Box::new(std::ptr::null_mut::<super::sys::ncclComm>()));
    // SAFETY: `from` is ready; `child` stays writable however long the split takes.
    unsafe { library.comm_split(from.0, color, key, child, config)? };
    settle(library, from, cancelled)?; // on an error, `child` must stay
    let child: *mut ncclComm_t = child;
    // SAFETY: the split is over: the box is ours again.
    let child = *unsafe { Box::from_raw(child) };
    if child.is_null() {
        return Ok(None);
    }
    settle(library, Handle(child), cancelled)?;
    Ok(Some(Handle(child)))
}
