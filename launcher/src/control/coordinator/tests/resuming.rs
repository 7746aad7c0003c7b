//! Jobs whose leading node was lost.

use super::*;

/// The coordinator of the next leader, which knows how far the job had come.
fn resuming(flags: &str, progress: Progress) -> Test {
    let mut test = Test::new(flags);
    let line = format!("flow-launch {flags} train");
    let job = Job::parse(line.split_whitespace().map(OsString::from), &|_| None).unwrap();
    test.coordinator = Coordinator::resuming(&job, &progress, None, test.now);
    test
}

fn after(round: u32, restarts: u32, nodes: usize) -> Progress {
    Progress { round, restarts, nodes, replica: None, result: None }
}

const ELASTIC: &str = "--nnodes 1:4 --rdzv-endpoint host0";

#[test]
fn a_round_begins_when_the_nodes_of_the_last_one_are_back() {
    let mut test = resuming(ELASTIC, after(3, 0, 3));
    test.join(LEADER, 2);
    assert_eq!(test.commands, []);
    test.join(1, 2);
    assert_eq!(test.ranks(), (vec![(0, 0), (1, 2)], 4));
    assert_eq!(test.coordinator.progress(), after(4, 0, 2));
}

#[test]
fn a_round_begins_without_those_that_do_not_come_back() {
    let mut test = resuming(ELASTIC, after(3, 0, 4));
    test.join(LEADER, 1);
    test.join(1, 1);
    test.pass(REJOINING - SECOND);
    assert_eq!(test.commands, []);
    test.pass(SECOND);
    assert_eq!(test.started().len(), 2);
    // From then on there is no such wait.
    test.handle(1, AgentEvent::Gone { why: "killed".into() });
    assert_eq!(test.stops().0, [LEADER]);
    test.stopped(LEADER, None);
    assert_eq!(test.started().len(), 1);
}

#[test]
fn the_loss_of_a_leader_that_is_needed_uses_up_a_restart() {
    let flags = format!("{THREE} --max-restarts 2");
    let mut test = resuming(&flags, after(1, 1, 3));
    for agent in [LEADER, 1, 2] {
        test.join(agent, 1);
    }
    assert_eq!(test.started()[0].1.restart_count, 2);
    let mut test = resuming(&flags, after(2, 2, 3));
    test.join(LEADER, 1);
    test.join(1, 1);
    let lost = "the leading node was lost, and no restart is left";
    assert_eq!(test.end(), (1, Some(lost.into())));
}

#[test]
fn restarts_in_place_are_counted_on() {
    let flags = format!("{THREE} --max-restarts 2 --elastic in-place");
    let mut test = resuming(&flags, after(1, 1, 3));
    for agent in [LEADER, 1, 2] {
        test.join(agent, 1);
    }
    assert_eq!(test.started().len(), 3);
    assert_eq!(test.coordinator.progress().restarts, 2);
    assert_eq!(test.coordinator.in_place.unwrap().restarts_left(), 0);
}

/// The last leader was lost before it could tell all.
#[test]
fn those_that_missed_the_end_hear_of_it() {
    let result = JobResult { code: 3, cause: Some("rank 1 failed".into()) };
    let progress = Progress { result: Some(result), ..after(1, 0, 3) };
    let mut test = resuming(ELASTIC, progress);
    test.join(LEADER, 1);
    test.join(1, 1);
    assert_eq!(test.end(), (3, Some("rank 1 failed".into())));
    assert!(!test.coordinator.is_alone());
}
