//! Programs that want to stop waiting.

use std::sync::OnceLock;

static CHECK: OnceLock<fn() -> bool> = OnceLock::new();

/// Sets what each thread that waits in an operation on the host calls some times a second, such as
/// an interpreter's look at signals. If it returns true the operation fails with
/// [`Error::Interrupted`](crate::Error::Interrupted), and its group on all ranks. The first call in
/// a process counts; later ones are without effect.
pub fn set_interrupt_check(check: fn() -> bool) {
    // The first one stays: what it checks is the process's, and not a group's.
    let _ = CHECK.set(check);
}

/// Whether the thread that waits is to stop.
pub fn is_interrupted() -> bool {
    CHECK.get().is_some_and(|check| check())
}
