//! Training in which something goes wrong.

use std::process::Command;
use std::time::{Duration, Instant};

use flow_tests::{
    assert_contains, job, launcher, rank, Finished, Process, DETECTION_LIMIT, TEST_TIMEOUT,
};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

const WORKER: &str = "check_ddp_failures";
/// See `ddp.rs`.
const MODES: [Option<(&str, &str)>; 3] =
    [None, Some(("FLOW_DDP_COPY", "1")), Some(("FLOW_DDP_PROGRESS", "thread"))];

fn quiet(mut command: Command, mode: Option<(&str, &str)>) -> Command {
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0").envs(mode);
    command
}

fn launched(ranks: usize, event: &str, mode: Option<(&str, &str)>) -> Finished {
    Process::start(quiet(launcher(ranks, &[], WORKER, &[event]), mode)).finish(DETECTION_LIMIT)
}

/// The ranks of a job without a launcher, which would stop the others at once: how each ended.
fn by_hand(ranks: usize, event: &str, mode: Option<(&str, &str)>) -> Vec<Finished> {
    let job = job();
    let start = |r| Process::start(quiet(rank(&job, r, ranks, WORKER, &[event]), mode));
    let ranks: Vec<Process> = (0..ranks).map(start).collect();
    ranks.into_iter().map(|rank| rank.finish(DETECTION_LIMIT)).collect()
}

#[test]
fn the_launcher_reports_a_rank_that_exits() {
    for mode in MODES {
        let job = launched(3, "exit", mode);
        assert_eq!(job.code, Some(3), "{}", job.stderr);
        assert_contains(&job.stderr, &["rank 1 (local rank 1, pid ", "failed with exit code 3"]);
    }
}

#[test]
fn the_launcher_reports_a_rank_that_is_killed() {
    let job = launched(2, "kill", None);
    assert_eq!(job.code, Some(128 + 9), "{}", job.stderr);
    assert_contains(
        &job.stderr,
        &["rank 1 (local rank 1, pid ", "was killed by signal 9 (SIGKILL)"],
    );
}

#[test]
fn the_launcher_reports_a_panic_in_forward() {
    let job = launched(2, "panic", None);
    assert_eq!(job.code, Some(101), "{}", job.stderr);
    assert_contains(&job.stderr, &["rank 1 (local rank 1, pid ", "the model cannot go on"]);
}

#[test]
fn a_rank_that_hangs_is_named_when_the_time_is_over() {
    for mode in MODES {
        let mut command = quiet(launcher(3, &["--grace", "1"], WORKER, &["hang"]), mode);
        command.env("FLOW_TIMEOUT", "2");
        let job = Process::start(command).finish(DETECTION_LIMIT);
        assert_eq!(job.code, Some(1), "{}", job.stderr);
        assert_contains(
            &job.stderr,
            &[
                "step 5: Timeout: ",
                "all_reduce",
                "bucket",
                "step 6)",
                "timed out after 2s",
                "waited for rank 1 (pid ",
            ],
        );
    }
}

#[test]
fn survivors_name_the_rank_that_is_gone() {
    for (event, mode) in
        [("kill", MODES[0]), ("kill", MODES[1]), ("kill", MODES[2]), ("exit", MODES[0])]
    {
        let ranks = by_hand(3, event, mode);
        let gone = format!("rank 1 (pid {} on ", ranks[1].pid);
        for rank in [0, 2] {
            let Finished { code, stderr, .. } = &ranks[rank];
            assert_eq!(*code, Some(1), "{stderr}");
            let [first, again] =
                ["all_reduce #", "backward failed"].map(|it| format!("rank {rank}: {it}"));
            assert_contains(
                stderr,
                &[&format!("step 5: PeerLost: {first}"), "bucket", &gone, "died"],
            );
            assert_contains(
                stderr,
                &[&format!("again: Poisoned: {again}: the process group is unusable"), &gone],
            );
        }
    }
}

#[test]
fn a_backward_that_fails_on_one_rank_fails_on_all() {
    for mode in MODES {
        let [panic, error] =
            ["a gradient hook panicked: the hook cannot go on", "the hook has had enough"]
                .map(|it| format!("backward: {it}"));
        for (event, reason) in [("hook_panic", panic), ("hook_error", error)] {
            let ranks = by_hand(3, event, mode);
            let cause =
                "rank 1 aborted the group: its backward failed before all gradients were there";
            let again = |rank| format!("again: Poisoned: rank {rank}: backward failed: ");
            assert_contains(
                &ranks[1].stderr,
                &[&format!("step 5: Backward: {reason}"), &again(1), cause],
            );
            for rank in [0, 2] {
                let first = format!("step 5: Poisoned: rank {rank}: all_reduce #");
                assert_contains(&ranks[rank].stderr, &[&first, &again(rank), cause]);
            }
            assert!(ranks.iter().all(|rank| rank.code == Some(1)));
        }
    }
}

#[test]
fn ranks_that_are_out_of_step_find_out() {
    for mode in MODES {
        for event in ["forward_only", "other_loss", "caught"] {
            for (rank, Finished { code, stderr, .. }) in
                by_hand(3, event, mode).into_iter().enumerate()
            {
                assert_eq!(code, Some(1), "{event}: {stderr}");
                let own = if rank == 1 { "step 6: " } else { "step 5: " };
                assert_contains(
                    &stderr,
                    &[own, "ranks disagree", "one of them skipped a backward"],
                );
                let told =
                    |one: &str, other: &str| stderr.contains(&format!("{one}, rank {other}"));
                let [zero, two] = [0, 2].map(|other| {
                    told("rank 1 is in step 7", &format!("{other} in step 6"))
                        || told(&format!("rank {other} is in step 6"), "1 in step 7")
                });
                assert!(zero || two, "{event}: {stderr}");
            }
        }
        for Finished { code, stderr, .. } in by_hand(3, "forward_only_with_buffers", mode) {
            assert_eq!(code, Some(1), "{stderr}");
            assert_contains(
                &stderr,
                &["ranks disagree", "called all_reduce", "step 6)", "called broadcast"],
            );
        }
        for Finished { code, stderr, .. } in by_hand(2, "forward_kept", mode) {
            assert_eq!(code, Some(1), "{stderr}");
            assert_contains(
                &stderr,
                &["ranks disagree", "in step 7", "in step 8", "one of them skipped a backward"],
            );
        }
        for event in ["all_forward_only", "all_forward_kept", "evaluates"] {
            by_hand(2, event, mode).into_iter().for_each(|rank| _ = rank.success());
        }
    }
}

#[test]
fn after_a_backward_that_fails_on_all_the_model_can_be_wrapped_again() {
    for mode in MODES {
        let ranks = by_hand(2, "all_fail", mode);
        for (rank, Finished { stderr, .. }) in ranks.iter().enumerate() {
            let again = format!(
                "again: Poisoned: rank {rank}: backward failed: the process group is unusable"
            );
            assert_contains(stderr, &["step 5: ", &again, "wrap the model again"]);
        }
        // The others may hear of that before they come to it themselves.
        assert!(ranks
            .iter()
            .any(|rank| rank.stderr.contains("step 5: Backward: backward: no rank can go on")));
        assert!(ranks.iter().all(|rank| rank.code == Some(1)));
        by_hand(2, "all_fail_and_wrap", mode).into_iter().for_each(|rank| _ = rank.success());
    }
}

#[test]
fn a_parameter_that_one_rank_thaws_fails_on_all() {
    for mode in MODES {
        let ranks = by_hand(3, "thaw", mode);
        let reason =
            "frozen.weight was frozen when the model was wrapped and is not now: wrap it again";
        assert_contains(
            &ranks[1].stderr,
            &[&format!("step 5: Model: rank 1: Ddp: {reason}"), "again: Poisoned: "],
        );
        for rank in [0, 2] {
            assert_contains(
                &ranks[rank].stderr,
                &["step 5: Poisoned: ", "rank 1 aborted the group: ", reason],
            );
        }
    }
}

#[test]
fn nothing_survives_the_launcher() {
    let mut job = Process::start(quiet(launcher(3, &[], WORKER, &["nothing"]), None));
    job.wait_for("step 20 ");
    kill(Pid::from_raw(job.pid() as i32), Signal::SIGKILL).unwrap();
    let said = job.finish(DETECTION_LIMIT).stdout;
    let mut pids: Vec<&str> = said.lines().filter_map(|line| line.split(' ').nth(3)).collect();
    pids.sort_unstable();
    pids.dedup();
    assert_eq!(pids.len(), 3, "{said}");
    // Their memory has no name, and goes with the last of them.
    let deadline = Instant::now() + DETECTION_LIMIT;
    while let Some(pid) = pids.iter().find(|pid| runs(pid)) {
        assert!(Instant::now() < deadline, "process {pid} has survived");
        std::thread::sleep(Duration::from_millis(10));
    }
    let names = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    assert_eq!(names.filter(|name| name.file_name().to_string_lossy().contains("flow")).count(), 0);
}

/// Whether the process is there and no zombie.
fn runs(pid: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status
        .rsplit(')')
        .next()
        .is_some_and(|fields| !fields.trim().is_empty() && !fields.trim().starts_with(['Z', 'X']))
}

#[test]
fn sixteen_ranks_on_whatever_cores_there_are() {
    let job = Process::start(quiet(launcher(16, &[], WORKER, &["five_steps"]), None))
        .finish(TEST_TIMEOUT);
    assert_eq!(job.success().lines().filter(|line| line.starts_with("step 5 ")).count(), 16);
}
