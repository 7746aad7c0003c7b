//! Jobs that go on in place and lose the node that leads them.

use super::*;

fn three(more: &str) -> String {
    flags("3", &format!("--elastic in-place {more}"))
}

fn is_spare(agent: &Agent) -> bool {
    agent.stderr().contains("this node is a spare")
}

/// Three nodes of two workers each that do this, and a spare one: node 0, which leads, first, and the
/// spare last.
fn three_and_a_spare(net: &Net, text: &str) -> Vec<Agent> {
    let command = telling(&three("--max-restarts 6"), &format!("{PLACE}; {text}"));
    let mut agents: Vec<Agent> = (0..4).map(|node| net.start(node, &command)).collect();
    until("three have started", || {
        agents.iter().filter(|agent| workers(agent).len() == 2).count() == 3
    });
    until("the fourth is a spare", || agents.iter().any(is_spare));
    agents.sort_by_key(is_spare);
    until_replicated(&agents[1..], 3);
    agents
}

/// Waits until all these know that the workers can go on under the next leader.
fn until_replicated<'a>(agents: impl IntoIterator<Item = &'a Agent>, members: usize) {
    let told =
        format!("{members} nodes elect the next leader, and one has a copy of the workers' store");
    for agent in agents {
        until(&told, || {
            agent
                .stderr()
                .lines()
                .rfind(|line| line.contains("elect"))
                .is_some_and(|line| line.ends_with(&told))
        });
    }
}

/// Whether an agent keeps a copy of the store.
fn has_copy(agent: &Agent) -> bool {
    agent.stderr().contains("this node keeps a copy of the workers' store")
}

/// The workers that a node has started: the rank of each, and the number of starts before.
fn workers(agent: &Agent) -> Vec<(usize, usize)> {
    let said = agent.stdout();
    let numbers = said.lines().map(|line| {
        let (rank, rest) = line.split_once(' ').unwrap();
        let (_, restart) = rest.rsplit_once(' ').unwrap();
        (rank.parse().unwrap(), restart.parse().unwrap())
    });
    numbers.collect()
}

/// Waits until an agent has started workers with these ranks, after so many others with these.
fn until_replaced(agent: &Agent, ranks: &[usize], restarts: usize) {
    until(&format!("{ranks:?} have started after {restarts} others"), || {
        let mut last: Vec<_> = workers(agent).into_iter().rev().take(ranks.len()).collect();
        last.sort_unstable();
        last.into_iter().eq(ranks.iter().map(|rank| (*rank, restarts)))
    });
}

fn ranks_of(agent: &Agent) -> Vec<usize> {
    let mut ranks: Vec<usize> = workers(agent).into_iter().map(|(rank, ..)| rank).collect();
    ranks.sort_unstable();
    ranks
}

/// Only the ranks of the leader's node start again, on the spare one.
fn without_leader(lose: fn(&Net, &Agent)) {
    let Some(net) = Net::new(4) else { return };
    let gate = Gate::new();
    let mut agents = three_and_a_spare(&net, &gate.wait());
    let leader = agents.remove(0);
    let its_ranks = ranks_of(&leader);
    lose(&net, &leader);
    until_replaced(&agents[2], &its_ranks, 1);
    for agent in &agents[..2] {
        assert_eq!(workers(agent).len(), 2, "{}", agent.stdout());
    }
    end_well(&net, &gate, agents);
}

#[test]
fn the_workers_go_on_when_the_leading_agent_is_killed() {
    without_leader(|_, leader| leader.signal(Signal::KILL));
}

#[test]
fn the_workers_go_on_when_the_leading_node_is_without_power() {
    without_leader(|net, _| net.power_off(0));
}

/// It leads no more while its workers stop.
#[test]
fn the_workers_of_others_go_on_when_the_leading_agent_is_stopped_by_a_signal() {
    let Some(net) = Net::new(4) else { return };
    let gate = Gate::new();
    let flags = flags("2:3", "--elastic in-place --max-restarts 6 --min-workers 2");
    let text = format!("trap 'echo stopping >&2; sleep 1; exit' TERM; {PLACE}; {}", gate.wait());
    let command = telling(&flags, &text);
    let mut agents: Vec<Agent> = (0..3).map(|node| net.start(node, &command)).collect();
    until("all have started", || agents.iter().all(|agent| workers(agent).len() == 2));
    until_replicated(&agents[1..], 3);
    let leader = agents.remove(0);
    leader.signal(Signal::TERM);
    let leads = |agent: &Agent| agent.stderr().contains("this one leads the job from now on");
    until("another one leads", || agents.iter().any(leads));
    let end = leader.finish();
    assert_eq!((end.code, end.stderr.matches("stopping\n").count()), (Some(143), 2), "{end:?}");
    until("it goes on smaller", || {
        agents.iter().all(|agent| agent.stderr().contains("the job goes on with 4 workers"))
    });
    for agent in &agents {
        assert_eq!(workers(agent).len(), 2, "{}", agent.stdout());
    }
    end_well(&net, &gate, agents);
}

/// The node that comes back is a spare, and has the ranks of the next leader that is lost.
#[test]
fn one_leader_after_the_other_is_lost_in_place() {
    let Some(net) = Net::new(4) else { return };
    let gate = Gate::new();
    let mut agents = three_and_a_spare(&net, &gate.wait());
    let leader = agents.remove(0);
    let its_ranks = ranks_of(&leader);
    leader.signal(Signal::KILL);
    until_replaced(&agents[2], &its_ranks, 1);
    drop(leader);
    agents.extend(start(&net, [0], &three("--max-restarts 6"), &gate));
    until("it is a spare", || is_spare(&agents[3]));
    let leads = |agent: &Agent| agent.stderr().contains("this one leads the job from now on");
    let second = agents.iter().position(leads).unwrap();
    let second = agents.remove(second);
    until_replicated(&agents, 3);
    let its_ranks = ranks_of(&second);
    let before: Vec<_> = agents[..2].iter().map(workers).collect();
    second.signal(Signal::KILL);
    until_replaced(&agents[2], &its_ranks, 1);
    assert_eq!(agents[..2].iter().map(workers).collect::<Vec<_>>(), before);
    end_well(&net, &gate, agents);
}

/// Nodes with ranks that the user has given. The one that comes back has its own again.
#[test]
fn the_workers_go_on_when_node_0_is_lost() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let master = ipv4(0);
    let text = format!("{PLACE}; {}", gate.wait());
    let start = |node: usize| {
        let flags = format!(
            "--nnodes 3 --node-rank {node} --master-addr {master} --nproc_per_node 2 \
             --elastic in-place --max-restarts 6 --min-workers 2"
        );
        net.start(node, &telling(&flags, &text))
    };
    let mut agents: Vec<Agent> = (0..3).map(start).collect();
    until("all have started", || agents.iter().all(|agent| workers(agent).len() == 2));
    until_replicated(&agents[1..], 3);
    let leader = agents.remove(0);
    assert_eq!(ranks_of(&leader), [0, 1]);
    leader.signal(Signal::KILL);
    until("it goes on smaller", || {
        agents.iter().all(|agent| agent.stderr().contains("the job goes on with 4 workers"))
    });
    drop(leader);
    agents.push(start(0));
    until_replaced(&agents[2], &[0, 1], 1);
    for agent in &agents[..2] {
        assert_eq!(workers(agent).len(), 2, "{}", agent.stdout());
    }
    end_well(&net, &gate, agents);
}

/// Its agent tells the next leader of it.
#[test]
fn a_worker_that_fails_while_nobody_leads_is_started_again_alone() {
    let Some(net) = Net::new(4) else { return };
    let [gate, failing] = [(); 2].map(|()| Gate::new());
    let is_first = "[ $LOCAL_RANK$TORCHELASTIC_RESTART_COUNT = 00 ]";
    let text = format!("if {is_first}; then {}; exit 7; fi; {}", failing.wait(), gate.wait());
    let mut agents = three_and_a_spare(&net, &text);
    let leader = agents.remove(0);
    let its_ranks = ranks_of(&leader);
    leader.signal(Signal::KILL);
    failing.open();
    until_replaced(&agents[2], &its_ranks, 1);
    for agent in &agents[..2] {
        until_replaced(agent, &ranks_of(agent)[..1], 1);
        assert_eq!(workers(agent).len(), 3, "{}", agent.stdout());
    }
    end_well(&net, &gate, agents);
}

/// Nobody else has the store: all workers start again.
#[test]
fn all_start_again_when_the_copy_is_lost_with_the_leader() {
    let Some(net) = Net::new(5) else { return };
    let gate = Gate::new();
    let flags = flags("2:5", "--elastic in-place --max-restarts 20 --min-workers 2");
    let mut agents = start(&net, 0..5, &flags, &gate);
    until("all have started", || agents.iter().all(|agent| workers(agent).len() == 2));
    until_replicated(&agents[1..], 5);
    let leader = agents.remove(0);
    let copy = agents.iter().position(has_copy).unwrap();
    let copy = agents.remove(copy);
    leader.signal(Signal::KILL);
    copy.signal(Signal::KILL);
    until("all start again", || agents.iter().all(|agent| workers(agent).len() == 4));
    end_well(&net, &gate, agents);
}

/// There is no spare node, and none is to go on without the others: they start again when one comes.
#[test]
fn the_others_wait_for_a_node_in_place_of_the_leader() {
    let Some(net) = Net::new(3) else { return };
    let gate = Gate::new();
    let flags = three("--max-restarts 6");
    let mut agents = start(&net, 0..3, &flags, &gate);
    until("all have started", || agents.iter().all(|agent| workers(agent).len() == 2));
    until_replicated(&agents[1..], 3);
    let leader = agents.remove(0);
    leader.signal(Signal::KILL);
    until("they start again", || {
        agents
            .iter()
            .all(|agent| agent.stderr().contains("the leading node is lost; all start again"))
    });
    agents.extend(start(&net, [0], &flags, &gate));
    until("all start again", || {
        agents.iter().zip([4, 4, 2]).all(|(agent, count)| workers(agent).len() == count)
    });
    end_well(&net, &gate, agents);
}
