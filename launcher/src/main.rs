//! `flow-launch`: starts the workers of a job, passes on their output, and stops them all when one
//! fails.
//!
//! | file | subject |
//! |---|---|
//! | `job.rs` | what the user asked for, validated |
//! | `cli/` | command line and environment -> [`job::Job`] (pure) |
//! | `plan/` | job and ranks -> each worker's command and environment (pure); `--dry-run` |
//! | `control/` | the control plane: the coordinator (pure), the leader and its followers |
//! | `agent/` | this node's event loop: workers, signals, when to stop whom (pure), the reaper |
//! | `hosts/` | `--hosts`: starts an agent on each host by ssh |
//! | `output/` | from workers' pipes to the console and to files |
//! | `report/` | the report of a failure; `--events` |
//! | `top/` | `flow-launch top`: what a running job does |
//! | `trace/` | `--trace`, `flow-launch trace` |
//! | `doctor/` | `flow-launch doctor`: what is on this machine |
//! | `libtorch/` | libtorch of Rust programs; `flow-launch setup-libtorch` gets it |
//! | `init.rs` | process 1 of a container: reaps orphans |
//! | `signal.rs` | signals by name; signals that are blocked and read |
//! | `net.rs`, `poll.rs` | addresses of this host; waiting for several descriptors |
//!
//! The way from `argv` to the exit code:
//!
//! 1. [`main`] chooses a role, and [`run`] prepares an agent's.
//! 2. `cli/mod.rs`, `Job::parse`: the command line becomes a [`job::Job`].
//! 3. `plan/host.rs`, `plan/numa.rs`, `plan/program.rs`: this host, its CPUs, the command.
//! 4. `agent/start.rs`, `Agent::start`: opens what an agent needs.
//! 5. `agent/mod.rs`, `Agent::run`: the event loop.
//! 6. `control/mod.rs`, `ControlPlane`: events to the coordinator, commands back.
//! 7. `control/coordinator.rs`, `Coordinator`: decides that a round starts.
//! 8. `plan/mod.rs`, `workers`: the workers of this node.
//! 9. `agent/worker_group.rs`, `WorkerGroup::start`: starts them and notes their ends.
//! 10. `output/tee.rs`: their output, to the console and to files.
//! 11. `agent/stop_policy.rs`, `StopPolicy`: when to stop them, and the root cause.
//! 12. `control/coordinator.rs`: the result of the job, or another round.
//! 13. `agent/final_report.rs` and `Agent::finish`: the report and the exit code.
//!
//! docs/architecture.md has the same steps with all files.

mod agent;
mod cli;
mod control;
mod doctor;
mod hosts;
mod init;
mod job;
mod libtorch;
mod net;
mod output;
mod plan;
mod poll;
mod report;
mod signal;
mod top;
mod trace;

use std::ffi::OsString;
use std::io::{Write, stderr};
use std::process::ExitCode;

use agent::{Agent, process, reaper};
use cli::flags;
use cli::usage::Usage;
use hosts::control_stream;
use job::{Job, Rendezvous};
use output::remainder;
use plan::{dry_run, host, numa, program};

/// Exit code for a command line that cannot be carried out.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    if init::is_process_1() {
        return exit_code(init::run(&arguments));
    }
    if arguments.get(1).is_some_and(|first| first == init::HIDDEN_FLAG) {
        arguments.remove(1);
        if let Err(error) = init::leave() {
            return exit_code(Err(error));
        }
    }
    match arguments.get(1).and_then(|first| first.to_str()) {
        Some(process::HIDDEN_FLAG) => return process::exec(arguments.into_iter().skip(2)),
        Some(remainder::HIDDEN_FLAG) => return remainder::main(arguments.into_iter().skip(2)),
        Some(reaper::HIDDEN_FLAG) => return reaper::main(arguments.into_iter().skip(2)),
        Some(control_stream::REMOTE_SHELL_FLAG) => {
            return control_stream::exec_remote_shell(arguments.into_iter().skip(2));
        }
        Some(control_stream::HIDDEN_FLAG) => {
            arguments.remove(1);
            if let Err(error) = control_stream::take() {
                return exit_code(Err(error));
            }
        }
        Some(flags::DOCTOR) => return exit_code(doctor::main(&arguments[2..])),
        Some(flags::SETUP_LIBTORCH) => {
            return exit_code(libtorch::setup::main(&arguments[2..]));
        }
        Some(flags::TOP) => return exit_code(top::main(&arguments[2..])),
        Some(flags::TRACE) => return exit_code(trace::main(&arguments[2..]).map(|()| 0)),
        _ => {}
    }
    env_logger::Builder::from_env(env_logger::Env::new().filter_or("FLOW_LOG", "warn")).init();
    let job = Job::parse(arguments, &|name| std::env::var_os(name));
    exit_code(job.map_err(anyhow::Error::from).and_then(run))
}

/// Prints an error, in one line.
fn exit_code(result: anyhow::Result<u8>) -> ExitCode {
    match result {
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
        return hosts::run(&job, &hosts);
    }
    for warning in job.warnings.iter().filter(|_| !job.quiet) {
        let _ = writeln!(stderr(), "flow-launch: {warning}");
    }
    let mut local_host = host::LocalHost::this();
    let local_world_size = plan::local_world_size(&job, &local_host)?;
    if let Some(binding) = job.numa_binding {
        let topology = numa::Topology::this(local_host.visible_devices())?;
        local_host.binding = numa::bind(binding, local_world_size as usize, &topology)?;
    }
    let command = program::command(&job.program)?;
    if job.dry_run {
        std::io::stdout().write_all(
            dry_run::describe(&job, local_world_size, &command, &local_host).as_bytes(),
        )?;
        return Ok(0);
    }
    // One node's job is its own: programs name things by its id.
    if matches!(job.nodes.rendezvous, Rendezvous::Alone { .. }) && job.nodes.id == job::NO_ID {
        job.nodes.id = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim_end().into();
    }
    Agent::start(job, local_host, command)?.run()
}
