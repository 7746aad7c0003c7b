//! Jobs that start anew: after a failure, or with other nodes.

use flow_harness::cli::{events, named, script, until};
use flow_harness::net::{Agent, Gate, Net, ipv4};

use std::fs;

use rustix::process::Signal;

/// Flags of a node with two workers. All meet at node 0.
fn elastic(nodes: &str, more: &str) -> String {
    format!(
        "--nnodes {nodes} --nproc_per_node 2 --rdzv-endpoint {}:29400 --rdzv-id job \
         --rdzv-conf last_call_timeout=1,join_timeout=5 {more}",
        ipv4(0)
    )
}

/// Workers that print their place and wait.
fn places(gate: &Gate) -> String {
    format!("echo $RANK of $WORLD_SIZE, restart $TORCHELASTIC_RESTART_COUNT; {}", gate.wait())
}

/// One or two nodes; node 0 starts first.
fn start(net: &Net, node: usize, gate: &Gate) -> Agent {
    net.start(node, &script(&elastic("1:2", "--max-restarts 3"), &places(gate)))
}

/// Two nodes whose workers have all started.
fn start_two(net: &Net, gate: &Gate) -> [Agent; 2] {
    let agents = [0, 1].map(|node| start(net, node, gate));
    agents.iter().for_each(|agent| until_places(agent, 4, 2));
    agents
}

/// Waits until the workers of a node have said so many times that the world has this size, and
/// nothing else since.
fn until_places(agent: &Agent, world: usize, times: usize) {
    let place = format!(" of {world}, restart 0");
    until(&format!("{times} times '{place}'"), || {
        let said = agent.stdout();
        let count = said.lines().filter(|line| line.ends_with(&place)).count();
        count >= times && said.lines().last().is_some_and(|line| line.ends_with(&place))
    });
}

/// The command lines of a node's processes, words ending with a zero.
fn command_lines(net: &Net, node: usize) -> Vec<String> {
    let line = |pid| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    net.processes(node).into_iter().map(line).collect()
}

/// How many workers, those of earlier starts too, there are on a node.
fn workers(net: &Net, node: usize, gate: &Gate) -> usize {
    let is_worker = |line: &&String| line.contains(&gate.wait()) && !line.contains("--nnodes");
    command_lines(net, node).iter().filter(is_worker).count()
}

/// The job ends well when its workers do.
pub fn end_well(net: &Net, gate: &Gate, agents: impl IntoIterator<Item = Agent>) {
    gate.open();
    for agent in agents {
        let end = agent.finish();
        assert_eq!(end.code, Some(0), "{end:?}");
    }
    net.until_nothing_is_left();
}

#[test]
fn a_lost_node_is_done_without_and_a_new_one_is_taken_in() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let [agent_0, _lost] = start_two(&net, &gate);
    net.power_off(1);
    until_places(&agent_0, 2, 2);
    let agent_2 = start(&net, 2, &gate);
    until_places(&agent_0, 4, 4);
    until_places(&agent_2, 4, 2);
    let (said_0, said_2) = (agent_0.stdout(), agent_2.stdout());
    let mut ranks: Vec<_> =
        said_0.lines().rev().take(2).chain(said_2.lines()).map(|line| &line[..1]).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, ["0", "1", "2", "3"]);
    end_well(&net, &gate, [agent_0, agent_2]);
}

#[test]
fn nodes_that_come_and_go_are_events() {
    let Some(net) = Net::new(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let reported = folder.path().join("events");
    let gate = Gate::new();
    let start = |node, more: &str| net.start(node, &script(&elastic("1:2", more), &places(&gate)));
    let agents = [start(0, &format!("--events {}", reported.display())), start(1, "")];
    agents.iter().for_each(|agent| until_places(agent, 4, 2));
    let [agent_0, agent_1] = agents;
    agent_1.signal(Signal::KILL);
    until_places(&agent_0, 2, 2);
    until("its workers are gone", || net.processes(1).is_empty());
    end_well(&net, &gate, [agent_0]);
    let reported = events(&reported);
    let (joined, lost) = (named(&reported, "node_joined"), named(&reported, "node_lost"));
    assert_eq!((joined.len(), lost.len()), (1, 1), "{reported:?}");
    assert_eq!(
        (&joined[0]["node_host"], &lost[0]["node_host"]),
        (&"node1".into(), &"node1".into())
    );
    assert!(lost[0]["reason"].as_str().unwrap().contains("killed"), "{}", lost[0]);
}

#[test]
fn a_node_that_is_stopped_leaves_the_others_at_work() {
    let Some(net) = Net::new(2) else { return };
    let gate = Gate::new();
    let [agent_0, agent_1] = start_two(&net, &gate);
    agent_1.signal(Signal::TERM);
    let left = agent_1.finish();
    assert_eq!(left.code, Some(143), "{left:?}");
    until_places(&agent_0, 2, 2);
    end_well(&net, &gate, [agent_0]);
}

/// Node 1 gets lost, stops its workers when it notices, and takes part again.
fn joins_again(lose: fn(&Net, &Agent), find: fn(&Net, &Agent)) {
    let Some(net) = Net::new(2) else { return };
    let gate = Gate::new();
    let [agent_0, agent_1] = start_two(&net, &gate);
    lose(&net, &agent_1);
    until_places(&agent_0, 2, 2);
    find(&net, &agent_1);
    until_places(&agent_0, 4, 4);
    until_places(&agent_1, 4, 4);
    until("no worker of an earlier start is left", || {
        [0, 1].map(|node| workers(&net, node, &gate)) == [2, 2]
    });
    end_well(&net, &gate, [agent_0, agent_1]);
}

#[test]
fn a_node_that_slept_too_long_joins_again() {
    joins_again(|_, agent| agent.signal(Signal::STOP), |_, agent| agent.signal(Signal::CONT));
}

#[test]
fn a_node_that_was_cut_off_joins_again() {
    joins_again(|net, _| net.cut(1), |net, _| net.restore(1));
}

#[test]
fn a_node_too_many_waits_until_it_is_needed() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let [agent_0, agent_1] = start_two(&net, &gate);
    let spare = start(&net, 2, &gate);
    until("it says so", || spare.stderr().contains("this node is a spare"));
    assert_eq!((agent_0.stdout().lines().count(), spare.stdout().as_str()), (2, ""));
    agent_1.signal(Signal::KILL);
    until_places(&agent_0, 4, 4);
    until_places(&spare, 4, 2);
    gate.open();
    let [end, spare] = [agent_0, spare].map(Agent::finish);
    assert_eq!((end.code, spare.code), (Some(0), Some(0)), "{end:?} {spare:?}");
    assert_eq!(spare.stderr.matches("this node is a spare").count(), 1, "{spare:?}");
    net.until_nothing_is_left();
}

#[test]
fn the_others_end_with_the_node_where_all_meet() {
    let Some(net) = Net::new(2) else { return };
    let [_lost, agent_1] = start_two(&net, &Gate::new());
    net.power_off(0);
    let end = agent_1.finish();
    assert!(end.code.is_some_and(|code| code != 0) && end.stderr.contains(&ipv4(0)), "{end:?}");
    net.until_nothing_is_left();
}

/// Two nodes, all of whose workers run this.
fn two(net: &Net, more: &str, text: &str) -> [flow_harness::Finished; 2] {
    [0, 1].map(|node| net.start(node, &script(&elastic("2", more), text))).map(Agent::finish)
}

#[test]
fn after_a_failure_all_workers_of_all_nodes_start_again() {
    let Some(net) = Net::new(2) else { return };
    let text = "case $RANK.$TORCHELASTIC_RESTART_COUNT in 3.0) exit 5;; *.0) exec sleep 1000;; esac; \
                echo $RANK: restart $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS";
    let ends = two(&net, "--max-restarts 1", text);
    let said = [ends[0].stdout.as_str(), &ends[1].stdout].concat();
    let mut lines: Vec<_> = said.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, [0, 1, 2, 3].map(|rank| format!("{rank}: restart 1 of 1")));
    assert!(ends.iter().all(|end| end.code == Some(0)), "{ends:?}");
    net.until_nothing_is_left();
}

/// What workers of node 0 have started, and what has left their process groups, goes with their
/// start; also if they themselves have ended well, but the start fails on node 1.
#[test]
fn nothing_of_a_start_that_fails_elsewhere_lives_on() {
    for (then, processes) in [("exit 0", 4), ("exec sleep 1000", 6)] {
        let Some(net) = Net::new(2) else { return };
        let [failure, end] = [Gate::new(), Gate::new()];
        let text = format!(
            "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
                [ $RANK != 3 ] || {{ {}; exit 5; }}
                [ $GROUP_RANK = 0 ] || exec sleep 1000
                if [ $RANK = 0 ]; then
                    timeout 1000 sleep 1001 &
                    until [ $(cut -d' ' -f5 /proc/$!/stat) = $! ]; do :; done
                fi
                {then}
             fi
             echo again; {}",
            failure.wait(),
            end.wait()
        );
        let flags = elastic("2", "--max-restarts 1 --grace 0.5");
        let agents = [0, 1].map(|node| net.start(node, &script(&flags, &text)));
        let survivors = || {
            command_lines(&net, 0).iter().filter(|line| line.starts_with("sleep\x001001")).count()
        };
        // The agent, its guard, timeout and what it runs, and the workers that have not ended.
        until("node 0 has come so far", || survivors() == 1 && net.processes(0).len() == processes);
        failure.open();
        agents.iter().for_each(|agent| agent.until_says(&["again"]));
        until("nothing is left of the first start", || survivors() == 0);
        end_well(&net, &end, agents);
    }
}
