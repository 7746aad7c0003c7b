//! From a job to its workers: pure functions.

use std::ffi::OsString;

use crate::args::{Job, Processes, Usage};
use crate::machine::Machine;

/// One worker: what to run and in which environment (added to the launcher's own).
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerSpec {
    pub rank: u32,
    pub local_rank: u32,
    pub command: Vec<OsString>,
    pub environment: Vec<(&'static str, String)>,
}

/// Where the workers find each other.
#[derive(Clone, Debug)]
pub struct MeetingPoint {
    pub master_addr: String,
    pub master_port: u16,
    /// Address and token of the launcher's store, where it has one.
    pub store: Option<(String, String)>,
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
    match size.checked_mul(job.nodes) {
        Some(_) => Ok(size),
        None => Err(Usage(format!("--nnodes {} times --nproc_per_node {size} is too many workers", job.nodes))),
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

/// The workers of this node, in rank order.
pub fn workers(
    job: &Job,
    local_world_size: u32,
    command: &[OsString],
    omp_threads: Option<u32>,
    meeting_point: &MeetingPoint,
) -> Vec<WorkerSpec> {
    let worker = |local_rank: u32| {
        let rank = job.node_rank * local_world_size + local_rank;
        let mut environment = vec![
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("WORLD_SIZE", (job.nodes * local_world_size).to_string()),
            ("LOCAL_WORLD_SIZE", local_world_size.to_string()),
            ("GROUP_RANK", job.node_rank.to_string()),
            ("NODE_RANK", job.node_rank.to_string()),
            ("MASTER_ADDR", meeting_point.master_addr.clone()),
            ("MASTER_PORT", meeting_point.master_port.to_string()),
        ];
        environment.extend(omp_threads.map(|threads| ("OMP_NUM_THREADS", threads.to_string())));
        if let Some((address, token)) = &meeting_point.store {
            environment.extend([("FLOW_STORE", address.clone()), ("FLOW_TOKEN", token.clone())]);
        }
        WorkerSpec { rank, local_rank, command: command.to_vec(), environment }
    };
    (0..local_world_size).map(worker).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn job(line: &str) -> Job {
        Job::parse(line.split(' ').map(OsString::from)).unwrap()
    }

    fn machine(cores: u32, gpus: u32) -> Machine {
        Machine { cores, gpus, omp_is_set: false }
    }

    fn meeting_point() -> MeetingPoint {
        MeetingPoint { master_addr: "node0".into(), master_port: 29500, store: None }
    }

    fn get<'a>(worker: &'a WorkerSpec, name: &str) -> Option<&'a str> {
        worker.environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str())
    }

    #[test]
    fn words_for_the_number_of_workers() {
        let size = |word: &str, cores, gpus| {
            local_world_size(&job(&format!("f --nproc_per_node {word} p")), &machine(cores, gpus))
        };
        assert_eq!(size("cpu", 6, 2).unwrap(), 6);
        assert_eq!(size("gpu", 6, 2).unwrap(), 2);
        assert_eq!(size("auto", 6, 2).unwrap(), 2);
        assert_eq!(size("auto", 6, 0).unwrap(), 6);
        assert!(size("gpu", 6, 0).unwrap_err().0.contains("no GPU"));
        let large = job("f --nnodes 70000 --nproc_per_node 70000 --master_addr a --master_port 1 p");
        assert!(local_world_size(&large, &machine(1, 0)).unwrap_err().0.contains("too many"));
    }

    #[test]
    fn omp_threads_are_a_share_of_the_cores() {
        assert_eq!(omp_threads(2, &machine(8, 0)), Some(4));
        assert_eq!(omp_threads(3, &machine(8, 0)), Some(2));
        assert_eq!(omp_threads(16, &machine(2, 0)), Some(1));
        assert_eq!(omp_threads(2, &Machine { cores: 8, gpus: 0, omp_is_set: true }), None);
        assert_eq!(omp_note(8, 1, &machine(8, 0)), None);
        assert!(omp_note(4, 2, &machine(8, 0)).unwrap().contains("OMP_NUM_THREADS=4"));
    }

    #[test]
    fn the_store_is_named_where_there_is_one() {
        let store = Some(("tcp://127.0.0.1:9".to_string(), "abc".to_string()));
        let with = workers(&job("f p"), 1, &[], None, &MeetingPoint { store, ..meeting_point() });
        assert_eq!(get(&with[0], "FLOW_STORE"), Some("tcp://127.0.0.1:9"));
        assert_eq!(get(&with[0], "FLOW_TOKEN"), Some("abc"));
        let without = workers(&job("f p"), 1, &[], None, &meeting_point());
        assert_eq!(get(&without[0], "FLOW_STORE"), None);
    }

    proptest! {
        #[test]
        fn ranks_of_all_nodes_are_each_number_once(nodes in 1u32..5, size in 1u32..9) {
            let mut ranks = BTreeSet::new();
            for node in 0..nodes {
                let job = job(&format!("f --nnodes {nodes} --node_rank {node} --master_addr a --master_port 1 p"));
                for (local, worker) in workers(&job, size, &["p".into()], Some(1), &meeting_point()).iter().enumerate() {
                    prop_assert_eq!(worker.local_rank as usize, local);
                    let number = |name| get(worker, name).and_then(|value| value.parse::<u32>().ok());
                    prop_assert_eq!(number("RANK"), Some(worker.rank));
                    prop_assert_eq!(number("WORLD_SIZE"), Some(nodes * size));
                    prop_assert_eq!(get(worker, "NODE_RANK"), get(worker, "GROUP_RANK"));
                    prop_assert!(ranks.insert(worker.rank));
                }
            }
            prop_assert_eq!(ranks, (0..nodes * size).collect());
        }
    }
}
