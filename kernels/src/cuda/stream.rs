//! Streams of work on a device, and events in them.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};

use super::device::Device;
use super::error::{Result, check, check_release};
use super::library::elapsed_time;

/// A queue of work on a GPU. Work of one stream is done in order; streams are equal if they are the
/// same queue.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    handle: CUstream,
    owned: bool,
}

// SAFETY: the driver's functions may be called from any thread, several at a time.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Makes a stream, whose work goes before that of others and does not wait for the default
    /// stream.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](super::Error::Driver).
    pub fn high_priority(device: &Arc<Device>) -> Result<Stream> {
        device.bind()?;
        let mut least = 0;
        let mut greatest = 0;
        let mut handle = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; what is written is there to be written.
        unsafe {
            check(
                "read the priorities of streams",
                sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest),
            )?;
            check(
                "create a stream",
                sys::cuStreamCreateWithPriority(&mut handle, flags, greatest),
            )?;
        }
        Ok(Stream { device: device.clone(), handle, owned: true })
    }

    /// Returns somebody else's stream, such as libtorch's current one; null is the legacy default
    /// stream.
    ///
    /// # Safety
    ///
    /// `handle` must be a stream (`CUstream`, `cudaStream_t`) of `device`'s primary context, and
    /// must outlive the result.
    pub unsafe fn borrowed(device: &Arc<Device>, handle: *mut c_void) -> Stream {
        Stream { device: device.clone(), handle: handle.cast(), owned: false }
    }

    /// Returns the `CUstream` (and `cudaStream_t`).
    pub fn handle(&self) -> *mut c_void {
        self.handle.cast()
    }

    /// Returns the GPU that the stream is on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Lets work that is enqueued from now on wait for the event's last recording. The host does
    /// not wait.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](super::Error::Driver).
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both handles are alive.
        check("let a stream wait", unsafe { sys::cuStreamWaitEvent(self.handle, event.handle, 0) })
    }

    /// Waits until all work that was enqueued is done.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](super::Error::Driver), also when earlier work of this process failed on
    /// the GPU.
    pub fn synchronize(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the handle is alive.
        check("finish the work of a stream", unsafe { sys::cuStreamSynchronize(self.handle) })
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Stream) -> bool {
        self.handle == other.handle && Arc::ptr_eq(&self.device, &other.device)
    }
}

impl Eq for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned && self.device.bind().is_ok() {
            // SAFETY: it is ours; the driver lets its work finish first.
            check_release("destroy a stream", unsafe { sys::cuStreamDestroy_v2(self.handle) });
        }
    }
}

/// A mark in the work of a stream.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    handle: CUevent,
}

// SAFETY: the driver's functions may be called from any thread, several at a time.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Makes an event that streams and the host can wait for.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](super::Error::Driver).
    pub fn new(device: &Arc<Device>) -> Result<Event> {
        Event::create(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Makes an event that also knows when it happened; recording it costs a little more.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](super::Error::Driver).
    pub fn timed(device: &Arc<Device>) -> Result<Event> {
        Event::create(device, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn create(device: &Arc<Device>, flags: sys::CUevent_flags) -> Result<Event> {
        device.bind()?;
        let mut handle = null_mut();
        // SAFETY: the context is current, and `handle` is there to be written.
        check("create an event", unsafe { sys::cuEventCreate(&mut handle, flags as u32) })?;
        Ok(Event { device: device.clone(), handle })
    }

    /// Marks where the work of `stream` ends now. An earlier mark is forgotten.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](super::Error::Driver).
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both handles are alive.
        check("record an event", unsafe { sys::cuEventRecord(self.handle, stream.handle) })
    }

    /// Whether the work before the mark is done; true if there is none.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](super::Error::Driver), also when earlier work of this process failed on
    /// the GPU.
    pub fn is_done(&self) -> Result<bool> {
        self.device.bind()?;
        // SAFETY: the handle is alive.
        match unsafe { sys::cuEventQuery(self.handle) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("finish the work before an event", result).map(|()| true),
        }
    }

    /// Waits until the work before the mark is done.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](super::Error::Driver), also when earlier work of this process failed on
    /// the GPU.
    pub fn synchronize(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the handle is alive.
        check("finish the work before an event", unsafe { sys::cuEventSynchronize(self.handle) })
    }

    /// Returns the time from `earlier` to this event, to about half a microsecond; zero if it was
    /// not earlier.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](super::Error::Driver) unless both are [`timed`](Event::timed), recorded
    /// and done.
    pub fn since(&self, earlier: &Event) -> Result<Duration> {
        self.device.bind()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: both handles are alive, and `milliseconds` is there to be written.
        let result = unsafe { elapsed_time()?(&mut milliseconds, earlier.handle, self.handle) };
        check("measure the time between two events", result)?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: it is ours; the driver keeps what streams still wait for.
            check_release("destroy an event", unsafe { sys::cuEventDestroy_v2(self.handle) });
        }
    }
}
