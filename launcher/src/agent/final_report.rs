//! The report that an agent prints at the end of a job.

use std::path::PathBuf;

use crate::agent::worker_group::WorkerGroup;
use crate::control::job_record::JobResult;
use crate::output::sink::Sinks;
use crate::report::error_file;
use crate::report::failure;

/// Prints why the job failed and how the other workers of this node ended. `group` is the last
/// round's; `signalled` is the signal that flow-launch received, if any.
pub fn print(
    result: &JobResult,
    group: Option<&WorkerGroup>,
    signalled: Option<i32>,
    host: &str,
    sinks: &mut Sinks,
) {
    let cause = result.cause.as_ref().filter(|cause| !cause.is_empty());
    if let Some(cause) = cause {
        sinks.say(cause);
    }
    let complete = group.filter(|group| group.shortfall.is_none());
    let outcomes = complete.map(WorkerGroup::outcomes).unwrap_or_default();
    let failed = group.and_then(WorkerGroup::first_failure).map(|(first, _)| first);
    let message = match signalled {
        Some(signal) if failed.is_none() => failure::killed_after_grace(&outcomes, signal),
        _ if result.code != 0 && cause.is_some() => failure::others(&outcomes, failed, host),
        _ => None,
    };
    if let Some(message) = message {
        sinks.say(&message);
    }
    if result.code != 0 {
        export_error(group, sinks);
    }
}

/// If flow-launch is itself a worker: copies the error that a worker recorded to flow-launch's own
/// error file.
fn export_error(group: Option<&WorkerGroup>, sinks: &mut Sinks) {
    let path = std::env::var_os(error_file::VARIABLE).filter(|path| !path.is_empty());
    let recorded = group.and_then(WorkerGroup::first_error);
    if let Some((path, (error, end))) = path.map(PathBuf::from).zip(recorded)
        && let Err(error) = error.copy(&path, end)
    {
        sinks.say(&format!("cannot write to {}: {error}", path.display()));
    }
}
