//! NCCL's functions as they are, with Rust's `Result`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use super::library::Library;
use super::sys::{self, ncclComm_t, ncclConfig_t, ncclResult_t};

/// A call to NCCL that failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{call}: {text}")]
pub struct NcclError {
    /// The function's name.
    pub call: &'static str,
    /// The code that it returned.
    pub code: ncclResult_t,
    /// The meaning of the code, and what NCCL says about it.
    pub text: String,
}

impl NcclError {
    /// Returns the error that nothing could be called: something that NCCL needs is not there.
    pub fn missing(text: String) -> NcclError {
        NcclError { call: "NCCL", code: ncclResult_t::ncclInvalidUsage, text }
    }
}

/// The progress of a communicator with what it was last asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommState {
    /// It is ready.
    Done,
    /// A non-blocking call is not over: until it is, the communicator can only be asked again, or
    /// aborted.
    InProgress,
}

/// The id by which the ranks of a new communicator find each other. Whoever has it can join.
#[derive(Clone, Copy)]
pub struct UniqueId(sys::ncclUniqueId);

impl UniqueId {
    /// The number of its bytes.
    pub const BYTES: usize = sys::NCCL_UNIQUE_ID_BYTES as usize;

    /// Returns its bytes, for the other ranks.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.internal.map(|byte| byte as u8)
    }

    /// Makes the id of the bytes that another rank sent.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> UniqueId {
        UniqueId(sys::ncclUniqueId { internal: bytes.map(|byte| byte as c_char) })
    }
}

/// The settings of a communicator. Those that are not set are as NCCL likes.
#[derive(Clone, Copy)]
pub struct Config(ncclConfig_t);

impl Config {
    /// Makes a configuration; `blocking`: whether calls return only once the communicator is ready
    /// again.
    pub fn new(blocking: bool) -> Config {
        const UNDEFINED: c_int = sys::NCCL_CONFIG_UNDEF_INT;
        Config(ncclConfig_t {
            // Every version takes this: an older one reads as much as it knows, a newer one sees
            // which fields are not here.
            size: size_of::<ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: sys::NCCL_VERSION_CODE,
            blocking: blocking.into(),
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: ptr::null(),
            splitShare: UNDEFINED,
            trafficClass: UNDEFINED,
            commName: ptr::null(),
            collnetEnable: UNDEFINED,
            CTAPolicy: UNDEFINED,
            shrinkShare: UNDEFINED,
            nvlsCTAs: UNDEFINED,
            nChannelsPerNetPeer: UNDEFINED,
            nvlinkCentricSched: UNDEFINED,
        })
    }
}

type Result<T, E = NcclError> = std::result::Result<T, E>;

/// Calls a function of NCCL's on behalf of an `unsafe` method, or one that can be called anyhow.
macro_rules! call {
    ($library:expr, $functions:expr, $function:ident($($argument:expr),*)) => {{
        // SAFETY: the arguments are what NCCL asks for: that is what the method's callers promise.
        let code = unsafe { $functions.$function($($argument),*) };
        $library.check(stringify!($function), code)
    }};
}

/// NCCL's functions but those that enqueue, each by its name. A non-blocking communicator that is
/// not ready is no error: see `async_error`.
///
/// # Safety
///
/// The `unsafe` ones ask for what NCCL asks for: a communicator is this library's, and neither
/// destroyed nor aborted. Results can be written where they are to go.
impl Library {
    /// Returns the id of a new communicator. One of its ranks makes it, and must stay until all
    /// have joined.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = sys::ncclUniqueId { internal: [0; UniqueId::BYTES] };
        call!(self, self.nccl, ncclGetUniqueId(&mut id)).map(|()| UniqueId(id))
    }

    /// Joins a new communicator, on the current device. `comm` is written before this returns.
    pub(super) unsafe fn comm_init_rank_config(
        &self,
        comm: &mut ncclComm_t,
        size: usize,
        id: &UniqueId,
        rank: usize,
        config: &Config,
    ) -> Result<()> {
        let mut config = config.0;
        call!(
            self,
            self.nccl,
            ncclCommInitRankConfig(comm, number(size), id.0, number(rank), &mut config)
        )
    }

    /// Splits the ranks of `comm` by color. `child` is written when that is over, for a
    /// non-blocking `comm` later.
    pub(super) unsafe fn comm_split(
        &self,
        comm: ncclComm_t,
        color: Option<u32>,
        key: usize,
        child: *mut ncclComm_t,
        config: &Config,
    ) -> Result<()> {
        let mut config = config.0;
        let color = color.map_or(sys::NCCL_SPLIT_NOCOLOR, |color| number(color as usize));
        call!(self, self.nccl, ncclCommSplit(comm, color, number(key), child, &mut config))
    }

    /// Ends what is under way, together with the other ranks.
    pub(super) unsafe fn comm_finalize(&self, comm: ncclComm_t) -> Result<()> {
        call!(self, self.nccl, ncclCommFinalize(comm))
    }

    /// Frees a communicator.
    pub(super) unsafe fn comm_destroy(&self, comm: ncclComm_t) -> Result<()> {
        call!(self, self.nccl, ncclCommDestroy(comm))
    }

    /// Ends and frees a communicator at once.
    pub(super) unsafe fn comm_abort(&self, comm: ncclComm_t) -> Result<()> {
        call!(self, self.nccl, ncclCommAbort(comm))
    }

    /// Returns how far `comm` is, or what has gone wrong with it since.
    pub(super) unsafe fn async_error(&self, comm: ncclComm_t) -> Result<CommState> {
        let mut state = ncclResult_t::ncclSuccess;
        call!(self, self.nccl, ncclCommGetAsyncError(comm, &mut state))?;
        self.check("ncclCommGetAsyncError", state)?;
        Ok(if state == ncclResult_t::ncclInProgress {
            CommState::InProgress
        } else {
            CommState::Done
        })
    }

    /// Returns the number of ranks.
    pub(super) unsafe fn comm_count(&self, comm: ncclComm_t) -> Result<usize> {
        let mut count = 0;
        call!(self, self.nccl, ncclCommCount(comm, &mut count)).map(|()| count as usize)
    }

    /// Returns this rank.
    pub(super) unsafe fn comm_user_rank(&self, comm: ncclComm_t) -> Result<usize> {
        let mut rank = 0;
        call!(self, self.nccl, ncclCommUserRank(comm, &mut rank)).map(|()| rank as usize)
    }

    /// Registers memory with a communicator.
    pub(super) unsafe fn comm_register(
        &self,
        comm: ncclComm_t,
        data: *mut c_void,
        bytes: usize,
        handle: &mut *mut c_void,
    ) -> Result<()> {
        call!(self, self.registration()?, ncclCommRegister(comm, data, bytes, handle))
    }

    /// Undoes a registration.
    pub(super) unsafe fn comm_deregister(
        &self,
        comm: ncclComm_t,
        handle: *mut c_void,
    ) -> Result<()> {
        call!(self, self.registration()?, ncclCommDeregister(comm, handle))
    }

    /// Allocates memory that can be registered.
    pub(super) unsafe fn mem_alloc(&self, data: &mut *mut c_void, bytes: usize) -> Result<()> {
        call!(self, self.registration()?, ncclMemAlloc(data, bytes))
    }

    /// Frees such memory.
    pub(super) unsafe fn mem_free(&self, data: *mut c_void) -> Result<()> {
        call!(self, self.registration()?, ncclMemFree(data))
    }

    /// Begins a group: the calls of this thread until `group_end` become one.
    pub(super) fn group_start(&self) -> Result<()> {
        call!(self, self.nccl, ncclGroupStart())
    }

    /// Issues the calls of the group, under the promises made for each.
    pub(super) fn group_end(&self) -> Result<()> {
        call!(self, self.nccl, ncclGroupEnd())
    }

    fn registration(&self) -> Result<&sys::Registration> {
        self.registration.as_ref().ok_or_else(|| {
            NcclError::missing(format!(
                "NCCL {} ({}) cannot register memory: install 2.19 or newer",
                self.version(),
                self.path().display()
            ))
        })
    }

    /// Turns what the function `call` has returned into a result.
    pub(crate) fn check(&self, call: &'static str, code: ncclResult_t) -> Result<()> {
        if matches!(code, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) {
            return Ok(());
        }
        // SAFETY: NCCL knows a text for every number, and keeps it.
        let meaning = unsafe { text(self.nccl.ncclGetErrorString(code)) };
        // SAFETY: it asks for no communicator, and what it returns stays; another thread's error at
        // the same time may garble it, but not end it.
        let last = unsafe { text(self.nccl.ncclGetLastError(ptr::null_mut())) };
        let text =
            if last.is_empty() { meaning } else { format!("{meaning} (last error: {last})") };
        Err(NcclError { call, code, text })
    }
}

/// Returns a rank, or a number of ranks. NCCL itself refuses what is too large for it.
fn number(value: usize) -> c_int {
    value.try_into().unwrap_or(c_int::MAX)
}

/// Returns the text at `pointer`, as one line.
///
/// # Safety
///
/// `pointer` is null or a C string.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) }.to_string_lossy();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
