//! What ends waits: the caller's own check, and threads that are told to stop.

use std::sync::{Mutex, MutexGuard, PoisonError};

use flow_comm::store::fork::{Once, PerProcess};

/// The function that C has given to `flow_set_interrupt_check`.
static CHECK: Once<extern "C" fn() -> bool> = Once::empty();

/// The threads whose waits are to end, by the numbers that Linux has for them.
static THREADS: PerProcess<Mutex<Vec<i32>>> = PerProcess::empty();

/// See `flow_comm.h`.
#[unsafe(no_mangle)]
pub extern "C" fn flow_set_interrupt_check(check: Option<extern "C" fn() -> bool>) {
    let Some(check) = check else { return };
    // The first one stays.
    CHECK.get_or_make(|| check);
    flow_comm::set_interrupt_check(is_interrupted);
}

/// See `flow_comm.h`.
#[unsafe(no_mangle)]
pub extern "C" fn flow_interrupt(thread: i32, wanted: bool) {
    let mut threads = threads();
    threads.retain(|known| *known != thread);
    if wanted {
        threads.push(thread);
        flow_comm::set_interrupt_check(is_interrupted);
    }
}

fn threads() -> MutexGuard<'static, Vec<i32>> {
    THREADS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_interrupted() -> bool {
    let thread = rustix::thread::gettid().as_raw_pid();
    let is_told = threads().contains(&thread);
    is_told || CHECK.get().is_some_and(|check| check())
}
