//! Decisions of the coordinator, with a clock of the test's.

use super::*;
use crate::control::assignment::RankAssignment;
use std::ffi::OsString;

mod in_place;
mod resuming;

const SECOND: Duration = Duration::from_secs(1);

/// A coordinator with its clock, and what the agents were ordered.
struct Test {
    coordinator: Coordinator,
    now: Instant,
    commands: Vec<(AgentId, Command)>,
}

impl Test {
    fn new(flags: &str) -> Test {
        let line = format!("flow-launch {flags} train");
        let job = Job::parse(line.split_whitespace().map(OsString::from), &|_| None).unwrap();
        let now = Instant::now();
        Test { coordinator: Coordinator::new(&job, now), now, commands: Vec::new() }
    }

    fn handle(&mut self, agent: AgentId, event: AgentEvent) {
        self.commands.extend(self.coordinator.handle(agent, event, self.now));
    }

    fn join(&mut self, agent: AgentId, workers: u32) {
        let node = Node {
            host: format!("host{agent}"),
            address: format!("10.0.0.{agent}"),
            node_rank: self.coordinator.is_static.then_some(agent as u32),
            local_world_size: workers,
            role: "default".into(),
            nodes: (self.coordinator.min as u32, self.coordinator.max as u32),
            is_in_place: self.coordinator.in_place.is_some(),
            can_report: true,
        };
        self.handle(agent, AgentEvent::Joined { node, kept: None });
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.commands.extend(self.coordinator.elapsed(self.now));
    }

    fn fail(&mut self, agent: AgentId, end: ExitStatus) {
        let failure = Failure { summary: format!("agent {agent}: {end}"), end };
        self.handle(agent, AgentEvent::Failed { round: self.coordinator.round, failure });
    }

    fn stopped(&mut self, agent: AgentId, cause: Option<&str>) {
        let round = self.coordinator.round;
        self.handle(agent, AgentEvent::Stopped { round, cause: cause.map(String::from) });
    }

    fn finish(&mut self, agent: AgentId) {
        self.handle(agent, AgentEvent::Finished { round: self.coordinator.round });
    }

    /// The placements of the round that has just started, by agent.
    fn started(&mut self) -> Vec<(AgentId, RankAssignment)> {
        let assignment = |(agent, command)| match command {
            Command::Start { assignment, .. } => (agent, assignment),
            other => panic!("agent {agent}: {other:?}"),
        };
        std::mem::take(&mut self.commands).into_iter().map(assignment).collect()
    }

    /// First ranks and world size of the round that has just started.
    fn ranks(&mut self) -> (Vec<(AgentId, u32)>, u32) {
        let started = self.started();
        let world_size = started[0].1.world_size;
        (
            started.into_iter().map(|(agent, assignment)| (agent, assignment.first_rank)).collect(),
            world_size,
        )
    }

    /// The agents that were commanded to stop, and the notice.
    fn stops(&mut self) -> (Vec<AgentId>, Option<String>) {
        let mut said = None;
        let commands = std::mem::take(&mut self.commands);
        let agents = commands.into_iter().map(|(agent, command)| match command {
            Command::Stop { why, .. } => {
                said = why;
                agent
            }
            other => panic!("agent {agent}: {other:?}"),
        });
        (agents.collect(), said)
    }

    /// The notice that one agent is to print; there is no other command.
    fn said(&mut self, agent: AgentId) -> String {
        match &std::mem::take(&mut self.commands)[..] {
            [(to, Command::Print(text))] if *to == agent => text.clone(),
            other => panic!("{other:?}"),
        }
    }

    /// The code that all agents end with, and the report.
    fn end(&mut self) -> (u8, Option<String>) {
        let commands = std::mem::take(&mut self.commands);
        let results: Vec<_> = commands
            .into_iter()
            .map(|(_, command)| match command {
                Command::Finish(result) => result,
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(
            !results.is_empty() && results.iter().all(|result| *result == results[0]),
            "{results:?}"
        );
        (results[0].code, results[0].cause.clone())
    }
}

const STATIC: &str = "--nnodes 2 --node_rank 0 --master_addr 10.0.0.0 --master_port 7";
const THREE: &str = "--nnodes 3 --rdzv-endpoint 10.0.0.0:7";
const ELASTIC: &str = "--nnodes 1:2 --rdzv-endpoint 10.0.0.0:7 --rdzv-conf last_call_timeout=5";

#[test]
fn a_job_on_one_node_starts_at_once_and_ends_well() {
    let mut test = Test::new("");
    test.join(LEADER, 2);
    let started = test.started();
    assert_eq!(started[0].1.world_size, 2);
    assert_eq!(test.coordinator.deadline(), None);
    test.finish(LEADER);
    assert_eq!(test.end(), (0, None));
}

#[test]
fn static_nodes_have_the_ranks_of_their_flags() {
    let mut test = Test::new(STATIC);
    test.join(1, 2);
    assert_eq!(test.commands, []);
    test.join(LEADER, 3);
    assert_eq!(test.ranks(), (vec![(0, 0), (1, 3)], 5));
    test.join(1, 1);
    let (code, cause) = test.end();
    assert!(code == 1 && cause.unwrap().contains("node rank 1 is taken by host host1"));
}

#[test]
fn nodes_at_an_endpoint_are_ranked_as_they_come() {
    let mut test = Test::new(THREE);
    for (agent, workers) in [(LEADER, 1), (2, 2), (1, 3)] {
        test.join(agent, workers);
    }
    let started = test.started();
    let ranks: Vec<_> =
        started.iter().map(|(agent, p)| (*agent, p.group_rank, p.first_rank)).collect();
    assert_eq!(ranks, [(0, 0, 0), (1, 1, 1), (2, 2, 4)]);
}

#[test]
fn those_who_do_not_come_are_named() {
    let mut test = Test::new(&format!("{STATIC} --rdzv-conf join_timeout=3"));
    test.join(LEADER, 1);
    test.pass(2 * SECOND);
    assert_eq!(test.commands, []);
    test.pass(SECOND);
    assert_eq!(test.end(), (1, Some("node 1 has not joined within 3 s".into())));
    let mut test = Test::new(&format!("{THREE} --rdzv-conf join_timeout=3"));
    test.join(LEADER, 1);
    test.join(1, 1);
    test.pass(3 * SECOND);
    let cause = test.end().1.unwrap();
    assert_eq!(cause, "only 2 of at least 3 nodes have joined within 3 s: host0, host1");
}

#[test]
fn a_long_wait_for_nodes_is_said() {
    let mut test = Test::new(STATIC);
    test.join(LEADER, 1);
    test.pass(FIRST_NOTICE);
    assert_eq!(
        test.commands,
        [(LEADER, Command::Print("node 1 has not joined within 10 s".into()))]
    );
    test.pass(FIRST_NOTICE);
    assert_eq!(test.commands.len(), 1);
    test.pass(FIRST_NOTICE);
    assert_eq!(test.commands.len(), 2);
}

#[test]
fn a_failure_stops_all_and_reaches_all() {
    let mut test = Test::new(STATIC);
    test.join(LEADER, 1);
    test.join(1, 1);
    test.started();
    test.fail(1, ExitStatus::Exit(3));
    assert_eq!(test.stops(), (vec![0, 1], None));
    test.stopped(1, Some("rank 1 ..."));
    test.stopped(1, None); // it had stopped when it was ordered to
    assert_eq!(test.commands, []);
    test.stopped(LEADER, None);
    assert_eq!(test.end(), (3, Some("rank 1 ...".into())));
}

#[test]
fn of_failures_that_come_together_a_crash_is_the_cause() {
    for (wait, code) in [(Duration::ZERO, 137), (SECOND, 1)] {
        let mut test = Test::new(STATIC);
        test.join(LEADER, 1);
        test.join(1, 1);
        test.fail(LEADER, ExitStatus::Exit(1));
        test.now += wait;
        test.fail(1, ExitStatus::Signal(9));
        test.commands.clear();
        test.stopped(LEADER, None);
        test.stopped(1, None);
        assert_eq!(test.end().0, code);
    }
}

#[test]
fn restarts_are_counted_and_finished_nodes_take_part() {
    let mut test = Test::new(&format!("{STATIC} --max-restarts 1"));
    test.join(LEADER, 1);
    test.join(1, 1);
    assert_eq!(test.started()[0].1.restart_count, 0);
    test.finish(LEADER);
    test.fail(1, ExitStatus::Exit(3));
    let (agents, said) = test.stops();
    assert_eq!(
        (agents, said.unwrap().as_str()),
        (vec![0, 1], "agent 1: exit code 3; restart 1 of 1")
    );
    test.stopped(1, None);
    test.stopped(LEADER, None);
    let started = test.started();
    assert!(started.len() == 2 && started.iter().all(|(_, p)| p.restart_count == 1));
    test.fail(1, ExitStatus::Exit(4));
    test.stops();
    test.stopped(1, None);
    test.stopped(LEADER, None);
    assert_eq!(test.end(), (4, Some("agent 1: exit code 4".into())));
}

#[test]
fn a_lost_node_ends_a_static_job() {
    let mut test = Test::new(STATIC);
    test.join(LEADER, 1);
    test.join(1, 1);
    test.started();
    test.handle(1, AgentEvent::Gone { why: "silence".into() });
    assert_eq!(test.stops(), (vec![0], None));
    test.stopped(LEADER, None);
    assert_eq!(test.end(), (1, Some("node 1 (host host1) was lost: silence".into())));
}

#[test]
fn a_lost_node_may_come_back_if_restarts_are_left() {
    let mut test = Test::new(&format!("{STATIC} --max-restarts 1"));
    test.join(LEADER, 1);
    test.join(1, 1);
    test.handle(1, AgentEvent::Gone { why: "silence".into() });
    test.stopped(LEADER, None);
    test.commands.clear();
    test.join(1, 1);
    assert_eq!(test.started()[0].1.restart_count, 1);
}

#[test]
fn a_node_that_was_started_again_takes_its_own_place() {
    let mut test = Test::new(&format!("{STATIC} --max-restarts 1"));
    test.join(LEADER, 1);
    test.join(1, 1);
    test.started();
    let node = Node { host: "host1".into(), ..test.coordinator.agents[&1].node.clone() };
    test.handle(2, AgentEvent::Joined { node, kept: None });
    // The old agent may still be there, with its workers.
    let [(1, Command::Stop { .. }), rest @ ..] = &test.commands[..] else {
        panic!("{:?}", test.commands)
    };
    assert!(
        matches!(rest, [(1, Command::Finish(_)), (LEADER, Command::Stop { .. })]),
        "{:?}",
        test.commands
    );
    test.commands.clear();
    test.stopped(LEADER, None);
    assert_eq!(test.ranks(), (vec![(0, 0), (2, 1)], 2));
}

#[test]
fn nodes_must_agree_on_their_number() {
    let mut test = Test::new(STATIC);
    test.join(LEADER, 1);
    let node =
        Node { nodes: (1, 3), node_rank: Some(1), ..test.coordinator.agents[&LEADER].node.clone() };
    test.handle(1, AgentEvent::Joined { node, kept: None });
    assert_eq!(test.end(), (1, Some("--nnodes is 1:3 here, but 2 on the leading node".into())));
}

#[test]
fn an_elastic_job_waits_for_a_last_call() {
    let mut test = Test::new(ELASTIC);
    test.join(LEADER, 1);
    test.pass(4 * SECOND);
    assert_eq!(test.commands, []);
    test.pass(SECOND);
    assert_eq!(test.ranks(), (vec![(0, 0)], 1));
}

#[test]
fn an_elastic_job_goes_on_with_who_is_left_and_takes_in_who_comes() {
    let mut test = Test::new(ELASTIC);
    test.join(LEADER, 1);
    test.join(1, 2);
    assert_eq!(test.ranks(), (vec![(0, 0), (1, 1)], 3));
    test.handle(1, AgentEvent::Gone { why: "silence".into() });
    assert!(test.stops().1.unwrap().ends_with("was lost: silence; going on without it"));
    test.stopped(LEADER, None);
    let started = test.started();
    assert_eq!((started.len(), started[0].1.world_size, started[0].1.restart_count), (1, 1, 0));
    test.join(2, 4);
    assert!(test.stops().1.unwrap().ends_with("has joined"));
    test.stopped(LEADER, None);
    assert_eq!(test.ranks(), (vec![(0, 0), (2, 1)], 5));
    // A third one waits until there is room.
    test.join(3, 1);
    assert!(test.said(3).contains("is a spare: the job has its 2 nodes"));
    test.handle(2, AgentEvent::Leaving { signal: 15 });
    test.stops();
    test.stopped(LEADER, None);
    assert_eq!(test.ranks(), (vec![(0, 0), (3, 1)], 2));
    test.finish(3);
    test.finish(LEADER);
    assert_eq!(test.end(), (0, None));
}

#[test]
fn a_surplus_node_is_a_spare_as_long_as_the_job_may_start_again() {
    let mut test = Test::new(&format!("{THREE} --max-restarts 1"));
    for agent in [LEADER, 1, 2] {
        test.join(agent, 1);
    }
    test.started();
    test.join(3, 1);
    assert!(test.said(3).contains("is a spare: the job has its 3 nodes"));
    test.join(4, 1);
    assert!(test.said(4).contains("is a spare"));
    test.handle(1, AgentEvent::Gone { why: "silence".into() });
    test.stops();
    test.stopped(LEADER, None);
    test.stopped(2, None);
    // One takes the place; there is no other start in which there could be one for the other.
    let surplus = test.commands.pop().unwrap();
    assert_eq!(test.ranks(), (vec![(0, 0), (2, 1), (3, 2)], 3));
    let cause = Some("this node is surplus: the job has its 3 nodes".into());
    assert_eq!(surplus, (4, Command::Finish(JobResult { code: 1, cause })));
    test.handle(4, AgentEvent::Gone { why: "it ended".into() });
    assert_eq!(test.commands, []);
}

#[test]
fn a_surplus_node_of_a_job_that_starts_once_ends() {
    let mut test = Test::new(THREE);
    for agent in [LEADER, 1, 2] {
        test.join(agent, 1);
    }
    test.started();
    test.join(3, 1);
    assert_eq!(test.end(), (1, Some("this node is surplus: the job has its 3 nodes".into())));
    for agent in [LEADER, 1, 2] {
        test.finish(agent);
    }
    assert_eq!(test.end(), (0, None));
}

#[test]
fn a_signal_to_one_node_ends_a_static_job() {
    let mut test = Test::new(STATIC);
    test.join(LEADER, 1);
    test.join(1, 1);
    test.started();
    test.handle(1, AgentEvent::Leaving { signal: 15 });
    test.stops();
    test.handle(1, AgentEvent::Gone { why: "it ended".into() });
    test.stopped(LEADER, None);
    assert_eq!(test.end(), (143, Some("node 1 (host host1) was stopped by a signal".into())));
    let mut waiting = Test::new(STATIC);
    waiting.join(LEADER, 1);
    waiting.handle(LEADER, AgentEvent::Leaving { signal: 2 });
    assert_eq!(waiting.end(), (130, None));
}

#[test]
fn an_agent_that_does_not_stop_its_workers_is_given_up() {
    let mut test = Test::new(STATIC);
    test.join(LEADER, 1);
    test.join(1, 1);
    test.started();
    test.fail(LEADER, ExitStatus::Exit(3));
    test.stops();
    test.stopped(LEADER, Some("rank 0 ..."));
    test.pass(test.coordinator.grace + STOPPING);
    assert!(
        matches!(&test.commands[0], (1, Command::Finish(result)) if result.code == 1),
        "{:?}",
        test.commands
    );
    test.commands.remove(0);
    assert_eq!(test.end(), (3, Some("rank 0 ...".into())));
}

#[test]
fn the_leaders_own_workers_are_waited_for() {
    let mut test = Test::new("");
    test.join(LEADER, 1);
    test.started();
    test.fail(LEADER, ExitStatus::Exit(3));
    test.stops();
    test.pass(test.coordinator.grace + STOPPING);
    assert_eq!(test.commands, []);
    assert!(test.coordinator.deadline().unwrap() > test.now);
    test.stopped(LEADER, Some("rank 0 ..."));
    assert_eq!(test.end(), (3, Some("rank 0 ...".into())));
}
