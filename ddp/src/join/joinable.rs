//! The trait of models and optimizers that can be joined.

use flow_autograd::BoxError;
use flow_comm::ProcessGroup;

use super::JoinContext;

/// Something whose collectives a rank that has ended can take part in: PyTorch's `Joinable`. A
/// [`Ddp`](crate::Ddp) is one.
///
/// ```
/// use flow_ddp::{
///     BoxError, Error, JoinContext, JoinHook, JoinOptions, Joinable, ProcessGroup, ReduceOp, join,
/// };
/// use std::cell::RefCell;
///
/// /// Counts the batches of all ranks.
/// struct Counter {
///     group: ProcessGroup,
///     context: RefCell<Option<JoinContext>>,
/// }
///
/// impl Counter {
///     fn add(&self, mut batches: [i64; 1]) -> Result<i64, Error> {
///         if let Some(context) = &*self.context.borrow() {
///             context.notify(0)?; // there is one collective only
///         }
///         self.group.all_reduce(&mut batches, ReduceOp::Sum)?;
///         Ok(batches[0])
///     }
/// }
///
/// impl Joinable for Counter {
///     fn join_group(&self) -> &ProcessGroup {
///         &self.group
///     }
///
///     fn join_hook(&self, context: JoinContext) -> Result<Box<dyn JoinHook + '_>, BoxError> {
///         self.context.replace(Some(context));
///         Ok(Box::new(Shadow(self)))
///     }
/// }
///
/// struct Shadow<'a>(&'a Counter);
///
/// impl JoinHook for Shadow<'_> {
///     fn main_hook(&mut self, _code: i64, _active: &[usize]) -> Result<(), BoxError> {
///         Ok(self.0.group.all_reduce(&mut [0i64], ReduceOp::Sum)?)
///     }
/// }
///
/// impl Drop for Shadow<'_> {
///     fn drop(&mut self) {
///         self.0.context.take();
///     }
/// }
///
/// let counter = Counter { group: ProcessGroup::from_env()?, context: RefCell::default() };
/// let mut total = 0;
/// join(&[&counter], JoinOptions::default(), || {
///     for _ in 0..3 + counter.group.rank() {
///         total += counter.add([1])?;
///     }
///     Ok::<_, Error>(())
/// })?;
/// # assert_eq!(total, 3);
/// # Ok::<(), Error>(())
/// ```
pub trait Joinable {
    /// Returns the group of its collectives, which also carries the join's notices. A join that fails
    /// aborts it.
    fn join_group(&self) -> &ProcessGroup;

    /// Begins a join, which ends when the hook is dropped. Until then the joinable calls
    /// [`JoinContext::notify`] before its collectives.
    ///
    /// # Errors
    ///
    /// It cannot be joined: all ranks are told why.
    fn join_hook(&self, context: JoinContext) -> Result<Box<dyn JoinHook + '_>, BoxError>;
}

/// The part that a rank that has ended takes for a [`Joinable`]. Errors end the join on all ranks.
pub trait JoinHook {
    /// Takes part in collectives that the ranks in `active`, which have not ended, are about to
    /// call; `code` is what they have given [`JoinContext::notify`].
    fn main_hook(&mut self, code: i64, active: &[usize]) -> Result<(), BoxError>;

    /// Is called on all ranks when all have ended (default: nothing). `last_joiners` are those that
    /// ended last, at the same time, at least one. All ranks are in step again, so that they may
    /// call collectives here.
    fn post_hook(&mut self, last_joiners: &[usize]) -> Result<(), BoxError> {
        let _ = last_joiners;
        Ok(())
    }
}
