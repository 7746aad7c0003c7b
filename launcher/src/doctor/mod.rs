//! `flow-launch doctor`: says what is on this machine, and what to do about what is wrong.
//!
//! | file | subject |
//! |---|---|
//! | `fact.rs` | what a probe has found, and how all of it is printed (pure) |
//! | `machine.rs` | cores, memory, names and ports |
//! | `limits.rs` | limits of the process and of its control group |
//! | `python.rs`, `probe.py` | Python, PyTorch, flow_torch and libtorch |
//! | `gpu.rs` | GPUs, driver, NCCL |
//! | `remote.rs` | other hosts |
//! | `command.rs` | commands with a time limit |

mod command;
mod fact;
mod gpu;
mod limits;
mod machine;
mod python;
mod remote;

use std::ffi::OsString;
use std::io::{Write, stdout};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::cli::doctor::{self, Request};
use crate::cli::flags;
use crate::doctor::fact::{Examination, Fact, State};
use crate::hosts;
use crate::hosts::agents::Place;
use crate::plan::program;

/// The time that a probe may take beyond that of its commands.
const MARGIN: Duration = Duration::from_secs(5);

/// A probe of what is at hand.
type PlainProbe = fn() -> Vec<Fact>;

/// A probe that runs commands, each for so long at most.
type CommandProbe = fn(Duration) -> Vec<Fact>;

/// A probe, and what it is called if it does not answer.
type Probe = (String, Box<dyn FnOnce() -> Vec<Fact> + Send>);

/// Prints the facts; returns the exit code, 1 if something is broken.
pub fn main(arguments: &[OsString]) -> anyhow::Result<u8> {
    program::note_namesake(flags::DOCTOR);
    let request = doctor::request(arguments)?;
    let facts = answers(probes(&request)?, 2 * request.timeout + MARGIN);
    let version = env!("CARGO_PKG_VERSION").into();
    let examination = Examination { version, host: machine::host(), facts };
    let text =
        if request.json { serde_json::to_string(&examination)? + "\n" } else { examination.text() };
    stdout().write_all(text.as_bytes())?;
    Ok(u8::from(examination.count(State::Broken) > 0))
}

/// Returns all probes, in the order of their facts.
fn probes(request: &Request) -> anyhow::Result<Vec<Probe>> {
    let timeout = request.timeout;
    let plain: [(&str, PlainProbe); 10] = [
        ("cores", machine::cores),
        ("NUMA", machine::numa_nodes),
        ("memory", machine::memory),
        ("shared memory", machine::shared_memory),
        ("/dev/shm", machine::dev_shm),
        ("open files", limits::open_files),
        ("locked memory", limits::locked_memory),
        ("processes", limits::processes),
        ("host name", machine::host_name),
        ("ports", machine::ports),
    ];
    let with_commands: [(&str, CommandProbe); 3] =
        [("GPUs", gpu::gpus), ("Python", python::python_and_libtorch), ("PyTorch", python::torch)];
    let mut probes = Vec::<Probe>::new();
    for (name, probe) in plain {
        probes.push((name.into(), Box::new(probe)));
    }
    for (name, probe) in with_commands {
        probes.push((name.into(), Box::new(move || probe(timeout))));
    }
    for host in &request.hosts {
        let place = Place {
            launcher: std::env::current_exe()?,
            folder: hosts::folder().context("the current folder is gone")?,
        };
        let (host, shell) = (host.clone(), request.remote_shell.clone());
        probes.push((
            host.destination(),
            Box::new(move || remote::host(&host, &shell, &place, timeout)),
        ));
    }
    Ok(probes)
}

/// Runs the probes side by side. One that hangs or fails is itself a fact.
fn answers(probes: Vec<Probe>, timeout: Duration) -> Vec<Fact> {
    let deadline = Instant::now() + timeout;
    let mut facts = Vec::new();
    let mut running = Vec::new();
    for (name, probe) in probes {
        let (sender, answer) = mpsc::channel();
        // The receiver is gone if the time is over.
        match thread::Builder::new().spawn(move || sender.send(probe())) {
            Ok(_) => running.push((name, answer)),
            Err(error) => facts.push(
                Fact::ok(&name, format!("cannot start a thread: {error}"))
                    .broken("raise the limits on processes and memory (ulimit -u, ulimit -v)"),
            ),
        }
    }
    for (name, answer) in running {
        match answer.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(found) => facts.extend(found),
            Err(RecvTimeoutError::Timeout) => facts.push(
                Fact::ok(&name, format!("no answer in {} s", timeout.as_secs_f64()))
                    .broken("something hangs there: a network, a file system or a driver"),
            ),
            Err(RecvTimeoutError::Disconnected) => facts.push(
                Fact::ok(&name, "the probe has failed").broken("its error is above: report it"),
            ),
        }
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_that_hangs_or_fails_is_a_fact() {
        let (_never, forever) = mpsc::channel::<Vec<Fact>>();
        let hangs: Probe = ("hangs".into(), Box::new(move || forever.recv().unwrap_or_default()));
        let fails: Probe = ("fails".into(), Box::new(|| panic!("as the test wants")));
        let works: Probe = ("works".into(), Box::new(|| vec![Fact::ok("works", "2")]));
        let mut facts = answers(vec![hangs], Duration::from_millis(1));
        facts.extend(answers(vec![fails, works], Duration::from_secs(300)));
        let found: Vec<_> = facts.iter().map(|fact| (fact.subject.as_str(), fact.state)).collect();
        let expected = [("hangs", State::Broken), ("fails", State::Broken), ("works", State::Ok)];
        assert_eq!(found, expected);
    }
}
