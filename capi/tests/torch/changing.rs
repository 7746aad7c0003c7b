//! Groups whose ranks change, and what is called when operations end. The programs start their
//! ranks themselves: a launcher would end all of them with the first that is killed.

use std::process::Command;

use flow_harness::Finished;
use flow_harness::cli::{launcher, run};
use flow_harness::python::python;

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
    are_good(&printed(Part::Cpp, "reconfiguring.py", &[]), 19);
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
    let python = python();
    let script = script("elastic.py");
    let mut command = launcher(&["--nproc-per-node", "3", "--elastic", "in-place"]);
    command.args(["--max-restarts", "3", "--no-python", &python, &script, "2"]);
    let finished = run(with_flow(&mut command));
    let lines = ["rank 0: good", "rank 1: good", "rank 2: good"];
    assert!(finished.code == Some(0) && finished.sorted_lines() == lines, "{finished:?}");
}
