//! Decisions about the workers of a job that goes on in place.

use super::*;
use crate::control::protocol::Verdict;
use crate::control::stall::Hang;

/// A job in place on two nodes, of two workers and of one.
fn in_place(flags: &str) -> Test {
    let mut test = Test::new(&format!("{STATIC} --elastic in-place {flags}"));
    test.join(LEADER, 2);
    test.join(1, 1);
    test.started();
    test
}

impl Test {
    fn exit(&mut self, agent: AgentId, rank: u32, failure: Option<&str>) {
        let round = self.coordinator.round;
        let failure =
            failure.map(|what| Failure { summary: what.into(), end: ExitStatus::Exit(9) });
        let end = String::new();
        self.handle(agent, AgentEvent::Exited { round, rank, replacement: 0, end, failure });
    }

    /// What all agents are to print, and then one agent is to do.
    fn decision(&mut self) -> (Option<String>, AgentId, Command) {
        let mut commands = std::mem::take(&mut self.commands);
        let (agent, command) = commands.pop().unwrap();
        let said = match &commands[..] {
            [] => None,
            [(LEADER, Command::Print(text)), (1, Command::Print(same))] if text == same => {
                Some(text.clone())
            }
            other => panic!("{other:?}"),
        };
        (said, agent, command)
    }

    fn hang(&mut self, culprit: Option<u32>) {
        let hang = Hang { report: "it hangs".into(), culprit };
        self.commands.extend(self.coordinator.hung(hang, self.now));
    }
}

fn decide(rank: u32, verdict: Verdict) -> Command {
    Command::Decide { round: 1, rank, verdict }
}

#[test]
fn all_nodes_share_the_restarts() {
    let mut test = in_place("--max-restarts 2");
    for (count, agent, rank) in [(1, 1, 2), (2, LEADER, 0)] {
        test.exit(agent, rank, Some("it failed"));
        let said = format!("it failed; it is started again alone ({count} of 2)");
        assert_eq!(test.decision(), (Some(said), agent, decide(rank, Verdict::Replace)));
    }
    test.exit(1, 2, Some("it failed"));
    assert_eq!(test.decision(), (None, 1, decide(2, Verdict::Fail)));
}

#[test]
fn the_job_goes_on_with_enough_workers() {
    let mut test = in_place("--min-workers 2");
    test.exit(LEADER, 0, None);
    test.exit(1, 2, Some("it failed"));
    let said = "it failed; the job goes on with 2 workers".to_string();
    assert_eq!(test.decision(), (Some(said), 1, decide(2, Verdict::GoOn)));
    test.exit(LEADER, 1, Some("it failed"));
    assert_eq!(test.decision(), (None, LEADER, decide(1, Verdict::Fail)));
}

#[test]
fn somebody_must_be_left_who_goes_on() {
    let mut test = in_place("--max-restarts 9 --min-workers 1");
    test.exit(LEADER, 0, None);
    test.exit(LEADER, 1, None);
    test.exit(1, 2, Some("it failed"));
    assert_eq!(test.decision(), (None, 1, decide(2, Verdict::Fail)));
}

#[test]
fn a_lost_node_takes_its_workers_with_it() {
    let mut test = in_place("--max-restarts 9 --min-workers 2");
    test.handle(1, AgentEvent::Gone { why: "silence".into() });
    assert_eq!(test.coordinator.take_lost_workers(), [(2, 0)]);
    let said = "node 1 (host host1) was lost: silence; the job goes on with 2 workers";
    assert_eq!(test.said(LEADER), said);
    test.finish(LEADER);
    assert_eq!(test.end(), (0, None));
    for flags in ["--max-restarts 9", "--max-restarts 9 --min-workers 3"] {
        let mut test = in_place(flags);
        test.handle(1, AgentEvent::Gone { why: "silence".into() });
        assert_eq!(test.stops(), (vec![0], None));
        test.stopped(LEADER, None);
        assert_eq!(test.end(), (1, Some("node 1 (host host1) was lost: silence".into())));
    }
}

#[test]
fn a_rank_that_hangs_is_killed() {
    let mut test = in_place("--max-restarts 1");
    let kill = |rank, replacement| Command::Kill { round: 1, rank, replacement };
    let said = "rank 2 is killed: the others have waited for it as long as --hang-timeout";
    test.hang(Some(2));
    let killed = test.commands.remove(0);
    assert_eq!(killed, (1, kill(2, 0)));
    let print = |agent| (agent, Command::Print(said.into()));
    assert_eq!(std::mem::take(&mut test.commands), [print(LEADER), print(1)]);
    test.exit(1, 2, Some("it was killed"));
    test.commands.clear();
    // No restart is left: the hang itself is the failure.
    test.hang(Some(2));
    assert_eq!(test.stops(), (vec![0, 1], None));
    test.stopped(LEADER, None);
    test.stopped(1, None);
    assert_eq!(test.end(), (124, Some("it hangs".into())));
    let mut test = in_place("--max-restarts 1");
    test.hang(None);
    test.stops();
    test.stopped(LEADER, None);
    test.stopped(1, None);
    let why = "it hangs; as there is no one rank that all others wait for, the job ends";
    assert_eq!(test.end(), (124, Some(why.into())));
}

#[test]
fn a_worker_that_hangs_while_it_is_taken_in_is_killed() {
    let mut test = with_a_newcomer();
    test.hang(Some(2));
    assert_eq!(test.commands[0].1, Command::Kill { round: 1, rank: 2, replacement: 1 });
    // Nobody that had joined would be left to go on.
    let mut test = with_a_newcomer();
    test.coordinator.in_place.as_mut().unwrap().succeeded(0);
    test.hang(Some(1));
    assert_eq!(test.stops(), (vec![0, 1], None));
}

#[test]
fn only_the_present_worker_with_a_rank_runs() {
    let mut test = in_place("--max-restarts 9 --min-workers 1");
    assert!(test.coordinator.runs(2, 0) && !test.coordinator.runs(2, 1));
    test.exit(1, 2, Some("it failed"));
    assert!(test.coordinator.runs(2, 1) && !test.coordinator.runs(2, 0));
    test.newcomer(2, true);
    assert!(test.coordinator.runs(2, 1));
    test.handle(1, AgentEvent::Gone { why: "silence".into() });
    assert!(!test.coordinator.runs(2, 1));
    test.exit(LEADER, 0, None);
    assert!(!test.coordinator.runs(0, 0));
    // Other jobs start all workers again, and have other stores then.
    assert!(Test::new(STATIC).coordinator.runs(2, 0));
}

#[test]
fn nodes_must_agree_whether_the_job_goes_on_in_place() {
    let mut test = Test::new(&format!("{STATIC} --elastic in-place"));
    test.join(LEADER, 1);
    let leader = test.coordinator.agents[&LEADER].node.clone();
    let node = Node { is_in_place: false, node_rank: Some(1), ..leader };
    test.handle(1, AgentEvent::Joined { node, kept: None });
    assert_eq!(test.end(), (1, Some("--elastic is another than on the leading node".into())));
}

/// The place that an agent is started at, after what all agents are to print.
fn taken(test: &mut Test, agent: AgentId) -> (String, RankAssignment) {
    let mut commands = std::mem::take(&mut test.commands);
    let (last, command) = commands.pop().unwrap();
    let Command::Start { round: 1, assignment } = command else { panic!("{command:?}") };
    assert_eq!(last, agent);
    let Some((_, Command::Print(said))) = commands.pop() else { panic!("{commands:?}") };
    (said, assignment)
}

#[test]
fn a_node_that_comes_back_has_the_ranks_of_before() {
    let mut test = in_place("--max-restarts 3 --min-workers 2");
    test.exit(1, 2, Some("it failed"));
    test.handle(1, AgentEvent::Gone { why: "silence".into() });
    assert_eq!(test.coordinator.take_lost_workers(), [(2, 1)]);
    test.commands.clear();
    test.join(2, 1);
    // It is node 2 of two here, as a test's agents have the rank of their number.
    let (said, assignment) = taken(&mut test, 2);
    let expected =
        "node 2 (host host2) has joined; rank 2 is started again on node 2 (host host2) (2 of 3)";
    assert_eq!(said, expected);
    let RankAssignment { first_rank, world_size, replacements, restart_count, .. } = assignment;
    assert_eq!((first_rank, world_size, replacements, restart_count), (2, 3, vec![2], 2));
    test.hang(Some(2));
    assert_eq!(test.commands[0], (2, Command::Kill { round: 1, rank: 2, replacement: 2 }));
}

#[test]
fn a_node_that_is_started_again_takes_its_own_place_in_place() {
    let mut test = in_place("--max-restarts 3");
    let node = test.coordinator.agents[&1].node.clone();
    test.handle(2, AgentEvent::Joined { node, kept: None });
    assert_eq!(test.coordinator.take_lost_workers(), [(2, 0)]);
    // The old agent may still be there.
    let why = "another flow-launch has taken its place";
    let commands: Vec<_> = test.commands.drain(..2).collect();
    let end = JobResult { code: 1, cause: Some(why.into()) };
    let stop = Command::Stop { round: 1, why: Some(why.into()) };
    assert_eq!(commands, [(1, stop), (1, Command::Finish(end))]);
    let (said, assignment) = taken(&mut test, 2);
    let expected = "node 1 (host host1) was lost: it was started again; rank 2 is started again on \
                    node 1 (host host1) (1 of 3)";
    assert_eq!((&said[..], assignment.replacements), (expected, vec![1]));
    assert_eq!(test.coordinator.members(), [LEADER, 2]);
}

/// Else a second start by mistake would end a job that is well.
#[test]
fn an_agent_that_could_not_take_the_place_leaves_the_other_one_alone() {
    let refused = |flags: &str, succeeded: Option<u32>, workers| {
        let mut test = in_place(flags);
        succeeded.into_iter().for_each(|rank| test.exit(LEADER, rank, None));
        let node = test.coordinator.agents[&1].node.clone();
        let node = Node { local_world_size: workers, ..node };
        test.handle(2, AgentEvent::Joined { node, kept: None });
        let (code, cause) = test.end();
        assert!(code == 1 && cause.unwrap().contains("node rank 1 is taken by host host1"));
        assert_eq!(test.coordinator.members(), [LEADER, 1]);
    };
    refused("", None, 1);
    refused("--min-workers 1", None, 1);
    refused("--max-restarts 9", None, 2);
    refused("--max-restarts 9", Some(0), 1);
}

#[test]
fn a_spare_node_takes_the_place_of_a_lost_one() {
    let mut test = Test::new("--nnodes 2 --rdzv-endpoint h:7 --elastic in-place --max-restarts 3");
    for (agent, workers) in [(LEADER, 2), (1, 2), (2, 1), (3, 2)] {
        test.join(agent, workers);
    }
    test.commands.clear();
    test.handle(1, AgentEvent::Gone { why: "silence".into() });
    // The first spare has not as many workers.
    let (said, assignment) = taken(&mut test, 3);
    assert!(
        said.ends_with(
            "; ranks 2-3 are started again on the node at 10.0.0.3 (host host3) (2 of 3)"
        ),
        "{said}"
    );
    assert_eq!((assignment.group_rank, assignment.replacements), (1, vec![1, 1]));
    // Too few restarts are left for another such node.
    test.join(4, 2);
    test.commands.clear();
    test.handle(3, AgentEvent::Gone { why: "silence".into() });
    assert_eq!(test.stops(), (vec![0], None));
}

#[test]
fn no_node_takes_part_once_workers_have_ended_or_no_restart_is_left() {
    for (flags, exit) in [("--max-restarts 3", Some(0)), ("--max-restarts 0", None)] {
        let mut test = in_place(&format!("--min-workers 1 {flags}"));
        test.handle(1, AgentEvent::Gone { why: "silence".into() });
        exit.into_iter().for_each(|rank| test.exit(LEADER, rank, None));
        test.commands.clear();
        test.join(2, 1);
        let expected = match &std::mem::take(&mut test.commands)[..] {
            [(2, Command::Print(text))] => {
                text.starts_with("this node is a spare") && exit.is_some()
            }
            [(2, Command::Finish(result))] => {
                result.cause.as_deref() == Some("this node is surplus: no restart is left")
            }
            _ => false,
        };
        assert!(expected, "{flags}");
    }
}

impl Test {
    fn newcomer(&mut self, rank: u32, waits: bool) {
        self.commands.extend(self.coordinator.newcomer(rank, 1, waits, self.now));
    }
}

/// A job in which rank 2 has failed, and another waits in its place.
fn with_a_newcomer() -> Test {
    let mut test = in_place("--max-restarts 9");
    test.exit(1, 2, Some("the first"));
    test.newcomer(2, true);
    test.commands.clear();
    test
}

#[test]
fn newcomers_that_nobody_takes_in_do_not_use_up_restarts() {
    let mut test = with_a_newcomer();
    test.exit(LEADER, 0, Some("the second"));
    let said = "the second; it is started again alone (2 of 9)".to_string();
    assert_eq!(test.decision(), (Some(said), LEADER, decide(0, Verdict::Replace)));
    test.exit(LEADER, 1, Some("the last"));
    // Rank 0 has not said yet that it waits.
    assert_eq!(test.decision().2, decide(1, Verdict::Replace));
    test.newcomer(0, true);
    assert_eq!(test.commands, []);
    test.newcomer(1, true);
    assert_eq!(test.stops().0, [0, 1]);
    test.stopped(LEADER, None);
    test.stopped(1, None);
    assert_eq!(test.end(), (9, Some("the last".into())));
}

#[test]
fn the_last_worker_that_had_joined_fails_the_job() {
    let mut test = with_a_newcomer();
    test.exit(LEADER, 0, Some("the second"));
    test.newcomer(0, true);
    test.commands.clear();
    test.exit(LEADER, 1, Some("the last"));
    assert_eq!(test.decision(), (None, LEADER, decide(1, Verdict::Fail)));
    // Others that have ended well do not help.
    let mut test = with_a_newcomer();
    test.exit(LEADER, 0, None);
    test.exit(LEADER, 1, Some("the last"));
    assert_eq!(test.decision(), (None, LEADER, decide(1, Verdict::Fail)));
    test.newcomer(2, true);
    assert_eq!(test.commands, []);
}

#[test]
fn a_newcomer_that_was_taken_in_goes_on() {
    let mut test = with_a_newcomer();
    test.newcomer(2, false);
    test.exit(LEADER, 0, Some("it failed"));
    test.exit(LEADER, 1, Some("it failed"));
    assert_eq!(test.commands.last().unwrap().1, decide(1, Verdict::Replace));
}

#[test]
fn a_newcomer_has_nothing_to_do_when_the_others_have_ended_well() {
    for gives_up in [false, true] {
        let mut test = with_a_newcomer();
        test.exit(LEADER, 0, None);
        if gives_up {
            test.coordinator.in_place.as_mut().unwrap().succeeded(1);
            test.exit(1, 2, Some("nobody is there"));
            assert_eq!(test.commands.pop().unwrap().1, decide(2, Verdict::Fail));
        } else {
            test.exit(LEADER, 1, None);
        }
        let why = "the others have ended well; rank 2 had not joined".to_string();
        assert_eq!(test.stops(), (vec![0, 1], Some(why)));
        test.stopped(LEADER, None);
        test.stopped(1, None);
        assert_eq!(test.end(), (0, None));
    }
}
