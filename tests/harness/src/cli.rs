//! Drives flow-launch itself. Workers are small shell scripts.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::process::Collected;
use crate::{Finished, TEST_TIMEOUT, program};

/// flow-launch with these arguments, without the note on OMP_NUM_THREADS, and with no signal
/// ignored (as SIGINT is where tests run in the background of a script).
pub fn launcher(arguments: &[&str]) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal").arg(program("flow-launch")).args(arguments);
    command
        .env("OMP_NUM_THREADS", "1")
        .env("FLOW_TOKEN", "secret")
        .env_remove("FLOW_LOG")
        .stdin(Stdio::null());
    command
}

/// flow-launch with these flags (separated by spaces), running a shell script in each worker.
pub fn script(flags: &str, script: &str) -> Command {
    let mut arguments: Vec<_> = flags.split_whitespace().collect();
    arguments.extend(["sh", "-c", script]);
    launcher(&arguments)
}

/// Runs to the end.
pub fn run(command: &mut Command) -> Finished {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    finish(child)
}

/// Reads what is left of a child's output and waits for its end. A child that does not end is
/// killed, and what it wrote is in the panic.
pub fn finish(mut child: Child) -> Finished {
    let mut stdout = child.stdout.take().map(Collected::from);
    let mut stderr = child.stderr.take().map(Collected::from);
    let pid = child.id();
    let Some(status) = status_in_time(&mut child) else {
        child.kill().unwrap();
        let stdout = stdout.map_or_else(String::new, |pipe| pipe.so_far());
        let stderr = stderr.map_or_else(String::new, |pipe| pipe.so_far());
        panic!("{pid} runs for more than {TEST_TIMEOUT:?}\nstdout:\n{stdout}\nstderr:\n{stderr}");
    };
    let stdout = stdout.as_mut().map_or_else(String::new, Collected::all);
    let stderr = stderr.as_mut().map_or_else(String::new, Collected::all);
    Finished::new(pid, status, stdout, stderr)
}

fn read(mut pipe: impl Read) -> String {
    let mut bytes = Vec::new();
    pipe.read_to_end(&mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Waits for the end of a child; its exit code, if it has one.
pub fn wait(child: &mut Child) -> Option<i32> {
    wait_for_status(child).code()
}

pub(crate) fn wait_for_status(child: &mut Child) -> ExitStatus {
    status_in_time(child).unwrap_or_else(|| panic!("{} does not end", child.id()))
}

/// None if it still runs after [`TEST_TIMEOUT`].
fn status_in_time(child: &mut Child) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        let status = child.try_wait().unwrap();
        if status.is_some() || start.elapsed() > TEST_TIMEOUT {
            return status;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for a condition, which must come true.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TEST_TIMEOUT, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A running flow-launch whose workers' output is read line by line.
pub struct Running {
    /// flow-launch.
    pub child: Child,
    /// What its workers wrote and the test has not read yet.
    pub stdout: BufReader<ChildStdout>,
}

impl Running {
    /// Starts flow-launch.
    pub fn start(command: &mut Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Running { child, stdout }
    }

    /// The next line.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_string()
    }

    /// Reads `count` lines and returns all numbers in them, such as pids.
    pub fn numbers(&mut self, count: usize) -> Vec<i32> {
        let lines: Vec<_> = (0..count).map(|_| self.line()).collect();
        lines
            .iter()
            .flat_map(|line| {
                line.split(' ').map(|word| word.parse().expect(line)).collect::<Vec<_>>()
            })
            .collect()
    }

    /// The process id of flow-launch.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends a signal to flow-launch.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Reads what is left, and waits for its end.
    pub fn finish(self) -> Finished {
        let reader = thread::spawn(move || read(self.stdout));
        let finished = finish(self.child);
        Finished { stdout: reader.join().unwrap(), ..finished }
    }
}

/// Whether a process exists and is not merely waiting to be reaped by whoever adopted it.
pub fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
    !matches!(state, None | Some('Z') | Some('X'))
}

/// Waits until none of these processes exists.
pub fn until_gone(pids: &[i32]) {
    until(&format!("{pids:?} are gone"), || !pids.iter().any(|pid| is_alive(*pid)));
}

/// The children of a process.
pub fn children(pid: i32) -> Vec<i32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// What `--events` has written to this file.
pub fn events(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

/// The events of this name.
pub fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["event"] == name).collect()
}
