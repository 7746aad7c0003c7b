//! What the user asked for, validated: see `args.rs` for how it is written.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::Signal;

/// The id of jobs that were given none, as torchrun has it.
pub const NO_ID: &str = "none";

/// A whole command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    pub program: Program,
    pub processes: Processes,
    pub role: String,
    pub nodes: Nodes,
    /// The machines on which this flow-launch is to start an agent each, if it is no agent itself.
    pub hosts: Option<Hosts>,
    pub max_restarts: u32,
    /// Time between asking workers to stop and killing them.
    pub grace: Duration,
    /// A worker that waits longer than this in one collective fails the job.
    pub hang_timeout: Option<Duration>,
    /// What the launcher passes on to its workers before it ends.
    pub signals: Vec<Signal>,
    /// Which workers read flow-launch's standard input, if that was said.
    pub stdin: Option<Stdin>,
    pub numa_binding: Option<NumaBinding>,
    /// Every worker is told LOCAL_RANK 0 and sees one GPU, its own.
    pub virtual_local_rank: bool,
    pub output: Output,
    /// Where to write what happens, a JSON object a line.
    pub events: Vec<PathBuf>,
    /// Say nothing but errors.
    pub quiet: bool,
    /// Print what would be started, and start nothing.
    pub dry_run: bool,
    /// What was odd in the command line, and was passed over.
    pub warnings: Vec<String>,
}

/// What to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    pub kind: ProgramKind,
    pub name: OsString,
    pub arguments: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ProgramKind {
    /// By its name: a `.py` file by Python, anything else as it is.
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

/// `--stdin`: which workers read flow-launch's standard input; that of all others is empty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stdin {
    All,
    None,
    Rank(u32),
}

impl Stdin {
    pub fn is_for(self, rank: u32) -> bool {
        self == Stdin::All || self == Stdin::Rank(rank)
    }

    /// The rank that the user at the terminal has before them.
    pub fn foreground(self) -> u32 {
        match self {
            Stdin::Rank(rank) => rank,
            Stdin::All | Stdin::None => 0,
        }
    }
}

/// `--numa-binding`, in torchrun's words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NumaBinding {
    Node,
    Socket,
    Exclusive,
    CoreComplex,
}

/// The job's nodes and how their agents meet.
#[derive(Clone, Debug, PartialEq)]
pub struct Nodes {
    pub min: u32,
    pub max: u32,
    pub rendezvous: Rendezvous,
    /// `--rdzv-id`: what tells this job from others.
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
    /// By node rank.
    pub list: Vec<HostEntry>,
    /// Where the others reach the first.
    pub master_addr: String,
    /// What runs a command on another machine: the host and the command are added.
    pub remote_shell: Vec<String>,
    /// The other flags, for the agents.
    pub flags: Vec<OsString>,
    /// `--export`: variables by name, with a value or with that of the head's environment.
    pub exports: Vec<(String, Option<String>)>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct HostEntry {
    pub user: Option<String>,
    pub name: String,
    /// As `--nproc-per-node` has it, if not given here.
    pub workers: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Rendezvous {
    /// There is one node. Its agent serves its workers at this address and port.
    Alone { master_addr: Option<String>, master_port: Option<u16> },
    /// Node 0 is known: its agent serves the others, and all workers, at `master_port`.
    Static { node_rank: u32, master_addr: String, master_port: u16 },
    /// Whichever node has this address serves the others.
    Endpoint { host: String, port: u16, is_host: Option<bool> },
}

/// How long agents wait for each other: `--rdzv-conf`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RendezvousTimeouts {
    /// For the least number of nodes.
    pub join: Duration,
    /// For more nodes, once there are the least.
    pub last_call: Duration,
    /// For a sign of life.
    pub heartbeat: Duration,
}

/// Where the workers' output goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Put the rank before each line.
    pub prefix: bool,
    pub log_dir: Option<PathBuf>,
    /// OneFlow's file names below `log_dir`, not torchrun's.
    pub oneflow_names: bool,
    pub redirects: StreamMap,
    pub tee: StreamMap,
    /// The local ranks whose output is shown, if not all.
    pub shown: Option<Vec<u32>>,
    /// Lines with one of these are copied to `filtered_stdout.log` and `filtered_stderr.log`.
    pub stdout_filters: Vec<String>,
    pub stderr_filters: Vec<String>,
}

/// Which streams of which local ranks.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamMap {
    All(Streams),
    /// None for local ranks that are not listed.
    Each(Vec<(u32, Streams)>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Streams {
    pub stdout: bool,
    pub stderr: bool,
}

impl StreamMap {
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
