//! The text of `--dry-run`: what would be started, as far as it is known before the start.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::control::assignment::{RankAssignment, RendezvousStoreInfo};
use crate::job::NO_ID;
use crate::job::{Job, Rendezvous};
use crate::plan;
use crate::plan::host::LocalHost;
use crate::plan::numa;

/// Describes the workers of this node, each with its CPUs, its additional environment, and its
/// command as for a shell. Values that are only known later are in angle brackets.
pub fn describe(
    job: &Job,
    local_world_size: u32,
    command: &[OsString],
    host: &LocalHost,
) -> String {
    let nodes = &job.nodes;
    let place = match &nodes.rendezvous {
        Rendezvous::Alone { .. } => "one node".into(),
        Rendezvous::Static { node_rank, .. } => {
            format!(
                "node {node_rank} of {}; the ranks are right if each node has as many",
                nodes.max
            )
        }
        Rendezvous::Endpoint { host, port, .. } => {
            format!(
                "a node of {} to {}; ranks are given when they meet at {host} port {port}",
                nodes.min, nodes.max
            )
        }
    };
    let mut text = format!("workers: {local_world_size}, on {place}\n");
    let has_error_files = job.output.log_dir.as_deref() != Some(Path::new("/dev/null"));
    let error_file = |_| has_error_files.then(|| PathBuf::from("error.json"));
    for worker in plan::workers(job, &assignment(job, local_world_size), command, host, error_file)
    {
        let rank = if matches!(nodes.rendezvous, Rendezvous::Endpoint { .. }) {
            "?".into()
        } else {
            worker.rank.to_string()
        };
        let cpus = worker.cores.map_or("any".into(), |cpus| numa::list(&cpus));
        let _ = writeln!(text, "\nrank {rank}, local rank {}, CPUs {cpus}", worker.local_rank);
        let mut environment = worker.environment;
        environment.sort();
        for (name, value) in environment {
            let value = later(name, &value, job).map_or_else(|| quote(&value), String::from);
            let _ = writeln!(text, "  {name}={value}");
        }
        let words: Vec<_> = worker.command.iter().map(|word| quote(word)).collect();
        let _ = writeln!(text, "  {}", words.join(" "));
    }
    text
}

/// Returns the ranks that this node would get if all nodes had as many workers.
fn assignment(job: &Job, local_world_size: u32) -> RankAssignment {
    let (group_rank, master_addr, master_port) = match &job.nodes.rendezvous {
        Rendezvous::Alone { master_addr, master_port } => {
            (0, master_addr.clone().unwrap_or_else(|| "127.0.0.1".into()), master_port.unwrap_or(0))
        }
        Rendezvous::Static { node_rank, master_addr, master_port } => {
            (*node_rank, master_addr.clone(), *master_port)
        }
        Rendezvous::Endpoint { port, .. } => (0, String::new(), *port),
    };
    RankAssignment {
        restart_count: 0,
        group_rank,
        group_world_size: job.nodes.max,
        first_rank: group_rank * local_world_size,
        local_world_size,
        world_size: job.nodes.max * local_world_size,
        replacements: vec![0; local_world_size as usize],
        first_role_rank: group_rank * local_world_size,
        role_world_size: job.nodes.max * local_world_size,
        stores: RendezvousStoreInfo {
            master_addr,
            master_port,
            has_agent_store: job.nodes.has_agent_store,
            ..Default::default()
        },
    }
}

/// Returns the text in place of a value that is not known yet or secret.
fn later(name: &str, value: &OsStr, job: &Job) -> Option<&'static str> {
    let is_alone = matches!(job.nodes.rendezvous, Rendezvous::Alone { .. });
    let is_placed = matches!(
        name,
        "RANK"
            | "GROUP_RANK"
            | "NODE_RANK"
            | "ROLE_RANK"
            | "WORLD_SIZE"
            | "GROUP_WORLD_SIZE"
            | "ROLE_WORLD_SIZE"
    );
    match name {
        "FLOW_TOKEN" => Some("***"),
        "FLOW_STORE" => Some("<the launcher's store>"),
        "TORCHELASTIC_ERROR_FILE" if !value.is_empty() => Some("<a file>"),
        "TORCHELASTIC_RUN_ID" if is_alone && value == NO_ID => Some("<a new one>"),
        "MASTER_PORT" if value == "0" => Some("<a free port>"),
        "MASTER_ADDR" if value.is_empty() => Some("<where rank 0 runs>"),
        _ if is_placed && matches!(job.nodes.rendezvous, Rendezvous::Endpoint { .. }) => {
            Some("<given later>")
        }
        _ => None,
    }
}

/// Quotes a word for a shell.
fn quote(word: &OsStr) -> String {
    let quoted = shlex::bytes::Quoter::new().allow_nul(true).quote(word.as_bytes());
    quoted.map_or_else(
        |_| word.to_string_lossy().into(),
        |word| String::from_utf8_lossy(&word).into(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn dry_run(line: &str) -> String {
        let words = ["flow-launch"].into_iter().chain(line.split(' ')).map(OsString::from);
        let job = Job::parse(words, &|_| None).unwrap();
        let host = LocalHost {
            cores: 4,
            environment: HashMap::from([("TORCH_NCCL_ASYNC_ERROR_HANDLING".into(), "1".into())]),
            binding: vec![vec![0, 1], vec![2, 3]],
            ..LocalHost::default()
        };
        describe(&job, 2, &["/bin/train".into(), "a b".into(), "${local_rank}".into()], &host)
    }

    #[test]
    fn one_node() {
        let text = dry_run("--nproc_per_node 2 --log-dir /dev/null train");
        let expected = "\
workers: 2, on one node

rank 0, local rank 0, CPUs 0-1
  FLOW_REPLACEMENT=0
  FLOW_REPORT_STALLS=30
  FLOW_STORE=<the launcher's store>
  FLOW_TOKEN=***
  GROUP_RANK=0
  GROUP_WORLD_SIZE=1
  LOCAL_RANK=0
  LOCAL_WORLD_SIZE=2
  MASTER_ADDR=127.0.0.1
  MASTER_PORT=<a free port>
  NODE_RANK=0
  OMP_NUM_THREADS=2
  RANK=0
  ROLE_NAME=default
  ROLE_RANK=0
  ROLE_WORLD_SIZE=2
  TORCHELASTIC_ERROR_FILE=''
  TORCHELASTIC_MAX_RESTARTS=0
  TORCHELASTIC_RESTART_COUNT=0
  TORCHELASTIC_RUN_ID=<a new one>
  TORCHELASTIC_SIGNALS_TO_HANDLE='SIGTERM,SIGINT,SIGHUP,SIGQUIT'
  TORCHELASTIC_USE_AGENT_STORE=True
  WORLD_SIZE=2
  /bin/train 'a b' 0

rank 1, local rank 1, CPUs 2-3
";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.ends_with("  /bin/train 'a b' 1\n"), "{text}");
    }

    #[test]
    fn several_nodes() {
        let text = dry_run("--nnodes 2 --node_rank 1 --master_addr a train");
        assert!(text.starts_with("workers: 2, on node 1 of 2;"), "{text}");
        assert!(
            text.contains("\nrank 2, ")
                && text.contains("\n  RANK=3\n")
                && text.contains("MASTER_PORT=29500")
        );
        assert!(text.contains("TORCHELASTIC_ERROR_FILE=<a file>"));
        let text = dry_run("--nnodes 1:3 --rdzv-endpoint a train");
        assert!(text.contains("a node of 1 to 3") && text.contains("a port 29400"), "{text}");
        assert!(
            text.contains("\nrank ?, local rank 1") && text.contains("  RANK=<given later>\n"),
            "{text}"
        );
        assert!(
            text.contains("MASTER_ADDR=<where rank 0 runs>")
                && text.contains("TORCHELASTIC_RUN_ID=none")
        );
    }
}
