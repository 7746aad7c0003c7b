//! The process that was started for one host: its agent, or the remote shell to it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open};

use crate::hosts::agents::Start;
use crate::hosts::control_stream;
use crate::output::lines::Assembler;
use crate::report::events;

/// The start of agents' own messages.
pub const OF_LAUNCHER: &[u8] = b"flow-launch: ";

/// The process for one host: its agent, or the remote shell to it.
pub struct HostProcess {
    pub host: String,
    /// The name of what runs the agent there, for messages.
    pub starter: String,
    pub process: Child,
    pub pidfd: OwnedFd,
    pub control: Option<ChildStdin>,
    /// Bytes to write to the control stream.
    pub unwritten: VecDeque<u8>,
    pub streams: [Option<HostStream>; 2],
    /// Its agent has greeted. Until then, output is the remote shell's.
    pub is_there: bool,
    /// It has ended or was given up.
    pub has_ended: bool,
    /// The number of times that it has printed each message.
    pub said: HashMap<Vec<u8>, usize>,
}

/// One of its streams, as lines.
pub struct HostStream {
    pub pipe: OwnedFd,
    pub assembler: Assembler,
}

impl HostStream {
    fn new(pipe: Option<OwnedFd>) -> io::Result<HostStream> {
        let pipe = pipe.ok_or_else(|| io::Error::other("a pipe is missing"))?;
        rustix::io::ioctl_fionbio(&pipe, true)?;
        Ok(HostStream { pipe, assembler: Assembler::new() })
    }
}

impl HostProcess {
    /// Starts it. `environment` is the beginning of its control stream.
    pub fn start(start: Start, environment: &str) -> io::Result<HostProcess> {
        let mut process = Command::new(&start.command[0]);
        let mut process = process
            .args(&start.command[1..])
            // Those are the head's.
            .env_remove(events::VARIABLE)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        // It ends when its control stream is closed.
        let control = process.stdin.take();
        let stdout = HostStream::new(process.stdout.take().map(OwnedFd::from))?;
        let stderr = HostStream::new(process.stderr.take().map(OwnedFd::from))?;
        if let Some(control) = &control {
            rustix::io::ioctl_fionbio(control, true)?;
        }
        Ok(HostProcess {
            host: start.host,
            starter: start.starter,
            pidfd: pidfd_open(Pid::from_child(&process), PidfdFlags::empty())?,
            process,
            control,
            unwritten: environment.bytes().collect(),
            streams: [Some(stdout), Some(stderr)],
            is_there: false,
            has_ended: false,
            said: HashMap::new(),
        })
    }

    /// Kills its process group.
    pub fn kill(&self) {
        let pid = Pid::from_child(&self.process);
        // It has just been started and has no process group yet.
        let killed =
            kill_process_group(pid, Signal::KILL).or_else(|_| kill_process(pid, Signal::KILL));
        if let Err(error) = killed {
            log::debug!("cannot kill what was started for {}: {error}", self.host);
        }
    }

    /// Adds a line to the control stream, if that is still open.
    pub fn send(&mut self, line: &str) {
        if self.control.is_some() {
            self.unwritten.extend(line.bytes());
        }
    }

    /// Writes as much as the control stream takes.
    pub fn write(&mut self) {
        let Some(control) = &self.control else { return };
        match rustix::io::write(control, self.unwritten.as_slices().0) {
            Ok(count) => drop(self.unwritten.drain(..count)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // The agent is ending.
            Err(_) => {
                self.control = None;
                self.unwritten.clear();
            }
        }
    }

    /// Whether it has ended and its streams have too.
    pub fn is_over(&self) -> bool {
        self.has_ended && self.streams.iter().all(Option::is_none)
    }

    /// Takes a segment of a stream; returns the prefix to show it with, or None if it is not to be
    /// shown.
    pub fn prefix(
        &mut self,
        which: usize,
        segment: &[u8],
        shown: &mut HashMap<Vec<u8>, usize>,
    ) -> Option<String> {
        if !self.is_there {
            self.is_there = which == 0 && segment == control_stream::GREETING.as_bytes();
            return (!self.is_there).then(|| format!("{}: ", self.host));
        }
        if which == 1 && segment.starts_with(OF_LAUNCHER) {
            let said = self.said.entry(segment.into()).or_default();
            let shown = shown.entry(segment.into()).or_default();
            *said += 1;
            if said <= shown {
                return None;
            }
            *shown = *said;
        }
        Some(String::new())
    }
}
