//! The agent: flow-launch on one node. Its event loop is one thread, which waits in `poll` for
//! signals, ends of workers, output and commands of the coordinator, and never blocks elsewhere.
//!
//! | file | subject |
//! |---|---|
//! | `worker_group.rs` | this node's workers in a round |
//! | `worker.rs`, `process.rs` | one worker, its process |
//! | `start.rs` | what an agent opens before it joins the job |
//! | `in_place.rs` | `--elastic in-place`: workers that fail are started again alone |
//! | `stop_policy.rs` | when workers are stopped, and which failure is the root cause (pure) |
//! | `reaper.rs` | the process that cleans up after a stopped round or a killed launcher |
//! | `signals.rs` | the signals that flow-launch receives |
//! | `terminal.rs` | what follows from them, and what stands on the terminal |
//! | `watchdog.rs`, `timers.rs`, `named_pipe.rs` | torchelastic's timers |
//! | `health.rs` | torchelastic's health check |
//! | `tracing.rs` | `--trace` |
//! | `checkpoint_memory.rs` | memory that outlives the workers |
//! | `flight.rs`, `status.rs` | what the workers do, for `flow-launch top` |
//! | `final_report.rs` | what is printed at the end |
//! | `exit_status.rs` | how a process ended |

mod checkpoint_memory;
pub mod exit_status;
mod final_report;
mod flight;
mod health;
mod in_place;
mod named_pipe;
pub mod process;
pub mod reaper;
pub mod signals;
mod start;
mod status;
pub mod stop_policy;
mod terminal;
mod timers;
mod tracing;
mod watchdog;
mod worker;
mod worker_group;

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::time::Instant;

use anyhow::Context;
use rustix::io::Errno;

use crate::agent::checkpoint_memory::CheckpointMemory;
use crate::agent::exit_status::ExitStatus;
use crate::agent::health::Health;
use crate::agent::reaper::Reaper;
use crate::agent::signals::Signals;
use crate::agent::stop_policy::{Action, Ended, StopPolicy};
use crate::agent::tracing::Tracing;
use crate::agent::watchdog::Watchdog;
use crate::agent::worker::Console;
use crate::agent::worker_group::{WorkerGroup, WorkerReady};
use crate::control::ControlPlane;
use crate::control::assignment::RankAssignment;
use crate::control::job_record::JobResult;
use crate::control::protocol::{
    AgentEvent, ClusterEvent, Command, ControlMessage, Failure, KeptWorkers, Loss,
};
use crate::job::Job;
use crate::output::log_files::LogFiles;
use crate::output::remainder::Remainder;
use crate::output::sink::Sinks;
use crate::plan;
use crate::plan::WorkerSpec;
use crate::plan::host::LocalHost;
use crate::poll::{self, readable, writable};
use crate::report::events::{EventLog, JobEvent};
use crate::report::failure::{self, Outcome};
use crate::top::panel::Panel;

/// A descriptor that `poll` has found ready.
enum AgentReady {
    Signals,
    Control,
    Reaper,
    Watchdog,
    Health,
    Panel,
    Sink(usize),
    WorkerGroup(WorkerReady),
}

/// This node's part in a job.
pub struct Agent {
    job: Job,
    local_host: LocalHost,
    command: Vec<OsString>,
    local_world_size: u32,
    host: String,
    control: ControlPlane,
    /// The coordinator has sent a command.
    has_joined: bool,
    /// The coordinator cannot be reached: join again when the workers are gone.
    must_rejoin: bool,
    group: Option<WorkerGroup>,
    /// The ranks of the workers of the present round.
    assignment: Option<RankAssignment>,
    /// The workers of the last round, once it is over.
    finished_group: Option<WorkerGroup>,
    sinks: Sinks,
    /// Our standard input is not `/dev/null`.
    has_input: bool,
    logs: LogFiles,
    events: EventLog,
    signals: Signals,
    /// The first signal that this process received.
    signalled: Option<i32>,
    result: Option<JobResult>,
    watchdog: Option<Watchdog>,
    health: Option<Health>,
    tracing: Option<Tracing>,
    checkpoint_memory: CheckpointMemory,
    /// `--top`.
    panel: Option<Panel>,
    /// When workers that are gone have done first steps: see [`WorkerGroup::resumed`].
    resumed: Vec<Instant>,
    /// By which `flow-launch top` finds the job; None where it cannot be made.
    _local_job: Option<File>,
    // Last, so that it is dropped last.
    reaper: Reaper,
}

impl Agent {
    /// Runs the job to its end; returns the exit code.
    pub fn run(mut self) -> anyhow::Result<u8> {
        loop {
            self.handle_commands();
            if self.group.is_none() && self.result.is_some() && self.control.is_done() {
                break;
            }
            if !self.poll_once()? && self.force_exit() {
                // All that is left is output that nobody reads.
                self.group.iter_mut().for_each(WorkerGroup::hang_up);
            }
        }
        self.panel = None;
        self.sinks.erase_footer();
        let code = self.finish();
        let group = self.finished_group.as_mut();
        let remainders = group.map(WorkerGroup::take_remainders).unwrap_or_default();
        if code == 0 {
            self.reaper.dismiss();
        }
        while self.sinks.watch().next().is_some() {
            if !self.poll_once()? && self.force_exit() {
                break;
            }
        }
        if code == 0 {
            read_on(remainders);
        }
        Ok(code)
    }

    /// Whether the launcher was signalled to end, and all that is left is output that nobody reads:
    /// stop waiting.
    fn force_exit(&self) -> bool {
        let group = self.group.as_ref().or(self.finished_group.as_ref());
        group.is_some_and(|group| group.policy.must_leave() && group.is_settled())
    }

    /// Executes the coordinator's commands.
    fn handle_commands(&mut self) {
        while let Some(message) = self.control.poll(&self.job, self.local_world_size) {
            match message {
                ControlMessage::Command(command) => {
                    self.has_joined = true;
                    self.execute(command);
                }
                ControlMessage::Notice(notice) => self.sinks.note(&notice),
                ControlMessage::Disconnected(loss) => self.handle_disconnect(loss),
                ControlMessage::SteppedDown(why) => self.step_down(&why),
            }
        }
        for event in self.control.events() {
            match (&event, &self.tracing) {
                (ClusterEvent::Trace(piece), Some(tracing)) => tracing.take(piece),
                _ => self.events.record_cluster(&event, &mut self.sinks),
            }
        }
        // A follower that was signalled to end does not wait for the leader.
        if let (Some(signal), None, ControlPlane::Follower(_)) =
            (self.signalled, &self.group, &self.control)
        {
            self.result
                .get_or_insert(JobResult { code: ExitStatus::Signal(signal).code(), cause: None });
        }
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Start { round, assignment } => self.start_round(round, &assignment),
            Command::Stop { round, why } => {
                if let Some(why) = &why {
                    self.sinks.note(why);
                }
                match self.stop() {
                    Some(Action::Nothing) => {}
                    Some(_) => {
                        let reason = why.as_deref().unwrap_or("a failure on another node");
                        self.events.record(&JobEvent::Stop { reason }, &mut self.sinks);
                    }
                    None => self.send_stopped(round, None),
                }
            }
            Command::Keep { round, stores } => self.keep(round, stores),
            Command::Decide { round, rank, verdict } => self.decide(round, rank, verdict),
            Command::Kill { round, rank, replacement } => {
                let group = self.group.iter().find(|group| group.round == round);
                group.into_iter().for_each(|group| group.kill(rank, replacement));
            }
            Command::Report { number } => self.report(number),
            Command::Print(text) => self.sinks.note(&text),
            Command::Finish(result) => self.result = Some(result),
            // The control plane's own.
            Command::Record(_) | Command::Replicate { .. } | Command::Rejoin => {}
        }
    }

    /// Stops the workers for a reason outside this node. If they have already succeeded, processes
    /// that they left behind are killed all the same. None if there is nothing to stop.
    fn stop(&mut self) -> Option<Action> {
        if self.group.is_none() {
            self.group = self.finished_group.take_if(|group| group.ended_well());
        }
        let group = self.group.as_mut()?;
        let action = group.policy.stop_requested(Instant::now());
        group.act(action);
        group.settle(&mut self.sinks, &mut self.reaper);
        Some(action)
    }

    /// Starts the workers of a round.
    fn start_round(&mut self, round: u32, assignment: &RankAssignment) {
        if self.signalled.is_some() {
            return self.send_stopped(round, None);
        }
        process::allow_descriptors(assignment.world_size);
        let attempt = assignment.restart_count;
        if let Some(watchdog) = &mut self.watchdog {
            watchdog.clear();
        }
        if let Some(tracing) = &mut self.tracing {
            tracing.start_round(assignment.world_size);
        }
        let specs = self.worker_specs(assignment);
        self.assignment = Some(assignment.clone());
        (self.events.node, self.events.restart_count) = (assignment.group_rank, attempt);
        if let Some(finished) = self.finished_group.take() {
            self.keep_resumed(finished.resumed(Instant::now()));
            let restart = JobEvent::Restart { round, world_size: assignment.world_size };
            self.events.record(&restart, &mut self.sinks);
        }
        let console = Console { sinks: &self.sinks, logs: &self.logs, has_input: self.has_input };
        let policy = StopPolicy::new(self.job.grace);
        match WorkerGroup::start(round, attempt, specs, policy, &console, &mut self.reaper) {
            Ok(mut group) => {
                let closed = (0..2).filter(|which| self.sinks.of(*which).is_closed());
                closed.for_each(|which| group.leave_console(which));
                for Outcome { rank, local_rank, pid, .. } in group.outcomes() {
                    let start = JobEvent::Start { rank, local_rank, pid };
                    self.events.record(&start, &mut self.sinks);
                }
                if let Some(shortfall) = &group.shortfall {
                    let summary = format!("{shortfall} (host {})", self.host);
                    let failure = Failure { summary, end: ExitStatus::Exit(1) };
                    self.control.send(AgentEvent::Failed { round, failure });
                    group.policy.stop_requested(Instant::now());
                    group.act(Action::Kill);
                    group.settle(&mut self.sinks, &mut self.reaper);
                }
                self.group = Some(group);
            }
            Err(error) => {
                let summary = format!("{error:#} (host {})", self.host);
                let failure = Failure { summary: summary.clone(), end: ExitStatus::Exit(1) };
                self.control.send(AgentEvent::Failed { round, failure });
                self.send_stopped(round, Some(summary));
            }
        }
    }

    /// Describes the workers of this node.
    fn worker_specs(&self, assignment: &RankAssignment) -> Vec<WorkerSpec> {
        let attempt = assignment.restart_count;
        let mut specs =
            plan::workers(&self.job, assignment, &self.command, &self.local_host, |local_rank| {
                self.logs.error_file(attempt, local_rank)
            });
        for spec in &mut specs {
            spec.environment.extend(self.checkpoint_memory.variables(spec.local_rank));
            spec.environment.extend(self.watchdog.as_ref().map(Watchdog::variable));
            spec.environment.extend(self.tracing.as_ref().map(Tracing::variable));
        }
        specs
    }

    fn send_stopped(&mut self, round: u32, cause: Option<String>) {
        self.control.send(AgentEvent::Stopped { round, cause });
    }

    /// Handles the loss of the coordinator, which is normal when the job is over.
    fn handle_disconnect(&mut self, loss: Loss) {
        let reason = loss.why;
        if self.must_rejoin || (self.result.is_some() && self.group.is_none()) {
            return;
        }
        if loss.was_found && self.keeps_workers() {
            self.sinks
                .note(&format!("{reason}; the workers go on while this node looks for the leader"));
            return self.join_again(self.kept_workers());
        }
        self.stop();
        let nodes = &self.job.nodes;
        // In place, the leading node knows how many restarts are left.
        let is_awaited = nodes.min < nodes.max || self.job.max_restarts > 0 || self.job.is_in_place;
        let may_return =
            (self.has_joined || loss.was_found) && is_awaited && self.signalled.is_none();
        if may_return {
            let first = if self.group.is_some() { "stopping the workers and " } else { "" };
            self.sinks.note(&format!("{reason}; {first}joining again"));
            self.must_rejoin = true;
            return self.rejoin();
        }
        self.result.get_or_insert(JobResult { code: 1, cause: Some(reason) });
    }

    /// Ends the work of a leader that may lead no more.
    fn step_down(&mut self, why: &str) {
        self.stop();
        let next = if self.signalled.is_some() { "another one leads" } else { "joining again" };
        self.sinks.note(&format!("{why}; stopping the workers, and {next}"));
        self.must_rejoin = true;
        self.rejoin();
    }

    /// Joins again, if the connection was lost and no worker is left.
    fn rejoin(&mut self) {
        if !self.must_rejoin || self.group.is_some() {
            return;
        }
        self.must_rejoin = false;
        self.join_again(None);
    }

    /// Joins again, with the workers that were kept.
    fn join_again(&mut self, kept: Option<KeptWorkers>) {
        self.has_joined = false;
        if let Err(error) = self.control.reopen(&self.job, self.local_world_size, kept) {
            self.stop();
            self.result = Some(JobResult { code: 1, cause: Some(format!("{error:#}")) });
        }
    }

    /// Waits for events and handles them; false if there were none.
    fn poll_once(&mut self) -> anyhow::Result<bool> {
        let ready = self.wait().context("cannot wait for workers")?;
        let is_idle = ready.is_empty();
        let mut ended = Vec::new();
        for event in ready {
            match (event, &mut self.group) {
                (AgentReady::Signals, _) => self.take_signals(),
                (AgentReady::Reaper, _) => self.reaper.read_answer(),
                (AgentReady::Watchdog, _) => {
                    let complaint = self.watchdog.as_mut().and_then(Watchdog::take);
                    complaint.iter().for_each(|complaint| self.sinks.note(complaint));
                }
                (AgentReady::Panel, _) => self.show(),
                (AgentReady::Sink(sink), _) => self.write_sink(sink),
                (AgentReady::WorkerGroup(WorkerReady::Output(worker, which)), group) => {
                    let group = group.as_mut().or(self.finished_group.as_mut());
                    group.into_iter().for_each(|group| group.read(worker, which, &mut self.sinks));
                }
                (AgentReady::WorkerGroup(WorkerReady::End(worker)), Some(group)) => {
                    if let Some((rank, end)) = group.note_end(worker)? {
                        log::debug!("rank {rank} ended: {end}");
                        let is_undecided =
                            self.job.is_in_place && end.is_failure() && group.ended_well();
                        // Peers must be able to read this before they are stopped because of it.
                        self.control.send(AgentEvent::Exited {
                            round: group.round,
                            rank,
                            replacement: group.replacement(worker),
                            end: end.to_string(),
                            failure: is_undecided.then(|| Failure {
                                summary: failure::summary(&group.outcome(worker), &self.host),
                                end,
                            }),
                        });
                        let Outcome { local_rank, pid, .. } = group.outcome(worker);
                        let exit = JobEvent::Exit { rank, local_rank, pid, end: end.into() };
                        self.events.record(&exit, &mut self.sinks);
                        let end = (worker, end, group.error_time(worker));
                        if is_undecided {
                            group.await_verdict(end);
                        } else {
                            ended.push(end);
                        }
                    }
                }
                (AgentReady::Control | AgentReady::Health | AgentReady::WorkerGroup(_), _) => {}
            }
        }
        self.supervise(&ended);
        Ok(!is_idle)
    }

    /// Handles workers that have just ended, and deadlines.
    fn supervise(&mut self, ended: &[Ended]) {
        let now = Instant::now();
        self.reaper.elapsed(now);
        self.health.iter_mut().for_each(|health| health.serve(now));
        if let Some(watchdog) = &mut self.watchdog {
            let workers = self.group.as_ref().map(WorkerGroup::pids).unwrap_or_default();
            watchdog.elapsed(&workers).iter().for_each(|what| self.sinks.say(what));
        }
        let Some(group) = &mut self.group else { return };
        let was_decided = group.policy.cause().is_some();
        if !ended.is_empty() && !was_decided {
            let is_ending = group.is_ending();
            let action = group.policy.ended(ended, is_ending, now);
            group.act(action);
        }
        let action = group.policy.elapsed(now);
        group.act(action);
        if !was_decided && let Some((first, end)) = group.first_failure() {
            let summary = failure::summary(&group.outcome(first), &self.host);
            self.events.record(&JobEvent::Stop { reason: &summary }, &mut self.sinks);
            self.control
                .send(AgentEvent::Failed { round: group.round, failure: Failure { summary, end } });
        }
        group.elapsed(now, &mut self.sinks);
        group.settle(&mut self.sinks, &mut self.reaper);
        if group.is_over(&self.reaper) {
            let round = group.round;
            let cause = group.first_failure().map(|(first, _)| {
                if group.ended_by_closed_output(&self.sinks) {
                    String::new()
                } else {
                    failure::cause(&group.outcome(first), &self.host)
                }
            });
            let cause = group.shortfall.clone().or(cause);
            let is_finished = group.ended_well();
            if let Some(tracing) = &self.tracing {
                tracing.end_round(round, group.ranks(), &self.control);
            }
            self.finished_group = self.group.take();
            if is_finished {
                self.control.send(AgentEvent::Finished { round });
            } else {
                self.send_stopped(round, cause);
            }
            self.rejoin();
        }
    }

    fn wait(&self) -> Result<Vec<AgentReady>, Errno> {
        let mut watched = vec![readable(AgentReady::Signals, self.signals.as_fd())];
        watched
            .extend(self.control.watch().into_iter().map(|fd| readable(AgentReady::Control, fd)));
        watched.extend(self.reaper.watch().map(|fd| readable(AgentReady::Reaper, fd)));
        let watchdog = self.watchdog.as_ref().map(Watchdog::watch);
        watched.extend(watchdog.map(|fd| readable(AgentReady::Watchdog, fd)));
        let health = self.health.iter().flat_map(Health::watch);
        watched.extend(health.map(|fd| readable(AgentReady::Health, fd)));
        let panel = self.panel.as_ref().and_then(Panel::watch);
        watched.extend(panel.map(|fd| readable(AgentReady::Panel, fd)));
        watched.extend(self.sinks.watch().map(|(sink, fd)| writable(AgentReady::Sink(sink), fd)));
        let group = self.group.as_ref();
        // What a finished round has detached still writes.
        let writing = group.or(self.finished_group.as_ref());
        let workers = writing.map(|group| group.watch(&self.sinks)).unwrap_or_default();
        watched.extend(workers.into_iter().map(|(event, fd)| (AgentReady::WorkerGroup(event), fd)));
        let is_due = self.force_exit() || group.is_some_and(|group| group.is_over(&self.reaper));
        if is_due {
            return poll::ready(watched, Some(Instant::now()));
        }
        let deadlines = [
            group.and_then(|group| group.policy.deadline()),
            group.and_then(|group| group.deadline(&self.sinks)),
            self.reaper.deadline(),
            self.control.deadline(),
            self.watchdog.as_ref().and_then(Watchdog::deadline),
            self.health.as_ref().and_then(Health::deadline),
        ];
        poll::ready(watched, deadlines.into_iter().flatten().min())
    }

    /// Queues the final report; returns the exit code of the job.
    fn finish(&mut self) -> u8 {
        let Some(result) = self.result.take() else { return 1 };
        let group = self.finished_group.as_ref();
        final_report::print(&result, group, self.signalled, &self.host, &mut self.sinks);
        self.tracing.iter().for_each(|tracing| tracing.finish(&self.control, &mut self.sinks));
        let code = result.code;
        let rank = group.and_then(|group| Some(group.outcome(group.first_failure()?.0).rank));
        self.events.record(&JobEvent::End { code, rank }, &mut self.sinks);
        code
    }
}

/// Starts the processes that read what detached processes still write.
fn read_on(remainders: Vec<Remainder>) {
    for remainder in remainders {
        if let Err(error) = remainder.read_on() {
            log::warn!("nobody reads what detached processes still write: {error}");
        }
    }
}
