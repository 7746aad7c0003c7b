//! The event loop of an agent: one thread waits in `poll` for signals, ends of workers, output and
//! what the coordinator has to say, and never blocks elsewhere.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::address;
use crate::coordinator::{Event, Failure, Order, Verdict};
use crate::crew::{self, Console, Crew};
use crate::error_file;
use crate::events::{self, Events};
use crate::guard::Guard;
use crate::health::Health;
use crate::job::Job;
use crate::link::{Heard, Link};
use crate::logs::Logs;
use crate::machine::Machine;
use crate::plan;
use crate::policy::{Action, Ended, Policy};
use crate::report::{self, Outcome};
use crate::round::Placement;
use crate::route::Routes;
use crate::signals::{self, Request, Signals};
use crate::sink::Sinks;
use crate::wait;
use crate::watchdog::Watchdog;
use crate::worker::{self, End};

/// What `poll` has found ready.
enum Ready {
    Signals,
    Link,
    Guard,
    Watchdog,
    Health,
    Sink(usize),
    Crew(crew::Ready),
}

/// This node's part in a job.
pub struct Supervisor {
    job: Job,
    machine: Machine,
    command: Vec<OsString>,
    local_world_size: u32,
    host: String,
    link: Link,
    /// Whether the coordinator has been heard.
    has_joined: bool,
    /// The coordinator is out of reach: to join again when the workers are gone.
    is_cut_off: bool,
    crew: Option<Crew>,
    /// The crew of the last round, when it is over.
    last: Option<Crew>,
    sinks: Sinks,
    /// What we inherit as standard input may give something to read.
    has_input: bool,
    logs: Logs,
    events: Events,
    signals: Signals,
    /// The first signal that was sent to this process.
    signalled: Option<i32>,
    verdict: Option<Verdict>,
    watchdog: Option<Watchdog>,
    health: Option<Health>,
    // Last, so that it is dropped last.
    guard: Guard,
}

impl Supervisor {
    /// Joins the job.
    pub fn start(job: Job, machine: Machine, command: Vec<OsString>) -> anyhow::Result<Supervisor> {
        let local_world_size = plan::local_world_size(&job, &machine)?;
        worker::allow_descriptors(local_world_size);
        let signals = Signals::catch(&job.signals)?;
        let mut guard = Guard::start()?;
        let mut sinks =
            Sinks::standard(job.quiet).context("cannot open standard output and standard error")?;
        if let Some(threads) = plan::omp_threads(local_world_size, &machine) {
            sinks.note(&plan::omp_note(threads, local_world_size, &machine));
        }
        let template = std::env::var("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE").ok();
        let routes = Routes::new(&job.output, &job.role, template, std::io::stdout().is_terminal());
        let logs = Logs::create(&job.output, routes, &job.nodes.id, &guard)?;
        logs.note.iter().for_each(|note| sinks.note(note));
        let (watchdog, note) = Watchdog::start(&mut guard)?.unzip();
        note.flatten().iter().for_each(|note| sinks.note(note));
        let health = Health::start().unwrap_or_else(|error| {
            sinks.note(&error);
            None
        });
        let host = address::host_name();
        Ok(Supervisor {
            events: Events::open(&job.events, &host)?,
            link: Link::open(&job, local_world_size)?,
            host,
            has_joined: false,
            is_cut_off: false,
            crew: None,
            last: None,
            signalled: None,
            verdict: None,
            job,
            machine,
            command,
            local_world_size,
            sinks,
            has_input: has_input(),
            logs,
            signals,
            watchdog,
            health,
            guard,
        })
    }

    /// Sees the job to its end; returns the exit code that tells of it.
    pub fn run(mut self) -> anyhow::Result<u8> {
        loop {
            self.listen();
            if self.crew.is_none() && self.verdict.is_some() && self.link.is_done() {
                break;
            }
            if !self.turn()? && self.must_leave() {
                // Only a reader of our output is waited for.
                self.crew.iter_mut().for_each(Crew::hang_up);
            }
        }
        let code = self.conclude();
        if code == 0 {
            self.guard.dismiss();
        }
        while self.sinks.watch().next().is_some() {
            if !self.turn()? && self.must_leave() {
                break;
            }
        }
        Ok(code)
    }

    /// There is nothing to wait for but a reader of our output, and the launcher was told to end:
    /// no longer wait.
    fn must_leave(&self) -> bool {
        let crew = self.crew.as_ref().or(self.last.as_ref());
        crew.is_some_and(|crew| crew.policy.must_leave() && crew.is_settled())
    }

    /// Does what the coordinator says.
    fn listen(&mut self) {
        while let Some(heard) = self.link.hear() {
            match heard {
                Heard::Order(order) => {
                    self.has_joined = true;
                    self.obey(order);
                }
                Heard::Wait(notice) => self.sinks.note(&notice),
                Heard::Lost(reason) => self.lose(reason),
            }
        }
        for news in self.link.news() {
            record(&events::Event::from(&news), &mut self.events, &mut self.sinks);
        }
        // Whoever was told to end waits for nobody.
        if let (Some(signal), None, Link::Member(_)) = (self.signalled, &self.crew, &self.link) {
            self.verdict.get_or_insert(Verdict { code: End::Signal(signal).code(), cause: None });
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Start { round, placement } => self.begin(round, &placement),
            Order::Stop { round, why } => {
                if let Some(why) = &why {
                    self.sinks.note(why);
                }
                match self.stop() {
                    Some(Action::Nothing) => {}
                    Some(_) => {
                        let reason = why.as_deref().unwrap_or("a failure on another node");
                        record(&events::Event::Stop { reason }, &mut self.events, &mut self.sinks);
                    }
                    None => self.tell_stopped(round, None),
                }
            }
            Order::Say(text) => self.sinks.note(&text),
            Order::End(verdict) => self.verdict = Some(verdict),
        }
    }

    /// Stops the workers for a reason that is not here. If they have already ended well, what they
    /// have left behind must go all the same. None if there is nothing to stop.
    fn stop(&mut self) -> Option<Action> {
        if self.crew.is_none() {
            self.crew = self.last.take_if(|crew| crew.ended_well());
        }
        let crew = self.crew.as_mut()?;
        let action = crew.policy.ordered(Instant::now());
        crew.act(action);
        crew.settle(&mut self.sinks, &mut self.guard);
        Some(action)
    }

    /// Starts the workers of a round.
    fn begin(&mut self, round: u32, placement: &Placement) {
        if self.signalled.is_some() {
            return self.tell_stopped(round, None);
        }
        worker::allow_descriptors(placement.world_size);
        let attempt = placement.restart_count;
        let error_file = |local_rank| self.logs.error_file(attempt, local_rank);
        let mut specs =
            plan::workers(&self.job, placement, &self.command, &self.machine, error_file);
        if let Some(watchdog) = &mut self.watchdog {
            watchdog.clear();
            specs.iter_mut().for_each(|spec| spec.environment.push(watchdog.variable()));
        }
        (self.events.node, self.events.restart_count) = (placement.group_rank, attempt);
        if self.last.take().is_some() {
            let restart = events::Event::Restart { round, world_size: placement.world_size };
            record(&restart, &mut self.events, &mut self.sinks);
        }
        let console = Console { sinks: &self.sinks, has_input: self.has_input };
        match Crew::start(
            round,
            attempt,
            specs,
            Policy::new(self.job.grace),
            &self.logs,
            &console,
            &mut self.guard,
        ) {
            Ok(mut crew) => {
                (0..2)
                    .filter(|which| self.sinks.of(*which).is_closed())
                    .for_each(|which| crew.leave_console(which));
                for Outcome { rank, local_rank, pid, .. } in crew.outcomes() {
                    let start = events::Event::Start { rank, local_rank, pid };
                    record(&start, &mut self.events, &mut self.sinks);
                }
                if let Some(shortfall) = &crew.shortfall {
                    let failure = Failure {
                        summary: format!("{shortfall} (host {})", self.host),
                        end: End::Exit(1),
                    };
                    self.link.tell(Event::Failed { round, failure });
                    crew.policy.ordered(Instant::now());
                    crew.act(Action::Kill);
                    crew.settle(&mut self.sinks, &mut self.guard);
                }
                self.crew = Some(crew);
            }
            Err(error) => {
                let summary = format!("{error:#} (host {})", self.host);
                let failure = Failure { summary: summary.clone(), end: End::Exit(1) };
                self.link.tell(Event::Failed { round, failure });
                self.tell_stopped(round, Some(summary));
            }
        }
    }

    fn tell_stopped(&mut self, round: u32, cause: Option<String>) {
        self.link.tell(Event::Stopped { round, cause });
    }

    /// The coordinator is out of reach, as it may be when the job is over.
    fn lose(&mut self, reason: String) {
        if self.verdict.is_some() && self.crew.is_none() {
            return;
        }
        self.stop();
        let nodes = &self.job.nodes;
        let is_awaited = nodes.min < nodes.max || self.job.max_restarts > 0;
        let may_return = self.has_joined && is_awaited && self.signalled.is_none();
        if may_return {
            self.sinks.note(&format!("{reason}; stopping the workers and joining again"));
            self.is_cut_off = true;
            return self.return_to_job();
        }
        self.verdict.get_or_insert(Verdict { code: 1, cause: Some(reason) });
    }

    /// Joins again, if that is wanted and no worker is left.
    fn return_to_job(&mut self) {
        if !self.is_cut_off || self.crew.is_some() {
            return;
        }
        (self.is_cut_off, self.has_joined) = (false, false);
        match Link::reopen(&self.job, self.local_world_size) {
            Ok(link) => self.link = link,
            Err(error) => {
                self.verdict = Some(Verdict { code: 1, cause: Some(format!("{error:#}")) })
            }
        }
    }

    /// Waits for something to happen and deals with it; false if nothing did.
    fn turn(&mut self) -> anyhow::Result<bool> {
        let ready = self.wait().context("cannot wait for workers")?;
        let is_idle = ready.is_empty();
        let mut ended = Vec::new();
        for event in ready {
            match (event, &mut self.crew) {
                (Ready::Signals, _) => self.take_signals(),
                (Ready::Guard, _) => self.guard.hear(),
                (Ready::Watchdog, _) => {
                    let complaint = self.watchdog.as_mut().and_then(Watchdog::take);
                    complaint.iter().for_each(|complaint| self.sinks.note(complaint));
                }
                (Ready::Sink(sink), _) => self.write(sink),
                (Ready::Crew(crew::Ready::Output(worker, which)), Some(crew)) => {
                    crew.read(worker, which, &mut self.sinks);
                }
                (Ready::Crew(crew::Ready::End(worker)), Some(crew)) => {
                    if let Some((rank, end)) = crew.note_end(worker)? {
                        log::debug!("rank {rank} ended: {end}");
                        let round = crew.round;
                        // The others learn of it before any of them is stopped for it.
                        self.link.tell(Event::Exited { round, rank, end: end.to_string() });
                        let Outcome { local_rank, pid, .. } = crew.outcome(worker);
                        let exit = events::Event::Exit { rank, local_rank, pid, end: end.into() };
                        record(&exit, &mut self.events, &mut self.sinks);
                        ended.push((worker, end, crew.error_time(worker)));
                    }
                }
                (Ready::Link | Ready::Health | Ready::Crew(_), _) => {}
            }
        }
        self.supervise(&ended);
        Ok(!is_idle)
    }

    /// Sees to the workers, some of which have just ended.
    fn supervise(&mut self, ended: &[Ended]) {
        let now = Instant::now();
        self.guard.elapsed(now);
        self.health.iter_mut().for_each(|health| health.serve(now));
        if let Some(watchdog) = &mut self.watchdog {
            let workers = || self.crew.as_ref().map(Crew::pids).unwrap_or_default();
            watchdog.elapsed(workers).iter().for_each(|what| self.sinks.say(what));
        }
        let Some(crew) = &mut self.crew else { return };
        let was_decided = crew.policy.cause().is_some();
        if !ended.is_empty() && !was_decided {
            let is_ending = crew.is_ending();
            let action = crew.policy.ended(ended, is_ending, now);
            crew.act(action);
        }
        let action = crew.policy.elapsed(now);
        crew.act(action);
        if !was_decided {
            if let Some((first, end)) = crew.first_failure() {
                let summary = report::summary(&crew.outcome(first), &self.host);
                record(
                    &events::Event::Stop { reason: &summary },
                    &mut self.events,
                    &mut self.sinks,
                );
                self.link
                    .tell(Event::Failed { round: crew.round, failure: Failure { summary, end } });
            }
        }
        crew.elapsed(now, &mut self.sinks);
        crew.settle(&mut self.sinks, &mut self.guard);
        if crew.is_over(&self.guard) {
            let round = crew.round;
            let cause = crew.first_failure().map(|(first, _)| {
                match crew.ended_for_want_of_readers(&self.sinks) {
                    true => String::new(),
                    false => report::cause(&crew.outcome(first), &self.host),
                }
            });
            let cause = crew.shortfall.clone().or(cause);
            let is_finished = crew.ended_well();
            self.last = self.crew.take();
            match is_finished {
                true => self.link.tell(Event::Finished { round }),
                false => self.tell_stopped(round, cause),
            }
            self.return_to_job();
        }
    }

    fn take_signals(&mut self) {
        while let Some(request) = self.signals.next() {
            match request {
                Request::End(signal) => self.told_to_end(signal),
                Request::Suspend => self.suspend(),
                Request::Resize => self.crew.iter_mut().for_each(|crew| crew.resize(&self.sinks)),
            }
        }
    }

    fn told_to_end(&mut self, signal: i32) {
        let now = Instant::now();
        if let Some(crew) = &mut self.crew {
            let action = crew.policy.signalled(signal, now);
            crew.act(action.unwrap_or(Action::Nothing));
            if let Some(action) = action {
                self.sinks.say(&report::stopping(signal, action, crew.policy.time_left(now)));
            }
            if let Some(Action::Send(_)) = action {
                let reason = End::Signal(signal).to_string();
                record(&events::Event::Stop { reason: &reason }, &mut self.events, &mut self.sinks);
            }
        } else if self.signalled.is_none() && self.verdict.is_none() {
            self.sinks.say(&format!("{}: ending; no rank is running", worker::signal_name(signal)));
        }
        if self.signalled.is_none() {
            self.signalled = Some(signal);
            self.link.tell(Event::Leaving { signal });
        }
    }

    /// Ctrl-Z: stops the workers, which do not feel it, and this process, until the user goes on
    /// with them.
    fn suspend(&mut self) {
        self.crew.iter().for_each(Crew::pause);
        let stopped = signals::suspend().unwrap_or_else(|error| {
            log::warn!("cannot stop: {error}");
            Duration::ZERO
        });
        self.link.paused(stopped);
        self.guard.paused(stopped);
        if let Some(crew) = &mut self.crew {
            crew.policy.paused(stopped);
            crew.resume();
            crew.resize(&self.sinks);
        }
        self.sinks.redraw();
    }

    fn wait(&self) -> Result<Vec<Ready>, Errno> {
        let mut watched = vec![(Ready::Signals, PollFd::new(&self.signals, PollFlags::IN))];
        let link = self.link.watch();
        watched.extend(
            link.into_iter().map(|fd| (Ready::Link, PollFd::from_borrowed_fd(fd, PollFlags::IN))),
        );
        let guard = self.guard.watch();
        watched.extend(guard.map(|fd| (Ready::Guard, PollFd::from_borrowed_fd(fd, PollFlags::IN))));
        let watchdog = self.watchdog.as_ref().map(Watchdog::watch);
        watched.extend(
            watchdog.map(|fd| (Ready::Watchdog, PollFd::from_borrowed_fd(fd, PollFlags::IN))),
        );
        let health = self.health.iter().flat_map(Health::watch);
        watched
            .extend(health.map(|fd| (Ready::Health, PollFd::from_borrowed_fd(fd, PollFlags::IN))));
        let sinks = self.sinks.watch();
        watched.extend(
            sinks.map(|(sink, fd)| {
                (Ready::Sink(sink), PollFd::from_borrowed_fd(fd, PollFlags::OUT))
            }),
        );
        if let Some(crew) = &self.crew {
            watched.extend(
                crew.watch(&self.sinks).into_iter().map(|(event, fd)| (Ready::Crew(event), fd)),
            );
        }
        let crew = self.crew.as_ref().and_then(|crew| crew.policy.deadline());
        let is_due =
            self.must_leave() || self.crew.as_ref().is_some_and(|crew| crew.is_over(&self.guard));
        let prompts = self.crew.as_ref().and_then(|crew| crew.deadline(&self.sinks));
        let watchdog = self.watchdog.as_ref().and_then(Watchdog::deadline);
        let health = self.health.as_ref().and_then(Health::deadline);
        let deadlines =
            [crew, prompts, self.guard.deadline(), self.link.deadline(), watchdog, health];
        let deadline =
            if is_due { Some(Instant::now()) } else { deadlines.into_iter().flatten().min() };
        wait::until(watched, deadline)
    }

    /// Writes to one of our own outputs. When nobody reads it any more, the workers must feel it as
    /// they would alone.
    fn write(&mut self, sink: usize) {
        for which in self.sinks.write(sink) {
            self.crew.iter_mut().for_each(|crew| crew.leave_console(*which));
        }
    }

    /// The exit code of the job; what there is to say about it is queued.
    fn conclude(&mut self) -> u8 {
        let Some(Verdict { code, cause }) = self.verdict.take() else { return 1 };
        if let Some(cause) = cause.as_ref().filter(|cause| !cause.is_empty()) {
            self.sinks.say(cause);
        }
        let crew = self.last.as_ref().filter(|crew| crew.shortfall.is_none());
        let outcomes = crew.map(Crew::outcomes).unwrap_or_default();
        let failed = self.last.as_ref().and_then(Crew::first_failure).map(|(first, _)| first);
        let message = match self.signalled {
            Some(signal) if failed.is_none() => report::unwilling(&outcomes, signal),
            _ if code != 0 && cause.is_some_and(|cause| !cause.is_empty()) => {
                report::others(&outcomes, failed, &self.host)
            }
            _ => None,
        };
        if let Some(message) = message {
            self.sinks.say(&message);
        }
        if code != 0 {
            self.pass_on_error();
        }
        let rank = failed.and_then(|first| Some(self.last.as_ref()?.outcome(first).rank));
        record(&events::Event::End { code, rank }, &mut self.events, &mut self.sinks);
        code
    }

    /// Tells whoever has started flow-launch as a worker of the error that a worker here has
    /// recorded.
    fn pass_on_error(&mut self) {
        let path = std::env::var_os(error_file::VARIABLE)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from);
        let recorded = self.last.as_ref().and_then(Crew::first_error);
        if let Some((path, (error, end))) = path.zip(recorded) {
            if let Err(error) = error.copy(&path, end) {
                self.sinks.say(&format!("cannot write to {}: {error}", path.display()));
            }
        }
    }
}

/// Standard input is not `/dev/null`.
fn has_input() -> bool {
    let device = |fd: BorrowedFd| rustix::fs::fstat(fd).map(|stat| stat.st_rdev);
    let nothing = File::open("/dev/null").ok().and_then(|nothing| device(nothing.as_fd()).ok());
    device(io::stdin().as_fd()).ok() != nothing
}

/// Writes to the file of events.
fn record(event: &events::Event, events: &mut Events, sinks: &mut Sinks) {
    if let Err(error) = events.tell(event) {
        sinks.say(&error);
    }
}
