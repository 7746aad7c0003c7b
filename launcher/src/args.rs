//! The command line, validated into a [`Job`].

use std::ffi::OsString;
use std::str::FromStr;
use std::time::Duration;

use clap::Parser;

use crate::job::*;

/// A command line that makes no sense: one line that says what was wrong and what would be right.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

const ABOUT: &str = "\
Starts PROGRAM once per worker, passes on the output, and stops all workers when one fails.

PROGRAM is a path, a name beside flow-launch, or a name on PATH; a .py file runs with python3 -u.
Everything after PROGRAM is PROGRAM's. Flags may be written with dashes or underscores.";

/// The flags as they are written.
#[derive(Parser)]
#[command(name = "flow-launch", version, about = ABOUT, args_override_self = true)]
#[command(override_usage = "flow-launch [OPTIONS] PROGRAM [ARGS...]")]
struct Flags {
    /// Workers on this node
    #[arg(long, alias = "nproc_per_node", value_name = "N|auto|cpu|gpu", default_value = "1")]
    #[arg(allow_hyphen_values = true, help_heading = "Workers")]
    nproc_per_node: String,

    /// Nodes in the job
    #[arg(long, value_name = "N", default_value = "1", allow_hyphen_values = true, help_heading = "Nodes")]
    nnodes: String,

    /// This node, from 0
    #[arg(long, alias = "node_rank", value_name = "N", default_value = "0")]
    #[arg(allow_hyphen_values = true, help_heading = "Nodes")]
    node_rank: String,

    /// Address of node 0 [default: 127.0.0.1 for one node]
    #[arg(long, alias = "master_addr", value_name = "HOST", allow_hyphen_values = true, help_heading = "Nodes")]
    master_addr: Option<String>,

    /// Port on node 0 [default: a free one for one node]
    #[arg(long, alias = "master_port", value_name = "PORT", allow_hyphen_values = true, help_heading = "Nodes")]
    master_port: Option<String>,

    /// Time between asking workers to stop (SIGTERM) and killing them
    #[arg(long, value_name = "SECONDS", default_value = "5", allow_hyphen_values = true, help_heading = "Workers")]
    grace: String,

    /// Put `[rank N]` before each line of output, as on a terminal
    #[arg(long, help_heading = "Output")]
    prefix: bool,

    #[arg(long, alias = "max_restarts", default_value = "0")]
    max_restarts: u32,
    #[arg(long, alias = "rdzv_endpoint")]
    rdzv_endpoint: Option<String>,
    #[arg(long, alias = "rdzv_id")]
    rdzv_id: Option<String>,
    #[arg(long, alias = "rdzv_conf")]
    rdzv_conf: Option<String>,

    #[arg(hide = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

impl Job {
    /// Reads a whole command line, program name first. `--help` and `--version` are answered here and end the process.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Job, Usage> {
        match Flags::try_parse_from(arguments) {
            Ok(flags) => Job::validate(flags),
            Err(error) if !error.use_stderr() => error.exit(),
            Err(error) => {
                let text = error.to_string();
                let line = text.lines().next().unwrap_or_default();
                Err(Usage(format!("{}; see flow-launch --help", line.trim_start_matches("error: "))))
            }
        }
    }

    fn validate(flags: Flags) -> Result<Job, Usage> {
        let mut command = flags.command.into_iter();
        let Some(program) = command.next().filter(|program| !program.is_empty()) else {
            return Err(Usage("no program given; usage: flow-launch [OPTIONS] PROGRAM [ARGS...]".into()));
        };
        let processes = match flags.nproc_per_node.as_str() {
            "auto" => Processes::Auto,
            "cpu" => Processes::Cpu,
            "gpu" => Processes::Gpu,
            text => Processes::Count(number("nproc_per_node", text, 1, "a number from 1, or auto, cpu or gpu")?),
        };
        let (min, max) = match flags.nnodes.split_once(':') {
            Some((a, b)) => (number("nnodes", a, 1, "x")?, number("nnodes", b, 1, "x")?),
            None => {
                let n = number("nnodes", &flags.nnodes, 1, "a number from 1")?;
                (n, n)
            }
        };
        let node_rank = number("node_rank", &flags.node_rank, 0, "a number from 0")?;
        let master_port = match &flags.master_port {
            Some(text) => Some(number("master_port", text, 1, "a port from 1 to 65535")?),
            None => None,
        };
        let s = Duration::from_secs;
        let mut patience = Patience { join: s(600), last_call: s(30), heartbeat: s(8) };
        for kv in flags.rdzv_conf.as_deref().unwrap_or("").split(',') {
            match kv.split_once('=') {
                Some(("join_timeout", v)) => patience.join = s(v.parse().unwrap()),
                Some(("last_call_timeout", v)) => patience.last_call = s(v.parse().unwrap()),
                Some(("heartbeat_timeout", v)) => patience.heartbeat = s(v.parse().unwrap()),
                _ => {}
            }
        }
        let meeting = if max == 1 {
            Meeting::Alone { master_addr: flags.master_addr.clone(), master_port }
        } else if let Some(e) = &flags.rdzv_endpoint {
            let (h, p) = e.rsplit_once(':').unwrap();
            Meeting::Endpoint {
                host: h.trim_matches(|c| c == '[' || c == ']').into(),
                port: p.parse().unwrap(),
                is_host: None,
            }
        } else {
            Meeting::Static {
                node_rank,
                master_addr: flags.master_addr.clone().unwrap(),
                master_port: master_port.unwrap(),
            }
        };
        Ok(Job {
            processes,
            nodes: Nodes { min, max, meeting, id: flags.rdzv_id.unwrap_or("none".into()), local_addr: None, patience },
            grace: grace(&flags.grace)?,
            output: Output {
                prefix: flags.prefix,
                log_dir: None,
                oneflow_names: false,
                redirects: StreamMap::All(Streams::default()),
                tee: StreamMap::All(Streams::default()),
                shown: None,
                stdout_filters: vec![],
                stderr_filters: vec![],
            },
            program: Program { kind: ProgramKind::ByName, name: program, arguments: command.collect() },
            role: "default".into(),
            max_restarts: flags.max_restarts,
            hang_timeout: None,
            signals: vec![],
            numa_binding: None,
            virtual_local_rank: false,
            events: None,
            dry_run: false,
        })
    }
}

fn number<T: FromStr + PartialOrd>(flag: &str, text: &str, least: T, right: &str) -> Result<T, Usage> {
    match text.parse() {
        Ok(value) if value >= least => Ok(value),
        _ => Err(Usage(format!("--{flag} is '{text}'; it must be {right}"))),
    }
}

/// Longest grace period that can be asked for, in seconds.
const LONGEST_GRACE: f64 = 1e6;

fn grace(text: &str) -> Result<Duration, Usage> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=LONGEST_GRACE).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(Usage(format!("--grace is '{text}'; it must be a number of seconds from 0 to {LONGEST_GRACE}"))),
    }
}
