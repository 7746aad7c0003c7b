//! What the workers of this node do, for those who watch the job.

use std::fs;
use std::time::{Duration, Instant};

use rustix::param::{clock_ticks_per_second, page_size};

use crate::agent::Agent;
use crate::agent::worker::Worker;
use crate::agent::worker_group::WorkerGroup;
use crate::control::protocol::AgentEvent;
use crate::control::status::{NodeStatus, WorkerStatus};

/// How many times of first steps are kept of workers that are gone.
const RESUMED: usize = 64;

impl Agent {
    /// Tells the coordinator what the workers do.
    pub fn report(&mut self, number: u64) {
        let now = Instant::now();
        let group = self.group.as_ref().or(self.finished_group.as_ref());
        let status = NodeStatus {
            host: self.host.clone(),
            restarts: self.restarts_of_all(),
            workers: group.map(WorkerGroup::status).unwrap_or_default(),
            resumed: self.resumed.iter().map(|at| (now - *at).as_secs_f64()).collect(),
        };
        self.control.send(AgentEvent::Status { number, status });
    }

    /// Returns how often all workers were started again. In place, each is counted for itself.
    fn restarts_of_all(&self) -> u32 {
        let assignment = self.assignment.as_ref().filter(|_| !self.job.is_in_place);
        assignment.map_or(0, |assignment| assignment.restart_count)
    }

    /// Keeps when workers that are gone have done first steps.
    pub fn keep_resumed(&mut self, resumed: Vec<Instant>) {
        self.resumed.extend(resumed);
        let surplus = self.resumed.len().saturating_sub(RESUMED);
        self.resumed.drain(..surplus);
    }
}

impl Worker {
    /// Returns when it has done a first step: after its start, and after each change of the job's ranks.
    pub fn resumed(&self, now: Instant) -> Vec<Instant> {
        let activity = self.flight.as_ref().and_then(|flight| flight.read());
        let ages = activity.map(|activity| activity.resumed).unwrap_or_default();
        let times =
            ages.into_iter().map(|age| now.checked_sub(Duration::try_from_secs_f64(age).ok()?));
        times.flatten().collect()
    }

    /// Returns what the worker does.
    pub fn status(&self) -> WorkerStatus {
        let activity = self.flight.as_ref().and_then(|flight| flight.read());
        let started = self.process.pid.as_raw_pid();
        // The worker may be a shell, and the program its child.
        let pid = activity.as_ref().map_or(started, |activity| activity.pid);
        let is_running = self.end.is_none();
        WorkerStatus {
            rank: self.spec.rank,
            pid,
            replacement: self.spec.replacement,
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            end: self.end.map(|end| end.to_string()),
            memory_bytes: memory(pid).filter(|_| is_running),
            cpu_seconds: cpu_time(pid).filter(|_| is_running).map(|time| time.as_secs_f64()),
            activity,
        }
    }
}

/// Returns the resident memory of a process, in bytes.
fn memory(pid: i32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * page_size() as u64)
}

/// Returns the processors' time that a process has used.
fn cpu_time(pid: i32) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name may have spaces and parentheses in it.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks: u64 =
        fields.split_whitespace().skip(11).take(2).map_while(|t| t.parse::<u64>().ok()).sum();
    Some(Duration::from_secs_f64(ticks as f64 / clock_ticks_per_second() as f64))
}
