//! Programs that want to stop waiting.

use std::cell::Cell;

use flow_store::fork::Once;

static CHECK: Once<fn() -> bool> = Once::empty();

thread_local! {
    static ENDED_CALL: Cell<bool> = const { Cell::new(false) };
}

/// Sets what each thread that waits in an operation on the host calls some times a second, such as
/// an interpreter's look at signals. If it returns true the operation fails with
/// [`Error::Interrupted`](crate::Error::Interrupted), and its group on all ranks. The first call in
/// a process counts; later ones are without effect.
pub fn set_interrupt_check(check: fn() -> bool) {
    // The first one stays: what it checks is the process's, and not a group's.
    CHECK.get_or_make(|| check);
}

/// Whether the thread that waits is to stop.
pub fn is_interrupted() -> bool {
    has_ended_call() || asks()
}

/// Whether a call of this thread to the store is to stop. The thread's next look learns that, too: a
/// wait may leave the call's error out, and the check says so only once.
pub fn ends_call() -> bool {
    let ends = asks();
    ENDED_CALL.with(|ended| ended.set(ended.get() || ends));
    ends
}

/// Whether a call of this thread to the store was stopped, if that was not said yet.
pub fn has_ended_call() -> bool {
    ENDED_CALL.take()
}

fn asks() -> bool {
    CHECK.get().is_some_and(|check| check())
}
