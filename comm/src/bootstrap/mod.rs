//! How the ranks of a job come together. The steps, in order:
//!
//! | file | step |
//! |---|---|
//! | `store` | connect to the rendezvous store, which rank 0 may have to serve |
//! | `peer_info` | publish who this rank is, and, over several nodes, learn who the others are |
//! | `arena` | map the memory that the ranks of this node share |
//!
//! `monitor` watches meanwhile who is missing, and who has ended; `json` encodes what ranks leave
//! in the store. `in_process` makes a job of threads, which has no steps.

mod arena;
mod in_process;
mod json;
mod monitor;
mod peer_info;
mod store;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use flow_store::fork::Process;
use rustix::process::{Pid, PidfdFlags};

use crate::env::{Membership, Rendezvous};
use crate::error::{Error, Result};
use crate::internode::presence::ALL_RANKS;
use crate::settings;
use crate::shm::arena_header::ArenaHeader;
use crate::shm::control::MAX_RANKS;
use crate::stall::StallReporter;
use crate::transport;
use crate::world::{Peer, World, FIRST_WARNING};
use arena::attach_arena;
use monitor::{BootstrapMonitor, POLL_INTERVAL};
pub use peer_info::PeerInfo;
use store::connect_store;

impl World {
    /// Meets the other ranks that join under this name. All of them do so equally often; what else
    /// they have joined does not matter.
    pub fn join(membership: &Membership, name: &str, timeout: Duration) -> Result<Self> {
        let prefix = join_prefix(name);
        let (rank, size) = (membership.rank, membership.world_size);
        let begin = Instant::now();
        let fail = |reason: String| Error::Join { rank, reason };
        if size > MAX_RANKS {
            return Err(fail(format!("a job can have at most {MAX_RANKS} ranks, not {size}")));
        }
        let (server, store) = connect_store(membership, &prefix, timeout).map_err(fail)?;
        let several_nodes = membership.local_world_size < size;
        let mut transport =
            several_nodes.then(|| transport::open(membership)).transpose().map_err(fail)?;
        if let Some(transport) = &transport {
            transport.join_group(ALL_RANKS);
        }
        let address = transport.as_ref().map(|transport| transport.address()).unwrap_or_default();
        let launched = matches!(membership.rendezvous, Rendezvous::Server { .. })
            && is_launchers_rank(membership);
        let waits = StallReporter::from_env(rank).filter(|_| launched);
        let mut monitor = store.as_ref().map(|store| BootstrapMonitor {
            rank,
            size,
            store,
            prefix: &prefix,
            launched,
            begin,
            timeout,
            next_poll: begin + POLL_INTERVAL,
            next_warning: begin + FIRST_WARNING,
            long: waits.as_ref().map(|waits| waits.begin(store)),
        });
        let own = PeerInfo::own(membership, address);
        if let Some(monitor) = &monitor {
            monitor.register(&own).map_err(fail)?;
        }
        let infos = match &mut monitor {
            Some(monitor) if several_nodes => {
                let infos = monitor.exchange_peer_info().map_err(fail)?;
                check_local_size(&infos, &own, membership).map_err(fail)?;
                if let Some(transport) = &mut transport {
                    transport.set_peers(&infos, &own).map_err(fail)?;
                }
                infos
            }
            // On one node what else there is to know is in the arena.
            _ => vec![own.clone(); size],
        };
        let locals: Vec<usize> = (0..size).filter(|&r| infos[r].node == own.node).collect();

        let arena = attach_arena(rank, size, &locals, monitor.as_mut())?;
        drop(monitor);
        let watch = |r: usize| {
            let node = infos.iter().position(|info| info.node == infos[r].node).unwrap_or(r);
            let host = infos[r].host.clone();
            let Some(index) = locals.iter().position(|&local| local == r) else {
                return Ok(Peer { pid: infos[r].pid, host, node, pidfd: None, gone: false });
            };
            let pid = ArenaHeader::pid(&arena, index).load(Ordering::Acquire);
            let others = Pid::from_raw(pid as i32).filter(|_| r != rank);
            match others
                .map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()))
                .transpose()
            {
                Ok(pidfd) => Ok(Peer { pid, host, node, pidfd, gone: false }),
                Err(rustix::io::Errno::SRCH) => {
                    Ok(Peer { pid, host, node, pidfd: None, gone: true })
                }
                Err(error) => Err(fail(format!(
                    "cannot watch rank {r} (pid {pid}): {error}; that takes Linux 5.3, and a file \
                     descriptor for each rank (ulimit -n)"
                ))),
            }
        };
        let peers = (0..size).map(watch).collect::<Result<_>>()?;
        let root = ArenaHeader::of(&arena).root.load(Ordering::Acquire) as usize;
        let ranks_on_host = infos.iter().filter(|info| info.host_id == own.host_id).count();
        Ok(Self {
            rank,
            size,
            locals,
            spin: ranks_on_host <= ArenaHeader::of(&arena).processors(),
            arena,
            root,
            peers,
            launched,
            waits,
            store,
            prefix,
            transport,
            server,
            retired_blocks: Mutex::default(),
        })
    }
}

/// The prefix of a join's keys: its name, how often this process has joined under that before,
/// and how many forks lie behind it, so that forked processes do not meet those that they are
/// forked from.
fn join_prefix(name: &str) -> String {
    static JOINS: Mutex<BTreeMap<(u32, String), usize>> = Mutex::new(BTreeMap::new());
    let mut joins = JOINS.lock().unwrap_or_else(PoisonError::into_inner);
    let forks = Process::current().forks();
    let count = joins.entry((forks, name.into())).or_default();
    let number = std::mem::replace(count, *count + 1);
    let forks = if forks == 0 { String::new() } else { format!("fork {forks}/") };
    match name {
        "" => format!("world/{forks}{number}/"),
        // In quotes, so that no part of the one can be taken for a part of the other.
        name => format!("world/{name:?}/{forks}{number}/"),
    }
}

/// Whether flow-launch's reports about this rank, and this process's reports to it, are about the
/// same process: not where a program numbers its ranks itself, nor in forked processes.
fn is_launchers_rank(membership: &Membership) -> bool {
    Process::current().forks() == 0 && settings::has_place(membership.rank, membership.world_size)
}

/// Whether the ranks on this node are as many as they should be.
fn check_local_size(
    infos: &[PeerInfo],
    own: &PeerInfo,
    membership: &Membership,
) -> Result<(), String> {
    let local_ranks = infos.iter().filter(|info| info.node == own.node).count();
    if local_ranks != membership.local_world_size {
        return Err(format!(
            "{} ranks should be on this node ({}), and {local_ranks} are: give all ranks of a \
             node, and no others, the same GROUP_RANK",
            membership.local_world_size, own.host
        ));
    }
    Ok(())
}
