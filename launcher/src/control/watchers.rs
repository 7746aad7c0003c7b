//! Those who watch the job, and are no agents: what they are told. Pure: the time is an argument.
//!
//! One who watches asks again and again. The leader then asks every agent, and answers when all have
//! answered, or some have not in time. So nothing is sent when nobody watches.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::control::protocol::AgentId;
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
    changes: VecDeque<(Instant, String)>,
}

struct Question {
    watcher: AgentId,
    /// The number that the watcher has given it.
    number: u64,
    deadline: Instant,
    /// The hosts of the agents that have not answered.
    awaited: BTreeMap<AgentId, String>,
    nodes: Vec<NodeStatus>,
}

impl Watchers {
    /// Makes those of a job: none.
    pub fn new(job: &str) -> Watchers {
        Watchers { job: job.into(), questions: BTreeMap::new(), next: 0, changes: VecDeque::new() }
    }

    /// Takes a question, for agents on these hosts. Returns the number with which they are to be asked.
    pub fn ask(
        &mut self,
        watcher: AgentId,
        number: u64,
        awaited: BTreeMap<AgentId, String>,
        now: Instant,
    ) -> u64 {
        // Who asks again waits no longer for the answer to the question before.
        self.questions.retain(|_, question| question.watcher != watcher);
        let deadline = now + PATIENCE;
        let question = Question { watcher, number, deadline, awaited, nodes: Vec::new() };
        self.next += 1;
        self.questions.insert(self.next, question);
        self.next
    }

    /// Takes an agent's answer.
    pub fn answer(&mut self, agent: AgentId, number: u64, status: NodeStatus) {
        if let Some(question) = self.questions.get_mut(&number)
            && question.awaited.remove(&agent).is_some()
        {
            question.nodes.push(status);
        } else {
            log::debug!("agent {agent} answers too late, or what nobody has asked");
        }
    }

    /// Notes that somebody has joined or left.
    pub fn note(&mut self, what: String, now: Instant) {
        self.changes.push_back((now, what));
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
        let mut nodes = question.nodes;
        nodes.sort_by_key(|node| node.workers.first().map(|worker| worker.rank));
        let changes = self.changes.iter().map(|(at, what)| Change {
            seconds_ago: now.saturating_duration_since(*at).as_secs_f64(),
            what: what.clone(),
        });
        JobStatus {
            number: question.number,
            job: self.job.clone(),
            nodes,
            silent: question.awaited.into_values().collect(),
            changes: changes.collect(),
        }
    }

    /// Returns when an answer is due.
    pub fn deadline(&self) -> Option<Instant> {
        self.questions.values().map(|question| question.deadline).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: &str) -> NodeStatus {
        NodeStatus { host: host.into(), restarts: 0, workers: vec![], resumed: vec![] }
    }

    fn hosts(hosts: &[(AgentId, &str)]) -> BTreeMap<AgentId, String> {
        hosts.iter().map(|(agent, host)| (*agent, host.to_string())).collect()
    }

    #[test]
    fn who_asks_is_told_when_all_have_answered() {
        let (mut watchers, now) = (Watchers::new("job"), Instant::now());
        let number = watchers.ask(7, 31, hosts(&[(0, "a"), (2, "b")]), now);
        assert_eq!(watchers.deadline(), Some(now + PATIENCE));
        watchers.answer(0, number, node("a"));
        assert_eq!(watchers.take_due(now), []);
        watchers.answer(2, number, node("b"));
        let [(watcher, status)] = watchers.take_due(now).try_into().unwrap();
        assert_eq!((watcher, status.number, &status.job[..]), (7, 31, "job"));
        assert_eq!((status.nodes, status.silent), (vec![node("a"), node("b")], vec![]));
        assert_eq!((watchers.deadline(), watchers.take_due(now + PATIENCE)), (None, vec![]));
    }

    #[test]
    fn who_does_not_answer_is_named() {
        let (mut watchers, now) = (Watchers::new("job"), Instant::now());
        let number = watchers.ask(7, 1, hosts(&[(0, "a"), (2, "b")]), now);
        watchers.answer(0, number, node("a"));
        // Neither twice, nor by others, nor to other questions.
        watchers.answer(0, number, node("a"));
        watchers.answer(5, number, node("c"));
        watchers.answer(2, number + 1, node("b"));
        let [(_, status)] = watchers.take_due(now + PATIENCE).try_into().unwrap();
        assert_eq!((status.nodes, status.silent), (vec![node("a")], vec!["b".to_string()]));
        watchers.answer(2, number, node("b"));
        assert_eq!(watchers.take_due(now + PATIENCE * 2), []);
    }

    #[test]
    fn a_question_takes_the_place_of_the_one_before() {
        let (mut watchers, now) = (Watchers::new("job"), Instant::now());
        let first = watchers.ask(7, 1, hosts(&[(0, "a")]), now);
        let second = watchers.ask(7, 2, hosts(&[(0, "a")]), now);
        watchers.answer(0, first, node("a"));
        assert_eq!(watchers.take_due(now), []);
        watchers.answer(0, second, node("a"));
        assert_eq!(watchers.take_due(now).len(), 1);
    }

    #[test]
    fn the_last_changes_are_kept() {
        let (mut watchers, now) = (Watchers::new("job"), Instant::now());
        for number in 0..=CHANGES {
            watchers.note(number.to_string(), now);
        }
        watchers.ask(7, 1, hosts(&[]), now);
        let [(_, status)] = watchers.take_due(now + Duration::from_secs(2)).try_into().unwrap();
        let first = Change { seconds_ago: 2.0, what: "1".into() };
        assert_eq!((status.changes.len(), &status.changes[0]), (CHANGES, &first));
    }
}
