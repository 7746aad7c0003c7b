//! What is shown of a job. Pure.

use serde::Serialize;

use crate::control::status::{Activity, Change, JobStatus, Operation, WorkerStatus};

/// Who is in an operation for less than this does not wait: all ranks are in it for a moment.
const WAIT: f64 = 0.1;

/// What is shown of a job: a line of `flow-launch top --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct View {
    pub job: String,
    /// By rank.
    pub ranks: Vec<RankView>,
    /// The hosts that have not answered.
    pub silent: Vec<String>,
    /// The oldest first.
    pub changes: Vec<ChangeView>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankView {
    pub rank: u32,
    pub host: String,
    pub pid: i32,
    /// `running`, or how it has ended.
    pub state: String,
    /// How often it was started again, alone or with all.
    pub restarts: u32,
    pub uptime_seconds: f64,
    pub memory_bytes: Option<u64>,
    pub cpu_seconds: Option<f64>,
    /// None of a program that does not use Flow.
    pub steps: Option<u64>,
    pub step_seconds: Option<f64>,
    pub since_step_seconds: Option<f64>,
    /// The share of the time in which an operation was under way, from 0 to 1.
    pub communication: Option<f64>,
    /// The operation that is longest under way, or was over last.
    pub operation: Option<Operation>,
    /// The ranks that have not begun that operation yet.
    pub waits_for: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChangeView {
    pub seconds_ago: f64,
    pub what: String,
    /// The time from there to the end of the next step; None if there was none yet, or the job was not
    /// interrupted.
    pub cost_seconds: Option<f64>,
}

impl View {
    /// Returns what is shown of a job.
    pub fn of(status: &JobStatus) -> View {
        let workers: Vec<&WorkerStatus> =
            status.nodes.iter().flat_map(|node| &node.workers).collect();
        let mut ranks = Vec::new();
        for node in &status.nodes {
            for worker in &node.workers {
                let restarts = node.restarts + worker.replacement;
                ranks.push(rank(worker, &node.host, restarts, &workers, status.asked_seconds_ago));
            }
        }
        ranks.sort_by_key(|view| view.rank);
        let mut resumed: Vec<f64> = Vec::new();
        for node in &status.nodes {
            resumed.extend(&node.resumed);
            let activities = node.workers.iter().filter_map(|worker| worker.activity.as_ref());
            resumed.extend(activities.flat_map(|activity| &activity.resumed));
        }
        let changes = status.changes.iter().enumerate().map(|(number, change)| ChangeView {
            seconds_ago: change.seconds_ago,
            what: change.what.clone(),
            cost_seconds: cost(change, &status.changes[number + 1..], &resumed),
        });
        View {
            job: status.job.clone(),
            ranks,
            silent: status.silent.clone(),
            changes: changes.collect(),
        }
    }
}

fn rank(
    worker: &WorkerStatus,
    host: &str,
    restarts: u32,
    all: &[&WorkerStatus],
    asked_seconds_ago: f64,
) -> RankView {
    let activity = worker.activity.as_ref();
    let operation = activity.and_then(present);
    let is_running = worker.end.is_none();
    RankView {
        rank: worker.rank,
        host: host.into(),
        pid: worker.pid,
        state: worker.end.clone().unwrap_or_else(|| "running".into()),
        restarts,
        uptime_seconds: worker.uptime_seconds,
        memory_bytes: worker.memory_bytes,
        cpu_seconds: worker.cpu_seconds,
        steps: activity.map(|activity| activity.steps),
        step_seconds: activity.and_then(|activity| activity.step_seconds),
        since_step_seconds: activity.and_then(|activity| activity.since_step),
        communication: activity.and_then(|activity| activity.communication),
        operation: operation.cloned(),
        waits_for: operation
            .filter(|operation| is_running && operation.seconds >= asked_seconds_ago + WAIT)
            .map(|operation| missing(operation, all))
            .unwrap_or_default(),
    }
}

/// Returns the operation that is longest under way, or else was over last.
fn present(activity: &Activity) -> Option<&Operation> {
    let groups = activity.groups.iter();
    let operations: Vec<&Operation> =
        groups.flat_map(|group| group.collective.iter().chain(&group.message)).collect();
    let under_way = operations.iter().filter(|operation| operation.is_under_way);
    let present = under_way
        .max_by(|one, other| one.seconds.total_cmp(&other.seconds))
        .or_else(|| operations.iter().min_by(|one, other| one.seconds.total_cmp(&other.seconds)));
    present.copied()
}

/// Returns the ranks of the group that have not begun this operation. A group's name is the same on all
/// its ranks, and others have none of this name.
fn missing(operation: &Operation, all: &[&WorkerStatus]) -> Vec<u32> {
    let waits = operation.is_under_way && operation.is_collective;
    let mut missing = Vec::new();
    for worker in all.iter().filter(|_| waits) {
        let mut groups = worker.activity.iter().flat_map(|activity| &activity.groups);
        let Some(group) = groups.find(|group| group.name == operation.group) else { continue };
        if group.collective.as_ref().is_none_or(|last| last.sequence < operation.sequence) {
            missing.push(worker.rank);
        }
    }
    missing.sort_unstable();
    missing
}

/// Returns the time from a change that has interrupted the job to the end of the next step, if that was
/// before the next such change. `resumed` says how long ago ranks have done a first step after some change.
fn cost(change: &Change, later: &[Change], resumed: &[f64]) -> Option<f64> {
    let next = later.iter().find(|change| change.interrupts).map(|next| next.seconds_ago);
    let ages = resumed.iter().copied();
    let ages = ages.filter(|age| *age <= change.seconds_ago && next.is_none_or(|next| *age > next));
    let first = ages.max_by(f64::total_cmp).filter(|_| change.interrupts);
    first.map(|first| change.seconds_ago - first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::status::{GroupActivity, NodeStatus};

    fn operation(group: &str, sequence: u64, is_under_way: bool, seconds: f64) -> Operation {
        Operation {
            group: group.into(),
            name: "all_reduce".into(),
            sequence,
            bucket: None,
            is_collective: true,
            is_under_way,
            seconds,
        }
    }

    fn message(group: &str, seconds: f64) -> Operation {
        Operation {
            name: "recv".into(),
            is_collective: false,
            ..operation(group, 1, true, seconds)
        }
    }

    fn group(
        name: &str,
        collective: Option<Operation>,
        message: Option<Operation>,
    ) -> GroupActivity {
        GroupActivity { name: name.into(), collective, message }
    }

    fn worker(rank: u32, collectives: &[Operation]) -> WorkerStatus {
        let groups = collectives.iter();
        let groups = groups.map(|last| group(&last.group, Some(last.clone()), None)).collect();
        let activity = Activity {
            pid: 7,
            steps: 3,
            step_seconds: Some(0.5),
            since_step: Some(0.1),
            communication: Some(0.25),
            groups,
            resumed: vec![],
        };
        WorkerStatus {
            rank,
            pid: 7,
            replacement: 1,
            uptime_seconds: 9.0,
            end: None,
            memory_bytes: Some(1),
            cpu_seconds: Some(2.0),
            activity: Some(activity),
        }
    }

    fn node(host: &str, workers: Vec<WorkerStatus>, resumed: &[f64]) -> NodeStatus {
        NodeStatus { host: host.into(), restarts: 2, workers, resumed: resumed.into() }
    }

    fn view(nodes: Vec<NodeStatus>, changes: Vec<Change>) -> View {
        View::of(&JobStatus {
            number: 1,
            job: "j".into(),
            nodes,
            silent: vec![],
            changes,
            asked_seconds_ago: 0.5,
            members: vec![],
        })
    }

    #[test]
    fn ranks_wait_for_those_that_have_not_begun_the_same_operation() {
        let waiting = operation("0", 8, true, 3.0);
        let nodes = vec![
            node("b", vec![worker(2, &[operation("0", 7, false, 3.2)])], &[]),
            node(
                "a",
                vec![
                    worker(0, &[operation("0.1", 99, false, 9.0), waiting.clone()]),
                    worker(1, std::slice::from_ref(&waiting)),
                    // It is in no group of this name.
                    worker(3, &[operation("0.2", 1, true, 3.0)]),
                    WorkerStatus { activity: None, ..worker(4, &[]) },
                ],
                &[],
            ),
        ];
        let View { ranks, .. } = view(nodes, vec![]);
        let waits: Vec<_> =
            ranks.iter().map(|view| (view.rank, &view.host[..], &view.waits_for[..])).collect();
        let expected: [(u32, &str, &[u32]); 5] =
            [(0, "a", &[2]), (1, "a", &[2]), (2, "b", &[]), (3, "a", &[]), (4, "a", &[])];
        assert_eq!(waits, expected);
        assert_eq!((&ranks[0].operation, ranks[0].restarts), (&Some(waiting), 3));
        assert_eq!((ranks[4].steps, &ranks[4].operation), (None, &None));
    }

    #[test]
    fn who_is_in_an_operation_for_a_moment_waits_for_nobody() {
        // It may have begun after the others have answered.
        let short = operation("0", 8, true, 0.5 + WAIT / 2.0);
        let behind = operation("0", 7, false, 0.0);
        let nodes = vec![node("a", vec![worker(0, &[short]), worker(1, &[behind])], &[])];
        assert!(view(nodes, vec![]).ranks.iter().all(|view| view.waits_for.is_empty()));
    }

    /// One that has begun nothing has only the group, and one may be in a message since.
    #[test]
    fn ranks_that_have_begun_nothing_or_are_in_a_message_are_waited_for() {
        let waiting = operation("0", 8, true, 3.0);
        let recv = message("0", 2.0);
        let [mut nothing, mut in_recv] = [1, 2].map(|rank| worker(rank, &[]));
        nothing.activity.as_mut().unwrap().groups = vec![group("0", None, None)];
        in_recv.activity.as_mut().unwrap().groups =
            vec![group("0", Some(operation("0", 7, false, 4.0)), Some(recv.clone()))];
        let workers = vec![worker(0, &[waiting]), nothing, in_recv];
        let View { ranks, .. } = view(vec![node("a", workers, &[])], vec![]);
        assert_eq!(ranks[0].waits_for, [1, 2]);
        assert_eq!((&ranks[1].operation, &ranks[2].operation), (&None, &Some(recv)));
        assert_eq!((&ranks[1].waits_for[..], &ranks[2].waits_for[..]), (&[][..], &[][..]));
    }

    #[test]
    fn a_change_costs_the_time_to_the_next_step() {
        let change = |seconds_ago, interrupts| Change {
            seconds_ago,
            what: "rank 1 failed".into(),
            interrupts,
        };
        let nodes = vec![node("a", vec![], &[90.0, 7.5]), node("b", vec![], &[7.25, 40.0])];
        let changes = vec![
            change(95.0, false),
            change(50.0, true),
            // No step was done before the next one.
            change(20.0, true),
            change(8.0, true),
            change(7.75, false),
            change(3.0, true),
        ];
        let View { changes, .. } = view(nodes, changes);
        let costs: Vec<_> = changes.iter().map(|change| change.cost_seconds).collect();
        assert_eq!(costs, [None, Some(10.0), None, Some(0.5), None, None]);
    }
}
