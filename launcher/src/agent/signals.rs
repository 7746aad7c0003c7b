//! The signals that the launcher handles: those that end the job, and those of a terminal.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::Signal;
use signal_hook::flag;

use crate::signal::{self, SignalReader};

/// The request of a signal.
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
    arrived: SignalReader,
    passed_on: Vec<Signal>,
}

impl Signals {
    /// Blocks the signals in `passed_on` and those of a terminal, so that they can be read here.
    /// SIGHUP (nohup) and the terminal's signals stay ignored if they are. Others are caught all
    /// the same: a shell's script ignores SIGINT for its background jobs.
    pub fn catch(passed_on: &[Signal]) -> anyhow::Result<Signals> {
        let ignored = ignored_signals().context("cannot read /proc/self/status")?;
        let is_ignored = |signal: &Signal| ignored & (1 << (signal.as_raw() - 1)) != 0;
        if is_ignored(&Signal::CHILD) {
            bail!(
                "SIGCHLD is ignored by whatever started flow-launch, so that no exit code could \
                 be seen; start it otherwise"
            );
        }
        let mut passed_on = passed_on.to_vec();
        passed_on.retain(|signal| *signal != Signal::HUP || !is_ignored(signal));
        for signal in passed_on.iter().filter(|signal| is_ignored(signal)) {
            // With a handler, workers do not inherit that it is ignored.
            flag::register(signal.as_raw(), Arc::default())
                .with_context(|| format!("cannot handle {}", signal::name(signal.as_raw())))?;
        }
        let mut caught = passed_on.clone();
        caught.extend([Signal::TSTP, Signal::WINCH].iter().filter(|signal| !is_ignored(signal)));
        signal::block(&caught).context("cannot block signals")?;
        // Writing from the background must not stop us (stty tostop).
        signal::block(&[Signal::TTOU]).context("cannot block SIGTTOU")?;
        let arrived = SignalReader::of(&caught).context("cannot open a signalfd")?;
        Ok(Signals { arrived, passed_on })
    }

    /// Takes the request of the next signal that has arrived.
    pub fn next(&self) -> Option<Request> {
        let arrived =
            self.arrived.next().inspect_err(|error| log::warn!("cannot read signals: {error}"));
        let number = arrived.ok()??.number;
        log::debug!("received signal {number}");
        let signal = Signal::from_named_raw(number)?;
        Some(if self.passed_on.contains(&signal) {
            Request::End(number)
        } else if signal == Signal::TSTP {
            Request::Suspend
        } else {
            Request::Resize
        })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arrived.as_fd()
    }
}

/// Suspends this process, as its shell expects, until it is continued; returns for how long.
pub fn suspend() -> io::Result<Duration> {
    let start = Instant::now();
    signal::raise_once(Signal::TSTP)?;
    Ok(start.elapsed())
}

/// Bit N-1 is set where signal N is ignored (proc(5), SigIgn).
fn ignored_signals() -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.ok_or_else(|| std::io::Error::other("no SigIgn line"))
}
