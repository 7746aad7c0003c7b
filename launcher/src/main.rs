//! `flow-launch`: starts the workers of a job, passes on their output, and stops them all when one
//! fails.
//!
//! | file | subject |
//! |---|---|
//! | `args.rs`, `args/` | command line and environment -> [`job::Job`] (pure) |
//! | `find.rs` | PROGRAM -> the command to run |
//! | `plan.rs` | job and placement -> each worker's rank, command and environment (pure) |
//! | `numa.rs` | the CPUs of each worker |
//! | `dry_run.rs` | what would be started (pure) |
//! | `machine.rs`, `address.rs` | what this machine has, and where others reach it |
//! | `coordinator.rs` | who takes part, when a round starts and stops, how the job ends (pure) |
//! | `link.rs`, `leader.rs`, `member.rs` | how the nodes' agents and the coordinator hear of each other |
//! | `hang.rs` | who waits for whom (pure) |
//! | `timers.rs`, `watchdog.rs` | torchelastic's timers (pure), the pipe they come through and whom they kill |
//! | `health.rs` | torchelastic's health check |
//! | `worker.rs` | starting, signalling and reaping one worker |
//! | `guard.rs` | the process that cleans up after a round that was stopped, and when the launcher is killed |
//! | `policy.rs` | when to stop whom, and which failure is the root cause (pure) |
//! | `supervise.rs`, `crew.rs`, `signals.rs` | the event loop, this node's workers, signals |
//! | `wait.rs` | waiting for one of several things |
//! | `hosts.rs` | hosts -> what is started on each (pure) |
//! | `remote.rs`, `leash.rs` | `--hosts`: starting the agents of all hosts; how they hang on whoever has started them |
//! | `output.rs`, `sink.rs` | lines: assembling them (pure), writing them |
//! | `screen.rs` | lines of a terminal that are not complete: prompts, progress bars (pure) |
//! | `pty.rs`, `terminal.rs` | a terminal for rank 0, the user's terminal |
//! | `route.rs`, `copies.rs` | which way a stream of a worker goes (pure), copying it there |
//! | `logs.rs` | the files of streams and errors |
//! | `error_file.rs` | what a worker recorded of its error |
//! | `report.rs` | what is said about a failure (pure) |
//! | `events.rs` | what has happened, for programs |

mod address;
mod args;
mod coordinator;
mod copies;
mod crew;
mod dry_run;
mod error_file;
mod events;
mod find;
mod guard;
mod hang;
mod health;
mod hosts;
mod job;
mod leader;
mod leash;
mod link;
mod logs;
mod machine;
mod member;
mod numa;
mod output;
mod plan;
mod policy;
mod pty;
mod remote;
mod report;
mod round;
mod route;
mod screen;
mod signals;
mod sink;
mod supervise;
mod terminal;
mod timers;
mod wait;
mod watchdog;
mod worker;

use std::ffi::OsString;
use std::io::{stderr, Write};
use std::process::ExitCode;

use args::Usage;
use job::{Job, Meeting};
use supervise::Supervisor;

/// Exit code for a command line that makes no sense.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    match arguments.get(1).and_then(|first| first.to_str()) {
        Some(worker::HIDDEN_FLAG) => return worker::exec(arguments.into_iter().skip(2)),
        Some(guard::HIDDEN_FLAG) => return guard::main(arguments.into_iter().skip(2)),
        Some(leash::REMOTE_SHELL_FLAG) => {
            return leash::exec_remote_shell(arguments.into_iter().skip(2))
        }
        Some(leash::HIDDEN_FLAG) => {
            arguments.remove(1);
            if let Err(error) = leash::take() {
                eprintln!("flow-launch: {error:#}");
                return ExitCode::FAILURE;
            }
        }
        _ => {}
    }
    env_logger::Builder::from_env(env_logger::Env::new().filter_or("FLOW_LOG", "warn")).init();
    let environment = |name: &str| std::env::var_os(name);
    let job = Job::parse(arguments, &environment);
    // A worker may be a launcher, whose events are others.
    std::env::remove_var(events::VARIABLE);
    match job.map_err(anyhow::Error::from).and_then(run) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("flow-launch: {error:#}");
            ExitCode::from(if error.is::<Usage>() { USAGE } else { 1 })
        }
    }
}

/// Runs a job to its end and returns the exit code to end with.
fn run(mut job: Job) -> anyhow::Result<u8> {
    if job.quiet {
        log::set_max_level(log::max_level().min(log::LevelFilter::Error));
    }
    if let Some(hosts) = job.hosts.take() {
        return remote::run(&job, &hosts);
    }
    for warning in job.warnings.iter().filter(|_| !job.quiet) {
        let _ = writeln!(stderr(), "flow-launch: {warning}");
    }
    let mut machine = machine::Machine::this();
    let local_world_size = plan::local_world_size(&job, &machine)?;
    if let Some(binding) = job.numa_binding {
        let topology = numa::Topology::this(machine.visible_devices())?;
        machine.binding = numa::bind(binding, local_world_size as usize, &topology)?;
    }
    let command = find::command(&job.program)?;
    if job.dry_run {
        std::io::stdout()
            .write_all(dry_run::describe(&job, local_world_size, &command, &machine).as_bytes())?;
        return Ok(0);
    }
    // One node's job is its own: programs name things by its id.
    if matches!(job.nodes.meeting, Meeting::Alone { .. }) && job.nodes.id == args::NO_ID {
        job.nodes.id = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim_end().into();
    }
    Supervisor::start(job, machine, command)?.run()
}
