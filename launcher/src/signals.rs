//! The signals the launcher passes on to its workers.

use anyhow::{bail, Context};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::os::fd::{AsFd, BorrowedFd};

/// Reads the signals that are passed on, one at a time.
pub struct Signals(SignalFd);

impl Signals {
    /// Blocks the signals that are to be `passed_on`, so that they can be read here. One that whoever started us has had
    /// ignored (as nohup does with SIGHUP) stays ignored.
    pub fn catch(passed_on: &[Signal]) -> anyhow::Result<Signals> {
        let ignored = ignored_signals().context("cannot read /proc/self/status")?;
        let is_ignored = |signal: Signal| ignored & (1 << (signal as i32 - 1)) != 0;
        if is_ignored(Signal::SIGCHLD) {
            bail!("SIGCHLD is ignored by whatever started flow-launch, so that no exit code could be seen; start it otherwise");
        }
        let mask: SigSet = passed_on.iter().copied().filter(|signal| !is_ignored(*signal)).collect();
        mask.thread_block().context("cannot block signals")?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        Ok(Signals(SignalFd::with_flags(&mask, flags).context("cannot open a signalfd")?))
    }

    /// The next signal that has arrived, by number.
    pub fn next(&self) -> Option<i32> {
        match self.0.read_signal() {
            Ok(information) => information.map(|information| information.ssi_signo as i32),
            Err(error) => {
                log::warn!("cannot read signals: {error}");
                None
            }
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Undoes in a new worker what [`Signals::catch`] has done in the launcher.
pub fn unblock() -> nix::Result<()> {
    SigSet::all().thread_unblock()
}

/// Bit N-1 is set where signal N is ignored (proc(5), SigIgn).
fn ignored_signals() -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.ok_or_else(|| std::io::Error::other("no SigIgn line"))
}
