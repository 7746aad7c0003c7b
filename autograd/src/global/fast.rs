//! An operation that is known: one of the same key was dispatched before.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::value::Wrapping;
use crate::error::Error;
use crate::ffi::global::{self as ffi, FastCallView};
use crate::ffi::{check, slice};

/// An operation of libtorch on global tensors, by its key: what it runs on are the locals of its
/// inputs, as they are.
pub struct FastCall<'a, S> {
    view: &'a FastCallView,
    /// The spec of the first global tensor, which keeps it.
    spec: ManuallyDrop<Arc<S>>,
}

impl<'a, S: Send + Sync + 'static> FastCall<'a, S> {
    /// # Safety
    ///
    /// What `view` points to must be alive as long as this, and its spec be in an `Arc<S>`.
    pub(super) unsafe fn new(view: &'a FastCallView) -> Self {
        // SAFETY: the caller's promise; the spec stays the tensor's, as it is not dropped here.
        let spec = ManuallyDrop::new(unsafe { Arc::from_raw(view.spec.cast()) });
        Self { view, spec }
    }

    /// Returns the key, as [`Call::key`](super::Call::key) does.
    pub fn key(&self) -> &[u64] {
        // SAFETY: the key outlives the call.
        unsafe { slice(self.view.key, self.view.key_count) }
    }

    /// Returns the spec of the first global tensor.
    pub fn spec(&self) -> &Arc<S> {
        &self.spec
    }

    /// Runs the operation on the locals, with these lists in place of arguments of the same numbers.
    /// Arguments that it writes are returned to the caller.
    ///
    /// # Errors
    /// The operation's own.
    pub fn run(&mut self, ints: &[(usize, Vec<i64>)]) -> Result<(), Error> {
        let call = self.view.call;
        for (argument, values) in ints {
            let count = values.len();
            let values = values.as_ptr();
            // SAFETY: the call and the list are alive.
            unsafe {
                let text = ffi::flow_fast_set_integers(call, *argument, values, count);
                check("a call", text)?;
            }
        }
        // SAFETY: the call is alive.
        unsafe { check("a call", ffi::flow_fast_run(call)) }
    }

    /// Returns result `index` of [`FastCall::run`], which is no argument, as a global tensor, or all
    /// tensors of a list so.
    ///
    /// # Errors
    /// libtorch's.
    pub fn output(&self, index: usize, output: &Wrapping<'_, S>) -> Result<(), Error> {
        // SAFETY: the call, the spec and the lists are alive.
        unsafe { check("a call", ffi::flow_fast_output(self.view.call, index, output.view())) }
    }
}
