//! A job in one process and in virtual time, whose processes run the join and the agreement themselves. They
//! are threads, of which one runs at a time. Processes crash at any point, are slow, are interrupted,
//! give up and are replaced; the store answers late, and carries out requests of the dead; notices
//! of ends come late. A seed decides everything, so a run that fails can be repeated, and says what
//! happens: `SIMULATION_SEED=n`.

mod checks;
mod cluster;
mod faults;
mod join;
mod process;
mod runtime;

use std::sync::{Arc, Mutex};

use cluster::Cluster;
use fastrand::Rng;
use faults::Faults;
use process::{SimulatedProcess, lock};

/// What is left of a job.
struct Outcome {
    processes: usize,
    epochs: u64,
    errors: usize,
}

fn simulate(seed: u64, is_verbose: bool) -> Result<Outcome, String> {
    let mut random = Rng::with_seed(seed);
    let faults = Faults::random(&mut random);
    let cluster = Arc::new(Mutex::new(Cluster::new(random, faults, is_verbose)));
    SimulatedProcess::start_job(&cluster);
    while let Some(thread) = { lock(&cluster).threads.pop() } {
        thread.join().map_err(|_| "a process has panicked".to_owned())?;
    }
    let cluster = lock(&cluster);
    match &cluster.failure {
        Some(failure) => Err(format!("at {:?}: {failure}", cluster.now)),
        None => Ok(Outcome {
            processes: cluster.living().len(),
            epochs: cluster.epochs(),
            errors: cluster.errors,
        }),
    }
}

#[test]
fn members_agree_and_nobody_waits_in_vain() {
    let chosen = std::env::var("SIMULATION_SEED").ok();
    let seeds: Vec<u64> = match &chosen {
        Some(seed) => vec![seed.parse().expect("SIMULATION_SEED is a number")],
        None => (0..1000).collect(),
    };
    let mut jobs = 0;
    let mut epochs = 0;
    let mut errors = 0;
    for seed in &seeds {
        let outcome = simulate(*seed, chosen.is_some())
            .unwrap_or_else(|failure| panic!("SIMULATION_SEED={seed}: {failure}"));
        jobs += (outcome.processes > 0) as usize;
        epochs += outcome.epochs;
        errors += outcome.errors;
    }
    println!("{jobs} of {} jobs went on, in {epochs} epochs, with {errors} errors", seeds.len());
    if chosen.is_none() {
        assert!(jobs > seeds.len() / 2 && epochs > 2 * jobs as u64, "the faults are too hard");
    }
}
