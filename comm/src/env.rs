//! The environment that a launcher made: which rank this process is and how it finds the others.

use std::fmt;

use flow_kernels::digest;
use flow_store::Address;

use crate::settings::TRANSPORT;

/// A process's place in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// This process, from 0 to `world_size - 1`.
    pub rank: usize,
    /// The number of processes in the job.
    pub world_size: usize,
    /// This process among those of its node, from 0 to `local_world_size - 1`.
    pub local_rank: usize,
    /// The number of processes on its node.
    pub local_world_size: usize,
    /// The number of its node, where the launcher sets it. Else nodes are identified by the names
    /// of their hosts.
    pub node: Option<usize>,
    /// The way in which the processes find each other.
    pub rendezvous: Rendezvous,
}

/// The way in which the processes of a job find each other.
#[derive(Clone, PartialEq, Eq)]
pub enum Rendezvous {
    /// The process is alone.
    None,
    /// Through a store that the launcher serves.
    Server {
        /// The store's address.
        address: Address,
        /// The secret that admits to the store.
        token: String,
    },
    /// Through a store that rank 0 is to serve.
    RankZero {
        /// The address at which to serve the store. On one node it is a name that the job's ranks,
        /// and no other job's, derive alike; each join adds its own. On several nodes it is
        /// MASTER_ADDR and MASTER_PORT.
        address: Address,
        /// The secret that admits to the store. FLOW_TOKEN, or else derived like the address, and
        /// no secret: on one node it is the socket that admits one user only.
        token: String,
    },
    /// Through a store that rank 0 serves, whose address it sends by MPI. Nodes are connected by
    /// MPI then, unless FLOW_TRANSPORT names another transport; tcp refuses, as it needs a token.
    Mpi,
}

impl Rendezvous {
    /// Whether the processes still find each other when some have ended.
    pub fn outlives_ranks(&self) -> bool {
        matches!(self, Rendezvous::Server { .. })
    }
}

impl fmt::Debug for Rendezvous {
    /// Leaves out the token, which is not for logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rendezvous::None => write!(f, "None"),
            Rendezvous::Server { address, .. } => write!(f, "Server({address})"),
            Rendezvous::RankZero { address, .. } => write!(f, "RankZero({address})"),
            Rendezvous::Mpi => write!(f, "Mpi"),
        }
    }
}

/// An error in the environment; one line that names the variables, their values, and what would be
/// right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EnvError(String);

/// The variables in which a kind of launcher gives a process its ranks.
struct Family {
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    local_world_size: LocalWorldSize,
    /// The first that is set counts.
    node: &'static [&'static str],
    /// Whether the launcher always sets both `rank` and `world_size`, or neither.
    is_complete: bool,
}

enum LocalWorldSize {
    /// A number.
    Is(&'static str),
    /// A list of all nodes' numbers, and the index into it.
    OfNode { counts: &'static str, node: &'static str },
}

/// The families in the order in which they are looked for: the innermost launcher first, as
/// `torchrun` may run under `srun`.
const FAMILIES: [Family; 3] = [
    // flow-launch, torchrun, or by hand.
    Family {
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world_size: LocalWorldSize::Is("LOCAL_WORLD_SIZE"),
        node: &["GROUP_RANK", "NODE_RANK"],
        is_complete: true,
    },
    // OpenMPI's mpirun.
    Family {
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size: LocalWorldSize::Is("OMPI_COMM_WORLD_LOCAL_SIZE"),
        node: &[],
        is_complete: true,
    },
    // Slurm's srun. Not SLURM_NTASKS: a batch script has that, and a SLURM_PROCID, without being
    // one of so many.
    Family {
        rank: "SLURM_PROCID",
        world_size: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        local_world_size: LocalWorldSize::OfNode {
            counts: "SLURM_STEP_TASKS_PER_NODE",
            node: "SLURM_NODEID",
        },
        node: &["SLURM_NODEID"],
        is_complete: false,
    },
];

/// The variables with a process's rank in MPI, set by launchers of MPI programs.
const MPI_RANKS: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"];

/// The launcher's name of the job, if it is set.
const JOB_NAMES: [&str; 7] = [
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
];

impl Membership {
    /// Reads this process's environment, as flow-launch, torchrun, OpenMPI or Slurm make it.
    /// Without any: world size 1.
    ///
    /// # Errors
    /// Variables that contradict each other, or are no numbers.
    pub fn from_env() -> Result<Membership, EnvError> {
        Membership::from_vars(|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    /// Reads the variables that `get` returns, as [`Membership::from_env`] reads the environment.
    pub fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Membership, EnvError> {
        let mut membership = Membership {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            node: None,
            rendezvous: Rendezvous::None,
        };
        for family in &FAMILIES {
            if let Some(place) = family.read(&get)? {
                membership = place;
                break;
            }
        }
        membership.rendezvous =
            rendezvous(&get, membership.world_size, membership.local_world_size)?;
        Ok(membership)
    }
}

impl Family {
    /// Returns the ranks in this family's variables, `None` where they are not set.
    fn read(&self, get: &impl Fn(&str) -> Option<String>) -> Result<Option<Membership>, EnvError> {
        let (rank, world_size) = match (number(get, self.rank)?, number(get, self.world_size)?) {
            (Some(rank), Some(world_size)) => (rank, world_size),
            (None, Some(size)) if self.is_complete => {
                return Err(half(self.world_size, size, self.rank));
            }
            (Some(rank), None) if self.is_complete => {
                return Err(half(self.rank, rank, self.world_size));
            }
            _ => return Ok(None),
        };
        let local_world_size = match self.local_world_size {
            LocalWorldSize::Is(name) => number(get, name)?.map(|size| Named(name, size)),
            LocalWorldSize::OfNode { counts, node } => {
                size_of_node(get, counts, node)?.map(|size| Named(counts, size))
            }
        };
        let rank = Named(self.rank, rank);
        let world_size = Named(self.world_size, world_size);
        let local_rank =
            number(get, self.local_rank)?.map_or(rank, |rank| Named(self.local_rank, rank));
        let local_world_size = local_world_size.unwrap_or(world_size);

        rank.must_be_below(world_size)?;
        if local_world_size.1 > world_size.1 {
            return Err(EnvError(format!(
                "{local_world_size} but {world_size}: a node cannot have more ranks than the job"
            )));
        }
        local_rank.must_be_below(local_world_size)?;
        let node = self.node.iter().find_map(|name| number(get, name).transpose()).transpose()?;
        Ok(Some(Membership {
            rank: rank.1,
            world_size: world_size.1,
            local_rank: local_rank.1,
            local_world_size: local_world_size.1,
            node,
            rendezvous: Rendezvous::None,
        }))
    }
}

/// A variable and its value.
#[derive(Clone, Copy)]
struct Named(&'static str, usize);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.0, self.1)
    }
}

impl Named {
    fn must_be_below(self, size: Named) -> Result<(), EnvError> {
        match size.1 {
            0 => Err(EnvError(format!("{size}: a job has at least one rank"))),
            1 if self.1 > 0 => Err(EnvError(format!("{self} but {size}: {} must be 0", self.0))),
            size_value if self.1 >= size_value => Err(EnvError(format!(
                "{self} but {size}: {} must be 0 to {}",
                self.0,
                size_value - 1
            ))),
            _ => Ok(()),
        }
    }
}

fn half(set: &str, value: usize, missing: &str) -> EnvError {
    EnvError(format!("{set}={value} but {missing} is not set: set both, or neither to run alone"))
}

fn number(get: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<usize>, EnvError> {
    let Some(text) = get(name) else { return Ok(None) };
    match text.parse::<u32>() {
        Ok(number) => Ok(Some(number as usize)),
        Err(_) => Err(EnvError(format!("{name}={text:?}: must be a whole number, 0 or more"))),
    }
}

/// Returns the number of tasks on this node, from Slurm's list of all nodes' numbers: `4`, `2,1`,
/// `2(x3),1`.
fn size_of_node(
    get: &impl Fn(&str) -> Option<String>,
    counts: &str,
    node: &str,
) -> Result<Option<usize>, EnvError> {
    let (Some(text), Some(index)) = (get(counts), number(get, node)?) else { return Ok(None) };
    let mut nodes = 0;
    for part in text.split(',') {
        let (count, repeat) = repeated(part).ok_or_else(|| {
            EnvError(format!(
                "{counts}={text:?}: must be a list such as \"4\", \"2,1\" or \"2(x3),1\""
            ))
        })?;
        nodes += repeat as usize;
        if index < nodes {
            return Ok(Some(count as usize));
        }
    }
    Err(EnvError(format!(
        "{node}={index} but {counts}={text:?} lists {nodes} nodes: {node} must be below that"
    )))
}

/// Part of Slurm's list, `4` or `4(x3)`: the number, and on how many nodes.
fn repeated(part: &str) -> Option<(u32, u32)> {
    match part.split_once("(x") {
        None => Some((part.parse().ok()?, 1)),
        Some((count, repeat)) => {
            Some((count.parse().ok()?, repeat.strip_suffix(')')?.parse().ok()?))
        }
    }
}

fn rendezvous(
    get: &impl Fn(&str) -> Option<String>,
    world_size: usize,
    local_world_size: usize,
) -> Result<Rendezvous, EnvError> {
    let several_nodes = local_world_size < world_size;
    if uses_mpi(get, cfg!(feature = "mpi"))? && several_nodes {
        return Ok(Rendezvous::Mpi);
    }
    match (get("FLOW_STORE"), get("FLOW_TOKEN")) {
        (Some(address), Some(token)) => {
            let address =
                address.parse().map_err(|error| EnvError(format!("FLOW_STORE: {error}")))?;
            Ok(Rendezvous::Server { address, token })
        }
        (Some(address), None) => Err(EnvError(format!(
            "FLOW_STORE={address} but FLOW_TOKEN is not set: flow-launch sets both"
        ))),
        (None, Some(_)) if !several_nodes => Err(EnvError(
            "FLOW_TOKEN is set but FLOW_STORE is not: flow-launch sets both".to_string(),
        )),
        (None, None) if world_size == 1 => Ok(Rendezvous::None),
        (None, token) => {
            let set = JOB_NAMES
                .iter()
                .filter_map(|name| get(name).map(|value| format!("{name}={value}\n")));
            let job: String = set.chain([format!("world size {world_size}\n")]).collect();
            let address = if several_nodes {
                master(get)?.ok_or_else(|| {
                    EnvError(format!(
                        "the job has {world_size} ranks, {local_world_size} of them on this node: \
                         set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port \
                         there"
                    ))
                })?
            } else {
                let user = rustix::process::geteuid().as_raw();
                Address::Unix(format!("flow-{user}-{:016x}", digest(&job)))
            };
            let token =
                token.unwrap_or_else(|| format!("{:016x}", digest(&format!("token of {job}"))));
            Ok(Rendezvous::RankZero { address, token })
        }
    }
}

/// Whether nodes are connected by MPI, in a program that is built with it or not.
fn uses_mpi(get: &impl Fn(&str) -> Option<String>, is_built: bool) -> Result<bool, EnvError> {
    match get(TRANSPORT).as_deref() {
        // flow-launch or torchrun may run under an MPI launcher, and its ranks are not the
        // launcher's.
        None | Some("") => {
            let is_launched = get("RANK").is_some() || get("FLOW_STORE").is_some();
            Ok(is_built && !is_launched && MPI_RANKS.iter().any(|name| get(name).is_some()))
        }
        Some("mpi") if is_built => Ok(true),
        Some("mpi") => Err(EnvError(format!(
            "{TRANSPORT}=mpi but this program is built without MPI: build it with --features mpi, \
             or set {TRANSPORT}=tcp"
        ))),
        Some(_) => Ok(false),
    }
}

/// Returns the address at which rank 0 can serve a job of several nodes.
fn master(get: &impl Fn(&str) -> Option<String>) -> Result<Option<Address>, EnvError> {
    let (host, port) = match (get("MASTER_ADDR"), get("MASTER_PORT")) {
        (Some(host), Some(port)) => {
            let number = port.parse::<u16>().ok().filter(|port| (1..u16::MAX).contains(port));
            let port = number.ok_or_else(|| {
                EnvError(format!("MASTER_PORT={port:?}: must be a port, 1 to 65534"))
            })?;
            // torchrun's agent listens at the port itself then.
            (host, port + u16::from(get("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True")))
        }
        (None, None) => {
            match (
                get("SLURM_STEP_NODELIST").and_then(|list| first_host(&list)),
                number(get, "SLURM_JOB_ID")?,
            ) {
                (Some(host), Some(job)) => (host, 20_000 + (job % 10_000) as u16),
                _ => return Ok(None),
            }
        }
        _ => return Ok(None),
    };
    Ok(Some(Address::Tcp(if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    })))
}

/// Returns the first of Slurm's list of hosts: `n003` of `n[003-005,7],m1`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (host, rest) = list.split_at(end);
    let number =
        rest.strip_prefix('[').map(|rest| rest.split(['-', ',', ']']).next().unwrap_or_default());
    Some(format!("{host}{}", number.unwrap_or_default())).filter(|host| !host.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(vars: &[(&str, &str)], is_built: bool) -> Result<bool, EnvError> {
        uses_mpi(
            &|name| vars.iter().find(|(var, _)| *var == name).map(|(_, value)| value.to_string()),
            is_built,
        )
    }

    #[test]
    fn mpi_is_used_under_its_launcher_or_if_asked_for() {
        for rank in MPI_RANKS {
            assert_eq!(uses(&[(rank, "0")], true), Ok(true), "{rank}");
            assert_eq!(uses(&[(rank, "0")], false), Ok(false), "{rank}");
            assert_eq!(uses(&[(rank, "0"), ("FLOW_TRANSPORT", "tcp")], true), Ok(false), "{rank}");
            assert_eq!(uses(&[(rank, "0"), ("RANK", "0")], true), Ok(false), "{rank}");
            assert_eq!(
                uses(&[(rank, "0"), ("FLOW_STORE", "tcp://h:1")], true),
                Ok(false),
                "{rank}"
            );
        }
        assert_eq!(uses(&[], true), Ok(false));
        assert_eq!(uses(&[("FLOW_TRANSPORT", "mpi"), ("RANK", "0")], true), Ok(true));
        assert!(
            uses(&[("FLOW_TRANSPORT", "mpi")], false)
                .unwrap_err()
                .to_string()
                .contains("--features mpi")
        );
    }
}
