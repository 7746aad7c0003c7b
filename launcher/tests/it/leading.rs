//! Jobs that lose the node that leads them.

mod in_place;

use std::process::Command;

use flow_harness::cli::{launcher, script, until};
use flow_harness::net::{Agent, Gate, Net, ipv4};

use rustix::process::Signal;
use serde_json::Value;

use crate::elastic::end_well;

/// Flags of a node with two workers. All meet at node 0, which leads them at first.
fn flags(nodes: &str, more: &str) -> String {
    format!(
        "--nnodes {nodes} --nproc_per_node 2 --rdzv-endpoint {}:29400 --rdzv-id job \
         --rdzv-conf last_call_timeout=5,join_timeout=30 {more}",
        ipv4(0)
    )
}

/// The shell command by which a worker says where it is.
const PLACE: &str =
    "echo $RANK of $WORLD_SIZE at $MASTER_ADDR, restart $TORCHELASTIC_RESTART_COUNT";

/// Nodes whose workers say where they are, and wait.
fn start(
    net: &Net,
    nodes: impl IntoIterator<Item = usize>,
    flags: &str,
    gate: &Gate,
) -> Vec<Agent> {
    let text = format!("{PLACE}; {}", gate.wait());
    nodes.into_iter().map(|node| net.start(node, &telling(flags, &text))).collect()
}

/// Agents that tell how many nodes elect the next leader.
fn telling(flags: &str, text: &str) -> Command {
    let mut command = script(flags, text);
    command.env("FLOW_LOG", "warn,flow_launch::control=info");
    command
}

/// Waits until all but the leader know that so many nodes elect the next one. Before that the loss of
/// the leader is the end of the job.
fn until_electing<'a>(agents: impl IntoIterator<Item = &'a Agent>, members: usize) {
    let told = format!("{members} nodes elect the next leader");
    for agent in agents {
        until(&told, || agent.stderr().contains(&told));
    }
}

/// Whether the two workers of a node were started last in a world of this size.
fn has_started(agent: &Agent, world: usize, restart: usize) -> bool {
    let said = agent.stdout();
    let last: Vec<&str> = said.lines().rev().take(2).collect();
    let is_there = |line: &&str| {
        line.contains(&format!(" of {world} at ")) && line.ends_with(&format!("restart {restart}"))
    };
    last.len() == 2 && last.iter().all(is_there)
}

fn until_started(agents: &[&Agent], world: usize, restart: usize) {
    until(&format!("a world of {world}, restart {restart}"), || {
        agents.iter().all(|agent| has_started(agent, world, restart))
    });
}

/// The address at which the workers of a node last met.
fn master(agent: &Agent) -> String {
    let said = agent.stdout();
    let last = said.lines().last().unwrap().split_once(" at ").unwrap().1;
    last.split_once(',').unwrap().0.to_string()
}

/// Three nodes, of which the one that leads is lost.
fn without_leader(lose: fn(&Net, &Agent)) {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let agents = start(&net, 0..3, &flags("1:3", ""), &gate);
    let [agent_0, agent_1, agent_2] = agents.try_into().ok().unwrap();
    until_started(&[&agent_0, &agent_1, &agent_2], 6, 0);
    assert_eq!(master(&agent_1), ipv4(0));
    until_electing([&agent_1, &agent_2], 3);
    lose(&net, &agent_0);
    until_started(&[&agent_1, &agent_2], 4, 0);
    let masters = [&agent_1, &agent_2].map(master);
    assert!(masters == [ipv4(1), ipv4(1)] || masters == [ipv4(2), ipv4(2)], "{masters:?}");
    end_well(&net, &gate, [agent_1, agent_2]);
}

#[test]
fn another_node_leads_when_the_leading_agent_is_killed() {
    without_leader(|_, agent| agent.signal(Signal::KILL));
}

#[test]
fn another_node_leads_when_the_leading_one_is_without_power() {
    without_leader(|net, _| net.power_off(0));
}

/// Found on a follower's machine, or at the address of the first leader.
#[test]
fn who_watches_finds_the_new_leader() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let start = |node: usize, command: Command| net.start(node, &command);
    let text = format!("{PLACE}; {}", gate.wait());
    let [agent_0, agent_1, agent_2] =
        [0, 1, 2].map(|node| start(node, script(&flags("1:3", ""), &text)));
    until_started(&[&agent_0, &agent_1, &agent_2], 6, 0);
    let endpoint = format!("{}:29400", ipv4(0));
    let there = ["top", "--json", "--rdzv-endpoint", &endpoint, "--rdzv-id", "job"];
    let watching = [start(1, launcher(&["top", "--json"])), start(2, launcher(&there))];
    let until_all_show = |ranks: usize| {
        until(&format!("{ranks} ranks are shown"), || {
            watching.iter().all(|top| {
                let said = top.stdout();
                let view = said.lines().last().map(serde_json::from_str::<Value>);
                let count = |view: &Value, key: &str| view[key].as_array().unwrap().len();
                view.is_some_and(|view| {
                    view.is_ok_and(|it| count(&it, "ranks") == ranks && count(&it, "silent") == 0)
                })
            })
        });
    };
    until_all_show(6);
    agent_0.signal(Signal::KILL);
    until_started(&[&agent_1, &agent_2], 4, 0);
    until_all_show(4);
    for node in [1, 2] {
        let late = start(node, launcher(&["top", "--json", "--once", "job"])).finish();
        assert_eq!((late.code, late.stdout.lines().count()), (Some(0), 1), "{late:?}");
    }
    gate.open();
    for top in watching {
        let end = top.finish();
        assert_eq!((end.code, &end.stderr[..]), (Some(0), ""), "{end:?}");
        assert!(end.stdout.contains("the leading node is lost: another one leads"), "{end:?}");
    }
    end_well(&net, &gate, [agent_1, agent_2]);
}

/// Neither side can know that the other is alive: the smaller one must stop.
#[test]
fn a_leading_node_that_is_cut_off_stops_and_joins_again() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let agents = start(&net, 0..3, &flags("1:3", ""), &gate);
    let agents: Vec<&Agent> = agents.iter().collect();
    until_started(&agents, 6, 0);
    until_electing(agents[1..].iter().copied(), 3);
    net.cut(0);
    until("node 0 stops", || agents[0].stderr().contains("has lost most of those"));
    until_started(&agents[1..], 4, 0);
    net.restore(0);
    until("node 0 follows", || master(agents[0]) != ipv4(0));
    until_started(&agents, 6, 0);
}

/// Its host does not begin another job, and new nodes still meet there.
#[test]
fn the_node_where_all_meet_comes_back() {
    let Some(net) = Net::new(4) else { return };
    let gate = Gate::new();
    let flags = flags("2:4", "");
    let mut agents = start(&net, 0..3, &flags, &gate);
    until_started(&[&agents[0], &agents[1], &agents[2]], 6, 0);
    until_electing(&agents[1..], 3);
    agents.remove(0).signal(Signal::KILL);
    until_started(&[&agents[0], &agents[1]], 4, 0);
    agents.extend(start(&net, [0], &flags, &gate));
    until_started(&agents.iter().collect::<Vec<_>>(), 6, 0);
    agents.extend(start(&net, [3], &flags, &gate));
    until_started(&agents.iter().collect::<Vec<_>>(), 8, 0);
    end_well(&net, &gate, agents);
}

/// Each loss uses up a restart where all nodes are needed, and each spare node fills a place.
#[test]
fn one_leader_after_the_other_is_lost() {
    let Some(net) = Net::new(5) else { return };
    let gate = Gate::new();
    let flags = flags("3", "--max-restarts 2");
    let mut agents = start(&net, 0..3, &flags, &gate);
    until_started(&agents.iter().collect::<Vec<_>>(), 6, 0);
    let spares = start(&net, 3..5, &flags, &gate);
    for spare in &spares {
        until("it is a spare", || spare.stderr().contains("this node is a spare"));
    }
    agents.extend(spares);
    until_electing(&agents[1..], 5);
    let mut numbers: Vec<usize> = (0..5).collect();
    for restart in 1..=2 {
        let present = |agent: &&Agent| has_started(agent, 6, restart - 1);
        let address = master(agents.iter().find(present).unwrap());
        let leader = numbers.iter().position(|number| ipv4(*number) == address).unwrap();
        numbers.remove(leader);
        agents.remove(leader).signal(Signal::KILL);
        until(&format!("restart {restart}"), || {
            agents.iter().filter(|agent| has_started(agent, 6, restart)).count() == 3
        });
        let present = |agent: &&Agent| has_started(agent, 6, restart);
        assert_ne!(master(agents.iter().find(present).unwrap()), address);
    }
    end_well(&net, &gate, agents);
}

/// Its machine may be taken away. Ctrl-C is the wish to end the job.
#[test]
fn a_leading_agent_that_is_stopped_by_a_signal_leaves_the_job_to_the_others() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let Some(net) = Net::new(3) else { return };
        let gate = Gate::new();
        let agents = start(&net, 0..3, &flags("1:3", ""), &gate);
        let [agent_0, agent_1, agent_2] = agents.try_into().ok().unwrap();
        until_started(&[&agent_0, &agent_1, &agent_2], 6, 0);
        until_electing([&agent_1, &agent_2], 3);
        agent_0.signal(signal);
        assert_eq!(agent_0.finish().code, Some(code));
        if signal == Signal::TERM {
            until_started(&[&agent_1, &agent_2], 4, 0);
            end_well(&net, &gate, [agent_1, agent_2]);
        } else {
            assert_eq!([agent_1, agent_2].map(|agent| agent.finish().code), [Some(code); 2]);
        }
    }
}

/// It is there before the others have stopped their workers, and would begin another job.
#[test]
fn an_agent_that_is_started_again_at_once_joins_its_job() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let flags = flags("3", "--max-restarts 1");
    let mut agents = start(&net, 0..3, &flags, &gate);
    until_started(&agents.iter().collect::<Vec<_>>(), 6, 0);
    until_electing(&agents[1..], 3);
    agents.remove(0).signal(Signal::KILL);
    agents.extend(start(&net, [0], &flags, &gate));
    until_started(&agents.iter().collect::<Vec<_>>(), 6, 1);
    assert_ne!(master(&agents[0]), ipv4(0));
    end_well(&net, &gate, agents);
}

/// A member votes at once, and follows when its workers are gone.
#[test]
fn workers_that_stop_slowly_are_waited_for() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    // Longer than the others would wait for somebody who is silent.
    let text = format!("trap 'sleep 9; exit' TERM; {PLACE}; {}", gate.wait());
    let command = telling(&flags("1:3", ""), &text);
    let mut agents: Vec<Agent> = (0..3).map(|node| net.start(node, &command)).collect();
    until_started(&agents.iter().collect::<Vec<_>>(), 6, 0);
    until_electing(&agents[1..], 3);
    agents.remove(0).signal(Signal::KILL);
    until_started(&agents.iter().collect::<Vec<_>>(), 4, 0);
    end_well(&net, &gate, agents);
}

/// The next leader is lost before the workers have started again.
#[test]
fn two_leaders_are_lost_at_once() {
    let Some(net) = Net::new(5) else { return };
    let gate = Gate::new();
    let mut agents = start(&net, 0..5, &flags("1:5", ""), &gate);
    until_started(&agents.iter().collect::<Vec<_>>(), 10, 0);
    until_electing(&agents[1..], 5);
    agents.remove(0).signal(Signal::KILL);
    agents.remove(0).signal(Signal::KILL);
    until_started(&agents.iter().collect::<Vec<_>>(), 6, 0);
    end_well(&net, &gate, agents);
}
