//! Panics of a program's functions.

use std::any::Any;
use std::panic::{catch_unwind, AssertUnwindSafe};

use flow_autograd::BoxError;

/// A panic as an error. Nothing around it then unwinds, such as tch's `no_grad`, which would leave
/// gradients off.
pub fn caught<T>(run: impl FnOnce() -> Result<T, BoxError>) -> Result<T, BoxError> {
    let result = catch_unwind(AssertUnwindSafe(run));
    result.unwrap_or_else(|panic| Err(text(panic.as_ref()).into()))
}

fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panic: {}", text.unwrap_or_default())
}
