//! Signals of Python's that come while its main thread waits here.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use flow_comm::store::fork::Once;

use crate::interrupt::flow_set_interrupt_check;

/// An object of Python's, or null.
type Object = *mut c_void;

/// The C type `flow_python`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Python {
    ensure: extern "C" fn() -> c_int,
    release: extern "C" fn(c_int),
    check_signals: extern "C" fn() -> c_int,
    fetch: extern "C" fn(*mut Object, *mut Object, *mut Object),
    restore: extern "C" fn(Object, Object, Object),
}

/// An exception as Python's functions hand it out: its type, its value and where it was raised.
struct Exception([Object; 3]);

// SAFETY: they are addresses here, which only Python's functions use, with the GIL held.
unsafe impl Send for Exception {}

static PYTHON: Once<Python> = Once::empty();
/// What a handler has raised, and nobody has been told yet.
static RAISED: Mutex<Option<Exception>> = Mutex::new(None);

/// See `flow_comm.h`.
///
/// # Safety
///
/// It is null, or has Python's functions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flow_watch_python(python: *const Python) {
    // SAFETY: the caller's promise.
    let Some(python) = (unsafe { python.as_ref() }) else { return };
    PYTHON.get_or_make(|| *python);
    flow_set_interrupt_check(Some(is_interrupted));
}

/// See `flow_comm.h`.
#[unsafe(no_mangle)]
pub extern "C" fn flow_raise_interrupt() {
    let raised = RAISED.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let (Some(python), Some(Exception([kind, value, place]))) = (PYTHON.get(), raised) {
        (python.restore)(kind, value, place);
    }
}

/// Runs the handlers of signals that have come, where this is the thread that Python runs them on.
extern "C" fn is_interrupted() -> bool {
    let is_main = rustix::thread::gettid() == rustix::process::getpid();
    let Some(python) = PYTHON.get().filter(|_| is_main) else { return false };
    if RAISED.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
        return true;
    }
    let state = (python.ensure)();
    let has_raised = (python.check_signals)() != 0;
    if has_raised {
        let mut parts = [null_mut(); 3];
        let [kind, value, place] = &mut parts;
        (python.fetch)(kind, value, place);
        *RAISED.lock().unwrap_or_else(PoisonError::into_inner) = Some(Exception(parts));
    }
    (python.release)(state);
    has_raised
}
