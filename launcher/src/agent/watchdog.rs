//! torchelastic's watchdog, enabled by TORCHELASTIC_ENABLE_FILE_TIMER=1: workers set and release
//! timers through a named pipe (torch's `FileTimerClient`). A process whose timer expires is sent
//! the signal that it asked for.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{self, Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::agent::named_pipe::remove_unread;
use crate::agent::reaper::Reaper;
use crate::agent::timers::{Expired, Timers};
use crate::report::text::printable;
use crate::signal;

/// The variable that enables it.
const ENABLE: &str = "TORCHELASTIC_ENABLE_FILE_TIMER";

/// The variable with the path of the pipe: in our environment where the user wants it, in the
/// workers' where it is.
const VARIABLE: &str = "TORCHELASTIC_TIMER_FILE";

/// The most ancestors of a process to look at.
const GENERATIONS: usize = 64;

/// Bytes read at once.
const READ: usize = 1 << 16;

/// The timers that workers set, and the named pipe by which they set them. The reaper removes the pipe.
pub struct Watchdog {
    path: PathBuf,
    pipe: File,
    timers: Timers,
}

impl Watchdog {
    /// Starts the watchdog; None if it is not enabled. The text is a notice for the user.
    pub fn start(reaper: &mut Reaper) -> anyhow::Result<Option<(Watchdog, Option<String>)>> {
        if std::env::var_os(ENABLE).is_none_or(|value| value != "1") {
            return Ok(None);
        }
        let mut note = None;
        if let Some(path) =
            std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
        {
            match at(&path, reaper) {
                Ok(watchdog) => return Ok(Some((watchdog, None))),
                Err(error) => {
                    note = Some(format!(
                        "{VARIABLE} is '{}': {error}; timers have another pipe",
                        path.display()
                    ))
                }
            }
        }
        let folder = reaper.temporary_folder().context("cannot make a temporary folder")?;
        let watchdog =
            open(folder.join("timers")).context("cannot make the pipe of the watchdog's timers")?;
        Ok(Some((watchdog, note)))
    }

    /// Returns the variable for the environment of every worker.
    pub fn variable(&self) -> (&'static str, OsString) {
        (VARIABLE, self.path.clone().into())
    }

    /// Returns what is readable when workers have written.
    pub fn watch(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }

    /// Reads requests of workers; may return a notice for the user.
    pub fn take(&mut self) -> Option<String> {
        let mut bytes = vec![0; READ];
        match self.pipe.read(&mut bytes) {
            Ok(count) => self
                .timers
                .take(&bytes[..count])
                .map(|what| format!("{} has {what}", self.path.display())),
            Err(_) => None, // nothing there yet
        }
    }

    /// Returns when to call [`Watchdog::elapsed`].
    pub fn deadline(&self) -> Option<Instant> {
        let left = (self.timers.next()? - now()).max(0.0);
        Instant::now().checked_add(Duration::try_from_secs_f64(left).ok()?)
    }

    /// Signals processes whose timers have expired, if they belong to one of `workers` (process and
    /// rank); returns notices for the user.
    pub fn elapsed(&mut self, workers: &[(Pid, u32)]) -> Vec<String> {
        self.timers.expired(now()).iter().filter_map(|expired| end(expired, workers)).collect()
    }

    /// Forgets all timers, as the workers are started again.
    pub fn clear(&mut self) {
        self.timers.clear();
    }
}

/// Makes a watchdog with its pipe at the path that the user chose.
fn at(path: &Path, reaper: &mut Reaper) -> io::Result<Watchdog> {
    let path = path::absolute(path)?;
    if !remove_unread(&path) {
        return Err(io::Error::other("it is there already, and in use or no named pipe"));
    }
    reaper.adopt_pipe(&path)?;
    open(path)
}

fn open(path: PathBuf) -> io::Result<Watchdog> {
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    // Open for writing too, so that reading does not end while no worker has it open.
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32;
    let pipe = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path)?;
    Ok(Watchdog { path, pipe, timers: Timers::default() })
}

/// Sends a process whose timer has expired the signal it asked for.
fn end(expired: &Expired, workers: &[(Pid, u32)]) -> Option<String> {
    let Expired { pid, scope, signal, late } = expired;
    let scope = printable(scope);
    let what = format!("the timer '{scope}' of process {pid} expired {late:.1} s ago");
    let process = Pid::from_raw(*pid)?;
    // Holding a pidfd keeps the pid from being reused meanwhile.
    let handle = pidfd_open(process, PidfdFlags::empty()).ok()?; // it has ended
    let Some(rank) = rank(process, workers) else {
        return Some(format!("{what}; it belongs to none of the workers here, and is left alone"));
    };
    let what = format!("rank {rank}: {what}");
    let Some(number) = *signal else { return Some(format!("{what}; it asked for no signal")) };
    let Some(signal) = Signal::from_named_raw(number) else {
        return Some(format!("{what}; it asked for signal {number}, which does not exist"));
    };
    let name = signal::name(number);
    match pidfd_send_signal(&handle, signal) {
        Ok(()) => Some(format!("{what}; {name} is sent to it, as it asked")),
        Err(error) => Some(format!("{what}; cannot send {name}: {error}")),
    }
}

/// Returns the rank of the worker that this process is, or descends from.
fn rank(process: Pid, workers: &[(Pid, u32)]) -> Option<u32> {
    let mut next = Some(process);
    for _ in 0..GENERATIONS {
        let pid = next?;
        let (parent, group) = relations(pid)?;
        let known = workers.iter().find(|(worker, _)| *worker == pid || Some(*worker) == group);
        if let Some((_, rank)) = known {
            return Some(*rank);
        }
        next = parent;
    }
    None
}

/// Returns the parent of a process and its process group (proc(5), stat).
fn relations(pid: Pid) -> Option<(Option<Pid>, Option<Pid>)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    let mut pids =
        fields.split_whitespace().skip(1).map(|field| field.parse().ok().and_then(Pid::from_raw));
    Some((pids.next()?, pids.next()?))
}

/// Seconds since 1970, the clock of the timers.
fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
