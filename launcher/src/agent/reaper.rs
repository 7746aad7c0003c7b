//! The reaper: a process that outlives the launcher for a moment and kills what a job leaves
//! behind.
//!
//! The launcher registers each worker's process group with it, through a pipe that only the
//! launcher holds open. However the launcher dies, the pipe ends, and the reaper kills the
//! registered groups. Unless the job succeeded it then kills *stragglers*. They are processes that
//! have left those groups (as `timeout` makes them) and carry the job's tag in their environment.
//! Last, it restores the modes of the terminal and removes the watchdog's pipe and the job's
//! temporary folder, whose name contains the tag.
//!
//! Each round has a tag of its own, which begins with the job's. After a round that was stopped,
//! the launcher asks the reaper to kill the stragglers of that round. So none of them meets the
//! processes of the next. Reading all processes of a host may take long; the launcher's event loop
//! continues meanwhile.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io::{self, BufRead, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, geteuid, kill_process, kill_process_group};

use crate::agent::named_pipe::remove_unread;
use crate::control::token::TOKEN;
use crate::output::footer::Footer;
use crate::output::sink::Sinks;
use crate::output::terminal::Modes;
use crate::signal;

/// First argument of a flow-launch process that is a reaper. The second is the job's tag; the
/// third, if standard error is the user's terminal, its modes at the start.
pub const HIDDEN_FLAG: &str = "--reaper";

/// Lines to the reaper: the launcher has drawn a footer on the terminal, or has erased it.
const FOOTER: &str = "footer";
const NO_FOOTER: &str = "no-footer";

/// The variable with the tag, in the environment of all processes of a round.
const JOB_TAG: &str = "FLOW_LAUNCHER";

/// Line to the reaper: the job succeeded.
const DISMISSAL: &str = "dismissed";

/// Line to the reaper: kill the stragglers of the round whose number follows. The reaper answers
/// with one byte when it has.
const KILL_STRAGGLERS: &str = "kill-stragglers ";

/// Line to the reaper: remove the named pipe whose path follows.
const PIPE: &str = "pipe ";

/// The time that the launcher waits for the answer.
const REAPER_TIMEOUT: Duration = Duration::from_secs(10);

/// The most passes over all processes: new ones may start meanwhile, and some cannot be killed.
const KILL_PASSES: usize = 100;

/// The most attempts to remove the temporary folder and the pipe. A worker that is being killed may
/// still write to the folder, and a launcher that is being killed may still read the pipe.
const REMOVALS: usize = 100;
const BETWEEN_REMOVALS: Duration = Duration::from_millis(10);

/// The launcher's side of the reaper. Dropping it ends the reaper, which kills the rest of the job.
pub struct Reaper {
    process: Child,
    answers: ChildStdout,
    job: String,
    /// The round whose workers are being started.
    round: u32,
    /// Requests that are not answered yet, and how long to wait for the answers.
    unanswered: usize,
    deadline: Option<Instant>,
    /// A named pipe to remove.
    pipe: Option<PathBuf>,
    /// What the reaper knows of the terminal.
    has_footer: bool,
}

impl Reaper {
    /// Starts the reaper. With `has_footers`, it can erase what the launcher draws at the foot of the terminal.
    pub fn start(has_footers: bool) -> anyhow::Result<Reaper> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let job = format!("{}.{}", std::process::id(), now.as_nanos());
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("flow-launch")
            .arg(HIDDEN_FLAG)
            .arg(&job)
            .process_group(0)
            .env_remove(JOB_TAG)
            .env_remove(TOKEN);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let modes = Modes::of_input();
        if let Some(modes) = modes {
            command.arg(modes.to_string()).stderr(again(io::stdin().as_fd())?);
        }
        if has_footers {
            command.stderr(again(io::stderr().as_fd())?);
        }
        let mut process = command.spawn().context("cannot start the reaper process")?;
        let answers = process.stdout.take().context("the reaper process has no standard output")?;
        rustix::io::ioctl_fionbio(&answers, true).context("cannot listen to the reaper process")?;
        Ok(Reaper {
            process,
            answers,
            job,
            round: 0,
            unanswered: 0,
            deadline: None,
            pipe: None,
            has_footer: false,
        })
    }

    /// Returns the tag, which is unique on this host.
    pub fn name(&self) -> &str {
        &self.job
    }

    /// Returns the job's temporary folder, which is made if needed, and removed when the launcher
    /// ends.
    pub fn temporary_folder(&self) -> io::Result<PathBuf> {
        let folder = temporary_folder(&self.job);
        match DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists || !is_ours(&folder) => {
                Err(error)
            }
            _ => Ok(folder),
        }
    }

    /// Tells the reaper of a named pipe that is about to be made, which it removes when the
    /// launcher ends.
    pub fn adopt_pipe(&mut self, path: &Path) -> io::Result<()> {
        let line = path.to_str().filter(|path| !path.contains('\n'));
        let line = line.ok_or_else(|| {
            io::Error::new(ErrorKind::InvalidInput, "it is not UTF-8 in one line")
        })?;
        self.send(&format!("{PIPE}{line}"));
        self.pipe = Some(path.to_path_buf());
        Ok(())
    }

    /// Workers that are started from now on belong to this round.
    pub fn begin(&mut self, round: u32) {
        self.round = round;
    }

    /// Returns the variable for the environment of every worker.
    pub fn job_tag(&self) -> (&'static str, String) {
        (JOB_TAG, round_tag(&self.job, &self.round.to_string()))
    }

    /// Asks the reaper to kill all processes that are left of this round.
    pub fn kill_stragglers(&mut self) {
        self.send(&format!("{KILL_STRAGGLERS}{}", self.round));
        self.unanswered += 1;
        self.deadline = Some(Instant::now() + REAPER_TIMEOUT);
    }

    /// Whether a request is not answered yet.
    pub fn is_killing_stragglers(&self) -> bool {
        self.deadline.is_some()
    }

    /// Returns what is readable when the reaper answers; None if no answer is expected.
    pub fn watch(&self) -> Option<BorrowedFd<'_>> {
        self.is_killing_stragglers().then(|| self.answers.as_fd())
    }

    /// Notes that the launcher was suspended for this long.
    pub fn paused(&mut self, time: Duration) {
        self.deadline.iter_mut().for_each(|deadline| *deadline += time);
    }

    /// Returns when to call [`Reaper::elapsed`].
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Gives up an answer that is overdue.
    pub fn elapsed(&mut self, now: Instant) {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            log::warn!(
                "the reaper process does not answer: processes of the last round may be left"
            );
            self.deadline = None;
        }
    }

    /// Reads an answer.
    pub fn read_answer(&mut self) {
        match rustix::io::read(&self.answers, &mut [0; 1]) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            Ok(1) => self.unanswered -= 1,
            // The reaper has gone.
            _ => self.unanswered = 0,
        }
        if self.unanswered == 0 {
            self.deadline = None;
        }
    }

    /// Tells whether the launcher has left something at the foot of the terminal. What erases it may wait to be
    /// written.
    pub fn note_footer(&mut self, sinks: &Sinks) {
        let queue = &sinks.of(1).queue;
        let is_there = queue.footer_height() > 0 || self.has_footer && queue.len() > 0;
        if std::mem::replace(&mut self.has_footer, is_there) != is_there {
            self.send(if is_there { FOOTER } else { NO_FOOTER });
        }
    }

    /// Notes that the job succeeded; processes that it detached on purpose may keep running.
    pub fn dismiss(&mut self) {
        self.send(DISMISSAL);
    }

    /// Tells the reaper to kill this worker's process group when the launcher dies.
    pub fn register(&mut self, worker: Pid) {
        self.send(&format!("+{worker}"));
    }

    /// Call it before the worker is reaped, while its pid cannot be reused.
    pub fn unregister(&mut self, worker: Pid) {
        self.send(&format!("-{worker}"));
    }

    fn send(&mut self, line: &str) {
        let Some(pipe) = &mut self.process.stdin else { return };
        if let Err(error) = pipe.write_all(format!("{line}\n").as_bytes()) {
            log::warn!(
                "the reaper process has gone ({error}): processes that leave their group may \
                 outlive the job"
            );
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        // Closes the pipe first.
        if let Err(error) = self.process.wait() {
            log::warn!("cannot wait for the reaper process: {error}");
        }
        // The reaper has removed these, unless somebody killed it.
        remove(&temporary_folder(&self.job));
        self.pipe.as_deref().map(remove_unread);
    }
}

/// Opens a terminal once more.
fn again(terminal: BorrowedFd<'_>) -> anyhow::Result<OwnedFd> {
    terminal.try_clone_to_owned().context("cannot open the terminal once more")
}

/// Runs the reaper process itself.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let tag = arguments.next();
    let modes = arguments.next().and_then(|modes| Modes::parse(modes.to_str()?));
    // A signal for the launcher (Ctrl-C, a hang-up, a kill by name) must not end the reaper before
    // the launcher.
    let tag = tag.and_then(|tag| tag.into_string().ok()).filter(|tag| !tag.contains('/'));
    let (Some(tag), Ok(())) = (tag, signal::block_all()) else {
        return ExitCode::FAILURE;
    };
    let _ = rustix::thread::set_name(c"flow-reaper");
    let mut groups = HashSet::new();
    let mut pipes: Vec<PathBuf> = Vec::new();
    let mut is_dismissed = false;
    let mut has_footer = false;
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        is_dismissed |= line == DISMISSAL;
        has_footer = line == FOOTER || has_footer && line != NO_FOOTER;
        if let Some(round) = line.strip_prefix(KILL_STRAGGLERS) {
            kill_stragglers(&round_tag(&tag, round));
            // Fails only if the launcher has died.
            let _ = rustix::io::write(io::stdout(), b"!");
        }
        pipes.extend(line.strip_prefix(PIPE).map(PathBuf::from));
        let Some(pid) = line.get(1..).and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw)
        else {
            continue;
        };
        if line.starts_with('+') {
            groups.insert(pid);
        } else {
            groups.remove(&pid);
        }
    }
    for group in groups {
        let _ = kill_process_group(group, Signal::KILL);
    }
    if has_footer {
        // It fails only where the terminal has gone.
        let _ = io::stderr().write_all(Footer::erasure().as_bytes());
    }
    if !is_dismissed {
        kill_stragglers(&job_tag(&tag));
    }
    modes.into_iter().for_each(Modes::restore);
    let folder = temporary_folder(&tag);
    for _ in 0..REMOVALS {
        let is_removed = remove(&folder);
        pipes.retain(|pipe| !remove_unread(pipe));
        if is_removed && pipes.is_empty() {
            break;
        }
        std::thread::sleep(BETWEEN_REMOVALS);
    }
    ExitCode::SUCCESS
}

/// Returns the start of the tags of all rounds of a job.
fn job_tag(job: &str) -> String {
    format!("{job}.")
}

/// Returns the tag of a round. No round's tag begins with another's.
fn round_tag(job: &str, round: &str) -> String {
    format!("{}{round}.", job_tag(job))
}

fn temporary_folder(job: &str) -> PathBuf {
    std::env::temp_dir().join(format!("flow-launch_{job}"))
}

/// Removes a job's temporary folder, if it exists and is ours; false if some of it is left.
fn remove(folder: &Path) -> bool {
    !is_ours(folder) || fs::remove_dir_all(folder).is_ok()
}

fn is_ours(folder: &Path) -> bool {
    fs::symlink_metadata(folder)
        .is_ok_and(|found| found.is_dir() && found.uid() == geteuid().as_raw())
}

/// Kills all processes whose tag begins with `tag`.
fn kill_stragglers(tag: &str) {
    let entry = format!("{JOB_TAG}={tag}");
    for _ in 0..KILL_PASSES {
        if !kill_all(entry.as_bytes()) {
            break;
        }
        std::thread::yield_now();
    }
}

/// Kills all processes with an environment entry that begins with `entry`; false if there are none.
fn kill_all(entry: &[u8]) -> bool {
    let mut found = false;
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid =
            process.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let environment = fs::read(process.path().join("environ")).unwrap_or_default();
        if let Some(pid) = pid
            .filter(|_| environment.split(|byte| *byte == 0).any(|other| other.starts_with(entry)))
        {
            found |= kill_process(pid, Signal::KILL).is_ok();
        }
    }
    found
}
