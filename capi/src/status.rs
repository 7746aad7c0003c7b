//! The results of functions, and the text of the last error.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use flow_comm::Error;

const OK: c_int = 0;
const ENVIRONMENT: c_int = 1;
const JOIN: c_int = 2;
const ARGUMENT: c_int = 3;
const MISMATCH: c_int = 4;
const TIMEOUT: c_int = 5;
const PEER_LOST: c_int = 6;
const POISONED: c_int = 7;
const FORKED: c_int = 8;
const SYSTEM: c_int = 9;
const PANIC: c_int = 10;
const INTERRUPTED: c_int = 11;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// An error as C gets it.
pub struct Failure {
    code: c_int,
    message: String,
}

/// Result of what a function does.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// Makes the error of an argument that is not allowed.
    pub fn argument(message: String) -> Self {
        Self { code: ARGUMENT, message }
    }

    /// Makes the error of a system that has no more memory.
    pub fn system(message: String) -> Self {
        Self { code: SYSTEM, message }
    }

    fn panic(name: &str, rank: Option<usize>, cause: Box<dyn Any + Send>) -> Self {
        let text = cause.downcast_ref::<&str>().copied();
        let text = text.or_else(|| cause.downcast_ref::<String>().map(String::as_str));
        let text = text.unwrap_or("it does not say why");
        let rank = rank.map_or(String::new(), |rank| format!("rank {rank}: "));
        let message = format!("{rank}{name}: flow-comm panicked: {text}");
        Self { code: PANIC, message }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error {
            Error::Environment(_) => ENVIRONMENT,
            Error::Join { .. } => JOIN,
            Error::Argument { .. } => ARGUMENT,
            Error::Mismatch { .. } | Error::Poisoned { is_mismatch: true, .. } => MISMATCH,
            Error::Timeout { .. } => TIMEOUT,
            Error::PeerLost { .. } => PEER_LOST,
            Error::Poisoned { .. } => POISONED,
            Error::Interrupted { .. } => INTERRUPTED,
            Error::Forked { .. } => FORKED,
            Error::System { .. } => SYSTEM,
        };
        Self { code, message: error.to_string() }
    }
}

/// Runs the body of the C function of this name. Returns the code of its error, and keeps the text.
/// `rank`: this rank, if it is known.
pub fn call(name: &str, rank: Option<usize>, body: impl FnOnce() -> Result<()>) -> c_int {
    let result = catch_unwind(AssertUnwindSafe(body));
    let result = result.unwrap_or_else(|cause| Err(Failure::panic(name, rank, cause)));
    let Err(failure) = result else { return OK };
    let text = CString::new(failure.message.replace('\0', " ")).unwrap_or_default();
    // A thread that ends has no text any more.
    let _ = MESSAGE.try_with(|message| message.replace(text));
    failure.code
}

/// Does what `flow_comm.h` says.
#[unsafe(no_mangle)]
pub extern "C" fn flow_error_message() -> *const c_char {
    MESSAGE.try_with(|message| message.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
