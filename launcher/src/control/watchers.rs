//! Those who watch the job, and are no agents: what they are told. Pure: the time is an argument.
//!
//! One who watches asks again and again. The leader then asks every agent, and answers when all have
//! answered, or some have not in time. So nothing is sent when nobody watches.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::control::protocol::{AgentEvent, AgentId, Command, Verdict};
use crate::control::status::{Change, JobStatus, NodeStatus};

/// The time that agents have to answer.
const PATIENCE: Duration = Duration::from_millis(800);

/// How many changes are kept.
const CHANGES: usize = 100;

/// The questions that are not answered yet, and who has joined and left.
pub struct Watchers {
    job: String,
    /// By its number.
    questions: BTreeMap<u64, Question>,
    next: u64,
    /// Those who have asked, until they leave.
    watching: BTreeSet<AgentId>,
    changes: VecDeque<Noted>,
}

/// A change.
struct Noted {
    at: Instant,
    what: String,
    interrupts: bool,
}

struct Question {
    watcher: AgentId,
    /// The number that the watcher has given it.
    number: u64,
    asked: Instant,
    deadline: Instant,
    /// The hosts of the agents that have not answered.
    awaited: BTreeMap<AgentId, String>,
    /// The answers, and when they came.
    nodes: Vec<(NodeStatus, Instant)>,
    /// The hosts of agents that cannot answer.
    silent: Vec<String>,
}

impl Watchers {
    /// Makes those of a job: none.
    pub fn new(job: &str) -> Watchers {
        Watchers {
            job: job.into(),
            questions: BTreeMap::new(),
            next: 0,
            watching: BTreeSet::new(),
            changes: VecDeque::new(),
        }
    }

    /// Takes a question, for agents on these hosts. Those on `silent` ones cannot answer. Returns the
    /// number with which the others are to be asked.
    pub fn ask(
        &mut self,
        watcher: AgentId,
        number: u64,
        awaited: BTreeMap<AgentId, String>,
        silent: Vec<String>,
        now: Instant,
    ) -> u64 {
        self.watching.insert(watcher);
        // Who asks again waits no longer for the answer to the question before.
        self.questions.retain(|_, question| question.watcher != watcher);
        let question = Question {
            watcher,
            number,
            asked: now,
            deadline: now + PATIENCE,
            awaited,
            nodes: Vec::new(),
            silent,
        };
        self.next += 1;
        self.questions.insert(self.next, question);
        self.next
    }

    /// Notes that somebody has gone; returns whether that is one who has watched.
    pub fn left(&mut self, watcher: AgentId) -> bool {
        self.questions.retain(|_, question| question.watcher != watcher);
        self.watching.remove(&watcher)
    }

    /// Takes an agent's answer.
    pub fn answer(&mut self, agent: AgentId, number: u64, status: NodeStatus, now: Instant) {
        if let Some(question) = self.questions.get_mut(&number)
            && question.awaited.remove(&agent).is_some()
        {
            question.nodes.push((status, now));
        } else {
            log::debug!("agent {agent} answers too late, or what nobody has asked");
        }
    }

    /// Notes that somebody has joined or left, and whether that has interrupted the job.
    pub fn note(&mut self, what: String, interrupts: bool, now: Instant) {
        self.changes.push_back(Noted { at: now, what, interrupts });
        if self.changes.len() > CHANGES {
            self.changes.pop_front();
        }
    }

    /// Takes the answers that are complete, or due.
    pub fn take_due(&mut self, now: Instant) -> Vec<(AgentId, JobStatus)> {
        let is_due = |question: &Question| question.awaited.is_empty() || question.deadline <= now;
        let due = self.questions.iter().filter(|(_, question)| is_due(question));
        let due: Vec<u64> = due.map(|(number, _)| *number).collect();
        let due: Vec<Question> =
            due.into_iter().filter_map(|number| self.questions.remove(&number)).collect();
        due.into_iter().map(|question| (question.watcher, self.status(question, now))).collect()
    }

    fn status(&self, question: Question, now: Instant) -> JobStatus {
        let seconds_since = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
        let mut nodes = Vec::new();
        for (mut node, came) in question.nodes {
            node.age(seconds_since(came));
            nodes.push(node);
        }
        nodes.sort_by_key(|node| node.workers.first().map(|worker| worker.rank));
        let mut silent = question.silent;
        silent.extend(question.awaited.into_values());
        let changes = self.changes.iter().map(|change| Change {
            seconds_ago: seconds_since(change.at),
            what: change.what.clone(),
            interrupts: change.interrupts,
        });
        JobStatus {
            number: question.number,
            job: self.job.clone(),
            nodes,
            silent,
            changes: changes.collect(),
            asked_seconds_ago: seconds_since(question.asked),
            members: Vec::new(),
        }
    }

    /// Returns when an answer is due.
    pub fn deadline(&self) -> Option<Instant> {
        self.questions.values().map(|question| question.deadline).min()
    }
}

/// Says which worker has failed, if this event is such a failure.
pub fn failure(event: &AgentEvent) -> Option<String> {
    match event {
        AgentEvent::Failed { failure, .. } => Some(failure.summary.clone()),
        AgentEvent::Exited { failure, .. } => Some(failure.as_ref()?.summary.clone()),
        _ => None,
    }
}

/// Says what follows when the coordinator answers a failure with these commands.
pub fn consequence(commands: &[(AgentId, Command)]) -> &'static str {
    let verdict = commands.iter().find_map(|(_, command)| match command {
        Command::Decide { verdict, .. } => Some(*verdict),
        _ => None,
    });
    match verdict {
        Some(Verdict::Replace) => "; another is started in its place",
        Some(Verdict::GoOn) => "; the others go on without it",
        Some(Verdict::Fail) | None => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::status::{Activity, GroupActivity, Operation, WorkerStatus};

    fn node(host: &str) -> NodeStatus {
        NodeStatus { host: host.into(), restarts: 0, workers: vec![], resumed: vec![] }
    }

    fn hosts(hosts: &[(AgentId, &str)]) -> BTreeMap<AgentId, String> {
        hosts.iter().map(|(agent, host)| (*agent, host.to_string())).collect()
    }

    #[test]
    fn who_asks_is_told_when_all_have_answered() {
        let (mut watchers, now) = (Watchers::new("job"), Instant::now());
        let number = watchers.ask(7, 31, hosts(&[(0, "a"), (2, "b")]), vec![], now);
        assert_eq!(watchers.deadline(), Some(now + PATIENCE));
        watchers.answer(0, number, node("a"), now);
        assert_eq!(watchers.take_due(now), []);
        watchers.answer(2, number, node("b"), now);
        let [(watcher, status)] = watchers.take_due(now).try_into().unwrap();
        assert_eq!((watcher, status.number, &status.job[..]), (7, 31, "job"));
        assert_eq!((status.nodes, status.silent), (vec![node("a"), node("b")], vec![]));
        assert_eq!((watchers.deadline(), watchers.take_due(now + PATIENCE)), (None, vec![]));
    }

    #[test]
    fn who_does_not_answer_is_named() {
        let (mut watchers, now) = (Watchers::new("job"), Instant::now());
        let number = watchers.ask(7, 1, hosts(&[(0, "a"), (2, "b")]), vec![], now);
        watchers.answer(0, number, node("a"), now);
        // Neither twice, nor by others, nor to other questions.
        watchers.answer(0, number, node("a"), now);
        watchers.answer(5, number, node("c"), now);
        watchers.answer(2, number + 1, node("b"), now);
        let [(_, status)] = watchers.take_due(now + PATIENCE).try_into().unwrap();
        assert_eq!((status.nodes, status.silent), (vec![node("a")], vec!["b".to_string()]));
        watchers.answer(2, number, node("b"), now);
        assert_eq!(watchers.take_due(now + PATIENCE * 2), []);
    }

    #[test]
    fn a_question_takes_the_place_of_the_one_before() {
        let (mut watchers, now) = (Watchers::new("job"), Instant::now());
        let first = watchers.ask(7, 1, hosts(&[(0, "a")]), vec![], now);
        let second = watchers.ask(7, 2, hosts(&[(0, "a")]), vec![], now);
        watchers.answer(0, first, node("a"), now);
        assert_eq!(watchers.take_due(now), []);
        watchers.answer(0, second, node("a"), now);
        assert_eq!(watchers.take_due(now).len(), 1);
    }

    /// All ages are those at the time of the answer to who watches.
    #[test]
    fn answers_age_while_others_are_awaited() {
        let (mut watchers, now) = (Watchers::new("job"), Instant::now());
        let operation = Operation {
            group: "0".into(),
            name: "recv".into(),
            sequence: 1,
            bucket: None,
            is_collective: false,
            is_under_way: true,
            seconds: 3.0,
        };
        let group = GroupActivity {
            name: "0".into(),
            collective: Some(operation.clone()),
            message: Some(operation),
        };
        let activity = Activity {
            pid: 7,
            steps: 1,
            step_seconds: Some(1.0),
            since_step: Some(2.0),
            communication: None,
            groups: vec![group],
            resumed: vec![4.0],
        };
        let worker = WorkerStatus {
            rank: 0,
            pid: 7,
            replacement: 0,
            uptime_seconds: 1.0,
            end: None,
            memory_bytes: None,
            cpu_seconds: None,
            activity: Some(activity),
        };
        let number = watchers.ask(7, 1, hosts(&[(0, "a"), (2, "b")]), vec!["old".into()], now);
        let half = Duration::from_millis(500);
        let early = NodeStatus { workers: vec![worker], resumed: vec![5.0], ..node("a") };
        watchers.answer(0, number, early, now);
        watchers.answer(2, number, node("b"), now + half);
        let [(_, status)] = watchers.take_due(now + half).try_into().unwrap();
        assert_eq!((status.asked_seconds_ago, &status.silent[..]), (0.5, &["old".to_string()][..]));
        let early = status.nodes.iter().find(|node| node.host == "a").unwrap();
        let activity = early.workers[0].activity.as_ref().unwrap();
        assert_eq!((&early.resumed[..], &activity.resumed[..]), (&[5.5][..], &[4.5][..]));
        assert_eq!((activity.since_step, activity.step_seconds), (Some(2.5), Some(1.0)));
        let group = &activity.groups[0];
        let seconds = [&group.collective, &group.message].map(|it| it.as_ref().unwrap().seconds);
        assert_eq!(seconds, [3.5, 3.5]);
    }

    #[test]
    fn who_leaves_gets_no_answer() {
        let (mut watchers, now) = (Watchers::new("job"), Instant::now());
        watchers.ask(7, 1, hosts(&[]), vec![], now);
        assert!(watchers.left(7) && !watchers.left(7) && !watchers.left(8));
        assert_eq!(watchers.take_due(now), []);
    }

    #[test]
    fn the_last_changes_are_kept() {
        let (mut watchers, now) = (Watchers::new("job"), Instant::now());
        for number in 0..=CHANGES {
            watchers.note(number.to_string(), false, now);
        }
        watchers.ask(7, 1, hosts(&[]), vec![], now);
        let [(_, status)] = watchers.take_due(now + Duration::from_secs(2)).try_into().unwrap();
        let first = Change { seconds_ago: 2.0, what: "1".into(), interrupts: false };
        assert_eq!((status.changes.len(), &status.changes[0]), (CHANGES, &first));
    }
}
