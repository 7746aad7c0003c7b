//! Links over TCP.
//!
//! Two ranks of a link have two connections: one for the data, and one on which nothing is sent
//! until a member leaves. As the latter is idle, the kernel's keep-alive tells within ten seconds
//! when the other machine, or the network, is gone; a process that is merely slow, or stopped, is
//! alive to it. (`TCP_USER_TIMEOUT` on the data would take a stopped reader for dead.) The sizes of
//! buffers are left to the kernel, which adapts them up to a larger bound than it grants to those
//! who ask.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::acceptor::Acceptor;
use super::queue::QueuePair;
use super::{CancelCheck, ConnectError, Connections, DisconnectReason, PeerDown, Transport};
use crate::bootstrap::PeerInfo;
use crate::env::{Membership, Rendezvous};
use crate::error::Result;
use crate::net::local_address_for;
use crate::settings::{self, LOCAL_ADDRESS};
use crate::store::Address;

/// A connection that is idle for so many seconds is probed, at such an interval, and is broken when
/// so many probes were not answered.
const PROBE_AFTER: u32 = 4;
const PROBE_INTERVAL: u32 = 2;
const PROBES: u32 = 3;
/// One attempt to connect, and one look at who has connected.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Parts that one call to the kernel moves.
const MAX_SEGMENTS: usize = 64;
/// Said by a member that leaves with nothing more to do.
const CLOSE_OK: &[u8] = b"!";
/// How long the word of a member that leaves may be behind the end of its data.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);
/// How long what a member has sent before it went may stay away.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The connections of one rank.
pub struct TcpTransport {
    rank: usize,
    acceptor: Acceptor,
    /// Of all ranks' acceptors.
    addresses: Vec<SocketAddr>,
}

impl TcpTransport {
    /// Begins to listen at `address`, where other ranks of the job can connect.
    fn listen(rank: usize, address: IpAddr, token: &str) -> io::Result<Self> {
        Ok(Self { rank, acceptor: Acceptor::open(address, token)?, addresses: Vec::new() })
    }

    fn connect_to(
        &self,
        name: &str,
        rank: usize,
        mut cancel_check: impl FnMut() -> Result<()>,
    ) -> Result<TcpStream, Failed> {
        loop {
            match self.acceptor.connect(self.addresses[rank], name, CONNECT_TIMEOUT) {
                Ok(stream) => return Ok(stream),
                // It has listened since before its address was known.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    let address = self.addresses[rank];
                    return Err(Failed::Peer(DisconnectReason::OutOfReach(format!(
                        "{address} refuses the connection: the process has ended, or a firewall lies between"
                    ))));
                }
                Err(error) if error.kind() != io::ErrorKind::TimedOut => {
                    return Err(Failed::Peer(DisconnectReason::OutOfReach(error.to_string())));
                }
                Err(_) => cancel_check().map_err(Failed::Cancelled)?,
            }
        }
    }

    fn accept_from(
        &self,
        name: &str,
        mut cancel_check: impl FnMut() -> Result<()>,
    ) -> Result<TcpStream, Failed> {
        loop {
            match self.acceptor.accept(name, POLL_INTERVAL) {
                Some(stream) => return Ok(stream),
                None => cancel_check().map_err(Failed::Cancelled)?,
            }
        }
    }
}

enum Failed {
    Peer(DisconnectReason),
    Cancelled(crate::Error),
}

/// Begins to listen for ranks on other nodes: at FLOW_LOCAL_ADDR, else at the address from which this
/// host reaches the store.
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
    let transport = TcpTransport::listen(membership.rank, own, token).map_err(|e| {
        format!(
            "cannot listen at {own} for other nodes: {e}; set {LOCAL_ADDRESS} to an address of \
             this host"
        )
    })?;
    Ok(Box::new(transport))
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn address(&self) -> Vec<u8> {
        self.acceptor.address().to_string().into_bytes()
    }

    fn set_peers(&mut self, peers: &[PeerInfo], own: &PeerInfo) -> Result<(), String> {
        let address = |(rank, peer): (usize, &PeerInfo)| {
            let text = String::from_utf8_lossy(&peer.address);
            match text.parse::<SocketAddr>() {
                Ok(address) if address.ip().is_loopback() && peer.host_id != own.host_id => {
                    Err(format!(
                        "rank {rank} on {} says that it is at {address}, where only its own host \
                         can reach it: set {LOCAL_ADDRESS} there to the address of its network",
                        peer.host
                    ))
                }
                Ok(address) => Ok(address),
                Err(_) if text.is_empty() => Err(format!(
                    "rank {rank} on {} takes its node for the only one: check its LOCAL_WORLD_SIZE",
                    peer.host
                )),
                Err(_) => Err(format!(
                    "malformed address of rank {rank} on {}: got {text:?}; do all ranks use the \
                     same transport?",
                    peer.host
                )),
            }
        };
        self.addresses = peers.iter().enumerate().map(address).collect::<Result<_, _>>()?;
        Ok(())
    }

    fn connect(
        &self,
        channel: &str,
        members: &[usize],
        own: usize,
        cancel_check: CancelCheck,
    ) -> Result<Box<dyn Connections>, ConnectError> {
        let mut peers: Vec<Option<Peer>> = members.iter().map(|_| None).collect();
        // Those before this rank first: that takes nobody's cancel_check.
        for member in (0..own).chain(own + 1..members.len()) {
            let mut cancel_check = || cancel_check(&[member]);
            let mut connection = |kind: &str| match member < own {
                true => {
                    let name = format!("{channel}/{kind}/{}", self.rank);
                    self.connect_to(&name, members[member], &mut cancel_check)
                }
                false => self.accept_from(
                    &format!("{channel}/{kind}/{}", members[member]),
                    &mut cancel_check,
                ),
            };
            let peer = connection("data").and_then(|data| {
                let control = connection("control")?;
                Peer::new(data, control)
                    .map_err(|error| Failed::Peer(DisconnectReason::OutOfReach(error.to_string())))
            });
            peers[member] = Some(peer.map_err(|failed| match failed {
                Failed::Peer(how) => ConnectError::PeerDown(PeerDown { member, how }),
                Failed::Cancelled(error) => ConnectError::Cancelled(error),
            })?);
        }
        Ok(Box::new(TcpConnections { peers }))
    }

    fn have_connected(&self, channel: &str, members: &[usize], own: usize) -> bool {
        let name = |kind, rank: &usize| format!("{channel}/{kind}/{rank}");
        let names =
            members[own + 1..].iter().flat_map(|rank| [name("data", rank), name("control", rank)]);
        self.acceptor.have_connected(&names.collect::<Vec<_>>())
    }
}

struct TcpConnections {
    /// By position; None for this rank.
    peers: Vec<Option<Peer>>,
}

struct Peer {
    data: TcpStream,
    control: TcpStream,
    queues: QueuePair,
    /// Whether a read found nothing, or a write no room.
    waits: (bool, bool),
    /// Once it is known to have gone; and since when nothing has come from it, from then on.
    reason: Option<DisconnectReason>,
    last_receive: Instant,
    /// Nothing more is wanted from it than word of its reason.
    is_aborted: bool,
}

impl Peer {
    fn new(data: TcpStream, control: TcpStream) -> io::Result<Self> {
        data.set_nodelay(true)?;
        setsockopt(&control, sockopt::KeepAlive, &true)?;
        setsockopt(&control, sockopt::TcpKeepIdle, &PROBE_AFTER)?;
        setsockopt(&control, sockopt::TcpKeepInterval, &PROBE_INTERVAL)?;
        setsockopt(&control, sockopt::TcpKeepCount, &PROBES)?;
        data.set_nonblocking(true)?;
        control.set_nonblocking(true)?;
        Ok(Self {
            data,
            control,
            queues: QueuePair::default(),
            waits: (false, false),
            reason: None,
            last_receive: Instant::now(),
            is_aborted: false,
        })
    }

    /// Moves what can be moved without waiting; whether that was anything.
    fn progress_now(&mut self) -> Result<bool, DisconnectReason> {
        let written = self.flush();
        // Who takes nothing more may have sent something before.
        let read = self.fill();
        Ok(written? | read?)
    }

    fn flush(&mut self) -> Result<bool, DisconnectReason> {
        let mut moved = false;
        self.waits.1 = false;
        while !self.queues.sending.parts.is_empty() {
            let queue = &self.queues.sending;
            let mut slices = [IoSlice::new(&[]); MAX_SEGMENTS];
            for (index, (slice, part)) in slices.iter_mut().zip(&queue.parts).enumerate() {
                *slice = IoSlice::new(&part.bytes()[if index == 0 { queue.offset } else { 0 }..]);
            }
            match (&self.data).write_vectored(&slices[..queue.parts.len().min(MAX_SEGMENTS)]) {
                Ok(count) => self.queues.sending.skip(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.waits.1 = true;
                    break;
                }
                Err(error) => return Err(self.reason(Some(error))),
            }
            moved = true;
        }
        Ok(moved)
    }

    fn fill(&mut self) -> Result<bool, DisconnectReason> {
        let mut moved = false;
        self.waits.0 = false;
        while !self.queues.receiving.parts.is_empty() {
            let queue = &mut self.queues.receiving;
            let (offset, count) = (queue.offset, queue.parts.len().min(MAX_SEGMENTS));
            let mut slices: [IoSliceMut<'_>; MAX_SEGMENTS] =
                std::array::from_fn(|_| IoSliceMut::new(&mut []));
            for (index, (slice, part)) in slices.iter_mut().zip(&mut queue.parts).enumerate() {
                *slice =
                    IoSliceMut::new(&mut part.bytes_mut()[if index == 0 { offset } else { 0 }..]);
            }
            match (&self.data).read_vectored(&mut slices[..count]) {
                Ok(0) => return Err(self.reason(None)),
                Ok(count) => self.queues.receiving.skip(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.waits.0 = true;
                    break;
                }
                Err(error) => return Err(self.reason(Some(error))),
            }
            moved = true;
        }
        if moved && self.reason.is_some() {
            self.last_receive = Instant::now();
        }
        Ok(moved)
    }

    /// How it has gone, if something is due that will not come any more.
    fn overdue(&self) -> Option<DisconnectReason> {
        let is_due = !self.queues.is_empty();
        self.reason.clone().filter(|_| is_due && self.last_receive.elapsed() >= DRAIN_TIMEOUT)
    }

    /// Why the data has come to its end, which the peer says once.
    fn reason(&mut self, error: Option<io::Error>) -> DisconnectReason {
        let reason = self.reason.take().unwrap_or_else(|| {
            self.last_receive = Instant::now();
            self.read_close_reason(error)
        });
        self.reason.insert(reason).clone()
    }

    fn read_close_reason(&self, error: Option<io::Error>) -> DisconnectReason {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};
        if let Some(error) = error.filter(|e| !matches!(e.kind(), BrokenPipe | ConnectionReset)) {
            return DisconnectReason::OutOfReach(error.to_string());
        }
        let (begin, mut words, mut buffer) = (Instant::now(), Vec::new(), [0; 4096]);
        loop {
            match (&self.control).read(&mut buffer) {
                Ok(count @ 1..) => words.extend(&buffer[..count]),
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && begin.elapsed() < CLOSE_TIMEOUT =>
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => break,
            }
        }
        match &words[..] {
            [] => DisconnectReason::Ended,
            CLOSE_OK => DisconnectReason::Left,
            why => DisconnectReason::Failed(String::from_utf8_lossy(why).into_owned()),
        }
    }

    /// What is known to be wrong with the connections, when no data is waited for.
    fn poll_error(&mut self) -> Option<DisconnectReason> {
        if self.reason.is_some() {
            return self.reason.clone();
        }
        match self.control.take_error() {
            Ok(None) => {}
            Ok(Some(error)) | Err(error) => return Some(self.reason(Some(error))),
        }
        // The data says so after all that was sent.
        let last = if self.is_aborted { &self.control } else { &self.data };
        match last.peek(&mut [0]) {
            Ok(1..) if self.is_aborted => Some(self.reason(None)),
            Ok(0) => Some(self.reason(None)),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                Some(self.reason(Some(error)))
            }
            _ => None,
        }
    }
}

impl TcpConnections {
    fn peer(&mut self, member: usize) -> &mut Peer {
        self.peers[member].as_mut().expect("no member talks to itself") // invariant
    }

    fn others(&mut self) -> impl Iterator<Item = (usize, &mut Peer)> {
        self.peers
            .iter_mut()
            .enumerate()
            .filter_map(|(member, peer)| Some((member, peer.as_mut()?)))
    }

    fn progress_now(&mut self) -> Result<bool, PeerDown> {
        let mut moved = false;
        for (member, peer) in self.others() {
            moved |= peer.progress_now().map_err(|how| PeerDown { member, how })?;
        }
        Ok(moved)
    }

    /// Waits until something can be moved.
    fn sleep(&mut self, time: Duration) -> Result<(), PeerDown> {
        let (mut fds, mut controls) =
            (Vec::with_capacity(2 * self.peers.len()), Vec::with_capacity(self.peers.len()));
        for (member, peer) in self
            .peers
            .iter()
            .enumerate()
            .filter_map(|(member, peer)| Some((member, peer.as_ref()?)))
        {
            // An end that is known already must not cut every sleep short.
            if peer.reason.is_none() {
                controls.push((member, fds.len()));
                fds.push(PollFd::new(&peer.control, PollFlags::empty()));
            }
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, peer.waits.0);
            events.set(PollFlags::OUT, peer.waits.1);
            if !events.is_empty() {
                fds.push(PollFd::new(&peer.data, events));
            }
        }
        let time =
            Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
        if rustix::event::poll(&mut fds, Some(&time)).is_err() {
            return Ok(()); // interrupted: the caller looks in any case
        }
        let ended = controls
            .iter()
            .find(|(_, at)| fds[*at].revents().intersects(PollFlags::ERR | PollFlags::HUP));
        let Some(&(member, _)) = ended else { return Ok(()) };
        let peer = self.peer(member);
        match peer.reason(peer.control.take_error().ok().flatten()) {
            how @ DisconnectReason::OutOfReach(_) => Err(PeerDown { member, how }),
            // The data comes to its end after all that was sent.
            _ => Ok(()),
        }
    }
}

impl Connections for TcpConnections {
    fn size(&self) -> usize {
        self.peers.len()
    }

    fn queues(&self, member: usize) -> Option<&QueuePair> {
        self.peers[member].as_ref().map(|peer| &peer.queues)
    }

    fn queues_mut(&mut self, member: usize) -> Option<&mut QueuePair> {
        self.peers[member].as_mut().map(|peer| &mut peer.queues)
    }

    fn progress(&mut self, time: Duration) -> Result<(), PeerDown> {
        if self.progress_now()? || time.is_zero() {
            return Ok(());
        }
        self.sleep(time)?;
        if self.progress_now()? {
            return Ok(());
        }
        // Where the control was reset, as by a machine that has started again, the data may never
        // come to its end.
        let overdue = self
            .others()
            .find_map(|(member, peer)| Some(PeerDown { member, how: peer.overdue()? }));
        overdue.map_or(Ok(()), Err)
    }

    fn disconnect_reason(&mut self, member: usize) -> Option<DisconnectReason> {
        self.peers[member].as_mut()?.poll_error()
    }

    fn abort(&mut self, why: &str) {
        for (_, peer) in self.others() {
            let _ = (&peer.control).write(why.as_bytes());
            peer.queues = QueuePair::default();
            peer.is_aborted = true;
            let _ = peer.data.shutdown(Shutdown::Both);
            let _ = peer.control.shutdown(Shutdown::Write);
        }
    }

    fn shutdown(&mut self) {
        for (_, peer) in self.others() {
            let _ = (&peer.control).write(CLOSE_OK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_refuses_a_connection_may_be_behind_a_firewall() {
        let mut network = TcpTransport::listen(1, [127, 0, 0, 1].into(), "token").unwrap();
        let open = TcpTransport::listen(0, [127, 0, 0, 1].into(), "token").unwrap();
        let gone = open.acceptor.address();
        drop(open);
        network.addresses = vec![gone, network.acceptor.address()];
        let linked = network.connect("channel", &[0, 1], 1, &mut |_| Ok(()));
        let Err(ConnectError::PeerDown(PeerDown {
            member: 0,
            how: DisconnectReason::OutOfReach(why),
        })) = linked
        else {
            panic!("it must be out of reach")
        };
        assert!(why.contains(&format!("{gone} refuses the connection")), "{why}");
    }
}
