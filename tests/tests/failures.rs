//! What the others hear when a rank dies, leaves, hangs, or does something else; and that nothing
//! is left behind.
//!
//! Workers are started by hand except where the launcher is the subject: it would stop the others
//! at once.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use flow_tests::{
    assert_contains, job, launcher, rank, ranks, Finished, Process, DETECTION_LIMIT, TEST_TIMEOUT,
};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

fn signal(process: &Process, signal: Signal) {
    kill(Pid::from_raw(process.pid() as i32), signal).expect("the process is ours");
}

/// The lines of a process that ended well.
fn lines(finished: Finished) -> Vec<String> {
    finished.success().lines().filter(|line| *line != "looping").map(str::to_owned).collect()
}

/// The inodes of the shared memory that a process maps.
fn shared_memory_of(pid: &str) -> BTreeSet<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let ours = maps.lines().filter(|line| line.contains("memfd:flow-arena"));
    ours.filter_map(|line| line.split_whitespace().nth(4).map(str::to_owned)).collect()
}

/// Whether any process of the machine maps one of `inodes`.
fn is_mapped(inodes: &BTreeSet<String>) -> bool {
    let processes = std::fs::read_dir("/proc").expect("/proc is there");
    let mut names = processes.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.any(|name| !shared_memory_of(&name).is_disjoint(inodes))
}

/// Names in /dev/shm that could be ours.
fn named_shared_memory() -> BTreeSet<String> {
    let names = std::fs::read_dir("/dev/shm").into_iter().flatten();
    names
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.contains("flow"))
        .collect()
}

/// Kills rank 1 of three in the midst of what `what` does over and over.
fn killed_in(what: &str, operations: &[&str]) {
    for pause in [0, 7, 40] {
        let mut ranks = ranks(3, "check_failures", &["loop", what]);
        ranks.iter_mut().for_each(|rank| rank.wait_for("looping"));
        let memory = shared_memory_of(&ranks[0].pid().to_string());
        assert!(memory.len() == 1 && is_mapped(&memory), "{memory:?}");
        std::thread::sleep(Duration::from_millis(pause));
        let victim = ranks.remove(1);
        signal(&victim, Signal::SIGKILL);
        let pid = victim.pid();
        for (rank, process) in [0, 2].into_iter().zip(ranks) {
            let said = lines(process.finish(DETECTION_LIMIT));
            let named = |operation: &&str| {
                said[0].starts_with(&format!("PeerLost: rank {rank}: {operation}"))
            };
            assert!(operations.iter().any(named), "none of {operations:?} is in {said:?}");
            assert_contains(&said[0], &[&format!("rank 1 (pid {pid} on "), "died"]);
            assert_contains(
                &said[1],
                &["then Poisoned", &format!("rank {rank}: barrier #"), "rank 1 (pid"],
            );
        }
        drop(victim);
        assert!(!is_mapped(&memory), "{memory:?} is still mapped");
    }
    assert_eq!(named_shared_memory(), BTreeSet::new());
}

#[test]
fn killed_in_small_all_reduces() {
    killed_in("small", &["all_reduce #"]);
}

#[test]
fn killed_in_all_reduces_in_place() {
    killed_in("shared", &["all_reduce #"]);
}

#[test]
fn killed_in_all_reduces_through_staging() {
    killed_in("ordinary", &["all_reduce #"]);
}

#[test]
fn killed_in_all_gathers() {
    killed_in("gather", &["all_gather #"]);
}

#[test]
fn killed_in_asynchronous_all_reduces() {
    killed_in("async", &["all_reduce #"]);
}

/// In a ring, so that each of the others sends to the killed rank or receives from it.
#[test]
fn killed_in_messages() {
    killed_in("messages", &["send to rank ", "recv from rank "]);
}

#[test]
fn all_but_one_killed() {
    let mut ranks = ranks(4, "check_failures", &["loop", "ordinary"]);
    ranks.iter_mut().for_each(|rank| rank.wait_for("looping"));
    let survivor = ranks.remove(2);
    ranks.iter().for_each(|rank| signal(rank, Signal::SIGKILL));
    assert_contains(
        &lines(survivor.finish(DETECTION_LIMIT))[0],
        &["PeerLost: rank 2: all_reduce #", "died"],
    );
}

#[test]
fn a_rank_that_drops_its_group_is_named() {
    let mut ranks = ranks(3, "check_failures", &["leave"]);
    let mut leaver = ranks.remove(1);
    leaver.wait_for("left");
    for process in ranks {
        let said = lines(process.finish(DETECTION_LIMIT));
        let peer = format!("failed: rank 1 (pid {} on ", leaver.pid());
        assert_contains(
            &said[0],
            &["PeerLost", "all_reduce #1 (4 x f32, sum)", &peer, "has left the group"],
        );
        assert_contains(&said[1], &["then Poisoned"]);
    }
}

#[test]
fn a_rank_that_exits_is_named() {
    let mut ranks = ranks(3, "check_failures", &["exit"]);
    let pid = ranks.remove(1).finish(DETECTION_LIMIT).pid;
    for process in ranks {
        let said = lines(process.finish(DETECTION_LIMIT));
        assert_contains(
            &said[0],
            &["PeerLost", "all_reduce #1", &format!("rank 1 (pid {pid} on ")],
        );
    }
}

#[test]
fn a_message_outlives_its_sender() {
    let mut ranks = ranks(2, "check_failures", &["message_then_exit"]);
    let receiver = ranks.remove(1);
    let sender = ranks.remove(0).finish(DETECTION_LIMIT);
    let pid = sender.pid;
    sender.success();
    let said = lines(receiver.finish(DETECTION_LIMIT));
    assert_eq!(said[0], "received [7, 7, 7, 7, 7, 7, 7, 7, 7]");
    assert_contains(
        &said[1],
        &["PeerLost: rank 1: recv from rank 0 (9 x u8) failed: rank 0", &format!("(pid {pid} on ")],
    );
}

/// The first to run out of time tells the others, who may be a moment from it themselves.
fn assert_timed_out(said: &[Vec<String>], culprit: &str) {
    assert!(said.iter().any(|lines| lines[0].starts_with("Timeout")), "{said:?}");
    for lines in said {
        assert!(lines[0].starts_with("Timeout") || lines[0].starts_with("Poisoned"), "{said:?}");
        assert_contains(&lines[0], &["timed out after", culprit, "which has arrived"]);
        assert_contains(&lines[1], &["then Poisoned"]);
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let mut ranks = ranks(3, "check_failures", &["absent"]);
    let absent = ranks.pop().expect("there are three");
    let said: Vec<_> =
        ranks.into_iter().map(|process| lines(process.finish(DETECTION_LIMIT))).collect();
    assert_timed_out(
        &said,
        &format!("timed out after 1s: waited for rank 2 (pid {} on ", absent.pid()),
    );
}

#[test]
fn a_stopped_rank_is_named_and_hears_of_it() {
    let mut ranks = ranks(3, "check_failures", &["loop_timeout", "ordinary", "2"]);
    ranks.iter_mut().for_each(|rank| rank.wait_for("looping"));
    let stopped = ranks.remove(1);
    signal(&stopped, Signal::SIGSTOP);
    let said: Vec<_> =
        ranks.into_iter().map(|process| lines(process.finish(DETECTION_LIMIT))).collect();
    assert_timed_out(&said, &format!("waited for rank 1 (pid {} on ", stopped.pid()));
    signal(&stopped, Signal::SIGCONT);
    let said = lines(stopped.finish(DETECTION_LIMIT));
    assert_contains(&said[0], &["timed out after 2s: waited for rank 1 (pid"]);
}

#[test]
fn an_abort_reaches_all() {
    for process in ranks(3, "check_failures", &["abort", "0"]) {
        let said = lines(process.finish(DETECTION_LIMIT));
        assert_contains(
            &said[0],
            &["Poisoned", "all_reduce #1", "rank 0 aborted the group: the data ran out"],
        );
    }
}

#[test]
fn a_failed_group_does_not_harm_its_parent() {
    for process in ranks(3, "check_failures", &["apart"]) {
        let said = lines(process.finish(DETECTION_LIMIT));
        assert_eq!(said[0], "the parent group works");
        assert_contains(&said[1], &["Mismatch"]);
    }
}

/// Rank 1 of three calls `odd`, the others `even`: each rank is told its own side and one of the
/// other.
fn disagree(what: &str, even: &str, odd: &str) {
    for (rank, process) in ranks(3, "check_failures", &["mismatch", what]).into_iter().enumerate() {
        let said = lines(process.finish(DETECTION_LIMIT));
        let sides = match rank {
            1 => format!("rank 1 called {odd}, rank 0 called {even};"),
            _ => format!("rank {rank} called {even}, rank 1 called {odd};"),
        };
        assert_contains(&said[0], &[&format!("Mismatch: rank {rank}: ranks disagree"), &sides]);
        assert_contains(&said[1], &["then Poisoned", "disagree"]);
    }
}

#[test]
fn different_operations_are_told() {
    disagree("operation", "all_reduce #1 (4 x f32, sum)", "broadcast #1 (4 x f32, root 0)");
    disagree("new_group", "barrier #1", "new_group #1");
    disagree("asynchronous", "all_reduce #1 (3 x u8, sum)", "barrier #1");
}

#[test]
fn different_counts_are_told() {
    disagree("count", "all_reduce #1 (4 x f32, sum)", "all_reduce #1 (3 x f32, sum)");
    disagree("much", "all_reduce #1 (4 x f32, sum)", "all_reduce #1 (200000 x f32, sum)");
    disagree("much_gathered", "all_gather #1 (200000 x u8)", "all_gather #1 (4 x u8)");
}

#[test]
fn different_types_reductions_and_roots_are_told() {
    disagree("dtype", "all_reduce #1 (4 x f32, sum)", "all_reduce #1 (4 x i32, sum)");
    disagree("reduction", "all_reduce #1 (4 x f32, sum)", "all_reduce #1 (4 x f32, max)");
    disagree("root", "broadcast #1 (4 x f32, root 0)", "broadcast #1 (4 x f32, root 1)");
}

#[test]
fn under_the_launcher_the_signal_is_named() {
    let command =
        launcher(3, &["--grace", "10"], "check_failures", &["die_in_loop", "ordinary", "deaf"]);
    let finished = Process::start(command).finish(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(128 + 9), "{finished:?}");
    let said: Vec<&str> =
        finished.stdout.lines().filter(|line| line.starts_with("PeerLost")).collect();
    assert_eq!(said.len(), 2, "{finished:?}");
    for line in said {
        assert_contains(
            line,
            &["all_reduce #20 (200000 x f32, avg)", "rank 1 (pid ", "signal 9 (SIGKILL)"],
        );
    }
}

#[test]
fn the_launcher_killed_takes_all_ranks_and_their_memory_along() {
    let mut process = Process::start(launcher(3, &[], "check_failures", &["loop", "shared"]));
    process.wait_for("looping\nlooping\nlooping\n");
    let children = format!("/proc/{0}/task/{0}/children", process.pid());
    let children = std::fs::read_to_string(children).expect("the kernel lists children");
    let memory: BTreeSet<String> = children.split_whitespace().flat_map(shared_memory_of).collect();
    assert!(memory.len() == 1 && is_mapped(&memory), "{memory:?} of {children}");
    signal(&process, Signal::SIGKILL);
    assert_ne!(process.finish(DETECTION_LIMIT).code, Some(0));
    // The workers are not ours to wait for.
    for _ in 0..1000 {
        if !is_mapped(&memory) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("workers {children} still hold their shared memory");
}

/// What one process hears that is started with these variables.
fn told(variables: &[(&str, &str)]) -> String {
    let mut command = std::process::Command::new(flow_tests::program("check_failures"));
    command.arg("join").envs(variables.iter().copied());
    let mut lines = lines(Process::start(command).finish(DETECTION_LIMIT));
    assert_eq!(lines.len(), 1, "{lines:?}");
    lines.remove(0)
}

#[test]
fn contradictions_in_the_environment_are_told() {
    let cases: [(&[(&str, &str)], &str); 6] = [
        (
            &[("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")],
            "Environment: the job has 4 ranks, 2 of them on this node: set MASTER_ADDR to the host of rank 0, and \
             MASTER_PORT to a free port there",
        ),
        (&[("RANK", "2"), ("WORLD_SIZE", "2")], "Environment: RANK=2 but WORLD_SIZE=2: RANK must be 0 to 1"),
        (&[("RANK", "0")], "Environment: RANK=0 but WORLD_SIZE is not set: set both, or neither to run alone"),
        (&[("WORLD_SIZE", "2")], "Environment: WORLD_SIZE=2 but RANK is not set: set both, or neither to run alone"),
        (&[("RANK", "one"), ("WORLD_SIZE", "2")], "Environment: RANK=\"one\": must be a whole number, 0 or more"),
        (
            &[("FLOW_TIMEOUT", "abc")],
            "Argument: rank 0: from_env: FLOW_TIMEOUT=abc must be a positive number of seconds",
        ),
    ];
    for (variables, expected) in cases {
        assert_eq!(told(variables), expected);
    }
    assert_eq!(told(&[]), "no error");
    assert_eq!(told(&[("FLOW_TIMEOUT", "1e19")]), "no error");
}

#[test]
fn two_processes_with_the_same_rank_are_told() {
    let job = job();
    let start = |number| {
        let mut command = rank(&job, number, 3, "check_failures", &["join"]);
        command.env("FLOW_TIMEOUT", "3");
        Process::start(command)
    };
    let (first, twins) = (start(0), [start(1), start(1)]);
    let [one, other] = twins.map(|process| process.finish(DETECTION_LIMIT));
    let (pids, mut said) = ([one.pid, other.pid], [lines(one).remove(0), lines(other).remove(0)]);
    // Either may have been the second.
    let second = usize::from(!said[0].contains("before"));
    let refused = format!(
        "process {} has joined as rank 1 before: every process needs its own RANK",
        pids[1 - second]
    );
    assert_contains(&said[second], &["Join: rank 1: ", &refused]);
    said.swap(0, second);
    assert_contains(&said[1], &["rank 2 has not joined"]);
    assert_contains(
        &lines(first.finish(DETECTION_LIMIT))[0],
        &["Join: rank 0", "rank 2 has not joined within 3s"],
    );
}

#[test]
fn ranks_that_never_join_are_named() {
    let job = job();
    let mut command = rank(&job, 0, 3, "check_failures", &["join"]);
    command.env("FLOW_TIMEOUT", "1.5");
    let said = lines(Process::start(command).finish(DETECTION_LIMIT));
    assert_eq!(
        said,
        ["Join: rank 0: joining the process group failed: ranks 1, 2 have not joined within 1.5s"]
    );
}

#[test]
fn a_rank_that_dies_while_it_joins_is_named() {
    let job = job();
    let start = |number| Process::start(rank(&job, number, 4, "check_failures", &["join"]));
    let (first, victim, other) = (start(0), start(2), start(1));
    let deadline = Instant::now() + DETECTION_LIMIT;
    while [&first, &victim, &other]
        .iter()
        .any(|rank| shared_memory_of(&rank.pid().to_string()).is_empty())
    {
        assert!(Instant::now() < deadline, "the three do not meet");
        std::thread::sleep(Duration::from_millis(10));
    }
    signal(&victim, Signal::SIGKILL);
    let died = format!("rank 2 (pid {}) died before all ranks had joined", victim.pid());
    for (rank, process) in [(0, first), (1, other)] {
        assert_contains(
            &lines(process.finish(DETECTION_LIMIT))[0],
            &[&format!("Join: rank {rank}: "), &died],
        );
    }
}

/// It is no failure to the launcher, which therefore stops nobody. Rank 2 comes when the others
/// have given up.
#[test]
fn a_rank_that_ends_well_without_having_joined_is_named() {
    let worker = flow_tests::program("check_failures");
    for gone in [0, 1] {
        let script = format!(
            "[ $RANK = {gone} ] && exit; [ $RANK = 2 ] && sleep 2; exec {} join",
            worker.display()
        );
        let mut command = std::process::Command::new(flow_tests::program("flow-launch"));
        command.args(["--nproc_per_node", "3", "sh", "-c", &script]);
        let said = lines(Process::start(command).finish(DETECTION_LIMIT));
        assert_eq!(said.len(), 2, "{said:?}");
        for line in said {
            assert_contains(
                &line,
                &[
                    "Join: rank ",
                    &format!("rank {gone} ended with exit code 0 before all ranks had joined"),
                ],
            );
        }
    }
}
