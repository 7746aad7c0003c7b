//! `--elastic in-place`: a worker that fails is started again alone.

use flow_harness::cli::{events, run, script, until};
use flow_harness::net::{Agent, Gate, Net, ipv4};
use flow_harness::{Finished, assert_contains};
use rustix::process::Signal;

/// The other worker goes on until the one that has failed is there again.
const FAILS_ONCE: &str = r#"
    echo "rank $RANK, $FLOW_REPLACEMENT before, restart $TORCHELASTIC_RESTART_COUNT"
    if [ $RANK = 1 ]; then
        [ $FLOW_REPLACEMENT = 0 ] || { touch $0; exit 0; }
        echo its last words >&2
        kill -KILL $$
    fi
    while [ ! -e $0 ]; do sleep 0.02; done"#;

#[test]
fn a_worker_that_fails_is_started_again_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("events");
    let flags = format!(
        "--nproc_per_node 2 --elastic in-place --max-restarts 1 --log-dir {} --tee 3 --events {}",
        folder.path().display(),
        file.display()
    );
    let mut command = script(&flags, FAILS_ONCE);
    let finished = run(command.arg(folder.path().join("done")));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_contains(
        &finished.stdout,
        &["rank 0, 0 before, restart 0", "rank 1, 0 before", "rank 1, 1 before, restart 1"],
    );
    let says = "it is started again alone (1 of 1)";
    assert_contains(&finished.stderr, &["rank 1 ", "SIGKILL", says, "its last words"]);
    let events = events(&file);
    let of = |what: &str| {
        let events = events.iter().filter(|event| event["event"] == what);
        events.map(|event| event["rank"].as_u64()).collect::<Vec<_>>()
    };
    assert_eq!(of("start"), [Some(0), Some(1), Some(1)]);
    assert_eq!(of("stop").len() + of("restart").len(), 0, "{events:?}");
    // Each has a log of its own.
    let logs = folder.path().read_dir().unwrap().filter_map(|entry| {
        let path = entry.unwrap().path().join("attempt_1/1/stdout.log");
        std::fs::read_to_string(path).ok()
    });
    assert_eq!(logs.collect::<Vec<_>>(), ["rank 1, 1 before, restart 1\n"]);
}

fn of_failing(flags: &str) -> Finished {
    let flags = format!("--nproc_per_node 3 --grace 0.5 --elastic in-place {flags}");
    run(&mut script(&flags, "[ $RANK = 2 ] && exit 7; sleep 1000"))
}

#[test]
fn when_no_restart_is_left_the_job_fails() {
    for restarts in [0, 2] {
        let finished = of_failing(&format!("--max-restarts {restarts}"));
        assert_eq!(finished.code, Some(7), "{finished:?}");
        let again = finished.stderr.matches("is started again alone").count();
        assert_eq!(again, restarts, "{finished:?}");
        assert_contains(&finished.stderr, &["rank 2 ", "code 7"]);
    }
}

/// The first worker ends when flow-launch has seen both others end.
#[test]
fn fewer_workers_go_on_if_they_are_enough() {
    let fails = r#"[ $RANK = 0 ] || exit $RANK
        while [ $(grep -c '"event":"exit"' $0) -lt 2 ]; do sleep 0.02; done; echo well"#;
    let job = |min: usize| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("events");
        let flags = format!(
            "--nproc_per_node 3 --grace 0.5 --elastic in-place --min-workers {min} --events {}",
            file.display()
        );
        run(script(&flags, fails).arg(file))
    };
    let finished = job(1);
    assert_eq!((finished.code, &finished.stdout[..]), (Some(0), "well\n"), "{finished:?}");
    assert_contains(&finished.stderr, &["the job goes on with 1 worker\n"]);
    let finished = job(2);
    assert!(matches!(finished.code, Some(1 | 2)), "{finished:?}");
}

/// A job on so many nodes, of two workers each, whose agents have all started.
fn on_nodes(net: &Net, nodes: usize, flags: &str, text: &str) -> Vec<Agent> {
    let start = |node| {
        let flags = format!(
            "--nnodes {nodes} --node_rank {node} --master_addr {} --master_port 29500 \
             --nproc_per_node 2 --grace 0.5 --elastic in-place {flags}",
            ipv4(0)
        );
        net.start(node, &script(&flags, text))
    };
    (0..nodes).map(start).collect()
}

#[test]
fn workers_of_all_nodes_share_the_restarts() {
    let Some(net) = Net::new(2) else { return };
    let gate = Gate::new();
    let text = format!(
        "echo rank $RANK, $FLOW_REPLACEMENT before; [ $RANK-$FLOW_REPLACEMENT != 3-0 ] || exit 7; \
         {}; [ $RANK != 0 ] || exit 5; exec sleep 1000",
        gate.wait()
    );
    let agents = on_nodes(&net, 2, "--max-restarts 1", &text);
    agents[0].until_says(&["rank 0, 0 before", "rank 1, 0 before"]);
    agents[1].until_says(&["rank 2, 0 before", "rank 3, 1 before"]);
    gate.open();
    for end in agents.into_iter().map(Agent::finish) {
        assert_eq!(end.code, Some(5), "{end:?}");
        assert_contains(
            &end.stderr,
            &["rank 3 ", "it is started again alone (1 of 1)", "rank 0 ", "code 5"],
        );
    }
    net.until_nothing_is_left();
}

#[test]
fn a_node_that_is_lost_takes_its_workers_with_it() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let text = format!("echo ready; {}; echo well", gate.wait());
    let mut agents = on_nodes(&net, 3, "--min-workers 4", &text);
    agents.iter().for_each(|agent| agent.until_says(&["ready"]));
    let lost = agents.remove(1);
    lost.signal(Signal::KILL);
    lost.finish();
    let said = "; the job goes on with 4 workers";
    for agent in &agents {
        until("it is said", || agent.stderr().contains(said));
    }
    gate.open();
    for end in agents.into_iter().map(Agent::finish) {
        assert_eq!(end.code, Some(0), "{end:?}");
        assert_eq!(end.sorted_lines(), ["ready", "ready", "well", "well"]);
        assert_contains(&end.stderr, &["node 1 (host node1) was lost", said]);
    }
    net.until_nothing_is_left();
}

#[test]
fn a_spare_node_takes_the_place_of_one_that_is_lost() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let text = format!(
        "echo rank $RANK of $WORLD_SIZE on $GROUP_RANK, $FLOW_REPLACEMENT before, \
         restart $TORCHELASTIC_RESTART_COUNT; [ $RANK-$FLOW_REPLACEMENT != 2-1 ] || exit 7; {}",
        gate.wait()
    );
    let start = |node| {
        let flags = format!(
            "--nnodes 2 --nproc_per_node 2 --rdzv-endpoint {}:29400 --rdzv-id job \
             --elastic in-place --max-restarts 3",
            ipv4(0)
        );
        net.start(node, &script(&flags, &text))
    };
    let [agent_0, lost] = [0, 1].map(start);
    let says = |rank, before| format!("rank {rank} of 4 on 1, {before} before, restart {before}");
    lost.until_says(&[&says(2, 0), &says(3, 0)]);
    let spare = start(2);
    until("it waits", || spare.stderr().contains("this node is a spare"));
    lost.signal(Signal::KILL);
    lost.finish();
    spare.until_says(&[&says(2, 1), &says(3, 1), &says(2, 2)]);
    gate.open();
    for (agent, starts) in [(agent_0, 2), (spare, 3)] {
        let end = agent.finish();
        assert_eq!((end.code, end.stdout.lines().count()), (Some(0), starts), "{end:?}");
        assert_contains(
            &end.stderr,
            &["ranks 2-3 are started again on ", "(host node2) (2 of 3)", "alone (3 of 3)"],
        );
    }
    net.until_nothing_is_left();
}

/// A second agent for a node: the first one and its workers end.
#[test]
fn an_agent_that_is_started_twice_takes_the_place_of_the_first() {
    let Some(net) = Net::new(2) else { return };
    let gate = Gate::new();
    let text = format!("echo rank $RANK, $FLOW_REPLACEMENT before; {}", gate.wait());
    let start = |node| {
        let flags = format!(
            "--nnodes 2 --node_rank {node} --master_addr {} --master_port 29500 \
             --nproc_per_node 2 --grace 0.5 --elastic in-place --max-restarts 2",
            ipv4(0)
        );
        net.start(node, &script(&flags, &text))
    };
    let [agent_0, first] = [0, 1].map(start);
    first.until_says(&["rank 2, 0 before", "rank 3, 0 before"]);
    let second = start(1);
    second.until_says(&["rank 2, 1 before", "rank 3, 1 before"]);
    let end = first.finish();
    assert_eq!(end.code, Some(1), "{end:?}");
    assert_contains(&end.stderr, &["another flow-launch has taken its place"]);
    gate.open();
    for end in [agent_0, second].map(Agent::finish) {
        assert_eq!((end.code, end.stdout.lines().count()), (Some(0), 2), "{end:?}");
        assert_contains(&end.stderr, &["ranks 2-3 are started again on node 1 "]);
    }
    net.until_nothing_is_left();
}

/// Its own `--max-restarts` does not matter.
#[test]
fn a_node_that_was_cut_off_comes_back() {
    let Some(net) = Net::new(2) else { return };
    let gate = Gate::new();
    let text = format!("echo rank $RANK, $FLOW_REPLACEMENT before; {}", gate.wait());
    let start = |node, flags: &str| {
        let flags = format!(
            "--nnodes 2 --node_rank {node} --master_addr {} --master_port 29500 \
             --grace 0.5 --elastic in-place {flags}",
            ipv4(0)
        );
        net.start(node, &script(&flags, &text))
    };
    let agent_0 = start(0, "--min-workers 1 --max-restarts 1");
    let agent_1 = start(1, "");
    agent_0.until_says(&["rank 0, 0 before"]);
    agent_1.until_says(&["rank 1, 0 before"]);
    net.cut(1);
    until("the loss is noticed", || {
        agent_0.stderr().contains("goes on with 1 worker")
            && agent_1.stderr().contains("joining again")
    });
    net.restore(1);
    agent_1.until_says(&["rank 1, 1 before"]);
    gate.open();
    for end in [agent_0, agent_1].map(Agent::finish) {
        assert_eq!(end.code, Some(0), "{end:?}");
    }
    net.until_nothing_is_left();
}
