//! Turns panics of a program's functions into errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use flow_autograd::BoxError;

/// Runs `run`, and returns its panic as an error. So nothing around it unwinds: tch's `no_grad` would
/// leave gradients off.
pub fn caught<T>(run: impl FnOnce() -> Result<T, BoxError>) -> Result<T, BoxError> {
    let result = catch_unwind(AssertUnwindSafe(run));
    result.unwrap_or_else(|panic| Err(text(panic.as_ref()).into()))
}

fn text(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        return format!("panic: {text}");
    }
    if let Some(text) = panic.downcast_ref::<String>() {
        return format!("panic: {text}");
    }
    "panic: ".into()
}
