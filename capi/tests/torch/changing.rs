//! Groups whose ranks change, trainings in them, and what is called when operations end. Some programs
//! start their ranks themselves: a launcher would end all of them with the first that is killed.

use std::path::Path;
use std::process::Command;

use flow_harness::cli::{Running, children, launcher, run, until};
use flow_harness::net::{Agent, Net, ipv4};
use flow_harness::python::python;
use flow_harness::{Finished, root};
use rustix::process::{Pid, Signal, kill_process};

use super::{Part, is_skipped, lines_and_skipped, script, variables, with_flow};

/// What a program prints with this part, when it has ended well.
fn printed(part: Part, name: &str, arguments: &[&str]) -> Finished {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(python());
    command.arg(script(name)).arg(folder.path()).args(arguments);
    let finished = run(with_flow(&mut command).envs(variables(part)));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    finished
}

/// That so many cases are good, or cannot run.
fn are_good(printed: &Finished, cases: usize) {
    let (lines, skipped) = lines_and_skipped(printed);
    let good = lines.iter().filter(|line| line.ends_with(": good")).count();
    assert_eq!(good + skipped, cases, "{printed:?}");
}

/// A program of so many ranks under flow-launch --elastic in-place.
fn elastic(ranks: &str, restarts: &str, script: &str, arguments: &[&str]) -> Finished {
    let mut command = launcher(&["--nproc-per-node", ranks, "--elastic", "in-place"]);
    command.args(["--max-restarts", restarts, "--no-python", &python(), script]).args(arguments);
    let finished = run(with_flow(&mut command));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    finished
}

#[test]
fn groups_lose_ranks() {
    if is_skipped() {
        return;
    }
    are_good(&printed(Part::Cpp, "shrinking.py", &[]), 8);
    are_good(&printed(Part::Python, "shrinking.py", &["refused"]), 1);
}

/// Also in a random order of memberships. PyTorch has it since 2.14.
#[test]
fn groups_get_other_ranks() {
    if is_skipped() {
        return;
    }
    are_good(&printed(Part::Cpp, "reconfiguring.py", &[]), 21);
    are_good(&printed(Part::Python, "reconfiguring.py", &["refused"]), 1);
}

/// Also on helper threads. PyTorch has them since 2.14, and its flight recorder since 2.15.
#[test]
fn hooks_are_called_at_the_end_of_operations() {
    if is_skipped() {
        return;
    }
    are_good(&printed(Part::Cpp, "hooked.py", &[]), 6);
}

/// By flow-launch: two of three, one after the other, of which one is the first rank; and the first
/// newcomer, when the ranks have agreed on it.
#[test]
fn ranks_that_are_killed_are_taken_in_again() {
    if is_skipped() {
        return;
    }
    let finished = elastic("3", "3", &script("elastic.py"), &["2"]);
    let lines = ["rank 0: good", "rank 1: good", "rank 2: good"];
    assert_eq!(finished.sorted_lines(), lines, "{finished:?}");
}

/// Four of the processes at random moments of a training, and two as they come, in either class of
/// DistributedDataParallel: weights and losses are those of a training that nothing happens to.
#[test]
fn trainings_go_on_when_ranks_are_killed() {
    if is_skipped() {
        return;
    }
    let script = script("elastic_steps.py");
    let undisturbed = elastic("2", "0", &script, &["torch", "none"]);
    let (_, digest) = undisturbed.stdout.lines().next().unwrap().split_once(": ").unwrap();
    let lines = |ranks: usize| (0..ranks).map(|rank| format!("rank {rank}: {digest}"));
    assert_eq!(undisturbed.sorted_lines(), lines(2).collect::<Vec<_>>(), "{undisturbed:?}");
    for class in ["flow", "torch"] {
        let finished = elastic("3", "6", &script, &[class, "kills"]);
        assert_eq!(finished.sorted_lines(), lines(3).collect::<Vec<_>>(), "{finished:?}");
    }
}

/// Four of the processes at random moments of a training in parts, and one as it comes: it goes on from checkpoints in
/// memory, with as many ranks as there are, and ends with the weights of a training that nothing happens to.
#[test]
fn trainings_in_parts_begin_again_when_ranks_are_killed() {
    if is_skipped() {
        return;
    }
    let script = script("restarted_in_process.py");
    let trained = |ranks, restarts, kills| {
        let folder = tempfile::tempdir().unwrap();
        elastic(ranks, restarts, &script, &[folder.path().to_str().unwrap(), kills])
    };
    let undisturbed = trained("2", "0", "none");
    let (_, digest) = undisturbed.stdout.lines().next().unwrap().split_once(": ").unwrap();
    let lines = |ranks: usize| (0..ranks).map(|rank| format!("rank {rank}: {digest}"));
    assert_eq!(undisturbed.sorted_lines(), lines(2).collect::<Vec<_>>(), "{undisturbed:?}");
    let finished = trained("3", "5", "kills");
    assert_eq!(finished.sorted_lines(), lines(3).collect::<Vec<_>>(), "{finished:?}");
}

/// The spare node has the rank of the one that leads.
#[test]
fn a_training_goes_on_under_another_leader() {
    if is_skipped() {
        return;
    }
    let Some(net) = Net::new(4) else { return };
    let folder = tempfile::tempdir().unwrap();
    let [journal, end] = ["journal", "end"].map(|name| folder.path().join(name));
    let endpoint = format!("{}:29400", ipv4(0));
    let flags = "--nnodes 3 --nproc-per-node 1 --elastic in-place --max-restarts 9 --rdzv-id job --rdzv-conf \
                 last_call_timeout=5,join_timeout=60 --rdzv-endpoint";
    let mut command = launcher(&flags.split_whitespace().collect::<Vec<_>>());
    command.args([&endpoint, "--no-python", &python(), &script("elastic_machines.py")]);
    command.arg(&journal).arg(&end).env("FLOW_LOG", "warn,flow_launch::control=info");
    with_flow(&mut command);
    let mut agents: Vec<Agent> = (0..4).map(|node| net.start(node, &command)).collect();
    until_steps(&journal);
    for agent in &agents[1..] {
        until("a member has a copy of the store", || {
            let said = agent.stderr();
            let told = said.lines().rfind(|line| line.contains("elect the next leader"));
            told.is_some_and(|line| line.ends_with("workers' store"))
        });
    }
    let leader = agents.remove(0);
    assert!(children(leader.pid).into_iter().any(is_rank), "the leader has no rank to lose");
    leader.signal(Signal::KILL);
    drop(leader);
    until("another one leads", || {
        agents.iter().any(|agent| agent.stderr().contains("this one leads the job from now on"))
    });
    until_steps(&journal);
    std::fs::write(&end, "").unwrap();
    let mut said = Vec::new();
    for agent in agents {
        let finished = agent.finish();
        assert_eq!(finished.code, Some(0), "{finished:?}");
        said.extend(finished.sorted_lines().into_iter().map(String::from));
    }
    said.sort_unstable();
    assert_eq!(said, ["rank 0: good", "rank 1: good", "rank 2: good"]);
    net.until_nothing_is_left();
}

/// Waits until three ranks have done ten more steps together.
fn until_steps(journal: &Path) {
    let steps = || {
        let text = std::fs::read_to_string(journal).unwrap_or_default();
        text.lines().filter(|line| line.ends_with(" 3")).count()
    };
    let before = steps();
    until("more steps", || steps() >= before + 10);
}

/// The rank that goes on has no memory in common with those that have saved last.
#[test]
fn a_newcomer_goes_on_alone() {
    if is_skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = script("restarted_alone.py");
    let finished = elastic("2", "2", &script, &[folder.path().to_str().unwrap()]);
    assert_eq!(finished.sorted_lines(), ["rank 0: good", "rank 1: good"], "{finished:?}");
}

/// Failures at certain places, and errors of programs.
#[test]
fn cases_of_elastic_trainings() {
    if is_skipped() {
        return;
    }
    are_good(&elastic("2", "0", &script("elastic_cases.py"), &[]), 2 * 40);
}

/// Two of three ranks have such groups, and a third one is killed in the last case.
#[test]
fn what_is_under_way_in_smaller_groups_fails_at_once() {
    if is_skipped() {
        return;
    }
    are_good(&elastic("3", "1", &script("elastic_groups.py"), &[]), 2 * 4 + 3);
}

/// Also when a rank is killed.
#[test]
fn the_example_takes_each_sample_once() {
    if is_skipped() {
        return;
    }
    let script = root().join("examples/elastic.py").display().to_string();
    let mut command = launcher(&["--nproc-per-node", "2", "--elastic", "in-place"]);
    command.args(["--max-restarts", "1", "--no-python", &python(), &script, "--epochs", "12"]);
    let mut job = Running::start(with_flow(&mut command));
    let mut lines = vec![job.line()];
    let worker = children(job.pid()).into_iter().find(|pid| is_rank_1(*pid)).unwrap();
    kill_process(Pid::from_raw(worker).unwrap(), Signal::KILL).unwrap();
    let finished = job.finish();
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert!(finished.stderr.contains("it is started again alone"), "{finished:?}");
    lines.extend(finished.stdout.lines().map(String::from));
    let said = lines.iter().map(|line| line.split_once(", loss ").unwrap().0.to_string());
    let expected = (0..12).map(|epoch| format!("epoch {epoch}: 4096 samples once"));
    assert_eq!(said.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "{finished:?}");
}

fn is_rank_1(pid: i32) -> bool {
    has_variable(pid, b"RANK=1")
}

fn is_rank(pid: i32) -> bool {
    has_variable(pid, b"RANK=")
}

/// Whether a process has a variable that begins so.
fn has_variable(pid: i32, begin: &[u8]) -> bool {
    let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
    variables.split(|byte| *byte == 0).any(|variable| variable.starts_with(begin))
}
