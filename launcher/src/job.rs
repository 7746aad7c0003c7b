//! The job that the user asked for, validated. `cli/` reads it from the command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

/// The default id of a job, as in torchrun.
pub const NO_ID: &str = "none";

/// A whole command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    pub program: Program,
    pub processes: Processes,
    pub role: String,
    pub nodes: Nodes,
    /// The hosts on which this flow-launch starts an agent each, if it is no agent itself.
    pub hosts: Option<Hosts>,
    pub max_restarts: u32,
    /// A worker that fails is started anew alone, and the others go on.
    pub is_in_place: bool,
    /// The fewest workers with which a job goes on in place; all if not given.
    pub min_workers: Option<u32>,
    /// Time between asking workers to stop and killing them.
    pub grace: Duration,
    /// A worker that waits longer than this in one collective fails the job.
    pub hang_timeout: Option<Duration>,
    /// The signals that the launcher passes on to its workers before it ends.
    pub signals: Vec<Signal>,
    /// The workers that read flow-launch's standard input, if the user has chosen.
    pub stdin: Option<Stdin>,
    pub numa_binding: Option<NumaBinding>,
    /// Every worker gets LOCAL_RANK 0 and sees one GPU, its own.
    pub virtual_local_rank: bool,
    pub output: OutputOptions,
    /// The event files: a JSON object a line.
    pub events: Vec<PathBuf>,
    /// The file for the timeline of all ranks.
    pub trace: Option<PathBuf>,
    /// Show what the job does at the foot of the terminal.
    pub top: bool,
    /// Print errors only.
    pub quiet: bool,
    /// Print what would be started, and start nothing.
    pub dry_run: bool,
    /// Notices about ignored parts of the command line.
    pub warnings: Vec<String>,
}

/// The program to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    pub kind: ProgramKind,
    pub name: OsString,
    pub arguments: Vec<OsString>,
}

/// The way in which a program is run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ProgramKind {
    /// The way that its name says: a `.py` file by Python, anything else as it is.
    ByName,
    /// `--no-python`.
    Executable,
    /// `--module`.
    Module,
    /// `--run-path`: a Python script, whatever its name.
    Script,
}

/// `--nproc_per_node`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Processes {
    Count(u32),
    /// One per GPU where there are any, else one per core.
    Auto,
    Cpu,
    Gpu,
}

/// `--stdin`: which workers read flow-launch's standard input; the others have `/dev/null`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stdin {
    All,
    None,
    Rank(u32),
}

impl Stdin {
    /// Whether this rank reads flow-launch's standard input.
    pub fn is_for(self, rank: u32) -> bool {
        self == Stdin::All || self == Stdin::Rank(rank)
    }

    /// Returns the rank that writes to the user's terminal directly.
    pub fn foreground(self) -> u32 {
        match self {
            Stdin::Rank(rank) => rank,
            Stdin::All | Stdin::None => 0,
        }
    }
}

/// `--numa-binding`, with torchrun's words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NumaBinding {
    Node,
    Socket,
    Exclusive,
    CoreComplex,
}

/// The job's nodes and their rendezvous.
#[derive(Clone, Debug, PartialEq)]
pub struct Nodes {
    pub min: u32,
    pub max: u32,
    pub rendezvous: Rendezvous,
    /// `--rdzv-id`: identifies the job.
    pub id: String,
    /// The address at which others reach this node.
    pub local_addr: Option<String>,
    pub timeouts: RendezvousTimeouts,
    /// The leading agent serves PyTorch's store; otherwise rank 0 may.
    pub has_agent_store: bool,
}

/// `--hosts` or `--hostfile`.
#[derive(Clone, Debug, PartialEq)]
pub struct Hosts {
    /// The hosts by node rank.
    pub list: Vec<HostEntry>,
    /// The address at which the others reach the first.
    pub master_addr: String,
    pub master_port: u16,
    /// The command that runs a command on another host; the host and the command are appended.
    pub remote_shell: Vec<String>,
    /// The other flags, which the agents get.
    pub flags: Vec<OsString>,
    /// `--export`: names, each with a value or None for the value in the head's environment.
    pub exports: Vec<(String, Option<String>)>,
}

/// A host of `--hosts` or `--hostfile`.
#[derive(Clone, Debug, PartialEq)]
pub struct HostEntry {
    pub user: Option<String>,
    pub name: String,
    /// If not given here, `--nproc-per-node` decides.
    pub workers: Option<u32>,
}

/// The place at which the nodes of a job meet.
#[derive(Clone, Debug, PartialEq)]
pub enum Rendezvous {
    /// One node. Its agent serves its workers at this address and port.
    Alone { master_addr: Option<String>, master_port: Option<u16> },
    /// Node 0 is known: its agent serves the others, and all workers, at `master_port`.
    Static { node_rank: u32, master_addr: String, master_port: u16 },
    /// The node that has this address serves the others.
    Endpoint { host: String, port: u16, is_host: Option<bool> },
}

/// Timeouts of the rendezvous: `--rdzv-conf`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RendezvousTimeouts {
    /// For the least number of nodes to join.
    pub join: Duration,
    /// For more nodes to join, once there are the least.
    pub last_call: Duration,
    /// For a heartbeat.
    pub heartbeat: Duration,
}

/// The places to which the workers' output goes.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputOptions {
    /// Put the rank before each line.
    pub prefix: bool,
    pub log_dir: Option<PathBuf>,
    /// Use OneFlow's file names below `log_dir` instead of torchrun's.
    pub oneflow_names: bool,
    pub redirects: StreamMap,
    pub tee: StreamMap,
    /// The prefix of lines that are tee'd, if not torchrun's default.
    pub prefix_template: Option<String>,
    /// The local ranks whose output is shown, if not all.
    pub shown: Option<Vec<u32>>,
    /// Lines that contain one of these texts are copied to `filtered_stdout.log` and
    /// `filtered_stderr.log`.
    pub stdout_filters: Vec<String>,
    pub stderr_filters: Vec<String>,
}

/// The streams of local ranks.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamMap {
    All(Streams),
    /// Local ranks that are not listed have none.
    Each(Vec<(u32, Streams)>),
}

/// A choice among a worker's two streams.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Streams {
    pub stdout: bool,
    pub stderr: bool,
}

impl StreamMap {
    /// Returns the choice for a local rank.
    pub fn of(&self, local_rank: u32) -> Streams {
        match self {
            StreamMap::All(streams) => *streams,
            StreamMap::Each(map) => map
                .iter()
                .rev()
                .find(|(rank, _)| *rank == local_rank)
                .map_or_else(Streams::default, |(_, s)| *s),
        }
    }
}
