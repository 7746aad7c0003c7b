//! Drives the real flow-launch. Workers are small shell scripts. Its `net` is also used by the
//! tests of flow-tests.
#![allow(dead_code)] // Each test file uses a part of it.

pub mod net;
pub mod python;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rustix::process::{kill_process, Pid, Signal};
use serde_json::Value;

/// Longest time anything may take; far more than it should.
const PATIENCE: Duration = Duration::from_secs(300);

/// How a run of flow-launch ended.
#[derive(Debug)]
pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    pub fn sorted_lines(&self) -> Vec<&str> {
        let mut lines: Vec<_> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }
}

/// The file of the flow-launch that is tested.
pub fn binary() -> &'static str {
    match option_env!("CARGO_BIN_EXE_flow-launch") {
        Some(program) => program,
        None => panic!("this is no test of the flow-launch crate"),
    }
}

/// flow-launch with these arguments, without the note on OMP_NUM_THREADS, and with no signal
/// ignored (as SIGINT is where tests run in the background of a script).
pub fn launcher(arguments: &[&str]) -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal", binary()]).args(arguments);
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

/// Reads what is left of a child's output and waits for its end.
pub fn finish(mut child: Child) -> Finished {
    let stdout = child.stdout.take().map(|pipe| thread::spawn(|| read(pipe)));
    let stderr = child.stderr.take().map(|pipe| thread::spawn(|| read(pipe)));
    let code = wait(&mut child);
    let text = |reader: Option<thread::JoinHandle<String>>| {
        reader.map_or_else(String::new, |r| r.join().unwrap())
    };
    Finished { code, stdout: text(stdout), stderr: text(stderr) }
}

fn read(mut pipe: impl Read) -> String {
    let mut bytes = Vec::new();
    pipe.read_to_end(&mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Waits for the end of a child; its exit code, if it has one.
pub fn wait(child: &mut Child) -> Option<i32> {
    let mut status = None;
    until("the launcher ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap().code()
}

/// Waits for a condition, which must come true.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A running flow-launch whose workers' output is read line by line.
pub struct Running {
    pub child: Child,
    pub stdout: BufReader<ChildStdout>,
}

impl Running {
    pub fn start(command: &mut Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Running { child, stdout }
    }

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

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn finish(mut self) -> Finished {
        let reader = thread::spawn(move || read(self.stdout));
        let finished = finish_stderr(&mut self.child);
        Finished { stdout: reader.join().unwrap(), ..finished }
    }
}

fn finish_stderr(child: &mut Child) -> Finished {
    let stderr = child.stderr.take().map(|pipe| thread::spawn(|| read(pipe)));
    let code = wait(child);
    Finished {
        code,
        stdout: String::new(),
        stderr: stderr.map_or_else(String::new, |r| r.join().unwrap()),
    }
}

/// Whether a process exists and is not merely waiting to be reaped by whoever adopted it.
pub fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
    !matches!(state, None | Some('Z') | Some('X'))
}

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

/// How many seconds after the first order to stop, as a file of events has it, rank 0 had to be
/// killed.
pub fn seconds_until_killed(path: &Path) -> f64 {
    let events = events(path);
    let killed = named(&events, "exit")
        .into_iter()
        .find(|exit| exit["rank"] == 0 && exit["signal"] == 9)
        .unwrap();
    let time = |event: &Value| event["time"].as_str().unwrap().parse::<Timestamp>().unwrap();
    time(killed).duration_since(time(named(&events, "stop")[0])).as_secs_f64()
}
