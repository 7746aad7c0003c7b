//! Connections over TCP.
//!
//! | file | subject |
//! |---|---|
//! | `endpoint` | this process' end of all connections: making and accepting them |
//! | `dial` | a connection that is being made |
//! | `pair` | the connection with one other process: how its channels share it |
//! | `channel` | what goes between them in one channel |
//! | `frame`, `outgoing`, `incoming` | how that is cut, written and read |
//! | `control` | its sockets, and what the processes tell each other about channels |
//! | `waker` | wakes a thread that waits for a channel |

mod channel;
mod control;
mod dial;
mod endpoint;
mod frame;
mod incoming;
mod outgoing;
mod pair;
mod socket_name;
#[cfg(test)]
mod tests;
mod waker;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use flow_store::Address;
use flow_store::net::local_address_for;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::queue::QueuePair;
use super::{Connections, DisconnectReason, PeerDown, Transport};
use flow_kernels::digest;

use crate::env::{Membership, Rendezvous};
use crate::peer_info::PeerInfo;
use crate::settings::{self, LOCAL_ADDRESS};
use control::ChannelId;
use endpoint::Endpoint;
use pair::Waits;
use waker::Waker;

/// The longest sleep of a thread that cannot be woken, as there are no file descriptors left.
const UNWOKEN_SLEEP: Duration = Duration::from_millis(1);

struct TcpTransport {
    endpoint: Arc<Endpoint>,
    thread: Option<JoinHandle<()>>,
}

/// Begins to listen for ranks on other nodes: at FLOW_LOCAL_ADDR, else at the address from which
/// this host reaches the store.
pub fn open(membership: &Membership) -> Result<Box<dyn Transport>, String> {
    let (Rendezvous::Server { address, token } | Rendezvous::RankZero { address, token }) =
        &membership.rendezvous
    else {
        return Err("the transport tcp needs a store with a token, which MPI does not give".into());
    };
    let own: IpAddr = match (settings::local_address(), address) {
        (Some(name), _) => (name.trim_matches(['[', ']']), 0_u16)
            .to_socket_addrs()
            .ok()
            .and_then(|mut addresses| Some(addresses.next()?.ip()))
            .ok_or_else(|| {
                format!("{LOCAL_ADDRESS}={name:?}: must be an address, or a name, of this host")
            })?,
        (None, Address::Unix(_)) => Ipv4Addr::LOCALHOST.into(),
        (None, Address::Tcp(store)) => {
            local_address_for(store).map_err(|e| format!("no way to the store at {store}: {e}"))?
        }
    };
    let Membership { rank, world_size: size, .. } = *membership;
    let (endpoint, thread) = Endpoint::open(rank, size, own, token).map_err(|e| {
        format!(
            "cannot listen at {own} for other nodes: {e}; set {LOCAL_ADDRESS} to an address of \
             this host"
        )
    })?;
    Ok(Box::new(TcpTransport { endpoint, thread: Some(thread) }))
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn address(&self) -> Vec<u8> {
        self.endpoint.address().to_string().into_bytes()
    }

    fn set_peers(&mut self, peers: &[PeerInfo], own: &PeerInfo) -> Result<(), String> {
        let mut addresses = Vec::with_capacity(peers.len());
        for (rank, peer) in peers.iter().enumerate() {
            addresses.push(address_of(rank, peer, own)?);
        }
        // They are set once.
        let _ = self.endpoint.addresses.set(addresses);
        Ok(())
    }

    fn join_group(&self, group: &str) {
        self.endpoint.join_group(digest(group));
    }

    fn leave_group(&self, group: &str) {
        self.endpoint.leave_group(digest(group));
    }

    fn connect(
        &self,
        group: &str,
        channel: &str,
        members: &[usize],
        own: usize,
    ) -> Result<Box<dyn Connections>, PeerDown> {
        let id = digest(channel);
        let group = digest(group);
        let waker = Arc::<Waker>::default();
        let others = (0..members.len()).filter(|&member| member != own);
        for member in others.clone() {
            let mut pair = self.endpoint.pair(members[member]);
            pair.open(id, group, &waker);
            if pair.has_notices() {
                self.endpoint.ring();
            }
        }
        Ok(Box::new(TcpConnections {
            endpoint: Arc::clone(&self.endpoint),
            id,
            others: others.map(|member| (member, members[member])).collect(),
            ranks: members.to_vec(),
            queued: vec![QueueSnapshot::default(); members.len()],
            waker,
            events: 0,
        }))
    }
}

/// Returns the address that a rank has published.
fn address_of(rank: usize, peer: &PeerInfo, own: &PeerInfo) -> Result<SocketAddr, String> {
    let text = String::from_utf8_lossy(&peer.address);
    let host = &peer.host;
    match text.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_loopback() && peer.host_id != own.host_id => Err(format!(
            "rank {rank} on {host} says that it is at {address}, where only its own host can reach \
             it: set {LOCAL_ADDRESS} there to the address of its network"
        )),
        Ok(address) => Ok(address),
        Err(_) if text.is_empty() => Err(format!(
            "rank {rank} on {host} takes its node for the only one: check its LOCAL_WORLD_SIZE"
        )),
        Err(_) => Err(format!(
            "malformed address of rank {rank} on {host}: got {text:?}; do all ranks use the same \
             transport?"
        )),
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.endpoint.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A channel between some ranks.
struct TcpConnections {
    endpoint: Arc<Endpoint>,
    id: ChannelId,
    /// The members' ranks in the job, and the other members with theirs.
    ranks: Vec<usize>,
    others: Vec<(usize, usize)>,
    /// The queues by member.
    queued: Vec<QueueSnapshot>,
    waker: Arc<Waker>,
    /// The events of the waker that were seen.
    events: u64,
}

/// A member's queues, as far as this thread knows them without locking the connection.
#[derive(Clone, Copy)]
struct QueueSnapshot {
    /// Segments that are sent, and those that are received.
    moved: (u64, u64),
    is_empty: bool,
}

impl Default for QueueSnapshot {
    fn default() -> Self {
        Self { moved: (0, 0), is_empty: true }
    }
}

impl QueueSnapshot {
    fn of(queues: &QueuePair) -> Self {
        let moved = (queues.sending.done, queues.receiving.done);
        Self { moved, is_empty: queues.is_empty() }
    }
}

impl TcpConnections {
    /// Moves what can be moved now; whether that was anything. Connects where there is something to
    /// send and, for a thread that `waits`, where something is to come. Adds the sockets to wait
    /// for to `sleeps`.
    fn progress_now(
        &mut self,
        waits: bool,
        mut sleeps: Option<&mut Vec<(Arc<TcpStream>, Waits)>>,
    ) -> Result<bool, PeerDown> {
        let events = self.waker.events();
        let mut moved = std::mem::replace(&mut self.events, events) != events;
        for &(member, rank) in &self.others {
            let mut pair = self.endpoint.pair(rank);
            let queues = pair.queues(self.id);
            if !queues.sending.parts.is_empty() || waits && !queues.receiving.parts.is_empty() {
                self.endpoint.connect(rank, &mut pair);
            }
            let progress = pair.progress(self.id);
            self.queued[member] = QueueSnapshot::of(pair.queues(self.id));
            if pair.has_notices() {
                self.endpoint.ring();
            }
            let progress = progress.map_err(|how| PeerDown { member, how })?;
            moved |= progress.moved;
            if let (Some(sleeps), Some(data)) = (&mut sleeps, pair.data()) {
                sleeps.push((data, progress.waits));
            }
        }
        Ok(moved)
    }

    fn end(&mut self, how: &DisconnectReason) {
        for &(_, rank) in &self.others {
            let mut pair = self.endpoint.pair(rank);
            pair.end(self.id, how);
            if pair.has_notices() {
                self.endpoint.ring();
            }
        }
    }

    fn close(&mut self) {
        for &(_, rank) in &self.others {
            let mut pair = self.endpoint.pair(rank);
            pair.close(self.id);
            if pair.has_orphan() || pair.has_notices() {
                self.endpoint.ring();
            }
        }
    }
}

impl Connections for TcpConnections {
    fn with_queues(&mut self, member: usize, action: &mut dyn FnMut(&mut QueuePair)) {
        let mut pair = self.endpoint.pair(self.ranks[member]);
        let queues = pair.queues(self.id);
        action(queues);
        self.queued[member] = QueueSnapshot::of(queues);
    }

    fn moved(&mut self, member: usize) -> (u64, u64) {
        self.queued[member].moved
    }

    fn is_idle(&mut self, member: usize) -> bool {
        self.queued[member].is_empty
    }

    fn progress(&mut self, time: Duration) -> Result<(), PeerDown> {
        let waits = !time.is_zero();
        if self.progress_now(waits, None)? || !waits {
            return Ok(());
        }
        let waker = Arc::clone(&self.waker);
        let fd = waker.fall_asleep();
        let mut sleeps = Vec::with_capacity(self.others.len());
        // What another thread has done before the waker was asked for.
        let moved = self.progress_now(waits, Some(&mut sleeps));
        if let Ok(false) = moved {
            let time = fd.as_ref().map_or(time.min(UNWOKEN_SLEEP), |_| time);
            let mut fds: Vec<PollFd> = fd.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            for (data, waits) in sleeps.iter().filter(|(_, waits)| *waits != Waits::default()) {
                let mut events = PollFlags::empty();
                events.set(PollFlags::IN, waits.read);
                events.set(PollFlags::OUT, waits.write);
                fds.push(PollFd::new(&**data, events));
            }
            let time =
                Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
            // The caller looks in any case.
            let _ = rustix::event::poll(&mut fds, Some(&time));
        }
        waker.wake_up();
        if !moved? {
            self.progress_now(waits, None)?;
        }
        Ok(())
    }

    /// Connects, so that the next call sees whether the member is there.
    fn disconnect_reason(&mut self, member: usize) -> Option<DisconnectReason> {
        let rank = self.ranks[member];
        let mut pair = self.endpoint.pair(rank);
        self.endpoint.connect(rank, &mut pair);
        pair.reason(self.id)
    }

    fn abort(&mut self, why: &str) {
        self.end(&match why {
            "" => DisconnectReason::Ended,
            why => DisconnectReason::Failed(why.into()),
        });
        self.close();
        self.queued.fill(QueueSnapshot::default());
    }

    fn shutdown(&mut self) {
        self.end(&DisconnectReason::Left);
    }
}

impl Drop for TcpConnections {
    fn drop(&mut self) {
        self.abort("");
    }
}
