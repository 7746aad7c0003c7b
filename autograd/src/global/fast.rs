//! An operation that is known: one of the same key was dispatched before.

use std::marker::PhantomData;

use super::value::{clone_spec, Output};
use crate::error::Error;
use crate::ffi::global::{self as ffi, FastView};
use crate::ffi::{check, slice};

/// An operation of libtorch on global tensors, by its key: what it runs on are the locals of its
/// inputs, as they are.
pub struct FastCall<'a, S> {
    view: &'a FastView,
    specs: PhantomData<S>,
}

impl<'a, S: Send + Sync + 'static> FastCall<'a, S> {
    /// # Safety
    ///
    /// What `view` points to must be alive as long as this, and its spec be in an `Arc<S>`.
    pub(super) unsafe fn new(view: &'a FastView) -> Self {
        Self { view, specs: PhantomData }
    }

    /// See [`Call::key`](super::Call::key).
    pub fn key(&self) -> &[u64] {
        // SAFETY: the key outlives the call.
        unsafe { slice(self.view.key, self.view.key_count) }
    }

    /// Of the first global tensor.
    pub fn spec(&self) -> &S {
        // SAFETY: one of the inputs, which the call keeps, has the spec.
        unsafe { &*self.view.spec.cast() }
    }

    /// Runs the operation on the locals, with these lists in place of arguments of the same numbers.
    /// Arguments that it writes are returned to the caller.
    ///
    /// # Errors
    /// The operation's own.
    pub fn run(&mut self, ints: &[(usize, Vec<i64>)]) -> Result<(), Error> {
        let call = self.view.call;
        for (argument, values) in ints {
            let (values, count) = (values.as_ptr(), values.len());
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
    pub fn output(&mut self, index: usize, output: &Output<'_, S>) -> Result<(), Error> {
        // SAFETY: the call and the lists are alive; the spec is given away.
        unsafe {
            let (view, clone) = (output.view(), clone_spec::<S>);
            check("a call", ffi::flow_fast_output(self.view.call, index, view, clone))
        }
    }
}
