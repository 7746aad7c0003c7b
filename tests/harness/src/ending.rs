//! How the processes of tests end.

use std::ffi::{c_int, c_void};
use std::ptr;

unsafe extern "C" {
    /// glibc's: calls `function` at the end of the process, before what registered itself earlier.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Runs before `main` in each program that links the harness, and after libtorch's constructors.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    // SAFETY: `end` needs no argument, and is there as long as the program.
    unsafe { on_exit(end, ptr::null_mut()) };
}

/// Ends the process without libtorch's destructors. These take back all of its operators, which is a
/// third of the time of a test's process that does little. The programs of users, such as the
/// examples, do not link the harness, and end with them.
extern "C" fn end(status: c_int, _argument: *mut c_void) {
    // SAFETY: both may be called at any time; whatever C++ has not written yet is lost otherwise.
    unsafe {
        libc::fflush(ptr::null_mut());
        libc::_exit(status);
    }
}
