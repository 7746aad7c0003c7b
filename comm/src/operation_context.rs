//! The context of an operation on the host: what it needs to know beside its arguments. The thread
//! that runs the operation has it, so that it need not pass through every function between.

use std::cell::Cell;
use std::time::Duration;

use crate::trace::RecordId;

/// An operation that the program has asked for, and that begins later on another thread.
#[derive(Debug, Clone, Copy)]
pub struct QueuedCall {
    /// Its sequence number.
    pub sequence: u64,
    /// The time at which the program asked for it, in ticks.
    pub at: u64,
}

/// The context of the operation that a thread runs.
pub struct OperationContext {
    /// The time that the operation waits, if it has a timeout of its own.
    timeout: Cell<Option<Duration>>,
    /// The asynchronous call that runs here.
    queued: Cell<Option<QueuedCall>>,
    /// The operation's record, from its begin to its end.
    record: Cell<Option<RecordId>>,
}

thread_local! {
    static CONTEXT: OperationContext = const {
        OperationContext { timeout: Cell::new(None), queued: Cell::new(None), record: Cell::new(None) }
    };
}

impl OperationContext {
    /// Returns how long the operation waits, if it has a timeout of its own.
    #[inline]
    pub fn timeout() -> Option<Duration> {
        CONTEXT.with(|context| context.timeout.get())
    }

    /// Returns the asynchronous call that runs on this thread.
    #[inline]
    pub fn queued() -> Option<QueuedCall> {
        CONTEXT.with(|context| context.queued.get())
    }

    /// Notes the record of the operation that begins.
    #[inline]
    pub fn set_record(record: RecordId) {
        CONTEXT.with(|context| context.record.set(Some(record)));
    }

    /// Takes the record of the operation that ends, if it has begun.
    #[inline]
    pub fn take_record() -> Option<RecordId> {
        CONTEXT.with(|context| context.record.take())
    }

    /// Runs an operation, which waits so long if it has a timeout of its own.
    #[inline]
    pub fn within<T>(timeout: Option<Duration>, operation: impl FnOnce() -> T) -> T {
        struct Restore(Option<Duration>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CONTEXT.with(|context| context.timeout.set(self.0));
            }
        }
        let _restore =
            timeout.map(|own| Restore(CONTEXT.with(|context| context.timeout.replace(Some(own)))));
        operation()
    }
}

impl QueuedCall {
    /// Runs the operation: all that `run` begins on this thread has its number.
    pub fn run<T>(self, run: impl FnOnce() -> T) -> T {
        struct Clear;
        impl Drop for Clear {
            fn drop(&mut self) {
                CONTEXT.with(|context| context.queued.set(None));
            }
        }
        let _clear = Clear;
        CONTEXT.with(|context| context.queued.set(Some(self)));
        run()
    }
}
