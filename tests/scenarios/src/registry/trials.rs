//! The tests of a worker program: each scenario in each of its jobs.

use std::process::{Command, ExitCode};
use std::sync::LazyLock;

use libtest_mimic::{Arguments, Trial};

use super::job::Job;
use super::scenario::File;
use super::test::Test;
use crate::fakes::fake_cuda_is_found;

/// Runs the tests that the arguments after `--test` choose. A scenario that shares its job is also a
/// test of its own, which `--ignored` runs.
pub(super) fn run(files: &'static [File]) -> ExitCode {
    let arguments = Arguments::from_iter(std::env::args().skip(1));
    let mut trials = Vec::new();
    for (file, scenarios) in files {
        for scenario in *scenarios {
            for job in scenario.jobs.iter().filter(|job| can_run(job)) {
                let name = format!("{file}::{}", scenario.name);
                let check = scenario.check.unwrap_or(Test::passes);
                let title = format!("{name} ({})", job.title());
                let shares = scenario.shares(job);
                trials.push(trial(title, name, job, check).with_ignored_flag(shares));
                let shared = job.name_in(file);
                if shares && !trials.iter().any(|trial: &Trial| trial.name() == shared) {
                    trials.push(trial(shared.clone(), shared, job, Test::passes));
                }
            }
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(title: String, name: String, job: &'static Job, check: fn(&Test)) -> Trial {
    Trial::test(title, move || {
        let folder = tempfile::tempdir().expect("a folder of its own");
        check(&Test { name, job, folder });
        Ok(())
    })
}

/// Whether this program and this machine can start such a job.
fn can_run(job: &Job) -> bool {
    static HAS_MPIRUN: LazyLock<bool> = LazyLock::new(has_mpirun);
    job.is_of_this_program()
        && (!job.fake_cuda || fake_cuda_is_found())
        && (!cfg!(feature = "mpi") || *HAS_MPIRUN)
}

/// Whether there is an mpirun; if not, says so.
fn has_mpirun() -> bool {
    let has = Command::new("mpirun").arg("--version").output().is_ok();
    if !has {
        println!(
            "SKIPPED: groups over MPI: there is no mpirun (Debian, Ubuntu: apt-get install \
             openmpi-bin)"
        );
    }
    has
}
