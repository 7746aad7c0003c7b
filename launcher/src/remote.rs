//! The *head*: starts an agent on each host, passes on what they write and the signals it gets, and
//! ends with their exit code. Agents of a job see to each other; the head sees to those that never
//! come to that.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{kill_process, kill_process_group, pidfd_open, Pid, PidfdFlags, Signal};

use crate::address;
use crate::hosts::{self, Place, Start};
use crate::job::{Hosts, Job};
use crate::leader;
use crate::leash;
use crate::link::TOKEN;
use crate::output::{Assembler, Segment, Source};
use crate::signals::{self, Request, Signals};
use crate::sink::Sinks;
use crate::wait;
use crate::worker::{self, End};

/// When one agent has failed, the others hear of it from each other: this long they may take to end
/// or stop.
const TOGETHER: Duration = Duration::from_secs(5);

/// How long agents may take to end beyond the grace period of their workers, and after they were
/// killed.
const STOPPING: Duration = Duration::from_secs(45);
const LAST_WAIT: Duration = Duration::from_secs(10);

/// Bytes read at once.
const READ: usize = 1 << 16;

/// Exit code of ssh for what goes wrong with ssh itself.
const OF_SSH: End = End::Exit(255);

/// What agents put before their own messages.
const OF_LAUNCHER: &[u8] = b"flow-launch: ";

/// Whether an agent says by this line that it, or another, is told to end.
fn is_of_end(line: &[u8]) -> bool {
    let message = line.strip_prefix(OF_LAUNCHER);
    message.is_some_and(|message| {
        message.starts_with(b"SIGTERM: ") || message.ends_with(b" was told to end\n")
    })
}

/// Runs a job on several hosts to its end and returns the exit code to end with.
pub fn run(job: &Job, hosts: &Hosts) -> anyhow::Result<u8> {
    let (mut variables, missing) = hosts::environment(std::env::vars_os(), &hosts.exports);
    if !variables.contains_key(TOKEN) {
        variables.insert(TOKEN.into(), leader::secret()?);
    }
    let place = Place {
        launcher: std::env::current_exe()?,
        folder: folder().context("the current folder is gone")?,
    };
    let prefix = io::stdout().is_terminal();
    let is_local = |node: usize| address::is_local(&hosts.list[node].name);
    let nodes = 0..hosts.list.len();
    let starts: Vec<Start> =
        nodes.map(|node| hosts::start(job, hosts, node, is_local(node), &place, prefix)).collect();
    if job.dry_run {
        io::stdout().write_all(hosts::describe(&starts, &variables).as_bytes())?;
        return Ok(0);
    }
    worker::allow_descriptors(hosts.list.len() as u32);
    let mut head = Head {
        signals: Signals::catch(&job.signals)?,
        sinks: Sinks::standard(job.quiet)
            .context("cannot open standard output and standard error")?,
        grace: job.grace,
        patience: job.nodes.patience.join,
        started: Instant::now(),
        beat: Instant::now() + leash::BETWEEN_BEATS,
        agents: Vec::new(),
        shown: HashMap::new(),
        phase: Phase::Running,
        code: 0,
        is_signalled: false,
    };
    for name in missing {
        head.sinks.note(&format!(
            "--export {name}: there is no {name} here, or it is not UTF-8; {name}=VALUE sets it"
        ));
    }
    head.start(starts, &leash::environment(&variables)?);
    head.run()
}

/// The current folder, by the name by which the user has come there: another host may know it by
/// that only.
fn folder() -> io::Result<PathBuf> {
    let here = std::fs::metadata(".")?;
    let named = std::env::var_os("PWD").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let is_here = |folder: &PathBuf| {
        std::fs::metadata(folder)
            .is_ok_and(|named| (named.dev(), named.ino()) == (here.dev(), here.ino()))
    };
    named.filter(is_here).map_or_else(std::env::current_dir, Ok)
}

/// How far the end of the job has come, and when the next step is due.
#[derive(Clone, Copy)]
enum Phase {
    Running,
    /// An agent has failed: the others should end as well.
    Ending(Instant),
    /// All were told to end.
    Stopping(Instant),
    Killed(Instant),
}

/// What `poll` has found ready; agents and their streams by index.
enum Ready {
    Signals,
    Sink(usize),
    Leash(usize),
    Output(usize, usize),
    End(usize),
}

struct Head {
    agents: Vec<Agent>,
    signals: Signals,
    sinks: Sinks,
    grace: Duration,
    /// How long to wait for an agent to be there.
    patience: Duration,
    started: Instant,
    /// When to write to the leashes again.
    beat: Instant,
    /// How often a message of the agents was shown: all say the same of what concerns all.
    shown: HashMap<Vec<u8>, usize>,
    phase: Phase,
    /// Of the first agent that has failed.
    code: u8,
    is_signalled: bool,
}

/// What was started for one host: its agent, or the remote shell to it.
struct Agent {
    host: String,
    /// What runs it there.
    starter: String,
    process: Child,
    pidfd: OwnedFd,
    leash: Option<ChildStdin>,
    /// What is to be written to the leash.
    unwritten: VecDeque<u8>,
    streams: [Option<Stream>; 2],
    /// It has greeted. Until then, what comes is from the remote shell.
    is_there: bool,
    /// Or it was given up.
    has_ended: bool,
    /// How often it has said what.
    said: HashMap<Vec<u8>, usize>,
}

struct Stream {
    pipe: OwnedFd,
    assembler: Assembler,
}

impl Agent {
    fn start(start: Start, environment: &str) -> io::Result<Agent> {
        let mut process = Command::new(&start.command[0]);
        let mut process = process
            .args(&start.command[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let (leash, stdout, stderr) =
            (process.stdin.take(), process.stdout.take(), process.stderr.take());
        // Without a leash it ends.
        let stream = |pipe: Option<OwnedFd>| -> io::Result<Option<Stream>> {
            let pipe = pipe.ok_or_else(|| io::Error::other("a pipe is missing"))?;
            rustix::io::ioctl_fionbio(&pipe, true)?;
            Ok(Some(Stream { pipe, assembler: Assembler::new() }))
        };
        let streams = [stream(stdout.map(OwnedFd::from))?, stream(stderr.map(OwnedFd::from))?];
        if let Some(leash) = &leash {
            rustix::io::ioctl_fionbio(leash, true)?;
        }
        Ok(Agent {
            host: start.host,
            starter: start.starter,
            pidfd: pidfd_open(Pid::from_child(&process), PidfdFlags::empty())?,
            process,
            leash,
            unwritten: environment.bytes().collect(),
            streams,
            is_there: false,
            has_ended: false,
            said: HashMap::new(),
        })
    }

    fn kill(&self) {
        let pid = Pid::from_child(&self.process);
        // It has no group yet when it has only just been started.
        let killed =
            kill_process_group(pid, Signal::KILL).or_else(|_| kill_process(pid, Signal::KILL));
        if let Err(error) = killed {
            log::debug!("cannot kill what was started for {}: {error}", self.host);
        }
    }

    fn tell(&mut self, line: &str) {
        if self.leash.is_some() {
            self.unwritten.extend(line.bytes());
        }
    }

    /// Writes what the leash takes.
    fn write(&mut self) {
        let Some(leash) = &self.leash else { return };
        match rustix::io::write(leash, self.unwritten.as_slices().0) {
            Ok(count) => drop(self.unwritten.drain(..count)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // It is ending.
            Err(_) => {
                self.leash = None;
                self.unwritten.clear();
            }
        }
    }

    fn is_over(&self) -> bool {
        self.has_ended && self.streams.iter().all(Option::is_none)
    }

    /// Takes a segment of a stream; what to show of it before the segment itself, if it is to be
    /// shown.
    fn prefix(
        &mut self,
        which: usize,
        segment: &[u8],
        shown: &mut HashMap<Vec<u8>, usize>,
    ) -> Option<String> {
        if !self.is_there {
            self.is_there = which == 0 && segment == leash::GREETING.as_bytes();
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

impl Head {
    fn start(&mut self, starts: Vec<Start>, environment: &str) {
        for start in starts {
            let host = start.host.clone();
            match Agent::start(start, environment) {
                Ok(agent) => self.agents.push(agent),
                Err(error) => {
                    self.sinks.say(&format!("cannot start a process for {host}: {error}"));
                    return self.fail(1);
                }
            }
        }
    }

    fn run(mut self) -> anyhow::Result<u8> {
        while !self.agents.iter().all(Agent::is_over) {
            let deadline = self.deadline();
            self.turn(deadline)?;
        }
        // Only a reader of our output is waited for, unless we were told to end.
        while self.sinks.watch().next().is_some() {
            let deadline = self.is_signalled.then(Instant::now);
            if !self.turn(deadline)? && self.is_signalled {
                break;
            }
        }
        Ok(self.code)
    }

    fn deadline(&self) -> Option<Instant> {
        let is_awaited = self.agents.iter().any(|agent| !agent.is_there && !agent.has_ended);
        let phase = match self.phase {
            Phase::Running => is_awaited.then(|| self.started + self.patience),
            Phase::Ending(deadline) | Phase::Stopping(deadline) | Phase::Killed(deadline) => {
                Some(deadline)
            }
        };
        phase.into_iter().chain([self.beat]).min()
    }

    /// Waits for something to happen and deals with it; false if nothing did.
    fn turn(&mut self, deadline: Option<Instant>) -> anyhow::Result<bool> {
        let ready = wait::until(self.watch(), deadline).context("cannot wait for the hosts")?;
        let is_idle = ready.is_empty();
        for event in ready {
            match event {
                Ready::Signals => {
                    while let Some(request) = self.signals.next() {
                        match request {
                            Request::End(signal) => {
                                self.is_signalled = true;
                                self.stop(signal);
                            }
                            Request::Suspend => {
                                drop(signals::suspend().context("cannot stop for a while")?)
                            }
                            Request::Resize => {}
                        }
                    }
                }
                Ready::Sink(sink) => {
                    // When nobody reads it any more, the agents must feel it.
                    for which in self.sinks.write(sink) {
                        self.agents.iter_mut().for_each(|agent| agent.streams[*which] = None);
                    }
                }
                Ready::Leash(agent) => self.agents[agent].write(),
                Ready::Output(agent, which) => drop(self.read(agent, which)),
                Ready::End(agent) => self.note_end(agent)?,
            }
        }
        self.elapsed(Instant::now());
        Ok(!is_idle)
    }

    fn watch(&self) -> Vec<(Ready, PollFd<'_>)> {
        let mut watched = vec![(Ready::Signals, PollFd::new(&self.signals, PollFlags::IN))];
        let sinks = self.sinks.watch();
        watched.extend(
            sinks.map(|(sink, fd)| {
                (Ready::Sink(sink), PollFd::from_borrowed_fd(fd, PollFlags::OUT))
            }),
        );
        for (index, agent) in self.agents.iter().enumerate() {
            let leash = agent.leash.as_ref().filter(|_| !agent.unwritten.is_empty());
            watched.extend(leash.map(|leash| {
                (Ready::Leash(index), PollFd::from_borrowed_fd(leash.as_fd(), PollFlags::OUT))
            }));
            for (which, stream) in agent.streams.iter().enumerate() {
                let stream = stream.as_ref().filter(|_| !self.sinks.of(which).is_full());
                watched.extend(stream.map(|stream| {
                    (Ready::Output(index, which), PollFd::new(&stream.pipe, PollFlags::IN))
                }));
            }
            if !agent.has_ended {
                watched.push((Ready::End(index), PollFd::new(&agent.pidfd, PollFlags::IN)));
            }
        }
        watched
    }

    /// Passes on some of what an agent has written; false if there is no more for now.
    fn read(&mut self, index: usize, which: usize) -> bool {
        // The head has ended the agents by SIGTERM, of which the user is to know nothing.
        let is_ended_by_us =
            !self.is_signalled && matches!(self.phase, Phase::Stopping(_) | Phase::Killed(_));
        let Head { agents, sinks, shown, .. } = self;
        let agent = &mut agents[index];
        let Some(mut stream) = agent.streams[which].take() else { return false };
        let has_ended = agent.has_ended;
        let mut put = |segment: Segment| {
            if is_ended_by_us && which == 1 && is_of_end(segment.bytes) {
                return;
            }
            if let Some(prefix) = agent.prefix(which, segment.bytes, shown) {
                // What a shell says at its start is not the program's.
                let sink = sinks.of_mut(if prefix.is_empty() { which } else { 1 });
                let source =
                    Source { id: 2 * index + which, prefix: prefix.as_bytes(), is_live: false };
                sink.queue.put(&source, segment.rest());
            }
        };
        let mut buffer = vec![0; READ];
        match rustix::io::read(&stream.pipe, &mut buffer) {
            Ok(count) if count > 0 => stream.assembler.feed(&buffer[..count], put),
            Err(Errno::AGAIN | Errno::INTR) if !has_ended => {}
            _ => {
                stream.assembler.finish(&mut put);
                return false;
            }
        }
        agent.streams[which] = Some(stream);
        true
    }

    /// What was started for a host has ended. Processes that it has left behind may hold its output
    /// open.
    fn note_end(&mut self, index: usize) -> anyhow::Result<()> {
        let agent = &mut self.agents[index];
        let Some(status) =
            agent.process.try_wait().context("cannot learn how an agent has ended")?
        else {
            return Ok(());
        };
        agent.has_ended = true;
        agent.leash = None;
        let end = match std::os::unix::process::ExitStatusExt::signal(&status) {
            Some(signal) => End::Signal(signal),
            None => End::Exit(status.code().unwrap_or(1)),
        };
        for which in 0..2 {
            while self.read(index, which) {}
        }
        let Agent { host, starter, is_there, .. } = &self.agents[index];
        let is_first = matches!(self.phase, Phase::Running);
        match is_there {
            false if is_first => {
                let advice = match end {
                    OF_SSH => format!("; `{starter} {host} true` must work without a password"),
                    _ => String::new(),
                };
                self.sinks.say(&format!(
                    "cannot start flow-launch on {host}: {starter} ended with {end}{advice}"
                ));
                self.fail(end.code().max(1));
            }
            // The agents' report has it where a worker has ended so.
            true if is_first && end == OF_SSH && !self.has_shown("exit code 255") => {
                self.sinks
                    .say(&format!("the connection to {host} is lost: {starter} ended with {end}"));
                self.fail(end.code());
            }
            _ if end.is_failure() && *is_there && self.code == 0 => {
                self.code = end.code();
                if is_first {
                    self.phase = Phase::Ending(Instant::now() + TOGETHER);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn has_shown(&self, words: &str) -> bool {
        self.shown.keys().any(|line| String::from_utf8_lossy(line).trim_end().ends_with(words))
    }

    fn fail(&mut self, code: u8) {
        self.code = code;
        self.stop(Signal::TERM.as_raw());
    }

    /// Has all agents end as at this signal. One that is not there yet has nothing to end.
    fn stop(&mut self, signal: i32) {
        for agent in self.agents.iter_mut().filter(|agent| !agent.has_ended) {
            if agent.is_there {
                agent.tell(&leash::signal(signal));
            } else {
                agent.kill();
                if self.code == 0 {
                    self.code = End::Signal(signal).code();
                }
            }
        }
        if let Phase::Running | Phase::Ending(_) = self.phase {
            self.phase = Phase::Stopping(Instant::now() + self.grace + STOPPING);
        }
    }

    /// Time has passed.
    fn elapsed(&mut self, now: Instant) {
        if now >= self.beat {
            self.beat = now + leash::BETWEEN_BEATS;
            self.agents
                .iter_mut()
                .filter(|agent| agent.unwritten.is_empty())
                .for_each(|agent| agent.tell(leash::BEAT));
        }
        if self.deadline().is_some_and(|deadline| deadline > now) {
            return;
        }
        match self.phase {
            Phase::Running => {
                let late = self.agents.iter().filter(|agent| !agent.is_there && !agent.has_ended);
                let hosts: Vec<_> = late.map(|agent| agent.host.as_str()).collect();
                let (hosts, patience) = (hosts.join(", "), self.patience.as_secs_f64());
                self.sinks.say(&format!(
                    "no answer from {hosts} for {patience} s (--rdzv-conf join_timeout)"
                ));
                self.fail(1);
            }
            Phase::Ending(_) => self.stop(Signal::TERM.as_raw()),
            Phase::Stopping(_) => {
                self.agents.iter().filter(|agent| !agent.has_ended).for_each(Agent::kill);
                self.phase = Phase::Killed(now + LAST_WAIT);
            }
            Phase::Killed(_) => {
                for agent in &mut self.agents {
                    (agent.has_ended, agent.streams) = (true, [None, None]);
                }
            }
        }
    }
}
