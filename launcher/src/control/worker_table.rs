//! The workers of all nodes of a job that goes on in place, and whether it does when some are lost
//! (pure).

use std::collections::BTreeMap;
use std::ops::Range;

use crate::control::protocol::{AgentId, Verdict};
use crate::job::Job;

/// The workers of a job that goes on when some of them are lost.
pub struct WorkerTable {
    max_restarts: u32,
    /// The number of workers that were started in place of others.
    restarts: u32,
    /// The fewest workers that go on without others; None if all are needed.
    min_workers: Option<u32>,
    /// Those that have the ranks now.
    workers: BTreeMap<u32, Worker>,
}

#[derive(Clone, Copy)]
struct Worker {
    agent: AgentId,
    /// The number of workers that have had its rank before.
    replacement: u32,
    state: WorkerState,
}

#[derive(Clone, Copy, PartialEq)]
enum WorkerState {
    Running,
    Succeeded,
    Lost,
}

impl WorkerTable {
    /// Makes the table of a job, without workers; None if it does not go on in place.
    pub fn new(job: &Job) -> Option<WorkerTable> {
        job.is_in_place.then(|| WorkerTable {
            max_restarts: job.max_restarts,
            restarts: 0,
            min_workers: job.min_workers,
            workers: BTreeMap::new(),
        })
    }

    /// Notes that an agent starts workers with these ranks.
    pub fn start(&mut self, agent: AgentId, ranks: Range<u32>) {
        for rank in ranks {
            let worker = Worker { agent, replacement: 0, state: WorkerState::Running };
            self.workers.insert(rank, worker);
        }
    }

    /// Notes that a worker has ended well.
    pub fn succeeded(&mut self, rank: u32) {
        if let Some(worker) = self.workers.get_mut(&rank) {
            worker.state = WorkerState::Succeeded;
        }
    }

    /// Notes that a worker has failed. Returns what follows, and how to say that after the failure.
    pub fn failed(&mut self, rank: u32) -> (Verdict, Option<String>) {
        let Some(worker) = self.workers.get_mut(&rank) else { return (Verdict::Fail, None) };
        worker.state = WorkerState::Lost;
        if self.is_idle() {
            return (Verdict::Fail, None);
        }
        if self.restarts < self.max_restarts {
            self.restarts += 1;
            if let Some(worker) = self.workers.get_mut(&rank) {
                worker.replacement += 1;
                worker.state = WorkerState::Running;
            }
            let (count, max) = (self.restarts, self.max_restarts);
            return (
                Verdict::Replace,
                Some(format!("it is started again alone ({count} of {max})")),
            );
        }
        match self.smaller() {
            Some(what) => (Verdict::GoOn, Some(what)),
            None => (Verdict::Fail, None),
        }
    }

    /// Notes that a node is lost with its workers. If the others go on, returns how to say that.
    pub fn lost(&mut self, agent: AgentId) -> Option<String> {
        for worker in self.workers.values_mut() {
            if worker.agent == agent && worker.state == WorkerState::Running {
                worker.state = WorkerState::Lost;
            }
        }
        self.smaller()
    }

    /// Returns the agent of the worker that runs with this rank, and the number of those before it,
    /// if the job goes on when this worker is lost.
    pub fn expendable(&self, rank: u32) -> Option<(AgentId, u32)> {
        let worker =
            self.workers.get(&rank).filter(|worker| worker.state == WorkerState::Running)?;
        let others = self.count(WorkerState::Running) - 1;
        let left = others + self.count(WorkerState::Succeeded);
        let goes_on = self.restarts < self.max_restarts || self.is_enough(left);
        (others > 0 && goes_on).then_some((worker.agent, worker.replacement))
    }

    /// Returns the ranks of an agent's workers that run, each with the number of those before it.
    pub fn running_at(&self, agent: AgentId) -> Vec<(u32, u32)> {
        let own = self
            .workers
            .iter()
            .filter(|(_, worker)| worker.agent == agent && worker.state == WorkerState::Running);
        own.map(|(rank, worker)| (*rank, worker.replacement)).collect()
    }

    /// Says that the job goes on without those that are lost, if it does.
    fn smaller(&self) -> Option<String> {
        let left = self.count(WorkerState::Running) + self.count(WorkerState::Succeeded);
        if self.is_idle() || !self.is_enough(left) {
            return None;
        }
        let workers = if left == 1 { "worker" } else { "workers" };
        Some(format!("the job goes on with {left} {workers}"))
    }

    fn is_enough(&self, workers: usize) -> bool {
        self.min_workers.is_some_and(|min| workers >= min as usize)
    }

    /// Whether nobody is left who could go on.
    fn is_idle(&self) -> bool {
        self.count(WorkerState::Running) == 0
    }

    fn count(&self, state: WorkerState) -> usize {
        self.workers.values().filter(|worker| worker.state == state).count()
    }
}
