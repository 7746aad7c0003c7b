//! `flow-launch`: starts the workers of a job, passes on their output, and stops them all when one fails.
//!
//! | file | subject |
//! |---|---|
//! | `args.rs` | command line -> [`args::Job`] |
//! | `find.rs` | PROGRAM -> the command to run |
//! | `plan.rs` | job -> each worker's rank, command and environment (pure) |
//! | `rendezvous.rs` | the store and the ports the workers meet at |
//! | `worker.rs` | starting, signalling and reaping one worker |
//! | `guard.rs` | the process that cleans up when the launcher is killed |
//! | `policy.rs` | when to stop whom, and which failure is the root cause (pure) |
//! | `supervise.rs` | the event loop |
//! | `output.rs`, `sink.rs` | lines: assembling them (pure), writing them |
//! | `report.rs` | what is said about a failure (pure) |

mod address;
mod args;
mod coordinator;
mod crew;
mod find;
mod guard;
mod hang;
mod job;
mod leader;
mod link;
mod machine;
mod member;
mod output;
mod plan;
mod policy;
mod report;
mod round;
mod signals;
mod sink;
mod supervise;
mod worker;

use std::process::ExitCode;

use args::Usage;
use job::Job;
use supervise::Supervisor;

/// Exit code for a command line that makes no sense.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    match arguments.nth(1).as_deref().and_then(|first| first.to_str()) {
        Some(worker::HIDDEN_FLAG) => return worker::exec(arguments),
        Some(guard::HIDDEN_FLAG) => return guard::main(arguments.next()),
        _ => {}
    }
    env_logger::Builder::from_env(env_logger::Env::new().filter("FLOW_LOG")).init();
    match Job::parse(std::env::args_os()).map_err(anyhow::Error::from).and_then(run) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("flow-launch: {error:#}");
            ExitCode::from(if error.is::<Usage>() { USAGE } else { 1 })
        }
    }
}

/// Runs a job to its end and returns the exit code to end with.
fn run(job: Job) -> anyhow::Result<u8> {
    let machine = machine::Machine::this();
    let command = find::command(&job.program)?;
    Supervisor::start(job, machine, command)?.run()
}
