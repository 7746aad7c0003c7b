//! A leader whose followers are messages.

use super::*;
use std::ffi::OsString;

fn leader_of(nodes: u32) -> Leader {
    let flags = "--node_rank 0 --master_addr 127.0.0.1 --master_port 7";
    let line = format!("flow-launch --nnodes {nodes} {flags} train");
    let job = Job::parse(line.split_whitespace().map(OsString::from), &|_| None).unwrap();
    Leader::serving(&job, node(0, nodes), "127.0.0.1", 0).unwrap()
}

fn node(number: u32, nodes: u32) -> Node {
    Node {
        host: format!("host{number}"),
        address: "127.0.0.1".into(),
        node_rank: Some(number),
        local_world_size: 1,
        role: "default".into(),
        nodes: (nodes, nodes),
        is_in_place: false,
        can_report: true,
    }
}

/// Who is refused ends, and the leader waits for the others as long as it would have.
#[test]
fn a_node_that_is_refused_does_not_end_the_job() {
    let mut leader = leader_of(3);
    let mut commands_for = |agent, number| {
        leader.handle(agent, AgentEvent::Joined { node: node(number, 3), kept: None });
        assert_eq!(leader.linger_until, None);
        leader.commands_sent.get(&agent).copied()
    };
    assert_eq!(commands_for(1, 1), None);
    assert_eq!(commands_for(2, 1), Some(1), "it is refused");
    assert_eq!(commands_for(3, 2), Some(1), "it starts");
}

/// It would take the question for a malformed command, and end.
#[test]
fn an_agent_of_an_older_version_is_not_asked() {
    for can_report in [false, true] {
        let mut leader = leader_of(2);
        let mut node = serde_json::to_value(node(1, 2)).unwrap();
        if !can_report {
            node.as_object_mut().unwrap().remove("can_report");
        }
        let node = serde_json::from_value(node).unwrap();
        leader.handle(1, AgentEvent::Joined { node, kept: None });
        let before = leader.commands_sent[&1];
        leader.handle(7, AgentEvent::Watch { number: 1 });
        assert_eq!(leader.commands_sent[&1] > before, can_report);
    }
}
