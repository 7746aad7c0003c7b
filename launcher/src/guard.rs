//! The guard: a process that outlives the launcher for a moment, to kill what a job leaves behind.
//!
//! It is told of each worker's process group through a pipe that only the launcher holds open. However the launcher
//! dies, the pipe ends, and the guard kills the groups that are still registered. Then, unless the job ended well, it
//! looks for processes that have left those groups (as those of `timeout` do) by a mark in their environment. Last it
//! removes the job's temporary folder, which has the mark in its name: so it need not be told when that is made.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use nix::sys::signal::SigSet;
use rustix::process::{geteuid, kill_process, kill_process_group, Pid, Signal};

/// First argument of a flow-launch process that is a guard; the mark is the second.
pub const HIDDEN_FLAG: &str = "--guard";

/// Variable in the environment of all processes of a job that holds its mark.
const MARK: &str = "FLOW_LAUNCHER";

/// What tells the guard that the job ended well.
const DISMISSAL: &str = "dismissed";

/// Looks for marked processes at most so many times: new ones may be born meanwhile, and some cannot be killed.
const SWEEPS: usize = 100;

/// Tries to remove the temporary folder so many times: a worker that is being killed may still write to it.
const REMOVALS: usize = 100;
const BETWEEN_REMOVALS: Duration = Duration::from_millis(10);

/// The launcher's side of the guard. Dropping it ends the guard, which kills what is left of the job.
pub struct Guard {
    process: Child,
    mark: String,
}

impl Guard {
    pub fn start() -> anyhow::Result<Guard> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mark = format!("{}.{}", std::process::id(), now.as_nanos());
        let mut command = Command::new("/proc/self/exe");
        command.arg0("flow-launch").arg(HIDDEN_FLAG).arg(&mark).process_group(0).env_remove(MARK);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Guard { process: command.spawn().context("cannot start the guard process")?, mark })
    }

    /// What tells this job from all others on this machine.
    pub fn name(&self) -> &str {
        &self.mark
    }

    /// Where the job may make a folder that is gone when the launcher is.
    pub fn temporary_folder(&self) -> PathBuf {
        temporary_folder(self.mark.as_ref())
    }

    /// What is to be in the environment of every worker.
    pub fn mark(&self) -> (&'static str, &str) {
        (MARK, &self.mark)
    }

    /// The job has ended well; what it left running on purpose may stay.
    pub fn dismiss(&mut self) {
        self.tell(DISMISSAL);
    }

    /// From now on the group of this worker is killed when the launcher dies.
    pub fn register(&mut self, worker: Pid) {
        self.tell(&format!("+{worker}"));
    }

    /// To be called before the worker is reaped, while its pid cannot mean another process.
    pub fn unregister(&mut self, worker: Pid) {
        self.tell(&format!("-{worker}"));
    }

    fn tell(&mut self, line: &str) {
        let Some(pipe) = &mut self.process.stdin else { return };
        if let Err(error) = pipe.write_all(format!("{line}\n").as_bytes()) {
            log::warn!("the guard process has gone ({error}): grandchildren would outlive a killed launcher");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Closes the pipe first.
        if let Err(error) = self.process.wait() {
            log::warn!("cannot wait for the guard process: {error}");
        }
        // Nothing is left of it, unless somebody has killed the guard.
        remove(&self.temporary_folder());
    }
}

/// The guard process itself.
pub fn main(mark: Option<OsString>) -> ExitCode {
    // What is meant for the launcher (Ctrl-C, a hang-up, a kill by name) must not end the guard first.
    let mark = mark.filter(|mark| !mark.as_bytes().contains(&b'/'));
    let (Some(mark), Ok(())) = (mark, SigSet::all().thread_block()) else { return ExitCode::FAILURE };
    let _ = nix::sys::prctl::set_name(c"flow-guard");
    let mut groups = HashSet::new();
    let mut is_dismissed = false;
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        is_dismissed |= line == DISMISSAL;
        let Some(pid) = line.get(1..).and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw) else { continue };
        match line.starts_with('+') {
            true => groups.insert(pid),
            false => groups.remove(&pid),
        };
    }
    for group in groups {
        let _ = kill_process_group(group, Signal::KILL);
    }
    if !is_dismissed {
        let entry = [MARK.as_bytes(), b"=", mark.as_bytes()].concat();
        (0..SWEEPS).take_while(|_| sweep(&entry)).for_each(|_| std::thread::yield_now());
    }
    let folder = temporary_folder(&mark);
    (0..REMOVALS).take_while(|_| !remove(&folder)).for_each(|_| std::thread::sleep(BETWEEN_REMOVALS));
    ExitCode::SUCCESS
}

fn temporary_folder(mark: &OsStr) -> PathBuf {
    let mut name = OsString::from("flow-launch_");
    name.push(mark);
    std::env::temp_dir().join(name)
}

/// Removes a job's temporary folder, if there is one and it is ours; false if some of it is left.
fn remove(folder: &Path) -> bool {
    let is_ours = |found: &fs::Metadata| found.is_dir() && found.uid() == geteuid().as_raw();
    !fs::symlink_metadata(folder).is_ok_and(|found| is_ours(&found)) || fs::remove_dir_all(folder).is_ok()
}

/// Kills all processes with this entry in their environment; false if there are none.
fn sweep(entry: &[u8]) -> bool {
    let mut found = false;
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = process.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let environment = fs::read(process.path().join("environ")).unwrap_or_default();
        if let Some(pid) = pid.filter(|_| environment.split(|byte| *byte == 0).any(|other| other == entry)) {
            found |= kill_process(pid, Signal::KILL).is_ok();
        }
    }
    found
}
