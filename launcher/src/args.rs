//! The command line, validated into a [`Job`].

use std::ffi::OsString;
use std::str::FromStr;
use std::time::Duration;

use clap::Parser;

/// A command line that makes no sense: one line that says what was wrong and what would be right.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// `--nproc_per_node`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Processes {
    Count(u32),
    /// One per GPU where there are any, else one per core.
    Auto,
    Cpu,
    Gpu,
}

/// What the user asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    pub processes: Processes,
    pub nodes: u32,
    pub node_rank: u32,
    /// Given for certain when there are several nodes.
    pub master_addr: Option<String>,
    /// Given for certain when there are several nodes.
    pub master_port: Option<u16>,
    pub grace: Duration,
    pub prefix: bool,
    pub program: OsString,
    pub arguments: Vec<OsString>,
}

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
        let nodes = number("nnodes", &flags.nnodes, 1, "a number from 1")?;
        let node_rank = number("node_rank", &flags.node_rank, 0, "a number from 0")?;
        if node_rank >= nodes {
            return Err(Usage(format!("--node_rank is {node_rank}; with --nnodes {nodes} it must be below {nodes}")));
        }
        let master_port = match &flags.master_port {
            Some(text) => Some(number("master_port", text, 1, "a port from 1 to 65535")?),
            None => None,
        };
        if let Some(address) = &flags.master_addr {
            if address.is_empty() || address.starts_with('-') || address.contains(char::is_whitespace) {
                return Err(Usage(format!("--master_addr is '{address}'; it must be a host name or an address")));
            }
        }
        if nodes > 1 && (flags.master_addr.is_none() || master_port.is_none()) {
            return Err(Usage(format!(
                "--nnodes {nodes} needs --master_addr and --master_port, the same on every node"
            )));
        }
        Ok(Job {
            processes,
            nodes,
            node_rank,
            master_addr: flags.master_addr,
            master_port,
            grace: grace(&flags.grace)?,
            prefix: flags.prefix,
            program,
            arguments: command.collect(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(arguments: &[&str]) -> Result<Job, Usage> {
        Job::parse(std::iter::once("flow-launch").chain(arguments.iter().copied()).map(OsString::from))
    }

    #[test]
    fn defaults() {
        let job = parse(&["train"]).unwrap();
        assert_eq!(job.processes, Processes::Count(1));
        assert_eq!((job.nodes, job.node_rank), (1, 0));
        assert_eq!((job.master_addr, job.master_port), (None, None));
        assert_eq!(job.grace, Duration::from_secs(5));
        assert!(!job.prefix);
        assert_eq!(job.program, "train");
        assert!(job.arguments.is_empty());
    }

    #[test]
    fn both_spellings_and_the_last_one_wins() {
        let dashes = "--nproc-per-node=2 --nnodes 3 --node-rank 1 --master-addr h --master-port 9 --grace 0.5 p";
        let underscores = "--nproc_per_node 7 --nproc_per_node 2 --nnodes=3 --node_rank=1 --master_addr=h --master_port=9 --grace=.5 p";
        let split = |line: &str| parse(&line.split(' ').collect::<Vec<_>>()).unwrap();
        assert_eq!(split(dashes), split(underscores));
        assert_eq!(split(dashes).grace, Duration::from_millis(500));
    }

    #[test]
    fn a_world_too_large_to_count_is_no_panic() {
        assert!(parse(&["--nproc_per_node", "99999999999", "train"]).is_err());
    }

    proptest! {
        #[test]
        fn everything_after_the_program_is_the_programs(arguments in prop::collection::vec("(--)?[a-z_=-]{0,12}", 0..8)) {
            let mut line = vec!["--nproc_per_node", "2", "train"];
            line.extend(arguments.iter().map(String::as_str));
            let job = parse(&line).unwrap();
            prop_assert_eq!(job.program, "train");
            prop_assert_eq!(job.arguments, arguments.iter().map(OsString::from).collect::<Vec<_>>());
        }

        #[test]
        fn any_value_gives_a_job_or_a_single_line(
            flag in prop::sample::select(vec!["nproc_per_node", "nnodes", "node_rank", "master_port", "master_addr", "grace", "other"]),
            value in "[ -~]{0,10}",
        ) {
            if let Err(Usage(line)) = parse(&[&format!("--{flag}"), &value, "train"]) {
                prop_assert!(!line.contains('\n') && line.contains(flag), "{line}");
            }
        }
    }
}
