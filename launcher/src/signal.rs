//! Signals by name, sets of signals that are blocked and read: what rustix lacks. Only this file
//! has another crate (nix) for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::libc::SI_KERNEL;
use nix::sys::signal::{self as by_nix, SigSet, SigmaskHow};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::process::Signal;

/// Returns a signal's name, "SIGTERM" for 15.
pub fn name(signal: i32) -> String {
    match by_nix::Signal::try_from(signal) {
        Ok(signal) => signal.as_str().into(),
        Err(_) => format!("real-time signal {signal}"),
    }
}

/// Returns the signal of a name such as "SIGTERM".
pub fn named(name: &str) -> Option<Signal> {
    let signal: by_nix::Signal = name.parse().ok()?;
    Signal::from_named_raw(signal as i32)
}

/// Blocks all signals in this thread and in what it starts.
pub fn block_all() -> io::Result<()> {
    Ok(SigSet::all().thread_block()?)
}

/// Lets all signals in.
pub fn unblock_all() -> io::Result<()> {
    Ok(SigSet::all().thread_unblock()?)
}

/// Blocks these signals in this thread.
pub fn block(signals: &[Signal]) -> io::Result<()> {
    Ok(set(signals)?.thread_block()?)
}

/// Calls a function with all signals blocked, as they stay in the threads that it starts.
pub fn with_all_blocked<T>(function: impl FnOnce() -> T) -> io::Result<T> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let result = function();
    before.thread_set_mask()?;
    Ok(result)
}

/// Takes effect of a blocked signal, such as a stop, before it returns.
pub fn raise_once(signal: Signal) -> io::Result<()> {
    let set = set(&[signal])?;
    by_nix::raise(by_nix::Signal::try_from(signal.as_raw())?)?;
    // The signal takes effect here.
    set.thread_unblock()?;
    Ok(set.thread_block()?)
}

fn set(signals: &[Signal]) -> Result<SigSet, Errno> {
    signals.iter().map(|signal| by_nix::Signal::try_from(signal.as_raw())).collect()
}

/// A signal that has arrived.
pub struct Arrival {
    pub number: i32,
    /// The kernel sent it to all processes in the foreground of a terminal, as it does at Ctrl-C.
    pub is_of_terminal: bool,
}

/// Reads blocked signals, one at a time.
pub struct SignalReader(SignalFd);

impl SignalReader {
    /// Reads these signals, which are to be blocked, and does not wait for them.
    pub fn of(signals: &[Signal]) -> io::Result<SignalReader> {
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        Ok(SignalReader(SignalFd::with_flags(&set(signals)?, flags)?))
    }

    /// Reads all signals, and waits for each.
    pub fn of_all() -> io::Result<SignalReader> {
        Ok(SignalReader(SignalFd::with_flags(&SigSet::all(), SfdFlags::SFD_CLOEXEC)?))
    }

    /// Returns the next signal; None if none has arrived.
    pub fn next(&self) -> io::Result<Option<Arrival>> {
        let arrived = self.0.read_signal()?;
        Ok(arrived.map(|signal| Arrival {
            number: signal.ssi_signo as i32,
            is_of_terminal: signal.ssi_code == SI_KERNEL,
        }))
    }
}

impl AsFd for SignalReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
