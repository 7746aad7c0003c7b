//! Jobs on several nodes, whose number stays: they meet, fail and end together.

use flow_harness::Finished;
use flow_harness::cli::{events, named, script, until};
use flow_harness::net::{Agent, Gate, Net, ipv4, ipv6};

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

/// A worker that waits to be stopped.
const IDLE: &str = "echo ready $RANK; exec sleep 1000";

/// What makes an agent give up early on nodes that do not come.
const IMPATIENT: &str = "--rdzv-conf join_timeout=2";

/// Flags of a node of two, at which node 0 is known. Two workers each, unless `more` has another
/// number.
fn fixed(node: usize, more: &str) -> String {
    let address = ipv4(0);
    format!(
        "--nnodes 2 --node_rank {node} --master_addr {address} --master_port 29500 \
         --nproc_per_node 2 {more}"
    )
}

/// Flags of a node of three that meet at an address of node 0.
fn rendezvous(host: &str, more: &str) -> String {
    format!("--nnodes 3 --rdzv-backend c10d --rdzv-endpoint {host}:29400 --rdzv-id job {more}")
}

/// A job on two nodes.
fn pair(net: &Net, text: &str) -> [Agent; 2] {
    [0, 1].map(|node| net.start(node, &script(&fixed(node, ""), text)))
}

/// A job on two nodes whose workers have all started.
fn idle_pair(net: &Net) -> [Agent; 2] {
    let agents = pair(net, IDLE);
    agents[0].until_says(&["ready 0", "ready 1"]);
    agents[1].until_says(&["ready 2", "ready 3"]);
    agents
}

/// What an agent wrote to stderr, which must be one line.
fn only_line(finished: &Finished) -> &str {
    let lines: Vec<_> = finished.stderr.lines().collect();
    assert!(lines.len() == 1 && lines[0].starts_with("flow-launch: "), "{finished:?}");
    lines[0]
}

/// The state of a process: `S` if it sleeps.
fn state(pid: i32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let state = status.lines().find_map(|line| line.strip_prefix("State:\t")).unwrap();
    state.chars().take(1).collect()
}

/// Waits for the end of an agent that fails because a node was lost.
fn assert_ends_for(agent: Agent, lost: &str) {
    let end = agent.finish();
    assert!(end.code.is_some_and(|code| code != 0) && end.stderr.contains(lost), "{end:?}");
}

#[test]
fn nodes_with_numbers_meet_in_any_order() {
    let Some(net) = Net::new(2) else { return };
    let text = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $GROUP_RANK of \
                $GROUP_WORLD_SIZE, $MASTER_ADDR $MASTER_PORT";
    for (first, address) in [(0, ipv4(0)), (1, ipv4(0)), (0, ipv6(0)), (1, ipv6(0))] {
        let start = |node| {
            net.start(node, &script(&fixed(node, &format!("--master_addr {address}")), text))
        };
        let earlier = start(first);
        until("it waits for the other", || state(earlier.pid) == "S");
        let later = start(1 - first);
        let mut ends = [earlier.finish(), later.finish()];
        if first == 1 {
            ends.reverse();
        }
        for (node, end) in ends.iter().enumerate() {
            assert_eq!(
                (end.code, end.stderr.as_str()),
                (Some(0), ""),
                "node {node}, {first} first, {address}"
            );
            let line = |local| {
                format!("{} of 4, {local} of 2, {node} of 2, {address} 29500", 2 * node + local)
            };
            assert_eq!(end.sorted_lines(), [line(0), line(1)]);
        }
    }
    net.until_nothing_is_left();
}

#[test]
fn nodes_without_numbers_meet_in_any_order_with_any_number_of_workers() {
    let Some(net) = Net::new(3) else { return };
    let text = "echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $GROUP_WORLD_SIZE \
                $TORCHELASTIC_RUN_ID $MASTER_ADDR";
    let orders =
        [([0, 1, 2], ipv4(0)), ([1, 0, 2], "node0".into()), ([2, 1, 0], format!("[{}]", ipv6(0)))];
    for (order, host) in orders {
        let agents = order.map(|node| {
            let agent = net.start(
                node,
                &script(&rendezvous(&host, &format!("--nproc-per-node {}", node + 1)), text),
            );
            if node != order[2] {
                until("it waits for the others", || state(agent.pid) == "S");
            }
            agent
        });
        // The node, its number and the local rank by rank.
        let mut places = BTreeMap::new();
        let mut masters = Vec::new();
        for (node, agent) in order.into_iter().zip(agents) {
            let end = agent.finish();
            assert_eq!((end.code, end.stderr.as_str()), (Some(0), ""), "node {node} of {order:?}");
            assert_eq!(end.stdout.lines().count(), node + 1);
            for line in end.stdout.lines() {
                let words: Vec<_> = line.split(' ').collect();
                let number = |word: usize| words[word].parse::<usize>().unwrap();
                assert_eq!(words[3..6], ["6", "3", "job"], "{line}");
                masters.push(words[6].to_string());
                assert_eq!(places.insert(number(0), (number(2), node, number(1))), None, "{line}");
            }
        }
        assert_eq!(places.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        // In the order of ranks, one node follows another, and the local ranks of each count up.
        let places: Vec<_> = places.into_values().collect();
        assert!(places.is_sorted(), "{places:?}");
        let master = places[0].1;
        let names = [ipv4(master), ipv6(master), format!("node{master}")];
        assert!(
            masters.iter().all(|name| *name == masters[0] && names.contains(name)),
            "{masters:?}"
        );
    }
    net.until_nothing_is_left();
}

#[test]
fn a_node_too_many_says_so_and_ends() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let text = format!("echo ready; {}", gate.wait());
    let start = |node| {
        let flags = format!("--nnodes 2 --rdzv-endpoint {}:29400 --rdzv-id job", ipv4(0));
        net.start(node, &script(&flags, &text))
    };
    let agents = [0, 1].map(start);
    agents.iter().for_each(|agent| agent.until_says(&["ready"]));
    let surplus = start(2).finish();
    assert_eq!((surplus.code, surplus.stdout.as_str()), (Some(1), ""), "{surplus:?}");
    assert!(
        only_line(&surplus).contains("this node is surplus: the job has its 2 nodes"),
        "{surplus:?}"
    );
    gate.open();
    for end in agents.map(Agent::finish) {
        assert_eq!((end.code, end.stderr.as_str()), (Some(0), ""), "{end:?}");
    }
    net.until_nothing_is_left();
}

#[test]
fn nodes_that_do_not_come_are_named() {
    let Some(net) = Net::new(3) else { return };
    let number_0 = net.start(0, &script(&fixed(0, IMPATIENT), "echo started"));
    let number_1 = net.start(
        2,
        &script(&fixed(1, &format!("{IMPATIENT} --master_addr {}", ipv4(1))), "echo started"),
    );
    let two = [0, 1]
        .map(|node| net.start(node, &script(&rendezvous(&ipv4(0), IMPATIENT), "echo started")));
    let expect = |agent: Agent, text: &str| {
        let finished = agent.finish();
        assert_eq!((finished.code, finished.stdout.as_str()), (Some(1), ""), "{finished:?}");
        assert!(only_line(&finished).contains(text), "{finished:?}");
    };
    expect(number_0, "node 1");
    expect(number_1, &ipv4(1));
    for agent in two {
        expect(agent, "2 of at least 3 nodes");
    }
    net.until_nothing_is_left();
}

#[test]
fn a_failure_on_one_node_stops_all_and_all_name_it() {
    let Some(net) = Net::new(2) else { return };
    let gate = Gate::new();
    let agents = pair(
        &net,
        &format!(
            "echo ready; {}; [ $RANK != 3 ] || {{ echo boom >&2; exit 3; }}; {IDLE}",
            gate.wait()
        ),
    );
    agents.iter().for_each(|agent| agent.until_says(&["ready"]));
    gate.open();
    let opened = Instant::now();
    let ends = agents.map(Agent::finish);
    // A failure is to end the job everywhere within 2 s where workers stop when asked, as these do
    // at once. More than that is for machines with much else to do; with a grace period or a
    // heartbeat to wait for it would take longer.
    assert!(opened.elapsed() < Duration::from_secs(5), "{:?}", opened.elapsed());
    for end in &ends {
        assert_eq!(end.code, Some(3), "{end:?}");
        let report: Vec<_> =
            end.stderr.lines().filter(|line| line.starts_with("flow-launch: ")).collect();
        let cause = report[0];
        assert!(cause.starts_with("flow-launch: rank 3 (local rank 1, pid "), "{end:?}");
        assert!(
            cause.contains("node1") && cause.contains("failed with exit code 3 at "),
            "{end:?}"
        );
        assert_eq!(report.get(2), Some(&"flow-launch:   | boom"), "{end:?}");
    }
    net.until_nothing_is_left();
}

#[test]
fn a_killed_agent_takes_the_job_with_it() {
    for (killed, name) in [(0, ipv4(0)), (1, "node1".into())] {
        let Some(net) = Net::new(2) else { return };
        let [agent_0, agent_1] = idle_pair(&net);
        let (victim, other) = if killed == 0 { (agent_0, agent_1) } else { (agent_1, agent_0) };
        victim.signal(Signal::KILL);
        assert_eq!(victim.finish().code, None);
        assert_ends_for(other, &name);
        net.until_nothing_is_left();
    }
}

#[test]
fn a_node_without_power_is_noticed() {
    let Some(net) = Net::new(2) else { return };
    let [agent_0, _] = idle_pair(&net);
    net.power_off(1);
    assert_ends_for(agent_0, "node1");
    net.until_nothing_is_left();
}

#[test]
fn a_cut_link_is_noticed_on_both_sides() {
    let Some(net) = Net::new(2) else { return };
    let agents = idle_pair(&net);
    net.cut(1);
    for (agent, lost) in agents.into_iter().zip(["node1", &ipv4(0)]) {
        assert_ends_for(agent, lost);
    }
    net.until_nothing_is_left();
}

#[test]
fn a_link_that_comes_back_soon_does_no_harm() {
    let Some(net) = Net::new(2) else { return };
    let gate = Gate::new();
    let text = format!("echo ready; {}", gate.wait());
    let patient = "--rdzv-conf heartbeat_timeout=100";
    let agents = [0, 1].map(|node| net.start(node, &script(&fixed(node, patient), &text)));
    agents.iter().for_each(|agent| agent.until_says(&["ready"]));
    let retransmits = || net.retransmits(0) + net.retransmits(1);
    let before = retransmits();
    net.cut(1);
    until("a heartbeat is late", || retransmits() > before);
    net.restore(1);
    gate.open();
    for end in agents.map(Agent::finish) {
        assert_eq!((end.code, end.stderr.as_str()), (Some(0), ""));
    }
    net.until_nothing_is_left();
}

#[test]
fn a_failure_while_the_leader_sleeps_is_not_lost() {
    let Some(net) = Net::new(2) else { return };
    let gate = Gate::new();
    let folder = tempfile::tempdir().unwrap();
    let path = |node| folder.path().join(format!("events{node}"));
    let text = format!("echo ready; {}; [ $RANK != 3 ] || exit 7; {IDLE}", gate.wait());
    let agents = [0, 1].map(|node| {
        let flags = format!("--rdzv-conf heartbeat_timeout=100 --events {}", path(node).display());
        net.start(node, &script(&fixed(node, &flags), &text))
    });
    agents.iter().for_each(|agent| agent.until_says(&["ready"]));
    agents[0].signal(Signal::STOP);
    gate.open();
    until("the other agent has stopped its workers", || {
        named(&events(&path(1)), "exit").len() == 2
    });
    agents[0].signal(Signal::CONT);
    for end in agents.map(Agent::finish) {
        assert_eq!(end.code, Some(7), "{end:?}");
    }
    net.until_nothing_is_left();
}

#[test]
fn a_slow_link_is_enough() {
    let Some(net) = Net::new(2) else { return };
    if !net.slow(1, "64kbit") {
        return;
    }
    for end in pair(&net, "echo $RANK; sleep 1").map(Agent::finish) {
        assert_eq!((end.code, end.stderr.as_str(), end.stdout.lines().count()), (Some(0), "", 2));
    }
    for end in pair(&net, "[ $RANK != 3 ] || exit 7; exec sleep 1000").map(Agent::finish) {
        assert_eq!(end.code, Some(7), "{end:?}");
    }
    net.until_nothing_is_left();
}

#[test]
fn a_stopped_agent_is_lost_and_ends_when_it_goes_on() {
    let Some(net) = Net::new(2) else { return };
    let [agent_0, agent_1] = idle_pair(&net);
    agent_1.signal(Signal::STOP);
    assert_ends_for(agent_0, "node1");
    agent_1.signal(Signal::CONT);
    assert_ends_for(agent_1, &ipv4(0));
    net.until_nothing_is_left();
}

#[test]
fn a_signal_to_one_agent_stops_the_whole_job() {
    for (node, signal, code) in [(0, Signal::INT, 130), (1, Signal::TERM, 143)] {
        let Some(net) = Net::new(2) else { return };
        let agents = idle_pair(&net);
        agents[node].signal(signal);
        let ends = agents.map(Agent::finish);
        assert_eq!(ends[node].code, Some(code), "{ends:?}");
        assert_ne!(ends[1 - node].code, Some(0), "{ends:?}");
        net.until_nothing_is_left();
    }
}

#[test]
fn who_has_another_token_is_refused() {
    let Some(net) = Net::new(2) else { return };
    let start = |node, token| {
        net.start(node, script(&fixed(node, ""), "echo started").env("FLOW_TOKEN", token))
    };
    let agent_0 = start(0, "right");
    let refused = start(1, "wrong").finish();
    assert_eq!((refused.code, refused.stdout.as_str()), (Some(1), ""), "{refused:?}");
    assert!(only_line(&refused).contains("FLOW_TOKEN"), "{refused:?}");
    let agent_1 = start(1, "right");
    for end in [agent_0, agent_1].map(Agent::finish) {
        assert_eq!((end.code, end.stdout.as_str()), (Some(0), "started\nstarted\n"), "{end:?}");
    }
    net.until_nothing_is_left();
}

#[test]
fn agents_of_one_machine_are_nodes_too() {
    let Some(net) = Net::new(2) else { return };
    // Who comes first at node 0 serves the others.
    let agents = [0, 0, 1].map(|node| {
        net.start(node, &script(&rendezvous(&ipv4(0), ""), "echo $RANK of $WORLD_SIZE"))
    });
    let mut said: Vec<_> = agents.map(Agent::finish).map(|end| (end.code, end.stdout)).into();
    said.sort_unstable();
    assert_eq!(said, [0, 1, 2].map(|rank| (Some(0), format!("{rank} of 3\n"))));
    net.until_nothing_is_left();
}

#[test]
fn an_agent_killed_while_it_starts_leaves_nothing() {
    let Some(net) = Net::new(2) else { return };
    for step in 0..10 {
        let flags = |node| fixed(node, "--rdzv-conf join_timeout=1");
        let mut agents =
            [0, 1].map(|node| net.start(node, &script(&flags(node), "exec sleep 1000")));
        agents.rotate_left(step % 2);
        thread::sleep(Duration::from_millis(10 * step as u64));
        agents[0].signal(Signal::KILL);
        let [_, other] = agents;
        let end = other.finish();
        assert_eq!(end.code, Some(1), "{end:?}");
        net.until_nothing_is_left();
    }
}

#[test]
fn a_lost_node_may_be_started_again_where_restarts_are_left() {
    let Some(net) = Net::new(2) else { return };
    let gate = Gate::new();
    let text = format!("echo $RANK, restart $TORCHELASTIC_RESTART_COUNT; {}", gate.wait());
    let start = |node| net.start(node, &script(&fixed(node, "--max-restarts 1"), &text));
    let [agent_0, lost] = [0, 1].map(start);
    lost.until_says(&["2, restart 0", "3, restart 0"]);
    lost.signal(Signal::KILL);
    lost.finish();
    let agent_1 = start(1);
    agent_0.until_says(&["0, restart 1", "1, restart 1"]);
    agent_1.until_says(&["2, restart 1", "3, restart 1"]);
    gate.open();
    for end in [agent_0, agent_1].map(Agent::finish) {
        assert_eq!(end.code, Some(0), "{end:?}");
    }
    net.until_nothing_is_left();
}

#[test]
fn a_node_rank_that_is_taken_is_refused() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events");
    let text = format!("echo ready; {}", gate.wait());
    let start = |node, rank, more: &str| {
        net.start(node, &script(&fixed(rank, &format!("--nnodes 3 {more}")), &text))
    };
    let agent_0 = start(0, 0, &format!("--events {}", path.display()));
    let agent_1 = start(1, 1, "");
    until("node 1 has joined", || {
        path.exists() && !named(&events(&path), "node_joined").is_empty()
    });
    let refused = start(2, 1, "").finish();
    assert_eq!((refused.code, refused.stdout.as_str()), (Some(1), ""), "{refused:?}");
    assert!(only_line(&refused).contains("node1"), "{refused:?}");
    until("agent 0 waits without work", || state(agent_0.pid) == "S");
    let agents = [agent_0, agent_1, start(2, 2, "")];
    agents.iter().for_each(|agent| agent.until_says(&["ready"]));
    gate.open();
    for end in agents.map(Agent::finish) {
        assert_eq!(end.code, Some(0), "{end:?}");
    }
    net.until_nothing_is_left();
}

/// The port of the agents, while the nodes meet and while they run; by more connections than an
/// agent may have files.
#[test]
fn strangers_at_the_port_do_no_harm() {
    let Some(net) = Net::new(3) else { return };
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if maximum.is_some_and(|maximum| maximum < 8000) {
        return println!(
            "SKIPPED: strangers at the port: they need 8000 open files, and the hard limit is \
             {maximum:?}"
        );
    }
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let gate = Gate::new();
    let text = format!("echo ready; {}", gate.wait());
    let address = format!("{}:29500", ipv4(0));
    let start = |node| {
        let agent = script(&fixed(node, ""), &text);
        let mut limited = Command::new("prlimit");
        limited.arg("--nofile=1024:").arg(agent.get_program()).args(agent.get_args());
        limited.envs(agent.get_envs().filter_map(|(name, value)| Some((name, value?))));
        net.start(node, &limited)
    };
    let agent_0 = start(0);
    until("the agent listens", || net.within(2, || TcpStream::connect(&address).is_ok()));
    let disturb = || {
        net.within(2, || {
            let connect = || TcpStream::connect(&address).unwrap();
            (0..100).for_each(|_| drop(connect()));
            for garbage in [
                &b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n"[..],
                &[0xff; 1 << 16],
                b"\x80\x04\x95",
                b"\0\0\0\0",
            ] {
                // It may be refused before all of it is sent.
                let _ = connect().write_all(garbage);
            }
            (0..3000).map(|_| connect()).collect::<Vec<_>>()
        })
    };
    let _early = disturb();
    let agent_1 = start(1);
    [&agent_0, &agent_1].iter().for_each(|agent| agent.until_says(&["ready"]));
    let _late = disturb();
    gate.open();
    for end in [agent_0, agent_1].map(Agent::finish) {
        assert_eq!((end.code, end.stdout.as_str()), (Some(0), "ready\nready\n"), "{end:?}");
    }
    net.until_nothing_is_left();
}
