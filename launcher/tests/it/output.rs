//! Output of the workers: whole lines, marked where asked for, held up rather than hoarded.

use flow_harness::cli::{Running, children, run, script, until, until_gone, wait};

use std::fs::File;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::terminal::open_terminal;

#[test]
fn long_lines_of_two_workers_never_mix() {
    let text = "i=0; while [ $i -lt 20 ]; do head -c 200000 /dev/zero | tr '\\0' $RANK; echo; \
                i=$((i+1)); done";
    let finished = run(&mut script("--nproc_per_node 2", text));
    let lines = finished.sorted_lines();
    assert_eq!(lines.len(), 40);
    assert!(lines[..20].iter().all(|line| *line == "0".repeat(200_000)));
    assert!(lines[20..].iter().all(|line| *line == "1".repeat(200_000)));
}

#[test]
fn stdout_and_stderr_stay_apart_unless_they_are_the_same_file() {
    let finished = run(&mut script("", "echo out; echo err >&2"));
    assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("out\n", "err\n"));
    let flow_launch = env!("CARGO_BIN_EXE_flow-launch");
    let inner = "printf progress; echo err >&2; sleep 0.3; exit 1";
    let joined =
        run(Command::new("sh").args(["-c", &format!("{flow_launch} sh -c '{inner}' 2>&1")]));
    assert!(joined.stdout.starts_with("err\nprogress\nflow-launch: rank 0 "), "{joined:?}");
}

#[test]
fn lines_are_marked_on_request_only() {
    let text = "echo out $RANK; echo err >&2";
    let marked = run(&mut script("--nproc_per_node 2 --prefix", text));
    assert_eq!(marked.sorted_lines(), ["[rank 0] out 0", "[rank 1] out 1"]);
    assert!(marked.stderr.contains("[rank 0] err\n") && marked.stderr.contains("[rank 1] err\n"));
    assert_eq!(run(&mut script("--nproc_per_node 2", text)).sorted_lines(), ["out 0", "out 1"]);
}

#[test]
fn lines_are_marked_on_a_terminal() {
    let (keyboard, terminal) = open_terminal();
    let mut child =
        script("", "echo hello").stdout(terminal).stderr(Stdio::null()).spawn().unwrap();
    let mut shown = [0; 100];
    let count = File::from(keyboard).read(&mut shown).unwrap();
    assert_eq!(&shown[..count], b"[rank 0] hello\r\n");
    assert_eq!(wait(&mut child), Some(0));
}

#[test]
fn progress_bars_are_passed_on_while_they_run() {
    let mut running = Running::start(&mut script("", "printf '10%%\\r'; read x; sleep 1000"));
    let mut shown = [0; 4];
    running.stdout.read_exact(&mut shown).unwrap();
    assert_eq!(&shown, b"10%\r");
    running.signal(Signal::TERM);
    assert_eq!(running.finish().code, Some(143));
}

#[test]
fn bytes_are_passed_on_as_they_are() {
    let finished = run(&mut script("", "printf 'a\\r\\nb\\rc\\n\\n\\nno newline at the end'"));
    assert_eq!(finished.stdout, "a\r\nb\rc\n\n\nno newline at the end");
}

#[test]
fn a_closed_output_ends_writers_as_it_would_without_the_launcher() {
    let mut running = Running::start(&mut script("--nproc_per_node 2", "exec yes $RANK"));
    running.line();
    let Running { mut child, stdout } = running;
    drop(stdout);
    assert_eq!(wait(&mut child), Some(141));
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(stderr, "");
}

#[test]
fn an_output_nobody_reads_costs_no_memory_and_stops_no_signal() {
    let mut running =
        Running::start(&mut script("--nproc_per_node 2 --grace 0.3", "exec yes 1234567"));
    let mut bytes = vec![0; 1 << 20];
    running.stdout.read_exact(&mut bytes).unwrap();
    let before = peak_memory(running.pid());
    for _ in 0..100 {
        running.stdout.read_exact(&mut bytes).unwrap();
    }
    // From here on nobody reads, until even the launcher's queue is full and the workers are held
    // up.
    let pids = children(running.pid());
    let mut written = 0;
    until("the workers are held up", || {
        std::thread::sleep(Duration::from_millis(200));
        let before =
            std::mem::replace(&mut written, pids.iter().map(|pid| bytes_written(*pid)).sum());
        written == before
    });
    let peak = peak_memory(running.pid());
    assert!(peak < before + 16 * 1024, "{peak} KiB after {before} KiB");
    running.signal(Signal::TERM);
    assert_eq!(wait(&mut running.child), Some(143));
    until_gone(&pids);
}

/// Largest resident size so far, in KiB.
fn peak_memory(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn bytes_written(pid: i32) -> u64 {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    io.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap().parse().unwrap()
}

#[test]
fn a_hundred_megabytes_arrive_whole() {
    let text = "head -c 50000000 /dev/zero | tr '\\0' $RANK | fold -w 99";
    let finished = run(&mut script("--nproc_per_node 2", text));
    assert_eq!(finished.code, Some(0));
    assert_eq!(finished.stdout.matches('0').count(), 50_000_000);
    assert_eq!(finished.stdout.matches('1').count(), 50_000_000);
    assert!(finished.stdout.lines().all(|line| !(line.contains('0') && line.contains('1'))));
}
