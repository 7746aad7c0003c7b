//! Groups of ranks on several machines: namespaces with a network between them, each with a
//! flow-launch.

use flow_harness::cli::until;
use flow_harness::net::{ipv4, Agent, Net};

use std::thread;
use std::time::Duration;

use flow_tests::{assert_contains, launcher};

/// Starts two workers on each of two nodes.
fn start(net: &Net, worker: &str, arguments: &[&str]) -> [Agent; 2] {
    let address = ipv4(0);
    [0, 1].map(|node| {
        let number = node.to_string();
        let flags = [
            "--nnodes",
            "2",
            "--node_rank",
            &number,
            "--master_addr",
            &address,
            "--master_port",
            "29500",
        ];
        let mut command = launcher(2, &flags, worker, arguments);
        command.env("FLOW_TOKEN", "secret").env("OMP_NUM_THREADS", "1");
        net.start(node, &command)
    })
}

/// Starts workers that reduce for ever, and waits until they do.
fn start_endless(net: &Net, what: &str) -> [Agent; 2] {
    let agents = start(net, "check_failures", &["loop", what]);
    for agent in &agents {
        until("both workers loop", || agent.stdout().matches("looping").count() == 2);
    }
    agents
}

/// The agent ends because the other node was lost.
fn fails(agent: Agent) {
    let finished = agent.finish();
    let says = |text| finished.stderr.contains(text);
    assert!(
        finished.code != Some(0) && (says("was lost") || says("cannot be reached")),
        "{finished:?}"
    );
}

#[test]
fn collectives() {
    let Some(net) = Net::new(2) else { return };
    let finished = start(&net, "worker", &["collectives::all_are_right"]).map(Agent::finish);
    let passed = "collectives::all_are_right passed\n".repeat(2);
    assert!(finished.iter().all(|agent| agent.stdout == passed), "{finished:?}");
    assert_eq!(finished.map(|finished| finished.code), [Some(0); 2]);
    net.until_nothing_is_left();
}

#[test]
fn a_message_of_a_rank_that_has_ended_is_not_waited_for() {
    let Some(net) = Net::new(2) else { return };
    let [first, other] = start(&net, "check_failures", &["message_of_ended"]).map(Agent::finish);
    assert_contains(
        &first.stdout,
        &["PeerLost: rank 0: recv from rank 3", "ended with exit code 0"],
    );
    assert_eq!((first.code, other.code), (Some(0), Some(0)));
}

/// Also when it is gone for a while.
#[test]
fn a_slow_link_is_enough() {
    let Some(net) = Net::new(2) else { return };
    if !net.slow(1, "20mbit") {
        return;
    }
    let passed = "groups::more_rounds_than_slots_are_right passed\n".repeat(2);
    let agents = start(&net, "worker", &["groups::more_rounds_than_slots_are_right"]);
    thread::sleep(Duration::from_secs(2));
    net.cut(1);
    thread::sleep(Duration::from_secs(2));
    net.restore(1);
    let finished = agents.map(Agent::finish);
    for finished in finished {
        assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), passed.as_str()));
    }
}

#[test]
fn a_cut_link_ends_the_job_on_both_sides() {
    let Some(net) = Net::new(2) else { return };
    for what in ["ordinary", "messages"] {
        let agents = start_endless(&net, what);
        net.cut(1);
        agents.into_iter().for_each(fails);
        net.until_nothing_is_left();
        net.restore(1);
    }
}

#[test]
fn a_node_without_power_ends_the_job_on_the_other() {
    let Some(net) = Net::new(2) else { return };
    let [agent, gone] = start_endless(&net, "shared");
    net.power_off(1);
    drop(gone);
    fails(agent);
    net.until_nothing_is_left();
}
