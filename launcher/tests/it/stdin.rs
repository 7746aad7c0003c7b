//! Who reads flow-launch's standard input.

use flow_harness::Finished;
use flow_harness::cli::{Running, finish, launcher, run, script};

use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

use rustix::process::Signal;

/// Runs with this input.
fn fed(command: &mut Command, input: &str) -> Finished {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    finish(child)
}

const ECHO: &str = "read line; echo $RANK: $line";

#[test]
fn rank_0_reads_what_is_piped_in() {
    assert_eq!(
        fed(&mut script("--nproc_per_node 3", ECHO), "data\n").sorted_lines(),
        ["0: data", "1:", "2:"]
    );
}

#[test]
fn another_rank_or_none_may_read_it() {
    let lines = |flags: &str| {
        let finished = fed(&mut script(&format!("--nproc_per_node 2 {flags}"), ECHO), "data\n");
        finished.sorted_lines().join(" ")
    };
    assert_eq!(lines("--stdin 1"), "0: 1: data");
    assert_eq!(lines("--stdin none"), "0: 1:");
}

/// Reads a line of one character at once. The shell's `read` takes single bytes: of several shells
/// that read one pipe, one may get a line's character and another its newline.
const READ_LINE: &str = "dd bs=2 count=1 status=none";

/// As with torchrun, all have the same input, and what is in it goes to whoever reads it first.
#[test]
fn all_may_read_it() {
    let finished = fed(&mut script("--nproc_per_node 3 --stdin all", READ_LINE), "a\nb\nc\n");
    assert_eq!(finished.sorted_lines(), ["a", "b", "c"]);
}

#[test]
fn all_ranks_of_a_python_program_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("ask.py");
    fs::write(&program, "import os\nprint(os.read(0, 1))\n").unwrap();
    let run = |flags: &[&str]| {
        let finished = fed(
            &mut launcher(&[flags, &["--nproc_per_node", "2", program.to_str().unwrap()]].concat()),
            "xx",
        );
        finished.sorted_lines().join(" ")
    };
    assert_eq!(run(&[]), "b'x' b'x'");
    assert_eq!(run(&["--stdin", "0"]), "b'' b'x'");
}

/// The same open file, and so the same place in it.
#[test]
fn a_file_is_read_on_from_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("input");
    fs::write(&file, "first\nsecond\nthird\n").unwrap();
    let launch = "read x; $0 sh -c 'read y; echo $y'; read z; echo $x $z";
    let mut command = Command::new("sh");
    command
        .args(["-c", launch, env!("CARGO_BIN_EXE_flow-launch")])
        .stdin(fs::File::open(&file).unwrap());
    assert_eq!(run(&mut command).stdout, "second\nfirst third\n");
}

#[test]
fn no_input_at_all_is_an_empty_one() {
    let launch = "exec $0 --nproc_per_node 2 sh -c 'read x; echo $? $x' <&-";
    let finished = run(Command::new("sh").args(["-c", launch, env!("CARGO_BIN_EXE_flow-launch")]));
    assert_eq!(finished.stdout, "1\n1\n", "{finished:?}");
}

#[test]
fn a_prompt_without_a_newline_is_not_withheld() {
    let ask = "printf 'name? '; read name; echo hello $name";
    let mut child = script("--nproc_per_node 2", &format!("[ $RANK = 1 ] || {{ {ask}; }}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut prompt = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut prompt).unwrap();
    assert_eq!(&prompt, b"name? ");
    child.stdin.take().unwrap().write_all(b"Ann\n").unwrap();
    assert_eq!(finish(child).stdout, "hello Ann\n");
}

/// Of two that ask at once one is seen first, and then the other.
#[test]
fn prompts_of_two_ranks_do_not_mix() {
    let ask = format!("printf \"$RANK? \"; {READ_LINE}");
    let mut command = script("--nproc_per_node 2 --stdin all", &ask);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut shown = [0; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut shown).unwrap();
    // Whichever rank reads it.
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"a\na\n").unwrap();
    drop(stdin);
    let finished = finish(child);
    let all = format!("{}{}", String::from_utf8_lossy(&shown), finished.stdout);
    let mut lines: Vec<_> = all.lines().filter(|line| *line != "a").collect();
    lines.sort_unstable();
    // Who answered before the other's prompt was complete has ended that line.
    assert!(lines.iter().all(|line| ["0? a", "1? a", "0? ", "1? "].contains(line)), "{all:?}");
    assert_eq!(all.matches('a').count(), 2, "{all:?}");
}

/// Workers see the variables about colours and the width.
#[test]
fn variables_about_terminals_pass() {
    let text = "echo $FORCE_COLOR $NO_COLOR $CLICOLOR_FORCE $COLUMNS $TERM";
    let mut command = script("", text);
    command
        .env("FORCE_COLOR", "1")
        .env("NO_COLOR", "2")
        .env("CLICOLOR_FORCE", "3")
        .env("COLUMNS", "4")
        .env("TERM", "x");
    assert_eq!(run(&mut command).stdout, "1 2 3 4 x\n");
}

/// A worker that is stopped while it waits for input does not hold up the end.
#[test]
fn who_waits_for_input_can_be_stopped() {
    let mut command = script("--nproc_per_node 2 --stdin all", "echo ready; read x");
    let mut running = Running::start(command.stdin(Stdio::piped()));
    assert_eq!((running.line(), running.line()), ("ready".into(), "ready".into()));
    running.signal(Signal::TERM);
    assert_eq!(running.finish().code, Some(143));
}
