//! Checks of what C passes: texts, lists, places for results.

use std::ffi::{CStr, c_char};
use std::time::Duration;

use flow_comm::{DType, ReduceOp};

use crate::status::{Failure, Result};

/// Makes the error of a pointer that must not be null.
fn null(what: &str) -> Failure {
    Failure::argument(format!("{what} is null"))
}

/// Returns what a pointer points to.
///
/// # Safety
///
/// It is null, or points to a `T` that stays for the length of the call.
pub unsafe fn reference<'a, T>(pointer: *const T, what: &str) -> Result<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(what))
}

/// Reads a text of C's; None if it is null.
///
/// # Safety
///
/// It is null, or ends with a zero and stays for the length of the call.
pub unsafe fn optional_text<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map(Some).map_err(|_| Failure::argument(format!("{what} is not UTF-8")))
}

/// Reads a text of C's, which must not be null.
///
/// # Safety
///
/// As for [`optional_text`].
pub unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    unsafe { optional_text(text, what) }?.ok_or_else(|| null(what))
}

/// Reads a list of `count` items; it may be null if there are none.
///
/// # Safety
///
/// It is null, or points to so many items, which stay as they are for the length of the call.
pub unsafe fn list<'a, T>(list: *const T, count: usize, what: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() || !list.is_aligned() || count > isize::MAX as usize / size_of::<T>() {
        return Err(Failure::argument(format!(
            "{what}: not a list of {count}: it must be aligned memory of so many, and not null"
        )));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(list, count) })
}

/// Memory of C's that a result is written to.
pub struct Place<T>(*mut T);

impl<T> Place<T> {
    /// # Safety
    ///
    /// It is null, or can be written during the call.
    pub unsafe fn new(place: *mut T, what: &str) -> Result<Self> {
        if place.is_null() {
            return Err(null(what));
        }
        Ok(Self(place))
    }

    /// Writes the result.
    pub fn set(self, value: T) {
        // SAFETY: whoever made this has promised that it can be written.
        unsafe { self.0.write(value) }
    }
}

/// Reads a timeout in seconds; infinity is no timeout.
pub fn duration(seconds: f64) -> Result<Duration> {
    if seconds == f64::INFINITY {
        return Ok(Duration::MAX);
    }
    let time = Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero());
    time.ok_or_else(|| {
        Failure::argument(format!("a timeout of {seconds} s: it must be a positive number"))
    })
}

/// Reads the code of an element type.
pub fn dtype(code: u32) -> Result<DType> {
    coded(code, "dtype")
}

/// Reads the code of a reduction.
pub fn reduce_op(code: u32) -> Result<ReduceOp> {
    coded(code, "reduce operation")
}

fn coded<T: TryFrom<u8>>(code: u32, what: &str) -> Result<T> {
    let value = u8::try_from(code).ok().and_then(|code| T::try_from(code).ok());
    value.ok_or_else(|| {
        Failure::argument(format!("{code} is not the code of a {what}: flow_comm.h has them"))
    })
}
