//! Tests that need a process of their own, as they change what a process has once: random numbers,
//! variables, limits, the log.

use std::any::type_name;
use std::process::Command;

use crate::{Process, TEST_TIMEOUT};

/// Set in the process of such a test.
const VARIABLE: &str = "FLOW_TEST_APART";

/// Runs `test` in a process of its own, with these variables, and returns true. Returns false in
/// that process. A test calls this first, with itself: `if runs_apart(its_name, &[]) { return; }`.
pub fn runs_apart<Test: Fn()>(_test: Test, variables: &[(&str, &str)]) -> bool {
    if std::env::var_os(VARIABLE).is_some() {
        return false;
    }
    let (_program, name) = type_name::<Test>().split_once("::").expect("a function has a path");
    let mut command = Command::new(std::env::current_exe().expect("a program knows its own path"));
    command.args([name, "--exact", "--include-ignored", "--nocapture"]).env(VARIABLE, "1");
    command.envs(variables.iter().copied());
    let output = Process::start(command).finish(TEST_TIMEOUT).success();
    assert!(output.contains("test result: ok. 1 passed"), "{name} is not a test:\n{output}");
    // What it skips is said aloud.
    output.lines().filter(|line| line.contains("SKIPPED:")).for_each(|line| println!("{line}"));
    true
}
