//! One worker process: starting it, signalling it, reading how it ended.
//!
//! A worker starts as flow-launch itself ([`exec`]). It asks the kernel to kill it when the
//! launcher dies, waits until the reaper has registered it, and only then executes the program. So
//! a killed launcher never leaves a worker behind. It waits for its standard input, which arrives
//! as a descriptor through a socket.
//!
//! Each worker leads a session of its own without a controlling terminal, so that no terminal can
//! stop it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, kill_process,
    kill_process_group, pidfd_open, set_parent_process_death_signal, setrlimit, setsid, waitid,
};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::agent::exit_status::ExitStatus;
use crate::agent::reaper::Reaper;
use crate::plan::WorkerSpec;
use crate::plan::numa;
use crate::report::events;
use crate::signal;

/// First argument of a flow-launch process that is about to become a worker.
pub const HIDDEN_FLAG: &str = "--exec-worker";

/// Descriptors that the launcher needs beside those of its workers. Its stores accept up to 512
/// connections that are not authenticated yet. The rest is a reserve.
const OWN_DESCRIPTORS: u64 = 512 + 512;

/// Descriptors per worker: its pidfd, two pipes, two files, its memory for checkpoints and its flight
/// recorder's, and connections to the stores (several for each of PyTorch's process groups).
const WORKER_DESCRIPTORS: u64 = 14;

/// A worker that has been started and not yet reaped. It leads a session, and in it a process
/// group.
pub struct Process {
    pub pid: Pid,
    /// None once it is reaped.
    pidfd: Option<OwnedFd>,
}

impl Process {
    /// Starts a worker; returns it with the pipes from its standard output and standard error, for
    /// each that has no file in `files`.
    ///
    /// Call it on the main thread: the parent-death signal is tied to the thread that starts the
    /// worker.
    pub fn start(
        spec: &WorkerSpec,
        files: [Option<File>; 2],
        reaper: &mut Reaper,
    ) -> io::Result<(Process, [Option<OwnedFd>; 2])> {
        let mut command = Command::new("/proc/self/exe");
        let cores = spec.cores.as_deref().map(numa::list).unwrap_or_default();
        command.arg0("flow-launch").arg(HIDDEN_FLAG).arg(cores).args(&spec.command);
        command.env_remove("FLOW_STORE").env_remove("FLOW_TOKEN");
        // A worker may be a launcher, whose events are others.
        command.env_remove(events::VARIABLE);
        command.envs([reaper.job_tag()]);
        command.envs(spec.environment.iter().map(|(name, value)| (name, value)));
        let [stdout, stderr] = files.map(|file| file.map_or_else(Stdio::piped, Stdio::from));
        let (gate, awaited) = UnixStream::pair()?;
        command.stdin(OwnedFd::from(awaited)).stdout(stdout).stderr(stderr);
        let mut child = command.spawn()?;
        // Closes our copies of the worker's descriptors.
        drop(command);
        let pid = Pid::from_child(&child);
        reaper.register(pid);
        let start = pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from);
        let start = start.and_then(|pidfd| open_gate(&gate, spec.has_input).map(|()| pidfd));
        drop(gate);
        let pidfd = start.inspect_err(|_| {
            // The worker ends, as its gate is closed.
            let _ = child.wait();
            reaper.unregister(pid);
        })?;
        let pipes =
            [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
        Ok((Process { pid, pidfd: Some(pidfd) }, pipes))
    }

    /// Sends a signal to the worker and all of its process group.
    pub fn signal(&self, signal: i32) {
        let Some(signal) = Signal::from_named_raw(signal) else { return };
        let sent = match kill_process_group(self.pid, signal) {
            // It has just been started and has no process group yet.
            Err(Errno::SRCH) => kill_process(self.pid, signal),
            sent => sent,
        };
        if let Err(error) = sent {
            log::debug!("cannot signal process group {}: {error}", self.pid);
        }
    }

    /// Kills the worker's process group.
    pub fn kill(&self) {
        self.signal(Signal::KILL.as_raw());
    }

    /// Returns how the worker ended, if it has. Its pid stays reserved until it is reaped.
    pub fn end(&self) -> io::Result<Option<ExitStatus>> {
        let Some(pidfd) = self.pidfd() else { return Ok(None) };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::PidFd(pidfd), options)?;
        Ok(status.and_then(|status| {
            status
                .exit_status()
                .map(ExitStatus::Exit)
                .or_else(|| status.terminating_signal().map(ExitStatus::Signal))
        }))
    }

    /// Frees the pid of a worker that has ended.
    pub fn reap(&mut self) {
        let Some(pidfd) = self.pidfd.take() else { return };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        if let Err(error) = waitid(WaitId::PidFd(pidfd.as_fd()), options) {
            log::warn!("cannot reap process {}: {error}", self.pid);
        }
    }

    /// Returns what is readable when the worker has ended; None once it is reaped.
    pub fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(OwnedFd::as_fd)
    }
}

/// Executes the program, in the new process, or prints why it cannot and exits as a shell would.
/// The CPUs to bind to come before the program and its arguments.
pub fn exec(mut command: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(cores) = command.next() else { return ExitCode::FAILURE };
    become_program(await_launcher().and_then(|()| bind(&cores)), command)
}

/// Executes the program, if `ready` is no error.
pub fn become_program(
    ready: io::Result<()>,
    mut command: impl Iterator<Item = OsString>,
) -> ExitCode {
    let Some(program) = command.next() else { return ExitCode::FAILURE };
    let error = match ready {
        Ok(()) => Command::new(&program).args(command).exec(),
        Err(error) => error,
    };
    let is_missing = error.kind() == ErrorKind::NotFound;
    let lacks_interpreter = is_missing && Path::new(&program).exists();
    let hint = if lacks_interpreter { "; is the interpreter it names installed?" } else { "" };
    eprintln!("flow-launch: cannot run {}: {error}{hint}", program.display());
    ExitCode::from(if is_missing { 127 } else { 126 })
}

/// Lets a worker continue, with our standard input or `/dev/null`.
fn open_gate(gate: &UnixStream, has_input: bool) -> io::Result<()> {
    let stdin = io::stdin();
    let nothing = File::open("/dev/null")?;
    let input = [if has_input { stdin.as_fd() } else { nothing.as_fd() }];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&input));
    match retry_on_intr(|| sendmsg(gate, &[IoSlice::new(b"!")], &mut control, SendFlags::NOSIGNAL))
    {
        // It has already been killed; its end is handled as for any worker.
        Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn await_launcher() -> io::Result<()> {
    setsid()?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let gate = io::stdin();
    retry_on_intr(|| {
        recvmsg(&gate, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut input = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut received) => received.next(),
        _ => None,
    });
    let input = input.next().ok_or_else(|| io::Error::other("the launcher has gone"))?;
    rustix::stdio::dup2_stdin(input)?;
    signal::unblock_all()
}

/// Binds this process to the listed CPUs, if there are any.
fn bind(cores: &OsStr) -> io::Result<()> {
    let cores = cores.to_str().and_then(numa::parse).unwrap_or_default();
    if cores.is_empty() {
        return Ok(());
    }
    let mut mask = CpuSet::new();
    cores.into_iter().filter(|core| *core < CpuSet::MAX_CPU).for_each(|core| mask.set(core));
    Ok(sched_setaffinity(None, &mask)?)
}

/// Returns the number of descriptors that a launcher of this many workers may need.
pub fn needed_descriptors(workers: u32) -> u64 {
    OWN_DESCRIPTORS + WORKER_DESCRIPTORS * u64::from(workers)
}

/// Raises the soft limit on open files to what this many workers need, as far as allowed.
pub fn allow_descriptors(workers: u32) {
    let needed = needed_descriptors(workers);
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < needed) {
        let current = limit.maximum.map_or(needed, |maximum| maximum.min(needed));
        if let Err(error) =
            setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum: limit.maximum })
        {
            log::warn!("cannot raise the limit on open files to {current}: {error}");
        }
    }
}
