//! From a job to its workers: pure functions.

use std::ffi::OsString;

use crate::args::Usage;
use crate::job::{Job, Processes};
use crate::machine::Machine;
use crate::round::Placement;

/// One worker: what to run and in which environment (added to the launcher's own).
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerSpec {
    pub rank: u32,
    pub local_rank: u32,
    pub command: Vec<OsString>,
    pub environment: Vec<(&'static str, String)>,
}

/// Number of workers on this node.
pub fn local_world_size(job: &Job, machine: &Machine) -> Result<u32, Usage> {
    let size = match job.processes {
        Processes::Count(count) => count,
        Processes::Cpu => machine.cores,
        Processes::Auto if machine.gpus == 0 => machine.cores,
        Processes::Auto => machine.gpus,
        Processes::Gpu if machine.gpus == 0 => {
            return Err(Usage("--nproc_per_node is 'gpu' but no GPU is visible here; use cpu or a number".into()))
        }
        Processes::Gpu => machine.gpus,
    };
    match size.checked_mul(job.nodes.max) {
        Some(_) => Ok(size),
        None => Err(Usage(format!("--nnodes {} times --nproc_per_node {size} is too many workers", job.nodes.max))),
    }
}

/// OMP_NUM_THREADS for each worker: its share of the cores; none where the user has set it.
pub fn omp_threads(local_world_size: u32, machine: &Machine) -> Option<u32> {
    (!machine.omp_is_set).then(|| (machine.cores / local_world_size).max(1))
}

/// The line that tells the user of [`omp_threads`]; not needed for a single worker, which has all cores as it would alone.
pub fn omp_note(threads: u32, local_world_size: u32, machine: &Machine) -> Option<String> {
    let cores = machine.cores;
    (local_world_size > 1).then(|| {
        format!(
            "OMP_NUM_THREADS={threads} for each of {local_world_size} workers on {cores} cores; set it to change this"
        )
    })
}

pub fn workers(
    job: &Job,
    placement: &Placement,
    command: &[OsString],
    machine: &Machine,
    _error_file: impl Fn(u32) -> Option<std::path::PathBuf>,
) -> Vec<WorkerSpec> {
    let omp_threads = omp_threads(placement.local_world_size, machine);
    let worker = |local_rank: u32| {
        let rank = placement.first_rank + local_rank;
        let mut environment = vec![
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("WORLD_SIZE", placement.world_size.to_string()),
            ("LOCAL_WORLD_SIZE", placement.local_world_size.to_string()),
            ("GROUP_RANK", placement.group_rank.to_string()),
            ("NODE_RANK", placement.group_rank.to_string()),
            ("MASTER_ADDR", placement.master_addr.clone()),
            ("MASTER_PORT", placement.master_port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", placement.restart_count.to_string()),
            ("TORCHELASTIC_RUN_ID", job.nodes.id.clone()),
        ];
        environment.extend(omp_threads.map(|threads| ("OMP_NUM_THREADS", threads.to_string())));
        environment.extend([("FLOW_STORE", placement.store.0.clone()), ("FLOW_TOKEN", placement.store.1.clone())]);
        WorkerSpec { rank, local_rank, command: command.to_vec(), environment }
    };
    (0..placement.local_world_size).map(worker).collect()
}
