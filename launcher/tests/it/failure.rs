//! A worker fails: the others are stopped, the report leads with the cause, the exit code is the
//! failed worker's.

use flow_harness::cli::{Running, is_alive, run, script, until, until_gone};
use flow_store::Store;

use std::process::Command;
use std::time::Duration;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::{TimeZone, offset};
use tempfile::{TempDir, tempdir};

/// Rank 1 does one thing, all others another.
fn odd_one(flags: &str, one: &str, others: &str) -> Command {
    script(flags, &format!("if [ $RANK = 1 ]; then {one}; else {others}; fi"))
}

/// The same on two ranks or more, but rank 1 waits until all others have called `ready`, which says
/// so.
fn late_one(folder: &TempDir, ranks: usize, flags: &str, one: &str, others: &str) -> Command {
    let folder = folder.path().display();
    let others = format!("ready() {{ echo ready; : >{folder}/$RANK; }}; {others}");
    let ready = ranks - 1;
    let one = format!("until [ $(ls {folder} | wc -l) = {ready} ]; do sleep 0.02; done; {one}");
    odd_one(&format!("--nproc_per_node {ranks} {flags}"), &one, &others)
}

#[test]
fn success_is_silent() {
    let finished = run(&mut script("--nproc_per_node 4", "exit 0"));
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(0), ""));
}

#[test]
fn exit_code_and_report_are_those_of_the_first_failure() {
    let mut command = odd_one("--nproc_per_node 3", "echo boom >&2; exit 3", "exec sleep 1000");
    let finished = run(command.env("TZ", "JST-9"));
    assert_eq!(finished.code, Some(3));
    let lines: Vec<_> = finished.stderr.lines().collect();
    assert_eq!(lines[0], "boom");
    assert!(lines[1].starts_with("flow-launch: rank 1 (local rank 1, pid "), "{lines:?}");
    let (_, time) = lines[1].split_once("failed with exit code 3 at ").expect(&finished.stderr);
    let time = DateTime::strptime("%Y-%m-%d %H:%M:%S", time)
        .expect(time)
        .to_zoned(TimeZone::fixed(offset(9)))
        .unwrap();
    let age = Timestamp::now().duration_since(time.timestamp());
    assert!((0..3600).contains(&age.as_secs()), "{time}: {age:?}");
    assert_eq!(lines[2..4], ["flow-launch: the last line of its stderr:", "flow-launch:   | boom"]);
    assert_eq!(lines[4..], ["flow-launch: the others: ranks 0, 2 stopped by flow-launch"]);
}

#[test]
fn a_killed_worker_is_named_with_its_signal_and_last_words() {
    let one = "for i in $(seq 1 30); do echo line $i >&2; done; kill -9 $$";
    let finished = run(&mut odd_one("--nproc_per_node 2", one, "exec sleep 1000"));
    assert_eq!(finished.code, Some(137));
    assert!(finished.stderr.contains("rank 1 (local rank 1, pid "), "{}", finished.stderr);
    assert!(finished.stderr.contains("was killed by signal 9 (SIGKILL)"));
    assert!(
        finished.stderr.contains("the last 20 lines of its stderr:\nflow-launch:   | line 11\n")
    );
    assert!(finished.stderr.contains("flow-launch:   | line 30\n"));
}

#[test]
fn a_worker_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let stubborn = "trap '' TERM; ready; while :; do sleep 0.05; done";
    let folder = tempdir().unwrap();
    let finished = run(&mut late_one(&folder, 3, "--grace 0.3", "exit 4", stubborn));
    assert_eq!(finished.code, Some(4));
    assert_eq!(finished.stdout, "ready\nready\n");
    let last = finished.stderr.lines().last().unwrap();
    assert_eq!(
        last,
        "flow-launch: the others: ranks 0, 2 killed by flow-launch after the grace period"
    );
}

#[test]
fn what_siblings_do_when_stopped_is_not_the_cause() {
    let others = "trap 'echo dying >&2; exit 99' TERM; ready; while :; do sleep 0.05; done";
    let folder = tempdir().unwrap();
    let finished = run(&mut late_one(&folder, 3, "", "exit 5", others));
    assert_eq!(finished.code, Some(5));
    let report: Vec<_> =
        finished.stderr.lines().filter(|line| line.starts_with("flow-launch: rank ")).collect();
    assert_eq!(report.len(), 1);
    assert!(report[0].contains("rank 1 "), "{report:?}");
    assert!(finished.stderr.ends_with("ranks 0, 2 asked to stop, ended with exit code 99\n"));
}

#[test]
fn a_stopped_workers_children_may_use_the_grace_period() {
    let others = "(trap 'sleep 0.3; echo saved; exit' TERM; ready; while :; do sleep 0.05; \
                  done) & wait";
    let folder = tempdir().unwrap();
    let finished = run(&mut late_one(&folder, 2, "", "exit 6", others));
    assert_eq!(finished.code, Some(6));
    assert_eq!(finished.stdout, "ready\nsaved\n");
}

#[test]
fn what_a_finished_worker_leaves_in_its_group_is_killed() {
    let mut running = Running::start(&mut script("--nproc_per_node 2", "sleep 1000 & echo $$ $!"));
    let pids = running.numbers(2);
    assert_eq!(running.finish().code, Some(0));
    until_gone(&pids);
}

#[test]
fn a_process_that_escapes_with_the_output_does_not_hold_up_the_end() {
    let escape = "setsid sleep 1000 & echo $!; until [ $(cut -d' ' -f6 /proc/$!/stat) = $! ]; do :; done; \
         echo last words";
    let mut running = Running::start(&mut script("", escape));
    let pid = running.numbers(1)[0];
    let finished = running.finish();
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "last words\n"));
    let _ = rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).unwrap(),
        rustix::process::Signal::KILL,
    );
}

/// The launcher knows this process only by the output, which it holds open: it has no mark
/// of the job.
#[test]
fn an_output_held_open_beyond_the_grace_period_does_not_hold_up_the_end() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("pid");
    let hold = format!("env -i setsid sh -c 'echo $$ >{}; exec sleep 1000' & wait", file.display());
    let one = format!("while [ ! -s {} ]; do sleep 0.05; done; exit 3", file.display());
    let finished = run(&mut odd_one("--nproc_per_node 2 --grace 0.5", &one, &hold));
    let pid: i32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
    assert!(is_alive(pid));
    let _ = rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).unwrap(),
        rustix::process::Signal::KILL,
    );
    assert_eq!(finished.code, Some(3), "{finished:?}");
}

#[test]
fn survivors_learn_how_a_worker_ended() {
    let others = "trap '' TERM; echo $FLOW_STORE $FLOW_TOKEN; ready; while :; do sleep 0.05; done";
    let folder = tempdir().unwrap();
    let mut command = late_one(&folder, 2, "--grace 1000", "kill -SEGV $$", others);
    let mut running = Running::start(&mut command);
    let line = running.line();
    let (address, token) = line.split_once(' ').unwrap();
    let timeout = Duration::from_secs(20);
    let store = Store::connect(&address.parse().unwrap(), token, timeout).unwrap();
    assert_eq!(store.get("exit/1", timeout).unwrap(), b"signal 11 (SIGSEGV)");
    // The first says what the second does, in a stop that had another cause too.
    until("a second one, which comes later, ends it", || {
        running.signal(rustix::process::Signal::INT);
        !is_alive(running.pid())
    });
    let finished = running.finish();
    assert_eq!(finished.code, Some(139));
    assert!(
        finished.stderr.contains("again to kill them\nflow-launch: SIGINT: killing the ranks\n"),
        "{finished:?}"
    );
}
