//! The ranks of a job come together. The steps, in order:
//!
//! | file | step |
//! |---|---|
//! | `store` | connect to the rendezvous store, which rank 0 may have to serve |
//! | `monitor` | publish who this rank is, and, over several nodes, learn who the others are |
//! | `attach` | map the memory that the ranks of this node share: `arena` |
//! | `monitor` | if rank 0 serves the store, it waits until no node asks for anything more |
//!
//! `monitor` watches meanwhile who is missing, and who has ended. `lineage` knows who joins once more
//! after others have ended. `system` is what all this needs of the system that it runs on: a simulation has
//! another. `in_process` makes a job of threads, which has no steps.

mod arena;
pub mod attach;
mod in_process;
mod join_error;
pub mod lineage;
pub mod monitor;
mod store;
pub mod system;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use flow_store::fork::{PerProcess, Process};
use rustix::process::{Pid, PidfdFlags};

use crate::env::{Membership, Rendezvous};
use crate::error::{Error, Result};
use crate::internode::presence::ALL_RANKS;
use crate::interrupt::has_ended_call;
use crate::peer_info::PeerInfo;
use crate::settings;
use crate::shm::control::MAX_RANKS;
use crate::shm::join_memory::JoinMemory;
use crate::shm::machine_buffer::RetiredBuffers;
use crate::shm::tenancy::Tenancy;
use crate::stall::StallReporter;
use crate::transport;
use crate::world::{FIRST_WARNING, Origin, Peer, World};
pub use arena::ArenaSource;
use arena::JoinArena;
use attach::attach;
pub use join_error::JoinError;
use lineage::{Lineage, Members, Seat};
use monitor::BootstrapMonitor;
pub use monitor::info_key;
use store::connect_store;

impl World {
    /// Meets the other ranks that join under this name. All of them do so equally often; what else
    /// they have joined does not matter.
    pub fn join(membership: &Membership, name: &str, timeout: Duration) -> Result<Self> {
        let name = join_name(name);
        let prefix = format!("world/{name}/");
        let plan = JoinPlan {
            membership: membership.clone(),
            launched: membership.rendezvous.outlives_ranks()
                && is_launchers_rank(membership)
                && !HAS_CHANGED.load(Ordering::Relaxed),
            seats: (0..membership.world_size).map(Seat::first).collect(),
            name,
            prefix,
            source: ArenaSource::New,
            regions: (0..membership.local_world_size).collect(),
            epoch: None,
        };
        let rank = membership.rank;
        join(plan, timeout).map_err(|error| join_failed(rank, error))
    }
}

/// Whether this process' job has had other members. What flow-launch says of how a rank has ended may
/// then be about a process of before.
static HAS_CHANGED: AtomicBool = AtomicBool::new(false);

/// Returns the error of a rank that cannot join.
pub fn join_failed(rank: usize, error: JoinError) -> Error {
    match error {
        JoinError::Failed(reason) if !has_ended_call() => Error::Join { rank, reason },
        _ => Error::Interrupted { rank, operation: "joining the process group".into() },
    }
}

/// A join to be.
pub struct JoinPlan {
    /// This process' place among those that join.
    pub membership: Membership,
    pub name: String,
    /// Begins the join's keys.
    pub prefix: String,
    /// Whether flow-launch says how the processes end.
    pub launched: bool,
    /// The ranks as the launcher numbers them.
    pub seats: Vec<Seat>,
    /// The arena, and which regions of it the ranks of this node get.
    pub source: ArenaSource,
    pub regions: Vec<usize>,
    /// The members as they have agreed, and what begins the keys of all epochs; None of a program's
    /// own join.
    pub epoch: Option<(String, Members)>,
}

/// Meets the other ranks of the plan.
pub fn join(plan: JoinPlan, timeout: Duration) -> Result<World, JoinError> {
    let JoinPlan { membership, name, prefix, launched, seats, source, regions, epoch } = plan;
    let Membership { rank, world_size: size, .. } = membership;
    let begin = Instant::now();
    HAS_CHANGED.fetch_or(epoch.is_some(), Ordering::Relaxed);
    if size > MAX_RANKS {
        return Err(format!("a job can have at most {MAX_RANKS} ranks, not {size}").into());
    }
    let (server, store) = connect_store(&membership, &prefix, timeout)?;
    let several_nodes = membership.local_world_size < size;
    let mut transport = None;
    if several_nodes {
        let opened = transport::open(&membership)?;
        opened.join_group(ALL_RANKS);
        transport = Some(opened);
    }
    let address = transport.as_ref().map(|transport| transport.address()).unwrap_or_default();
    let waits = StallReporter::from_env(seats[rank]).filter(|_| launched);
    let own = PeerInfo::own(&membership, address);
    let mut monitor = store.as_ref().map(|store| BootstrapMonitor {
        rank,
        size,
        own: &own,
        seats: &seats,
        members: epoch.as_ref().map_or(&[], |(_, members)| &members.processes),
        system: store,
        prefix: &prefix,
        launched,
        begin,
        timeout,
        next_poll: begin,
        next_warning: begin + FIRST_WARNING,
        long: waits.as_ref().map(|waits| waits.begin(store)),
    });
    let infos = match &mut monitor {
        Some(monitor) => monitor.introduce(membership.local_world_size)?,
        None => vec![own.clone(); size],
    };
    if let Some(transport) = &mut transport {
        transport.set_peers(&infos, &own)?;
    }
    let locals = locals_of(&infos, &own);
    let index = locals.iter().position(|&local| local == rank).unwrap_or_default();
    let region = regions[index];
    let mut arena = JoinArena { source, size, locals: locals.len(), region, block: None };
    // Where rank 0 serves the store, it waits until no other node asks for anything more.
    let is_rank_zeros = !matches!(membership.rendezvous, Rendezvous::Server { .. });
    let memory = attach(rank, &locals, &mut arena, monitor.as_mut());
    let memory = memory.map_err(|error| match &monitor {
        Some(monitor) if several_nodes && is_rank_zeros => monitor.give_up(error),
        _ => error,
    })?;
    let tenancy = Arc::new(Tenancy::new(memory, index, &regions, arena.block));
    if let Some(monitor) = &mut monitor
        && several_nodes
        && is_rank_zeros
    {
        // MPI ends all ranks by itself when one dies.
        let watched = transport.as_deref().filter(|_| membership.rendezvous != Rendezvous::Mpi);
        monitor.wait_for_nodes(&infos, watched)?;
    }
    drop(monitor);
    let mut peers = Vec::with_capacity(size);
    for peer in 0..size {
        peers.push(watch_peer(peer, rank, &infos, &locals, &tenancy.memory)?);
    }
    let (lineage_prefix, members) = match epoch {
        Some((prefix, members)) => (prefix, members),
        None => (prefix.clone(), first_members(&infos, &peers)),
    };
    let ranks_on_host = infos.iter().filter(|info| info.host_id == own.host_id).count();
    Ok(World {
        rank,
        size,
        locals,
        spin: ranks_on_host <= tenancy.memory.header().processors(),
        arena: Arc::clone(&tenancy.memory.arena),
        retired_buffers: Arc::new(RetiredBuffers::new(&tenancy)),
        tenancy,
        peers,
        seats,
        lineage: Some(Lineage { membership, launched, prefix: lineage_prefix, members }),
        waits,
        store,
        origin: Origin::Processes,
        name,
        prefix,
        launched,
        transport,
        server,
        has_failed: AtomicBool::new(false),
        groups: Mutex::default(),
        retired_blocks: Mutex::default(),
    })
}

/// Describes rank `peer`. If that is another rank of this node, `rank` watches its process.
fn watch_peer(
    peer: usize,
    rank: usize,
    infos: &[PeerInfo],
    locals: &[usize],
    memory: &JoinMemory,
) -> Result<Peer, String> {
    let info = &infos[peer];
    let node = infos.iter().position(|other| other.node == info.node).unwrap_or(peer);
    let mut watched =
        Peer { pid: info.pid, host: info.host.clone(), node, pidfd: None, gone: false };
    let Some(index) = locals.iter().position(|&local| local == peer) else { return Ok(watched) };
    watched.pid = memory.local(index).pid.load(Ordering::Acquire);
    let Some(pid) = Pid::from_raw(watched.pid as i32).filter(|_| peer != rank) else {
        return Ok(watched);
    };
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => watched.pidfd = Some(pidfd),
        Err(rustix::io::Errno::SRCH) => watched.gone = true,
        Err(error) => {
            return Err(format!(
                "cannot watch rank {peer} (pid {}): {error}; that takes Linux 5.3, and a file \
                 descriptor for each rank (ulimit -n)",
                watched.pid
            ));
        }
    }
    Ok(watched)
}

/// Returns the members of a job as it begins, by their ranks.
fn first_members(infos: &[PeerInfo], peers: &[Peer]) -> Members {
    let mut processes = Vec::with_capacity(infos.len());
    for (rank, (info, peer)) in infos.iter().zip(peers).enumerate() {
        let info = PeerInfo { pid: peer.pid, ..info.clone() };
        processes.push(lineage::Process::of(Seat::first(rank), info, None));
    }
    Members { epoch: 0, processes, newcomers: 0, refused: Vec::new() }
}

/// Names a join: the name that it was given, how often this process has joined under that before,
/// and how many forks lie behind it. So forked processes do not meet those that they are forked
/// from.
fn join_name(name: &str) -> String {
    static JOINS: PerProcess<Mutex<BTreeMap<String, usize>>> = PerProcess::empty();
    let mut joins = JOINS.get().lock().unwrap_or_else(PoisonError::into_inner);
    let count = joins.entry(name.into()).or_default();
    let number = std::mem::replace(count, *count + 1);
    let forks = Process::current().forks();
    let forks = if forks == 0 { String::new() } else { format!("fork {forks}/") };
    match name {
        "" => format!("{forks}{number}"),
        // In quotes, so that no part of the one can be taken for a part of the other.
        name => format!("{name:?}/{forks}{number}"),
    }
}

/// Whether flow-launch's reports about this rank, and this process's reports to it, are about the
/// same process: not where a program numbers its ranks itself, nor in forked processes.
fn is_launchers_rank(membership: &Membership) -> bool {
    Process::current().forks() == 0 && settings::has_place(membership.rank, membership.world_size)
}

/// Returns the ranks on the node of `own`.
pub fn locals_of(infos: &[PeerInfo], own: &PeerInfo) -> Vec<usize> {
    (0..infos.len()).filter(|&rank| infos[rank].node == own.node).collect()
}
