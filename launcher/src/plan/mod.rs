//! The workers of a job: pure functions.

pub mod dry_run;
pub mod host;
pub mod numa;
pub mod program;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cli::usage::Usage;
use crate::control::assignment::RankAssignment;
use crate::job::{Job, Processes, Stdin};
use crate::plan::host::LocalHost;
use crate::signal;

/// The most workers on one node.
const MOST_WORKERS: u32 = 1 << 16;

/// A wait in a collective longer than this is reported.
const REPORT_STALLS: Duration = Duration::from_secs(30);

/// One worker: what to run and in which environment (added to the launcher's own).
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerSpec {
    pub rank: u32,
    pub local_rank: u32,
    /// The number of workers that had its place before it in the round.
    pub replacement: u32,
    pub command: Vec<OsString>,
    pub environment: Vec<(&'static str, OsString)>,
    /// The CPUs it is bound to, if any.
    pub cores: Option<Vec<usize>>,
    /// It reads flow-launch's standard input.
    pub has_input: bool,
    /// It writes to the terminal as the program before the user.
    pub is_foreground: bool,
}

/// Returns the number of workers on this node.
pub fn local_world_size(job: &Job, host: &LocalHost) -> Result<u32, Usage> {
    let size = match job.processes {
        Processes::Count(count) => count,
        Processes::Cpu => host.cores,
        Processes::Auto if host.gpus == 0 => host.cores,
        Processes::Auto => host.gpus,
        Processes::Gpu if host.gpus == 0 => {
            return Err(Usage(
                "--nproc-per-node is 'gpu' but no GPU is visible here; use cpu or a number".into(),
            ));
        }
        Processes::Gpu => host.gpus,
    };
    if size > MOST_WORKERS {
        return Err(Usage(format!(
            "--nproc-per-node is {size}; it must be at most {MOST_WORKERS}"
        )));
    }
    let nodes = job.nodes.max;
    if size.checked_mul(nodes).is_none() {
        return Err(Usage(format!(
            "--nnodes {nodes} times --nproc-per-node {size} is too many workers"
        )));
    }
    if let (Some(Stdin::Rank(rank)), 1) = (job.stdin, nodes)
        && rank >= size
    {
        return Err(Usage(format!(
            "--stdin is '{rank}'; it must be all, none or a rank below {size}"
        )));
    }
    let visible = host.visible_devices().map(|list| list.split(',').count());
    match visible.filter(|visible| job.virtual_local_rank && *visible < size as usize) {
        Some(visible) => Err(Usage(format!(
            "--virtual-local-rank needs a GPU for each of {size} workers, but \
             CUDA_VISIBLE_DEVICES names {visible}"
        ))),
        None => Ok(size),
    }
}

/// Returns which workers read flow-launch's standard input. The default is all for Python programs,
/// as with torchrun, and rank 0 for others, as with mpirun.
pub fn stdin(job: &Job) -> Stdin {
    let default = if program::is_python(&job.program) { Stdin::All } else { Stdin::Rank(0) };
    job.stdin.unwrap_or(default)
}

/// Returns OMP_NUM_THREADS for each of several workers: its share of the cores, or of those it is
/// bound to. None if the user has set it. A single worker has all cores, as it would without
/// flow-launch.
pub fn omp_threads(local_world_size: u32, host: &LocalHost) -> Option<u32> {
    let share = host.cores / local_world_size;
    let bound = host.binding.iter().map(|cpus| cpus.len() as u32).min();
    let is_chosen = local_world_size > 1 && !host.has_variable("OMP_NUM_THREADS");
    is_chosen.then(|| bound.map_or(share, |bound| share.min(bound)).max(1))
}

/// Returns the notice about [`omp_threads`].
pub fn omp_note(threads: u32, local_world_size: u32, host: &LocalHost) -> String {
    let cores = host.cores;
    format!(
        "OMP_NUM_THREADS={threads} for each of {local_world_size} workers on {cores} cores; set \
         it to change this"
    )
}

/// Makes the workers of this node, in rank order. `error_file` is the path for each one's error, by
/// local rank.
pub fn workers(
    job: &Job,
    assignment: &RankAssignment,
    command: &[OsString],
    host: &LocalHost,
    error_file: impl Fn(u32) -> Option<PathBuf>,
) -> Vec<WorkerSpec> {
    let stdin = stdin(job);
    let mut workers = Vec::with_capacity(assignment.local_world_size as usize);
    for local_rank in 0..assignment.local_world_size {
        let rank = assignment.first_rank + local_rank;
        workers.push(WorkerSpec {
            rank,
            local_rank,
            replacement: replacement(assignment, local_rank),
            command: command.iter().map(|word| substitute(word, local_rank)).collect(),
            environment: environment(job, assignment, host, local_rank, error_file(local_rank)),
            cores: host.binding.get(local_rank as usize).cloned(),
            has_input: stdin.is_for(rank),
            is_foreground: stdin.foreground() == rank,
        });
    }
    workers
}

/// Returns for which time the rank of this worker is started again alone.
fn replacement(assignment: &RankAssignment, local_rank: u32) -> u32 {
    assignment.replacements.get(local_rank as usize).copied().unwrap_or_default()
}

/// Makes the environment of a worker: torchrun's variables, and those of Flow.
fn environment(
    job: &Job,
    assignment: &RankAssignment,
    host: &LocalHost,
    local_rank: u32,
    error_file: Option<PathBuf>,
) -> Vec<(&'static str, OsString)> {
    let numbers = [
        ("RANK", assignment.first_rank + local_rank),
        ("LOCAL_RANK", if job.virtual_local_rank { 0 } else { local_rank }),
        ("GROUP_RANK", assignment.group_rank),
        ("NODE_RANK", assignment.group_rank),
        ("ROLE_RANK", assignment.first_role_rank + local_rank),
        ("LOCAL_WORLD_SIZE", assignment.local_world_size),
        ("WORLD_SIZE", assignment.world_size),
        ("GROUP_WORLD_SIZE", assignment.group_world_size),
        ("ROLE_WORLD_SIZE", assignment.role_world_size),
        ("MASTER_PORT", assignment.stores.master_port.into()),
        ("TORCHELASTIC_RESTART_COUNT", assignment.restart_count),
        ("TORCHELASTIC_MAX_RESTARTS", job.max_restarts),
        ("FLOW_REPLACEMENT", replacement(assignment, local_rank)),
    ];
    let signals: Vec<_> = job.signals.iter().map(|signal| signal::name(signal.as_raw())).collect();
    let stores = &assignment.stores;
    let texts = [
        ("ROLE_NAME", job.role.as_str()),
        ("MASTER_ADDR", &stores.master_addr),
        ("TORCHELASTIC_RUN_ID", &job.nodes.id),
        // PyTorch compares with this word.
        ("TORCHELASTIC_USE_AGENT_STORE", if stores.has_agent_store { "True" } else { "False" }),
        ("TORCHELASTIC_SIGNALS_TO_HANDLE", &signals.join(",")),
        ("FLOW_STORE", &stores.store),
        ("FLOW_TOKEN", &stores.token),
    ];
    let mut environment: Vec<(&str, OsString)> =
        numbers.into_iter().map(|(name, number)| (name, number.to_string().into())).collect();
    environment.extend(texts.map(|(name, text)| (name, text.into())));
    // Empty if there is none, so that a worker does not use the file of a launcher around this one.
    environment.push(("TORCHELASTIC_ERROR_FILE", error_file.unwrap_or_default().into()));
    if !host.has_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING") {
        environment.push(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1".into()));
    }
    let report_stalls =
        job.hang_timeout.map_or(REPORT_STALLS, |limit| REPORT_STALLS.min(limit / 2));
    environment.push(("FLOW_REPORT_STALLS", report_stalls.as_secs_f64().to_string().into()));
    if let Some(threads) = omp_threads(assignment.local_world_size, host) {
        environment.push(("OMP_NUM_THREADS", threads.to_string().into()));
    }
    if job.virtual_local_rank {
        let device =
            host.visible_devices().and_then(|list| list.split(',').nth(local_rank as usize));
        let device = device.map_or_else(|| local_rank.to_string(), |device| device.trim().into());
        environment.push(("CUDA_VISIBLE_DEVICES", device.into()));
    }
    if let Some(folder) = job.output.log_dir.as_deref().filter(|_| job.output.oneflow_names) {
        environment.push(("GLOG_log_dir", oneflow_folder(folder, local_rank).into()));
    }
    environment
}

/// Returns a worker's folder for files, by OneFlow's names.
fn oneflow_folder(log_dir: &Path, local_rank: u32) -> PathBuf {
    log_dir.join(format!("local_rank_{local_rank}"))
}

/// Replaces torchrun's `${local_rank}` in a command.
fn substitute(word: &OsStr, local_rank: u32) -> OsString {
    const MACRO: &[u8] = b"${local_rank}";
    let mut rest = word.as_bytes();
    let mut done = Vec::with_capacity(rest.len());
    while let Some(at) = rest.windows(MACRO.len()).position(|window| window == MACRO) {
        done.extend_from_slice(&rest[..at]);
        done.extend_from_slice(local_rank.to_string().as_bytes());
        rest = &rest[at + MACRO.len()..];
    }
    done.extend_from_slice(rest);
    OsString::from_vec(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::assignment::RendezvousStoreInfo;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn job(line: &str) -> Job {
        Job::parse(line.split(' ').map(OsString::from), &|_| None).unwrap()
    }

    fn host(cores: u32, gpus: u32) -> LocalHost {
        LocalHost { cores, gpus, ..LocalHost::default() }
    }

    fn with_variable(host: LocalHost, name: &str, value: &str) -> LocalHost {
        LocalHost { environment: HashMap::from([(name.into(), value.into())]), ..host }
    }

    /// Returns the second of three nodes, whose first has 5 workers.
    fn assignment() -> RankAssignment {
        RankAssignment {
            restart_count: 1,
            group_rank: 1,
            group_world_size: 3,
            first_rank: 5,
            local_world_size: 2,
            world_size: 8,
            replacements: vec![0, 3],
            first_role_rank: 3,
            role_world_size: 6,
            stores: RendezvousStoreInfo {
                master_addr: "node0".into(),
                master_port: 29500,
                has_agent_store: true,
                store: "tcp://node0:9".into(),
                token: "abc".into(),
            },
        }
    }

    fn planned(line: &str, command: &[&str], host: &LocalHost) -> Vec<WorkerSpec> {
        let command: Vec<_> = command.iter().map(OsString::from).collect();
        workers(&job(line), &assignment(), &command, host, |local| {
            Some(format!("/logs/{local}").into())
        })
    }

    fn get<'a>(worker: &'a WorkerSpec, name: &str) -> Option<&'a str> {
        worker
            .environment
            .iter()
            .find(|(key, _)| *key == name)
            .and_then(|(_, value)| value.to_str())
    }

    #[test]
    fn words_for_the_number_of_workers() {
        let size = |word: &str, cores, gpus| {
            local_world_size(&job(&format!("f --nproc_per_node {word} p")), &host(cores, gpus))
        };
        assert_eq!(size("cpu", 6, 2).unwrap(), 6);
        assert_eq!(size("gpu", 6, 2).unwrap(), 2);
        assert_eq!(size("auto", 6, 2).unwrap(), 2);
        assert_eq!(size("auto", 6, 0).unwrap(), 6);
        assert!(size("gpu", 6, 0).unwrap_err().0.contains("no GPU"));
        let large =
            job("f --nnodes 80000 --nproc_per_node 60000 --master_addr a --master_port 1 p");
        assert!(local_world_size(&large, &host(1, 0)).unwrap_err().0.contains("too many"));
    }

    #[test]
    fn the_input_is_for_all_pythons_or_for_rank_0() {
        let readers = |line: &str| {
            let first = RankAssignment { first_rank: 0, ..assignment() };
            let workers = workers(&job(line), &first, &[], &host(1, 0), |_| None);
            workers
                .iter()
                .map(|worker| (worker.has_input, worker.is_foreground))
                .collect::<Vec<_>>()
        };
        let (both, first, second) =
            ([(true, true), (true, false)], [(true, true), (false, false)], (true, true));
        for line in ["f train.py", "f -m train", "f --run-path train", "f --stdin all train"] {
            assert_eq!(readers(line), both, "{line}");
        }
        for line in ["f train", "f --no-python train.py", "f --stdin 0 train.py"] {
            assert_eq!(readers(line), first, "{line}");
        }
        assert_eq!(readers("f --stdin 1 train.py"), [(false, false), second]);
        assert_eq!(readers("f --stdin none train"), [(false, true), (false, false)]);
        let line = "f --nproc_per_node 2 --stdin 2 train";
        assert!(
            local_world_size(&job(line), &host(1, 0)).unwrap_err().0.contains("a rank below 2")
        );
    }

    #[test]
    fn omp_threads_are_a_share_of_the_cores() {
        assert_eq!(omp_threads(2, &host(8, 0)), Some(4));
        assert_eq!(omp_threads(3, &host(8, 0)), Some(2));
        assert_eq!(omp_threads(16, &host(2, 0)), Some(1));
        assert_eq!(omp_threads(2, &with_variable(host(8, 0), "OMP_NUM_THREADS", "3")), None);
        let bound = LocalHost { binding: vec![vec![0, 1], vec![2]], ..host(8, 0) };
        assert_eq!(omp_threads(2, &bound), Some(1));
        assert_eq!(omp_threads(1, &host(8, 0)), None);
        assert!(omp_note(4, 2, &host(8, 0)).contains("OMP_NUM_THREADS=4"));
    }

    #[test]
    fn the_whole_environment() {
        let workers =
            planned("f --max-restarts 4 --role actor --rdzv-id job7 p", &["p"], &host(8, 0));
        let mut found: Vec<_> = workers[1]
            .environment
            .iter()
            .map(|(name, value)| (*name, value.to_str().unwrap()))
            .collect();
        found.sort_unstable();
        let expected = [
            ("FLOW_REPLACEMENT", "3"),
            ("FLOW_REPORT_STALLS", "30"),
            ("FLOW_STORE", "tcp://node0:9"),
            ("FLOW_TOKEN", "abc"),
            ("GROUP_RANK", "1"),
            ("GROUP_WORLD_SIZE", "3"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "29500"),
            ("NODE_RANK", "1"),
            ("OMP_NUM_THREADS", "4"),
            ("RANK", "6"),
            ("ROLE_NAME", "actor"),
            ("ROLE_RANK", "4"),
            ("ROLE_WORLD_SIZE", "6"),
            ("TORCHELASTIC_ERROR_FILE", "/logs/1"),
            ("TORCHELASTIC_MAX_RESTARTS", "4"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("TORCHELASTIC_RUN_ID", "job7"),
            ("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("WORLD_SIZE", "8"),
        ];
        assert_eq!(found, expected);
        assert_eq!((workers[1].rank, workers[1].local_rank, &workers[1].cores), (6, 1, &None));
    }

    #[test]
    fn what_the_user_has_set_is_left_alone() {
        let name = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
        let workers = planned("f p", &["p"], &with_variable(host(8, 0), name, "0"));
        assert_eq!(get(&workers[0], name), None);
        let specs = super::workers(&job("f p"), &assignment(), &[], &host(1, 0), |_| None);
        assert_eq!(get(&specs[0], "TORCHELASTIC_ERROR_FILE"), Some(""));
    }

    #[test]
    fn virtual_local_ranks() {
        let gpus = with_variable(host(8, 3), "CUDA_VISIBLE_DEVICES", "4, 2,GPU-a");
        for (host, device) in [(&gpus, "2"), (&host(8, 3), "1")] {
            let worker = &planned("f --virtual-local-rank p", &["${local_rank}"], host)[1];
            assert_eq!(
                (get(worker, "LOCAL_RANK"), get(worker, "CUDA_VISIBLE_DEVICES")),
                (Some("0"), Some(device))
            );
            assert_eq!((worker.local_rank, worker.command[0].to_str()), (1, Some("1")));
        }
        let size = |count| {
            local_world_size(
                &job(&format!("f --virtual-local-rank --nproc_per_node {count} p")),
                &gpus,
            )
        };
        assert_eq!(size(3).unwrap(), 3);
        assert!(size(4).unwrap_err().0.contains("CUDA_VISIBLE_DEVICES"));
    }

    #[test]
    fn workers_get_oneflows_log_folder() {
        let worker =
            &planned("f --logdir /x --redirect_stdout_and_stderr p", &["p"], &host(1, 0))[1];
        assert_eq!(get(worker, "GLOG_log_dir"), Some("/x/local_rank_1"));
    }

    #[test]
    fn local_rank_is_put_into_the_command() {
        let command = [
            "p",
            "--out=${local_rank}/${local_rank}.log",
            "${rank}",
            "$local_rank",
            "$$",
            "${local_rank",
        ];
        let worker = &planned("f p", &command, &host(1, 0))[1];
        assert_eq!(
            worker.command,
            ["p", "--out=1/1.log", "${rank}", "$local_rank", "$$", "${local_rank"]
        );
        let odd = OsString::from_vec(b"\xff${local_rank}\xfe".to_vec());
        assert_eq!(substitute(&odd, 12).as_bytes(), b"\xff12\xfe");
    }

    #[test]
    fn workers_are_bound_as_planned() {
        let host = LocalHost { binding: vec![vec![0, 1], vec![2, 3]], ..host(4, 0) };
        let cores: Vec<_> =
            planned("f p", &["p"], &host).into_iter().map(|worker| worker.cores).collect();
        assert_eq!(cores, [Some(vec![0, 1]), Some(vec![2, 3])]);
    }

    proptest! {
        #[test]
        fn ranks_follow_the_first(first_rank in 0u32..1000, local_world_size in 1u32..9) {
            let assignment = RankAssignment { first_rank, local_world_size, ..assignment() };
            let workers = workers(&job("f p"), &assignment, &[], &host(1, 0), |_| None);
            for (local, worker) in workers.iter().enumerate() {
                let number = |name| get(worker, name).and_then(|value| value.parse::<u32>().ok());
                prop_assert_eq!(number("RANK"), Some(first_rank + local as u32));
                let local = local as u32;
                prop_assert_eq!((worker.rank, worker.local_rank), (first_rank + local, local));
                prop_assert_eq!(get(worker, "NODE_RANK"), get(worker, "GROUP_RANK"));
            }
        }
    }
}
