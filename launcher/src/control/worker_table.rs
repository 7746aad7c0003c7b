//! The workers of all nodes of a job that goes on in place, and whether it does when some are lost
//! (pure).

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::control::assignment::RankAssignment;
use crate::control::node::Node;
use crate::control::protocol::{AgentId, KeptWorkers, LEADER, Verdict, WorkerEnd};
use crate::job::Job;

/// The workers of a job that goes on when some of them are lost.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerTable {
    max_restarts: u32,
    /// The number of workers that were started in place of others.
    restarts: u32,
    /// The fewest workers that go on without others; None if all are needed.
    min_workers: Option<u32>,
    /// Those that have the ranks now.
    workers: BTreeMap<u32, Worker>,
    places: BTreeMap<AgentId, Place>,
    /// The places of nodes that are lost.
    vacant: Vec<Place>,
    /// A worker that had joined has failed, and the job with it.
    has_failed: bool,
    /// Places whose agents have yet to come to this leader, by numbers that no agent has.
    #[serde(skip)]
    awaited: BTreeSet<AgentId>,
}

/// The ranks of a node.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct Place {
    assignment: RankAssignment,
    role: String,
}

impl Place {
    fn ranks(&self) -> impl Iterator<Item = u32> {
        let first = self.assignment.first_rank;
        first..first + self.assignment.local_world_size
    }

    /// Whether a node has as many workers, of the same role.
    fn fits(&self, node: &Node) -> bool {
        self.assignment.local_world_size == node.local_world_size && self.role == node.role
    }
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Worker {
    agent: AgentId,
    /// The number of workers that have had its rank before.
    replacement: u32,
    state: WorkerState,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
enum WorkerState {
    Running,
    /// It waits to join the job, in place of one that has failed.
    Waiting,
    Succeeded,
    Lost,
}

impl WorkerState {
    fn runs(self) -> bool {
        matches!(self, WorkerState::Running | WorkerState::Waiting)
    }
}

impl WorkerTable {
    /// Makes the table of a job, without workers; None if it does not go on in place.
    pub fn new(job: &Job) -> Option<WorkerTable> {
        job.is_in_place.then(|| WorkerTable {
            max_restarts: job.max_restarts,
            restarts: 0,
            min_workers: job.min_workers,
            workers: BTreeMap::new(),
            places: BTreeMap::new(),
            vacant: Vec::new(),
            has_failed: false,
            awaited: BTreeSet::new(),
        })
    }

    /// Begins anew after so many restarts.
    pub fn start_over(&mut self, restarts: u32) {
        self.restarts = restarts.min(self.max_restarts);
        self.workers.clear();
        self.places.clear();
        self.vacant.clear();
        self.awaited.clear();
        self.has_failed = false;
    }

    /// Makes this table, which the last leader had, that of the next one. The last leader's own workers
    /// are lost: returns them, as [`WorkerTable::lost`] does. The other nodes have yet to come.
    pub fn resume(&mut self) -> Vec<(u32, u32)> {
        let lost = self.lost(LEADER);
        let places = std::mem::take(&mut self.places);
        // Agents are counted from 0.
        let numbers = (0..).map(|number| AgentId::MAX - number);
        let awaited: BTreeMap<AgentId, AgentId> = places.keys().copied().zip(numbers).collect();
        for worker in self.workers.values_mut() {
            worker.agent = awaited.get(&worker.agent).copied().unwrap_or(worker.agent);
        }
        self.places = places.into_iter().map(|(agent, place)| (awaited[&agent], place)).collect();
        self.awaited = awaited.into_values().collect();
        lost
    }

    /// Takes an agent that has kept its workers. Returns false if it is not awaited.
    pub fn rejoin(&mut self, agent: AgentId, kept: &KeptWorkers) -> bool {
        let Some(first) = kept.workers.first() else { return false };
        let is_its_place = |awaited: &&AgentId| {
            let place = self.places.get(awaited);
            place.is_some_and(|place| place.assignment.first_rank == first.rank)
        };
        let Some(awaited) = self.awaited.iter().find(is_its_place).copied() else { return false };
        self.awaited.remove(&awaited);
        let place = self.places.remove(&awaited);
        self.places.extend(place.map(|place| (agent, place)));
        for kept in &kept.workers {
            let Some(worker) = self.workers.get_mut(&kept.rank) else { continue };
            // One was replaced that this table does not know, or the agent does not.
            let restarts = i64::from(self.restarts) + i64::from(kept.replacement)
                - i64::from(worker.replacement);
            self.restarts = restarts.clamp(0, self.max_restarts.into()) as u32;
            if worker.replacement != kept.replacement || kept.end.is_none() && !worker.state.runs()
            {
                worker.state = WorkerState::Running;
            }
            worker.agent = agent;
            worker.replacement = kept.replacement;
            match kept.end {
                Some(WorkerEnd::Succeeded) => worker.state = WorkerState::Succeeded,
                Some(WorkerEnd::Lost(_)) => worker.state = WorkerState::Lost,
                Some(WorkerEnd::Failed(_)) | None => {}
            }
        }
        true
    }

    /// Notes workers that are stopped: others with their ranks have later numbers.
    pub fn note_refused(&mut self, kept: &KeptWorkers) {
        for kept in &kept.workers {
            if let Some(worker) = self.workers.get_mut(&kept.rank)
                && !worker.state.runs()
            {
                worker.replacement = worker.replacement.max(kept.replacement);
            }
        }
    }

    /// Returns the places whose agents have yet to come, by their numbers, with their ranks.
    pub fn awaited(&self) -> Vec<(AgentId, Vec<u32>)> {
        let places = self.places.iter().filter(|(agent, _)| self.awaited.contains(agent));
        places.map(|(agent, place)| (*agent, place.ranks().collect())).collect()
    }

    /// Whether the ranks of a lost node are free.
    pub fn has_vacancy(&self) -> bool {
        !self.vacant.is_empty()
    }

    /// Returns the number of workers that were started in place of others.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Notes that an agent of this role starts workers with these ranks.
    pub fn start(&mut self, agent: AgentId, role: &str, assignment: &RankAssignment) {
        for (rank, &replacement) in (assignment.first_rank..).zip(&assignment.replacements) {
            let worker = Worker { agent, replacement, state: WorkerState::Running };
            self.workers.insert(rank, worker);
        }
        let place = Place { assignment: assignment.clone(), role: role.into() };
        self.places.insert(agent, place);
    }

    /// Notes whether a worker that was started in place of so many others waits to join the job.
    pub fn newcomer(&mut self, rank: u32, replacement: u32, waits: bool) {
        if self.runs(rank, replacement)
            && let Some(worker) = self.workers.get_mut(&rank)
        {
            worker.state = if waits { WorkerState::Waiting } else { WorkerState::Running };
        }
    }

    /// Whether the worker that was started in place of so many others runs.
    pub fn runs(&self, rank: u32, replacement: u32) -> bool {
        let worker = self.workers.get(&rank);
        worker.is_some_and(|worker| worker.replacement == replacement && worker.state.runs())
    }

    /// Whether the worker with this rank waits to join the job.
    pub fn is_waiting(&self, rank: u32) -> bool {
        self.workers.get(&rank).is_some_and(|worker| worker.state == WorkerState::Waiting)
    }

    /// Returns the ranks of workers that wait to join the job.
    pub fn waiting(&self) -> Vec<u32> {
        let ranks = self.workers.keys().copied();
        ranks.filter(|rank| self.is_waiting(*rank)).collect()
    }

    /// Whether a worker has ended well.
    pub fn has_succeeded(&self) -> bool {
        self.count(WorkerState::Succeeded) > 0
    }

    /// Whether the job fails with a worker that had joined it.
    pub fn has_failed(&self) -> bool {
        self.has_failed
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
        let had_joined = worker.state == WorkerState::Running;
        worker.state = WorkerState::Lost;
        if self.is_idle() {
            self.has_failed |= had_joined;
            return (Verdict::Fail, None);
        }
        if self.restarts_left() > 0 {
            self.restarts += 1;
            if let Some(worker) = self.workers.get_mut(&rank) {
                worker.replacement += 1;
                worker.state = WorkerState::Running;
            }
            let notice = format!("it is started again alone ({})", self.budget());
            return (Verdict::Replace, Some(notice));
        }
        match self.smaller() {
            Some(what) => (Verdict::GoOn, Some(what)),
            None => (Verdict::Fail, None),
        }
    }

    /// Notes that a node is lost. Returns the ranks of its workers that ran, each with the number of
    /// those before it.
    pub fn lost(&mut self, agent: AgentId) -> Vec<(u32, u32)> {
        let place = self.places.remove(&agent);
        self.awaited.remove(&agent);
        let mut lost = Vec::new();
        for (rank, worker) in &mut self.workers {
            if worker.agent == agent && worker.state.runs() {
                worker.state = WorkerState::Lost;
                lost.push((*rank, worker.replacement));
            }
        }
        // A place whose workers have all ended well is not filled again.
        self.vacant.extend(place.filter(|place| {
            let mut workers = place.ranks().filter_map(|rank| self.workers.get(&rank));
            workers.any(|worker| worker.state != WorkerState::Succeeded)
        }));
        lost
    }

    /// Whether a node can take the place of this agent's, if the agent is lost.
    pub fn can_replace(&self, agent: AgentId, node: &Node) -> bool {
        match self.places.get(&agent) {
            Some(place) => self.can_start(node) && place.fits(node),
            None => self.can_start(node),
        }
    }

    /// Whether as many restarts are left as the node has workers. Once a worker has ended well there
    /// is nothing left to take part in.
    fn can_start(&self, node: &Node) -> bool {
        node.local_world_size <= self.restarts_left() && !self.has_succeeded()
    }

    /// Returns the ranks of a lost node for this one, if there are some that it can have.
    pub fn take_vacancy(&mut self, node: &Node) -> Option<RankAssignment> {
        if !self.can_start(node) {
            return None;
        }
        let position = self.vacant.iter().position(|place| place.fits(node))?;
        let mut assignment = self.vacant.remove(position).assignment;
        self.restarts += node.local_world_size;
        for (rank, replacement) in (assignment.first_rank..).zip(&mut assignment.replacements) {
            let before = self.workers.get(&rank).map_or(0, |worker| worker.replacement);
            *replacement = before + 1;
        }
        assignment.restart_count = assignment.replacements.iter().copied().max().unwrap_or(0);
        Some(assignment)
    }

    /// Returns how many workers may still be started in place of others.
    pub fn restarts_left(&self) -> u32 {
        self.max_restarts - self.restarts
    }

    /// Says how many of the restarts were used.
    pub fn budget(&self) -> String {
        format!("{} of {}", self.restarts, self.max_restarts)
    }

    /// Returns the agent of the worker that runs with this rank, and the number of those before it,
    /// if the job goes on when this worker is lost.
    pub fn expendable(&self, rank: u32) -> Option<(AgentId, u32)> {
        let worker = self.workers.get(&rank).filter(|worker| worker.state.runs())?;
        let joined = self.count(WorkerState::Running);
        let others = if worker.state == WorkerState::Running { joined - 1 } else { joined };
        let goes_on = self.restarts_left() > 0 || self.is_enough(self.sound() - 1);
        (others > 0 && goes_on).then_some((worker.agent, worker.replacement))
    }

    /// Says that the job goes on without those that are lost, if it does.
    pub fn smaller(&self) -> Option<String> {
        let left = self.sound();
        if self.is_idle() || !self.is_enough(left) {
            return None;
        }
        let workers = if left == 1 { "worker" } else { "workers" };
        Some(format!("the job goes on with {left} {workers}"))
    }

    /// Returns how many workers run or have ended well.
    fn sound(&self) -> usize {
        self.workers.len() - self.count(WorkerState::Lost)
    }

    fn is_enough(&self, workers: usize) -> bool {
        self.min_workers.is_some_and(|min| workers >= min as usize)
    }

    /// Whether no worker runs that could go on.
    pub fn is_idle(&self) -> bool {
        self.count(WorkerState::Running) == 0
    }

    fn count(&self, state: WorkerState) -> usize {
        self.workers.values().filter(|worker| worker.state == state).count()
    }
}
