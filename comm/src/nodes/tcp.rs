//! Links over TCP.
//!
//! Two ranks of a link have two connections: one for the data, and one on which nothing is sent
//! until a member leaves. As the latter is idle, the kernel's keep-alive tells within ten seconds
//! when the other machine, or the network, is gone; a process that is merely slow, or stopped, is
//! alive to it. (`TCP_USER_TIMEOUT` on the data would take a stopped reader for dead.) The sizes of
//! buffers are left to the kernel, which adapts them up to a larger bound than it grants to those
//! who ask.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::lobby::Lobby;
use super::queue::Queue;
use super::{Departure, Loss, Network, Patience, Unlinked, Wire};
use crate::error::Result;
use crate::shm::Part;

/// A connection that is idle for so many seconds is probed, at such an interval, and is broken when
/// so many probes were not answered.
const PROBE_AFTER: u32 = 4;
const PROBE_INTERVAL: u32 = 2;
const PROBES: u32 = 3;
/// One attempt to connect, and one look at who has connected.
const ATTEMPT: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(10);
/// Parts that one call to the kernel moves.
const BATCH: usize = 64;
/// Said by a member that leaves with nothing more to do.
const LEAVING: &[u8] = b"!";
/// How long the word of a member that leaves may be behind the end of its data.
const FAREWELL: Duration = Duration::from_millis(200);
/// How long what a member has sent before it went may stay away.
const DRY: Duration = Duration::from_secs(10);

/// The connections of one rank.
pub struct TcpNetwork {
    rank: usize,
    lobby: Lobby,
    /// Of all ranks' lobbies.
    addresses: Vec<SocketAddr>,
}

impl TcpNetwork {
    /// Begins to listen at `address`, where other ranks of the job can connect.
    pub fn listen(rank: usize, address: IpAddr, token: &str) -> io::Result<Self> {
        Ok(Self { rank, lobby: Lobby::open(address, token)?, addresses: Vec::new() })
    }

    pub fn address(&self) -> SocketAddr {
        self.lobby.address()
    }

    /// All ranks' addresses, by rank.
    pub fn set_addresses(&mut self, addresses: Vec<SocketAddr>) {
        self.addresses = addresses;
    }

    fn connect(
        &self,
        name: &str,
        rank: usize,
        mut patience: impl FnMut() -> Result<()>,
    ) -> Result<TcpStream, Failed> {
        loop {
            match self.lobby.knock(self.addresses[rank], name, ATTEMPT) {
                Ok(stream) => return Ok(stream),
                // It has listened since before its address was known.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    let address = self.addresses[rank];
                    return Err(Failed::Lost(Departure::OutOfReach(format!(
                        "{address} refuses the connection: the process has ended, or a firewall lies between"
                    ))));
                }
                Err(error) if error.kind() != io::ErrorKind::TimedOut => {
                    return Err(Failed::Lost(Departure::OutOfReach(error.to_string())));
                }
                Err(_) => patience().map_err(Failed::GivenUp)?,
            }
        }
    }

    fn accept(
        &self,
        name: &str,
        mut patience: impl FnMut() -> Result<()>,
    ) -> Result<TcpStream, Failed> {
        loop {
            match self.lobby.take(name, LOOK) {
                Some(stream) => return Ok(stream),
                None => patience().map_err(Failed::GivenUp)?,
            }
        }
    }
}

enum Failed {
    Lost(Departure),
    GivenUp(crate::Error),
}

impl Network for TcpNetwork {
    fn link(
        &self,
        channel: &str,
        members: &[usize],
        own: usize,
        patience: Patience,
    ) -> Result<Box<dyn Wire>, Unlinked> {
        let mut peers: Vec<Option<Peer>> = members.iter().map(|_| None).collect();
        // Those before this rank first: that takes nobody's patience.
        for member in (0..own).chain(own + 1..members.len()) {
            let mut patience = || patience(&[member]);
            let mut connection = |kind: &str| match member < own {
                true => {
                    let name = format!("{channel}/{kind}/{}", self.rank);
                    self.connect(&name, members[member], &mut patience)
                }
                false => {
                    self.accept(&format!("{channel}/{kind}/{}", members[member]), &mut patience)
                }
            };
            let peer = connection("data").and_then(|data| {
                let pulse = connection("pulse")?;
                Peer::new(data, pulse)
                    .map_err(|error| Failed::Lost(Departure::OutOfReach(error.to_string())))
            });
            peers[member] = Some(peer.map_err(|failed| match failed {
                Failed::Lost(how) => Unlinked::Lost(Loss { member, how }),
                Failed::GivenUp(error) => Unlinked::GivenUp(error),
            })?);
        }
        Ok(Box::new(TcpWire { peers }))
    }

    fn have_come(&self, channel: &str, members: &[usize], own: usize) -> bool {
        let name = |kind, rank: &usize| format!("{channel}/{kind}/{rank}");
        let names =
            members[own + 1..].iter().flat_map(|rank| [name("data", rank), name("pulse", rank)]);
        self.lobby.have_come(&names.collect::<Vec<_>>())
    }
}

struct TcpWire {
    /// By position; None for this rank.
    peers: Vec<Option<Peer>>,
}

struct Peer {
    data: TcpStream,
    pulse: TcpStream,
    sending: Queue,
    receiving: Queue,
    /// Whether a read found nothing, or a write no room.
    waits: (bool, bool),
    /// Once it is known to have gone; and since when nothing has come from it, from then on.
    departure: Option<Departure>,
    quiet_since: Instant,
    /// Nothing more is wanted from it than word of its departure.
    is_abandoned: bool,
}

impl Peer {
    fn new(data: TcpStream, pulse: TcpStream) -> io::Result<Self> {
        data.set_nodelay(true)?;
        setsockopt(&pulse, sockopt::KeepAlive, &true)?;
        setsockopt(&pulse, sockopt::TcpKeepIdle, &PROBE_AFTER)?;
        setsockopt(&pulse, sockopt::TcpKeepInterval, &PROBE_INTERVAL)?;
        setsockopt(&pulse, sockopt::TcpKeepCount, &PROBES)?;
        data.set_nonblocking(true)?;
        pulse.set_nonblocking(true)?;
        let (sending, receiving) = (Queue::default(), Queue::default());
        Ok(Self {
            data,
            pulse,
            sending,
            receiving,
            waits: (false, false),
            departure: None,
            quiet_since: Instant::now(),
            is_abandoned: false,
        })
    }

    /// Moves what can be moved without waiting; whether that was anything.
    fn go_on(&mut self) -> Result<bool, Departure> {
        let written = self.write_on();
        // Who takes nothing more may have sent something before.
        let read = self.read_on();
        Ok(written? | read?)
    }

    fn write_on(&mut self) -> Result<bool, Departure> {
        let mut moved = false;
        self.waits.1 = false;
        while !self.sending.parts.is_empty() {
            let queue = &self.sending;
            let mut slices = [IoSlice::new(&[]); BATCH];
            for (index, (slice, part)) in slices.iter_mut().zip(&queue.parts).enumerate() {
                *slice = IoSlice::new(&part.bytes()[if index == 0 { queue.offset } else { 0 }..]);
            }
            match (&self.data).write_vectored(&slices[..queue.parts.len().min(BATCH)]) {
                Ok(count) => self.sending.skip(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.waits.1 = true;
                    break;
                }
                Err(error) => return Err(self.departure(Some(error))),
            }
            moved = true;
        }
        Ok(moved)
    }

    fn read_on(&mut self) -> Result<bool, Departure> {
        let mut moved = false;
        self.waits.0 = false;
        while !self.receiving.parts.is_empty() {
            let queue = &mut self.receiving;
            let (offset, count) = (queue.offset, queue.parts.len().min(BATCH));
            let mut slices: [IoSliceMut<'_>; BATCH] =
                std::array::from_fn(|_| IoSliceMut::new(&mut []));
            for (index, (slice, part)) in slices.iter_mut().zip(&mut queue.parts).enumerate() {
                *slice =
                    IoSliceMut::new(&mut part.bytes_mut()[if index == 0 { offset } else { 0 }..]);
            }
            match (&self.data).read_vectored(&mut slices[..count]) {
                Ok(0) => return Err(self.departure(None)),
                Ok(count) => self.receiving.skip(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.waits.0 = true;
                    break;
                }
                Err(error) => return Err(self.departure(Some(error))),
            }
            moved = true;
        }
        if moved && self.departure.is_some() {
            self.quiet_since = Instant::now();
        }
        Ok(moved)
    }

    /// How it has gone, if something is due that will not come any more.
    fn overdue(&self) -> Option<Departure> {
        let is_due = !self.receiving.parts.is_empty() || !self.sending.parts.is_empty();
        self.departure.clone().filter(|_| is_due && self.quiet_since.elapsed() >= DRY)
    }

    /// Why the data has come to its end, which the peer says once.
    fn departure(&mut self, error: Option<io::Error>) -> Departure {
        let departure = self.departure.take().unwrap_or_else(|| {
            self.quiet_since = Instant::now();
            self.last_words(error)
        });
        self.departure.insert(departure).clone()
    }

    fn last_words(&self, error: Option<io::Error>) -> Departure {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};
        if let Some(error) = error.filter(|e| !matches!(e.kind(), BrokenPipe | ConnectionReset)) {
            return Departure::OutOfReach(error.to_string());
        }
        let (begin, mut words, mut buffer) = (Instant::now(), Vec::new(), [0; 4096]);
        loop {
            match (&self.pulse).read(&mut buffer) {
                Ok(count @ 1..) => words.extend(&buffer[..count]),
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && begin.elapsed() < FAREWELL =>
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => break,
            }
        }
        match &words[..] {
            [] => Departure::Ended,
            LEAVING => Departure::Left,
            why => Departure::Failed(String::from_utf8_lossy(why).into_owned()),
        }
    }

    /// What is known to be wrong with the connections, when no data is waited for.
    fn ailment(&mut self) -> Option<Departure> {
        if self.departure.is_some() {
            return self.departure.clone();
        }
        match self.pulse.take_error() {
            Ok(None) => {}
            Ok(Some(error)) | Err(error) => return Some(self.departure(Some(error))),
        }
        // The data says so after all that was sent.
        let last = if self.is_abandoned { &self.pulse } else { &self.data };
        match last.peek(&mut [0]) {
            Ok(1..) if self.is_abandoned => Some(self.departure(None)),
            Ok(0) => Some(self.departure(None)),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                Some(self.departure(Some(error)))
            }
            _ => None,
        }
    }
}

impl TcpWire {
    fn peer(&mut self, member: usize) -> &mut Peer {
        self.peers[member].as_mut().expect("no member talks to itself") // invariant
    }

    fn others(&mut self) -> impl Iterator<Item = (usize, &mut Peer)> {
        self.peers
            .iter_mut()
            .enumerate()
            .filter_map(|(member, peer)| Some((member, peer.as_mut()?)))
    }

    fn go_on(&mut self) -> Result<bool, Loss> {
        let mut moved = false;
        for (member, peer) in self.others() {
            moved |= peer.go_on().map_err(|how| Loss { member, how })?;
        }
        Ok(moved)
    }

    /// Waits until something can be moved.
    fn sleep(&mut self, time: Duration) -> Result<(), Loss> {
        let (mut fds, mut pulses) =
            (Vec::with_capacity(2 * self.peers.len()), Vec::with_capacity(self.peers.len()));
        for (member, peer) in self
            .peers
            .iter()
            .enumerate()
            .filter_map(|(member, peer)| Some((member, peer.as_ref()?)))
        {
            // An end that is known already must not cut every sleep short.
            if peer.departure.is_none() {
                pulses.push((member, fds.len()));
                fds.push(PollFd::new(&peer.pulse, PollFlags::empty()));
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
        let ended = pulses
            .iter()
            .find(|(_, at)| fds[*at].revents().intersects(PollFlags::ERR | PollFlags::HUP));
        let Some(&(member, _)) = ended else { return Ok(()) };
        let peer = self.peer(member);
        match peer.departure(peer.pulse.take_error().ok().flatten()) {
            how @ Departure::OutOfReach(_) => Err(Loss { member, how }),
            // The data comes to its end after all that was sent.
            _ => Ok(()),
        }
    }
}

impl Wire for TcpWire {
    fn send(&mut self, to: usize, part: Part) -> u64 {
        self.peer(to).sending.push(part)
    }

    fn receive(&mut self, from: usize, part: Part) -> u64 {
        self.peer(from).receiving.push(part)
    }

    fn sent(&self, to: usize) -> u64 {
        self.peers[to].as_ref().map_or(0, |peer| peer.sending.done)
    }

    fn received(&self, from: usize) -> u64 {
        self.peers[from].as_ref().map_or(0, |peer| peer.receiving.done)
    }

    fn is_idle(&self) -> bool {
        self.peers
            .iter()
            .flatten()
            .all(|peer| peer.sending.parts.is_empty() && peer.receiving.parts.is_empty())
    }

    fn drive(&mut self, time: Duration) -> Result<(), Loss> {
        if self.go_on()? || time.is_zero() {
            return Ok(());
        }
        self.sleep(time)?;
        if self.go_on()? {
            return Ok(());
        }
        // Where the pulse was reset, as by a machine that has started again, the data may never
        // come to its end.
        let overdue =
            self.others().find_map(|(member, peer)| Some(Loss { member, how: peer.overdue()? }));
        overdue.map_or(Ok(()), Err)
    }

    fn lost(&mut self, member: usize) -> Option<Departure> {
        self.peers[member].as_mut()?.ailment()
    }

    fn abandon(&mut self, why: &str) {
        for (_, peer) in self.others() {
            let _ = (&peer.pulse).write(why.as_bytes());
            peer.sending = Queue::default();
            peer.receiving = Queue::default();
            peer.is_abandoned = true;
            let _ = peer.data.shutdown(Shutdown::Both);
            let _ = peer.pulse.shutdown(Shutdown::Write);
        }
    }

    fn leave(&mut self) {
        for (_, peer) in self.others() {
            let _ = (&peer.pulse).write(LEAVING);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_refuses_a_connection_may_be_behind_a_firewall() {
        let mut network = TcpNetwork::listen(1, [127, 0, 0, 1].into(), "token").unwrap();
        let gone = TcpNetwork::listen(0, [127, 0, 0, 1].into(), "token").unwrap().address();
        network.set_addresses(vec![gone, network.address()]);
        let linked = network.link("channel", &[0, 1], 1, &mut |_| Ok(()));
        let Err(Unlinked::Lost(Loss { member: 0, how: Departure::OutOfReach(why) })) = linked
        else {
            panic!("it must be out of reach")
        };
        assert!(why.contains(&format!("{gone} refuses the connection")), "{why}");
    }
}
