//! This process' use of MPI.
//!
//! MPI may read or write a message's memory until the message is through, whoever has given up on
//! it meanwhile. So messages have buffers of their own, and one whose message never comes through
//! is left to MPI for good.
//!
//! One lock is held for every call of MPI, none of which waits; [`Threading::Serialized`] is
//! enough, unless the program calls MPI as well. As MPI moves messages only while it is called, a
//! thread calls it now and then, for ranks that compute meanwhile.
//!
//! A process that exits with status 0 finalizes MPI, which waits for all others to come so far. One
//! that fails does not: that is how `mpirun` sees that the job has to be ended. A program that has
//! initialized MPI itself finalizes it itself. MPI then says so first, to an attribute of its
//! smallest communicator, and the session ends there.
//!
//! The `unsafe` code here calls MPI. The `mpi` crate makes safe only what ends within a scope.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use flow_store::fork::Process;
use mpi::Threading;
use mpi::attribute::{AttributeKey, CommAttribute};
use mpi::environment::Universe;
use mpi::ffi;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{AnyCommunicator, AsRaw, Communicator};

/// The tag of handshakes, which no link has, and the longest handshake.
pub const HANDSHAKE_TAG: c_int = 0;
/// The size in bytes of the longest handshake.
pub const MAX_HANDSHAKE: usize = 2048;
/// The interval at which MPI is called while no rank waits, and the longest sleep of one that does.
const TICK: Duration = Duration::from_millis(2);
/// The longest pause between two looks.
pub const MAX_BACKOFF: Duration = Duration::from_millis(1);

/// The time that the end waits for what is still to be done.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(1);

static SESSION: Mutex<SessionState> = Mutex::new(SessionState::New);
/// The process whose session it is, for MPI knows nothing of forked children: 1 more than the forks
/// behind that process; 0: nobody's. No lock, which a fork might leave locked.
static OWNER: AtomicU32 = AtomicU32::new(0);

enum SessionState {
    New,
    Open(Session),
    Over,
}

/// This process' use of MPI. All calls of MPI are methods of it, so that there is one at a time.
pub struct Session {
    communicator: ffi::MPI_Comm,
    pub rank: usize,
    pub size: usize,
    /// The tag of the last link, and the highest that MPI has.
    tag: c_int,
    max_tag: c_int,
    /// The tag of a rank in a channel, as handshakes say.
    pub tags: HashMap<(c_int, String), c_int>,
    /// The message in which the next handshake comes in.
    handshake: Option<Request>,
    pub background: Vec<Box<dyn BackgroundRequest>>,
    /// Finalizes MPI. None where the program itself had initialized it.
    universe: Option<Universe>,
}

/// Requests that are still to be completed, though nobody waits for them.
pub trait BackgroundRequest: Send {
    /// Does what can be done now; whether that was all.
    fn is_done(&mut self, session: &mut Session) -> bool;

    /// Forgets what is still to come in.
    fn cancel(&mut self, _: &Session) {}
}

// SAFETY: the handles in it name objects of the whole process, and MPI was told that any thread may
// come with them.
unsafe impl Send for Session {}

/// The memory that MPI sends or fills.
pub struct Request {
    request: ffi::MPI_Request,
    pub buffer: Vec<u8>,
    is_through: bool,
}

// SAFETY: as for the session.
unsafe impl Send for Request {}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.is_through {
            // MPI may use it at any time.
            std::mem::forget(std::mem::take(&mut self.buffer));
        }
    }
}

/// The facts of a message that is through.
pub struct Status {
    pub source: c_int,
    pub bytes: usize,
}

unsafe extern "C" {
    /// Registers a function as `atexit` does; it gets the exit status.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

extern "C" fn finalize(status: c_int, _: *mut c_void) {
    if status == 0 && is_ours() {
        drop(end());
    }
}

/// Ends the session. To drop what it returns, which takes that the lock is free, finalizes MPI.
fn end() -> Option<Universe> {
    let state = std::mem::replace(&mut *lock(), SessionState::Over);
    match state {
        SessionState::Open(session) => session.end(),
        _ => None,
    }
}

/// An attribute that MPI drops before it does anything else to finalize itself.
#[derive(Clone)]
struct FinalizeHook;

impl CommAttribute for FinalizeHook {}

impl Drop for FinalizeHook {
    fn drop(&mut self) {
        // That is what is going on.
        std::mem::forget(end());
    }
}

/// MPI's own attribute that is the highest tag.
#[derive(Clone)]
struct MaxTag(c_int);

impl CommAttribute for MaxTag {
    fn get_key() -> AttributeKey {
        // SAFETY: it is a key of MPI's own.
        unsafe { AttributeKey::new_unchecked(ffi::MPI_TAG_UB as c_int) }
    }
}

/// Whether this process was the first to ask.
fn is_ours() -> bool {
    let own = Process::current().forks() + 1;
    OWNER
        .compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed)
        .map_or_else(|owner| owner == own, |_| true)
}

fn lock() -> MutexGuard<'static, SessionState> {
    SESSION.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls MPI, which is initialized by the first call.
pub fn with_session<T>(
    action: impl FnOnce(&mut Session) -> Result<T, String>,
) -> Result<T, String> {
    if !is_ours() {
        return Err(
            "this process was forked from one that uses MPI, and cannot: start it as a program \
             (std::process::Command), or set FLOW_TRANSPORT=tcp"
                .into(),
        );
    }
    let mut state = lock();
    if matches!(*state, SessionState::New) {
        *state = SessionState::Open(Session::open()?);
    }
    match &mut *state {
        SessionState::Open(session) => action(session),
        _ => Err("MPI is finalized: the process is about to end".into()),
    }
}

/// Returns the error of an MPI function, from what it returned.
fn check(code: c_int) -> Result<(), String> {
    if code == 0 {
        return Ok(());
    }
    let mut text = [0_u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut length = 0;
    // SAFETY: the buffer has the size that the standard asks for.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    Err(String::from_utf8_lossy(&text[..usize::try_from(length).unwrap_or(0)]).into_owned())
}

impl Session {
    fn open() -> Result<Self, String> {
        if mpi::environment::is_finalized() {
            return Err("the program has finalized MPI already".into());
        }
        let (universe, threading) = match mpi::initialize_with_threading(Threading::Serialized) {
            Some((universe, threading)) => (Some(universe), threading),
            None => (None, mpi::environment::threading_support()),
        };
        if universe.is_some() && threading < Threading::Serialized {
            return Err(format!(
                "this MPI is for {threading:?} threads: it takes one with MPI_THREAD_SERIALIZED"
            ));
        }
        if universe.is_none() && threading < Threading::Multiple {
            return Err(format!(
                "the program has initialized MPI for {threading:?} threads, and Flow has one that \
                 calls MPI as well: initialize it with MPI_THREAD_MULTIPLE"
            ));
        }
        // Apart from what the program itself may send.
        let own = SimpleCommunicator::world().duplicate();
        let communicator = own.as_raw();
        let rank = own.rank() as usize;
        let size = own.size() as usize;
        std::mem::forget(own); // lives as long as MPI does
        let max_tag = SimpleCommunicator::world().get_attr::<MaxTag>().map_or(0, |tag| tag.0);
        // SAFETY: the communicator was just made.
        check(unsafe { ffi::MPI_Comm_set_errhandler(communicator, ffi::RSMPI_ERRORS_RETURN) })?;
        // SAFETY: the function lives as long as the process.
        if universe.is_some() && unsafe { on_exit(finalize, std::ptr::null_mut()) } != 0 {
            return Err("there is no room for a function to be called at exit".into());
        }
        std::thread::Builder::new()
            .name("flow-mpi".into())
            .spawn(progress_until_closed)
            .map_err(|error| error.to_string())?;
        // Not before all else is well: to drop the universe here must not end the session.
        SimpleCommunicator::self_comm().set_attr(FinalizeHook);
        Ok(Self {
            communicator,
            rank,
            size,
            tag: HANDSHAKE_TAG,
            max_tag,
            tags: HashMap::new(),
            handshake: None,
            background: Vec::new(),
            universe,
        })
    }

    /// Leaves as little as possible under way.
    fn end(mut self) -> Option<Universe> {
        let begin = Instant::now();
        while self.progress().is_ok()
            && !self.background.is_empty()
            && begin.elapsed() < FINALIZE_TIMEOUT
        {
            std::thread::sleep(MAX_BACKOFF);
        }
        for mut request in std::mem::take(&mut self.background) {
            request.cancel(&self);
        }
        if let Some(handshake) = self.handshake.take() {
            self.cancel(handshake);
        }
        self.universe.take()
    }

    /// Returns a tag that this rank has not used before.
    pub fn new_tag(&mut self) -> Result<c_int, String> {
        if self.tag >= self.max_tag {
            return Err(format!(
                "this process has had {} channels, and this MPI has no more tags (MPI_TAG_UB): \
                 make groups once and keep them, or set FLOW_TRANSPORT=tcp",
                self.max_tag
            ));
        }
        self.tag += 1;
        Ok(self.tag)
    }

    /// Begins to send a buffer.
    pub fn send(&self, mut buffer: Vec<u8>, to: c_int, tag: c_int) -> Result<Request, String> {
        let data = buffer.as_mut_ptr().cast::<c_void>();
        let count = buffer.len() as c_int;
        Request::begin(buffer, |request| {
            // SAFETY: the buffer is that long, and lives until the message is through.
            unsafe {
                ffi::MPI_Isend(data, count, ffi::RSMPI_UINT8_T, to, tag, self.communicator, request)
            }
        })
    }

    /// Begins to fill a buffer.
    pub fn receive(&self, mut buffer: Vec<u8>, from: c_int, tag: c_int) -> Result<Request, String> {
        let data = buffer.as_mut_ptr().cast::<c_void>();
        let count = buffer.len() as c_int;
        Request::begin(buffer, |request| {
            // SAFETY: as above, and nobody else uses it.
            unsafe {
                ffi::MPI_Irecv(
                    data,
                    count,
                    ffi::RSMPI_UINT8_T,
                    from,
                    tag,
                    self.communicator,
                    request,
                )
            }
        })
    }

    /// Gives all ranks the buffer of rank 0; all buffers are as long.
    pub fn broadcast(&self, mut buffer: Vec<u8>) -> Result<Request, String> {
        let data = buffer.as_mut_ptr().cast::<c_void>();
        let count = buffer.len() as c_int;
        Request::begin(buffer, |request| {
            // SAFETY: as above.
            unsafe {
                ffi::MPI_Ibcast(data, count, ffi::RSMPI_UINT8_T, 0, self.communicator, request)
            }
        })
    }

    /// Whether the message is through.
    pub fn test(&self, message: &mut Request) -> Result<Option<Status>, String> {
        let mut flag = 0;
        let mut status = MaybeUninit::<ffi::MPI_Status>::zeroed();
        let mut count = 0;
        // SAFETY: the request is under way, or null after an error: whoever has heard that it is
        // through drops it.
        check(unsafe { ffi::MPI_Test(&mut message.request, &mut flag, status.as_mut_ptr()) })?;
        if flag == 0 {
            return Ok(None);
        }
        message.is_through = true;
        // SAFETY: a status consists of numbers.
        let status = unsafe { status.assume_init() };
        // SAFETY: it is one of a message of bytes.
        check(unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count) })?;
        Ok(Some(Status { source: status.MPI_SOURCE, bytes: usize::try_from(count).unwrap_or(0) }))
    }

    /// Forgets what was to come in.
    pub fn cancel(&self, mut message: Request) {
        // SAFETY: the request is under way.
        if unsafe { ffi::MPI_Cancel(&mut message.request) } == 0 {
            let _ = self.test(&mut message);
        }
    }

    /// Takes what handshakes have come, and goes on with what is left over.
    pub fn progress(&mut self) -> Result<(), String> {
        loop {
            let mut handshake = match self.handshake.take() {
                Some(handshake) => handshake,
                None => {
                    // SAFETY: it is a number.
                    let any_source = unsafe { ffi::RSMPI_ANY_SOURCE };
                    self.receive(vec![0; MAX_HANDSHAKE], any_source, HANDSHAKE_TAG)?
                }
            };
            let Status { source, bytes } = match self.test(&mut handshake) {
                Ok(Some(status)) => status,
                other => {
                    self.handshake = Some(handshake);
                    other?;
                    break;
                }
            };
            if let Some((tag, channel)) = handshake.buffer[..bytes].split_first_chunk() {
                let channel = String::from_utf8_lossy(channel).into_owned();
                self.tags.insert((source, channel), c_int::from_le_bytes(*tag));
            }
        }
        let mut background = std::mem::take(&mut self.background);
        background.retain_mut(|request| !request.is_done(self));
        self.background = background;
        Ok(())
    }
}

impl Request {
    fn begin(
        buffer: Vec<u8>,
        begin: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) -> Result<Self, String> {
        let mut request = MaybeUninit::uninit();
        check(begin(request.as_mut_ptr()))?;
        // SAFETY: MPI has written it.
        Ok(Self { request: unsafe { request.assume_init() }, buffer, is_through: false })
    }
}

/// A message that is still to be sent.
impl BackgroundRequest for Request {
    fn is_done(&mut self, session: &mut Session) -> bool {
        !matches!(session.test(self), Ok(None))
    }
}

/// Runs the thread that moves what nobody waits for, as long as the session is open.
fn progress_until_closed() {
    loop {
        std::thread::sleep(TICK);
        match &mut *lock() {
            // The thread that uses a connection reports what goes wrong.
            SessionState::Open(session) => drop(session.progress()),
            _ => break,
        }
    }
}
