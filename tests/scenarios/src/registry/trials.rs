//! The tests of a worker program: each scenario in each of its jobs.

use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Trial};

use super::job::Job;
use super::scenario::File;
use super::test::Test;
use crate::fakes::fake_cuda_is_found;

/// Runs the tests that the arguments after `--test` choose.
pub(super) fn run(files: &[File]) -> ExitCode {
    let arguments = Arguments::from_iter(std::env::args().skip(1));
    let mut tests = Vec::new();
    for (file, scenarios) in files {
        for scenario in *scenarios {
            for job in scenario.jobs.iter().filter(|job| job.is_of_this_program()) {
                tests.push((format!("{file}::{}", scenario.name), job, scenario.check));
            }
        }
    }
    if tests.iter().any(|(_, job, _)| job.fake_cuda) && !fake_cuda_is_found() {
        tests.retain(|(_, job, _)| !job.fake_cuda);
    }
    if cfg!(feature = "mpi") && !has_mpirun() {
        tests.clear();
    }
    let trial = |(name, job, check): (String, &'static Job, fn(&Test))| {
        Trial::test(format!("{name} ({})", job.title()), move || {
            let folder = tempfile::tempdir().expect("a folder of its own");
            check(&Test { name, job, folder });
            Ok(())
        })
    };
    libtest_mimic::run(&arguments, tests.into_iter().map(trial).collect()).exit_code()
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
