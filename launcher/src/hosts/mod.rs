//! The *head* of a job with `--hosts`. It starts an agent on each host, passes on their output and
//! the signals it receives, and ends with their exit code. The agents coordinate themselves; the
//! head handles hosts whose agents never start.

pub mod agents;
pub mod control_stream;
mod host_process;

use std::collections::HashMap;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use flow_store::net::secret;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::Signal;

use crate::agent::exit_status::ExitStatus;
use crate::agent::process;
use crate::agent::reaper::Reaper;
use crate::agent::signals::{self, Request, Signals};
use crate::control::token::TOKEN;
use crate::hosts::agents::{Place, Start};
use crate::hosts::host_process::{HostProcess, OF_LAUNCHER};
use crate::job::{Hosts, Job};
use crate::net;
use crate::output::lines::{Segment, Source};
use crate::output::sink::Sinks;
use crate::poll;
use crate::top::panel::Panel;

/// The time that other agents may take to end or to stop when one has failed: they learn of it from
/// each other.
const PEER_EXIT_GRACE: Duration = Duration::from_secs(5);

/// The time that agents may take to end, in addition to the grace period of their workers; and
/// after they were killed.
const STOPPING: Duration = Duration::from_secs(45);
const LAST_WAIT: Duration = Duration::from_secs(10);

/// Bytes read at once.
const READ: usize = 1 << 16;

/// Exit code of ssh for its own errors.
const OF_SSH: ExitStatus = ExitStatus::Exit(255);

/// Whether an agent reports by this line that it, or another, received a signal to end.
fn is_of_end(line: &[u8]) -> bool {
    let message = line.strip_prefix(OF_LAUNCHER);
    message.is_some_and(|message| {
        message.starts_with(b"SIGTERM: ") || message.ends_with(b" was stopped by a signal\n")
    })
}

/// Runs a job on several hosts to its end and returns the exit code to end with.
pub fn run(job: &Job, hosts: &Hosts) -> anyhow::Result<u8> {
    let (mut variables, missing) = agents::environment(std::env::vars_os(), &hosts.exports);
    if !variables.contains_key(TOKEN) {
        variables.insert(TOKEN.into(), secret()?);
    }
    let place = Place {
        launcher: std::env::current_exe()?,
        folder: folder().context("the current folder is gone")?,
    };
    let prefix = io::stdout().is_terminal();
    let mut starts = Vec::new();
    for (node, entry) in hosts.list.iter().enumerate() {
        let is_local = net::is_local(&entry.name);
        starts.push(agents::start(job, hosts, node, is_local, &place, prefix));
    }
    if job.dry_run {
        io::stdout().write_all(agents::describe(&starts, &variables).as_bytes())?;
        return Ok(0);
    }
    process::allow_descriptors(hosts.list.len() as u32);
    let signals = Signals::catch(&job.signals)?;
    let sinks =
        Sinks::standard(job.quiet).context("cannot open standard output and standard error")?;
    let mut panel = None;
    let mut reaper = None;
    if job.top {
        Panel::check_terminal(&sinks)?;
        reaper = Some(Reaper::start(true)?);
        let address = net::join(&hosts.master_addr, hosts.master_port);
        panel = Some(Panel::start(address, variables[TOKEN].clone())?);
    }
    let mut head = Head {
        signals,
        sinks,
        panel,
        reaper,
        grace: job.grace,
        join_timeout: job.nodes.timeouts.join,
        started: Instant::now(),
        next_heartbeat: Instant::now() + control_stream::HEARTBEAT_INTERVAL,
        agents: Vec::new(),
        shown: HashMap::new(),
        phase: Phase::Running,
        goes_on_without_hosts: goes_on_without_hosts(job),
        codes: ExitCodes::default(),
        is_signalled: false,
    };
    for name in missing {
        head.sinks.note(&format!(
            "--export {name}: there is no {name} here, or it is not UTF-8; {name}=VALUE sets it"
        ));
    }
    head.start(starts, &control_stream::environment(&variables)?);
    head.run()
}

/// Whether the agents may go on without some of the hosts.
fn goes_on_without_hosts(job: &Job) -> bool {
    job.is_in_place && (job.max_restarts > 0 || job.min_workers.is_some())
}

/// Returns the current folder, by the name that the user knows: another host may have it under that
/// name only.
pub fn folder() -> io::Result<PathBuf> {
    let here = std::fs::metadata(".")?;
    let named = std::env::var_os("PWD").map(PathBuf::from).filter(|folder| folder.is_absolute());
    if let Some(folder) = named {
        let found = std::fs::metadata(&folder);
        if found.is_ok_and(|found| (found.dev(), found.ino()) == (here.dev(), here.ino())) {
            return Ok(folder);
        }
    }
    std::env::current_dir()
}

/// The phases of a job; the times are deadlines for the next step.
#[derive(Clone, Copy)]
enum Phase {
    Running,
    /// An agent has failed: the others should end too.
    Ending(Instant),
    /// All were asked to end.
    Stopping(Instant),
    Killed(Instant),
}

/// The exit codes of the agents.
#[derive(Default)]
struct ExitCodes {
    /// An agent has ended well, which none does before the job has.
    has_succeeded: bool,
    /// That of the first agent without which the others went on.
    of_lost: Option<u8>,
    /// That of the first other agent that failed.
    of_failed: Option<u8>,
}

impl ExitCodes {
    /// Returns the exit code of the job.
    fn of_job(&self) -> u8 {
        match (self.of_failed, self.has_succeeded) {
            (Some(code), _) => code,
            (None, true) => 0,
            (None, false) => self.of_lost.unwrap_or(0),
        }
    }
}

/// A descriptor that `poll` has found ready; agents and their streams by index.
enum HeadReady {
    Signals,
    Panel,
    Sink(usize),
    Control(usize),
    Output(usize, usize),
    End(usize),
}

struct Head {
    agents: Vec<HostProcess>,
    signals: Signals,
    sinks: Sinks,
    /// `--top`, and who erases what it has drawn.
    panel: Option<Panel>,
    reaper: Option<Reaper>,
    grace: Duration,
    /// The time to wait for an agent to start.
    join_timeout: Duration,
    started: Instant,
    /// The time at which to send the next heartbeat.
    next_heartbeat: Instant,
    /// The number of times that each message of agents was shown: all agents print messages that
    /// concern all.
    shown: HashMap<Vec<u8>, usize>,
    phase: Phase,
    goes_on_without_hosts: bool,
    codes: ExitCodes,
    is_signalled: bool,
}

impl Head {
    fn start(&mut self, starts: Vec<Start>, environment: &str) {
        let count = starts.len();
        for (index, start) in starts.into_iter().enumerate() {
            let host = start.host.clone();
            let mut beginning = environment.to_string();
            if self.may_lose(index, count) {
                // A host that has lost its connection is lost: the others go on without its workers.
                beginning += &control_stream::at_end(Signal::KILL);
            }
            match HostProcess::start(start, &beginning) {
                Ok(agent) => self.agents.push(agent),
                Err(error) => {
                    self.sinks.say(&format!("cannot start a process for {host}: {error}"));
                    return self.fail(1);
                }
            }
        }
    }

    fn run(mut self) -> anyhow::Result<u8> {
        while !self.agents.iter().all(HostProcess::is_over) {
            let deadline = self.deadline();
            self.poll_once(deadline)?;
        }
        self.panel = None;
        self.sinks.erase_footer();
        // All that is left is to write output; no longer once we were signalled to end.
        while self.sinks.watch().next().is_some() {
            let deadline = self.is_signalled.then(Instant::now);
            if !self.poll_once(deadline)? && self.is_signalled {
                break;
            }
        }
        Ok(self.codes.of_job())
    }

    fn deadline(&self) -> Option<Instant> {
        let is_awaited = self.agents.iter().any(|agent| !agent.is_there && !agent.has_ended);
        let phase = match self.phase {
            Phase::Running => is_awaited.then(|| self.started + self.join_timeout),
            Phase::Ending(deadline) | Phase::Stopping(deadline) | Phase::Killed(deadline) => {
                Some(deadline)
            }
        };
        phase.into_iter().chain([self.next_heartbeat]).min()
    }

    /// Waits for events and handles them; false if there were none.
    fn poll_once(&mut self, deadline: Option<Instant>) -> anyhow::Result<bool> {
        let ready = poll::ready(self.watch(), deadline).context("cannot wait for the hosts")?;
        let is_idle = ready.is_empty();
        for event in ready {
            match event {
                HeadReady::Signals => {
                    while let Some(request) = self.signals.next() {
                        match request {
                            Request::End(signal) => {
                                self.is_signalled = true;
                                self.stop(signal);
                            }
                            Request::Suspend => {
                                self.sinks.erase_footer();
                                while self.sinks.can_write_footer() {
                                    self.write_sink(self.sinks.of_footer());
                                }
                                let _stopped_for =
                                    signals::suspend().context("cannot stop for a while")?;
                                self.draw();
                            }
                            Request::Resize => self.draw(),
                        }
                    }
                }
                HeadReady::Panel => {
                    self.panel.iter_mut().for_each(|panel| panel.take(&mut self.sinks));
                    self.note_footer();
                }
                HeadReady::Sink(sink) => self.write_sink(sink),
                HeadReady::Control(agent) => self.agents[agent].write(),
                HeadReady::Output(agent, which) => drop(self.read(agent, which)),
                HeadReady::End(agent) => self.note_end(agent)?,
            }
        }
        self.elapsed(Instant::now());
        Ok(!is_idle)
    }

    /// Draws what is at the foot of the terminal for its present size.
    fn draw(&mut self) {
        self.panel.iter().for_each(|panel| panel.draw(&mut self.sinks));
        self.note_footer();
    }

    /// Tells the reaper whether something is left at the foot of the terminal.
    fn note_footer(&mut self) {
        self.reaper.iter_mut().for_each(|reaper| reaper.note_footer(&self.sinks));
    }

    /// Writes to one of our own outputs. If its reader has gone, the agents get SIGPIPE.
    fn write_sink(&mut self, sink: usize) {
        for which in self.sinks.write(sink) {
            self.agents.iter_mut().for_each(|agent| agent.streams[*which] = None);
        }
        self.note_footer();
    }

    fn watch(&self) -> Vec<(HeadReady, PollFd<'_>)> {
        let mut watched = vec![(HeadReady::Signals, PollFd::new(&self.signals, PollFlags::IN))];
        let panel = self.panel.as_ref().and_then(Panel::watch);
        watched.extend(panel.map(|fd| poll::readable(HeadReady::Panel, fd)));
        let sinks = self.sinks.watch();
        watched.extend(sinks.map(|(sink, fd)| {
            (HeadReady::Sink(sink), PollFd::from_borrowed_fd(fd, PollFlags::OUT))
        }));
        for (index, agent) in self.agents.iter().enumerate() {
            let control = agent.control.as_ref().filter(|_| !agent.unwritten.is_empty());
            watched.extend(control.map(|control| {
                (
                    HeadReady::Control(index),
                    PollFd::from_borrowed_fd(control.as_fd(), PollFlags::OUT),
                )
            }));
            for (which, stream) in agent.streams.iter().enumerate() {
                let stream = stream.as_ref().filter(|_| !self.sinks.of(which).is_full());
                watched.extend(stream.map(|stream| {
                    (HeadReady::Output(index, which), PollFd::new(&stream.pipe, PollFlags::IN))
                }));
            }
            if !agent.has_ended {
                watched.push((HeadReady::End(index), PollFd::new(&agent.pidfd, PollFlags::IN)));
            }
        }
        watched
    }

    /// Passes on output of an agent; false if there is no more for now.
    fn read(&mut self, index: usize, which: usize) -> bool {
        // The head itself has sent the SIGTERM, which the user did not ask for.
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
                // Output of a login shell is not the program's: it goes to standard error.
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

    /// Notes that the process that was started for a host has ended. Processes that it left behind
    /// may hold its output open.
    fn note_end(&mut self, index: usize) -> anyhow::Result<()> {
        let agent = &mut self.agents[index];
        let Some(status) =
            agent.process.try_wait().context("cannot learn how an agent has ended")?
        else {
            return Ok(());
        };
        agent.has_ended = true;
        agent.control = None;
        let end = match std::os::unix::process::ExitStatusExt::signal(&status) {
            Some(signal) => ExitStatus::Signal(signal),
            None => ExitStatus::Exit(status.code().unwrap_or(1)),
        };
        for which in 0..2 {
            while self.read(index, which) {}
        }
        let HostProcess { host, starter, is_there, .. } = &self.agents[index];
        let is_first = matches!(self.phase, Phase::Running);
        // If a worker ended by a signal, the agents' report says so.
        let has_no_connection = end == OF_SSH && !self.has_shown("failed with exit code 255");
        let are_left = self.codes.has_succeeded || self.agents.iter().any(|other| !other.has_ended);
        let others_go_on = self.may_lose(index, self.agents.len()) && are_left;
        if !is_there {
            if !is_first {
                return Ok(());
            }
            let advice = match end {
                OF_SSH => format!(
                    "; `{starter} {host} true` must work without a password; `flow-launch doctor \
                     --hosts {host}` says more"
                ),
                _ => String::new(),
            };
            self.sinks.say(&format!(
                "cannot start flow-launch on {host}: {starter} ended with {end}{advice}"
            ));
            self.fail(end.code().max(1));
        } else if !end.is_failure() {
            self.codes.has_succeeded = true;
        } else if is_first && others_go_on {
            if has_no_connection || matches!(end, ExitStatus::Signal(_)) {
                self.sinks.note(&format!("{host} is lost: {starter} ended with {end}"));
            }
            self.codes.of_lost.get_or_insert(end.code());
        } else if is_first && has_no_connection {
            self.sinks
                .say(&format!("the connection to {host} is lost: {starter} ended with {end}"));
            self.fail(end.code());
        } else {
            self.codes.of_failed.get_or_insert(end.code());
            if is_first {
                self.phase = Phase::Ending(Instant::now() + PEER_EXIT_GRACE);
            }
        }
        Ok(())
    }

    /// Whether the agents of so many hosts may go on without this one. One alone cannot, and two cannot elect another
    /// leader than the first.
    fn may_lose(&self, index: usize, count: usize) -> bool {
        self.goes_on_without_hosts && count > 1 && (index > 0 || count > 2)
    }

    fn has_shown(&self, words: &str) -> bool {
        self.shown.keys().any(|line| String::from_utf8_lossy(line).contains(words))
    }

    fn fail(&mut self, code: u8) {
        self.codes.of_failed = Some(code);
        self.stop(Signal::TERM.as_raw());
    }

    /// Ends all agents as this signal does. An agent that has not started yet has nothing to end.
    fn stop(&mut self, signal: i32) {
        for agent in self.agents.iter_mut().filter(|agent| !agent.has_ended) {
            if agent.is_there {
                agent.send(&control_stream::signal(signal));
            } else {
                agent.kill();
                self.codes.of_failed.get_or_insert(ExitStatus::Signal(signal).code());
            }
        }
        if let Phase::Running | Phase::Ending(_) = self.phase {
            self.phase = Phase::Stopping(Instant::now() + self.grace + STOPPING);
        }
    }

    /// Acts on deadlines that have passed.
    fn elapsed(&mut self, now: Instant) {
        if now >= self.next_heartbeat {
            self.next_heartbeat = now + control_stream::HEARTBEAT_INTERVAL;
            self.agents
                .iter_mut()
                .filter(|agent| agent.unwritten.is_empty())
                .for_each(|agent| agent.send(control_stream::HEARTBEAT));
        }
        if self.deadline().is_some_and(|deadline| deadline > now) {
            return;
        }
        match self.phase {
            Phase::Running => {
                let late = self.agents.iter().filter(|agent| !agent.is_there && !agent.has_ended);
                let hosts: Vec<_> = late.map(|agent| agent.host.as_str()).collect();
                self.sinks.say(&format!(
                    "no answer from {} for {} s (--rdzv-conf join_timeout)",
                    hosts.join(", "),
                    self.join_timeout.as_secs_f64()
                ));
                self.fail(1);
            }
            Phase::Ending(_) => self.stop(Signal::TERM.as_raw()),
            Phase::Stopping(_) => {
                self.agents.iter().filter(|agent| !agent.has_ended).for_each(HostProcess::kill);
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
