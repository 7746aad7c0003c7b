//! What ends waits: the caller's own check, and threads that are told to stop.

use std::sync::{Mutex, OnceLock, PoisonError};

/// The function that C has given to `flow_set_interrupt_check`.
static CHECK: OnceLock<extern "C" fn() -> bool> = OnceLock::new();

/// The threads whose waits are to end, by the numbers that Linux has for them.
static THREADS: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// See `flow_comm.h`.
#[unsafe(no_mangle)]
pub extern "C" fn flow_set_interrupt_check(check: Option<extern "C" fn() -> bool>) {
    let Some(check) = check else { return };
    // The first one stays.
    let _ = CHECK.set(check);
    flow_comm::set_interrupt_check(is_interrupted);
}

/// See `flow_comm.h`.
#[unsafe(no_mangle)]
pub extern "C" fn flow_interrupt(thread: i32, wanted: bool) {
    let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    threads.retain(|known| *known != thread);
    if wanted {
        threads.push(thread);
        flow_comm::set_interrupt_check(is_interrupted);
    }
}

fn is_interrupted() -> bool {
    let thread = rustix::thread::gettid().as_raw_pid();
    let is_told = THREADS.lock().unwrap_or_else(PoisonError::into_inner).contains(&thread);
    is_told || CHECK.get().is_some_and(|check| check())
}
