//! The guard: a process that outlives the launcher for a moment, to kill what a killed launcher leaves behind.
//!
//! It is told of each worker's process group through a pipe that only the launcher holds open. However the launcher
//! dies, the pipe ends, and the guard kills the groups that are still registered, grandchildren included.

use std::collections::HashSet;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::Context;
use nix::sys::signal::SigSet;
use rustix::process::{kill_process_group, Pid, Signal};

/// First argument of a flow-launch process that is a guard.
pub const HIDDEN_FLAG: &str = "--guard";

/// The launcher's side of the guard. Dropping it ends the guard, which kills what is still registered.
pub struct Guard(Child);

impl Guard {
    pub fn start() -> anyhow::Result<Guard> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("flow-launch").arg(HIDDEN_FLAG).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Guard(command.spawn().context("cannot start the guard process")?))
    }

    /// From now on the group of this worker is killed when the launcher dies.
    pub fn register(&mut self, worker: Pid) {
        self.tell('+', worker);
    }

    /// To be called before the worker is reaped, while its pid cannot mean another process.
    pub fn unregister(&mut self, worker: Pid) {
        self.tell('-', worker);
    }

    fn tell(&mut self, sign: char, worker: Pid) {
        let Some(pipe) = &mut self.0.stdin else { return };
        if let Err(error) = pipe.write_all(format!("{sign}{worker}\n").as_bytes()) {
            log::warn!("the guard process has gone ({error}): grandchildren would outlive a killed launcher");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Closes the pipe first.
        if let Err(error) = self.0.wait() {
            log::warn!("cannot wait for the guard process: {error}");
        }
    }
}

/// The guard process itself.
pub fn main() -> ExitCode {
    // What is meant for the launcher (Ctrl-C, a hang-up, a kill by name) must not end the guard first.
    if SigSet::all().thread_block().is_err() {
        return ExitCode::FAILURE;
    }
    let _ = nix::sys::prctl::set_name(c"flow-guard");
    let mut groups = HashSet::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let Some(pid) = line.get(1..).and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw) else { continue };
        match line.starts_with('+') {
            true => groups.insert(pid),
            false => groups.remove(&pid),
        };
    }
    for group in groups {
        let _ = kill_process_group(group, Signal::KILL);
    }
    ExitCode::SUCCESS
}
