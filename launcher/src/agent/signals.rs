//! The signals that the launcher handles: those that end the job, and those of a terminal.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, Context};
use nix::sys::signal::{raise, SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use signal_hook::flag;

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Request {
    /// End the job, by this signal.
    End(i32),
    /// Suspend until the user continues us (Ctrl-Z).
    Suspend,
    /// Read the terminal's new size.
    Resize,
}

/// Reads the signals one at a time.
pub struct Signals {
    arrived: SignalFd,
    passed_on: SigSet,
}

impl Signals {
    /// Blocks the signals in `passed_on` and those of a terminal, so that they can be read here.
    /// SIGHUP (nohup) and the terminal's signals stay ignored if they are. Others are caught all
    /// the same: a shell's script ignores SIGINT for its background jobs.
    pub fn catch(passed_on: &[Signal]) -> anyhow::Result<Signals> {
        let ignored = ignored_signals().context("cannot read /proc/self/status")?;
        let is_ignored = |signal: &Signal| ignored & (1 << (*signal as i32 - 1)) != 0;
        if is_ignored(&Signal::SIGCHLD) {
            bail!(
                "SIGCHLD is ignored by whatever started flow-launch, so that no exit code could \
                 be seen; start it otherwise"
            );
        }
        let passed_on = passed_on
            .iter()
            .copied()
            .filter(|signal| *signal != Signal::SIGHUP || !is_ignored(signal));
        let passed_on: SigSet = passed_on.collect();
        for signal in passed_on.iter().filter(is_ignored) {
            // With a handler, workers do not inherit that it is ignored.
            flag::register(signal as i32, Arc::default())
                .with_context(|| format!("cannot handle {signal}"))?;
        }
        let terminals = [Signal::SIGTSTP, Signal::SIGWINCH];
        let caught: SigSet =
            passed_on.iter().chain(terminals.into_iter().filter(|s| !is_ignored(s))).collect();
        caught.thread_block().context("cannot block signals")?;
        // Writing from the background must not stop us (stty tostop).
        SigSet::from(Signal::SIGTTOU).thread_block().context("cannot block SIGTTOU")?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        Ok(Signals {
            arrived: SignalFd::with_flags(&caught, flags).context("cannot open a signalfd")?,
            passed_on,
        })
    }

    /// The request of the next signal that has arrived.
    pub fn next(&self) -> Option<Request> {
        let arrived = self
            .arrived
            .read_signal()
            .inspect_err(|error| log::warn!("cannot read signals: {error}"));
        let number = arrived.ok()??.ssi_signo as i32;
        log::debug!("received signal {number}");
        Some(match Signal::try_from(number) {
            Ok(signal) if self.passed_on.contains(signal) => Request::End(number),
            Ok(Signal::SIGTSTP) => Request::Suspend,
            _ => Request::Resize,
        })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arrived.as_fd()
    }
}

/// Suspends this process, as its shell expects, until it is continued; returns for how long.
pub fn suspend() -> nix::Result<Duration> {
    let stop = SigSet::from(Signal::SIGTSTP);
    let start = Instant::now();
    raise(Signal::SIGTSTP)?;
    // The signal takes effect here.
    stop.thread_unblock()?;
    stop.thread_block()?;
    Ok(start.elapsed())
}

/// Unblocks in a new worker the signals that [`Signals::catch`] has blocked in the launcher.
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
