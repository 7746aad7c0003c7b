//! flow-launch as process 1 of a container. The kernel gives that process every orphan. An orphan
//! that nobody reaps stays a zombie for as long as the container runs.
//!
//! So process 1 only reaps, and a second flow-launch does the work. Process 1 passes signals on to
//! it, and ends as it ends. Children of the second process are none of process 1's, so nobody takes
//! their exit codes away.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use crate::agent::exit_status::ExitStatus;
use crate::signal::{self, SignalReader};

/// First argument of a flow-launch whose parent is process 1. The command line follows.
pub const HIDDEN_FLAG: &str = "--child-of-init";

/// Whether this process is the first of a container.
pub fn is_process_1() -> bool {
    std::process::id() == 1
}

/// Process 1: runs the command line (program name first) in a child; returns its exit code.
pub fn run(arguments: &[OsString]) -> anyhow::Result<u8> {
    signal::block_all().context("cannot block signals")?;
    let arrived = SignalReader::of_all().context("cannot open a signalfd")?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("flow-launch").arg(HIDDEN_FLAG).args(&arguments[1..]);
    let child = Pid::from_child(&command.spawn().context("cannot start a second flow-launch")?);
    let _ = rustix::thread::set_name(c"flow-init");
    loop {
        let Some(signal) = arrived.next().context("cannot read signals")? else { continue };
        let number = Signal::from_named_raw(signal.number);
        if number == Some(Signal::CHILD) {
            if let Some(end) = reap(child)? {
                return Ok(end.code());
            }
        } else if !signal.is_of_terminal {
            // The child may have ended: then SIGCHLD is the next signal. A signal of the terminal
            // reaches the child without us.
            let _ = number.map(|number| kill_process(child, number));
        }
    }
}

/// Reaps all processes that have ended; returns how `child` ended if it is one of them.
fn reap(child: Pid) -> anyhow::Result<Option<ExitStatus>> {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == child => {
                let code = status.exit_status().map(ExitStatus::Exit);
                let signal = status.terminating_signal().map(ExitStatus::Signal);
                return Ok(code.or(signal));
            }
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) => return Ok(None),
            Err(error) => return Err(error).context("cannot wait for the second flow-launch"),
        }
    }
}

/// Lets the signals in again, in the child, that process 1 has blocked.
pub fn leave() -> anyhow::Result<()> {
    signal::unblock_all().context("cannot unblock signals")
}
