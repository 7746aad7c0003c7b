//! The two ends of a connection.
//!
//! Parts are cut into, and put together from, messages of at most [`CHUNK`] bytes. Each member of a
//! channel sends under a tag of its own, and tells the others that tag by a *handshake*. Nobody
//! waits for handshakes: what is sent before its tag is known waits at its destination.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::session::{
    BackgroundRequest, HANDSHAKE_TAG, MAX_BACKOFF, MAX_HANDSHAKE, Request, Session, with_session,
};
use crate::env::Membership;
use crate::peer_info::PeerInfo;
use crate::transport::queue::QueuePair;
use crate::transport::{Connections, DisconnectReason, PeerDown, Transport};

/// The most bytes of one message, and how many messages to and from a member are under way at most.
const CHUNK: usize = 256 << 10;
const DEPTH: usize = 4;

/// A message's first byte: data follows, or nothing more does, because the sender leaves or has
/// given up. Why, is in the rest, if it knows.
const DATA: u8 = 0;
const CLOSED: u8 = 1;
const ABORTED: u8 = 2;

/// The ranks of the job, which are MPI's.
struct MpiTransport;

/// # Errors
/// MPI cannot be used here, or numbers the ranks otherwise than the job does.
pub fn open(membership: &Membership) -> Result<Box<dyn Transport>, String> {
    super::check_place(membership)?;
    Ok(Box::new(MpiTransport))
}

impl Transport for MpiTransport {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn address(&self) -> Vec<u8> {
        Vec::new()
    }

    /// MPI knows its ranks by their numbers.
    fn set_peers(&mut self, _: &[PeerInfo], _: &PeerInfo) -> Result<(), String> {
        Ok(())
    }

    fn connect(
        &self,
        _: &str,
        channel: &str,
        members: &[usize],
        own: usize,
    ) -> Result<Box<dyn Connections>, PeerDown> {
        let others = (0..members.len()).filter(|&member| member != own);
        let linked = with_session(|session| {
            let tag = session.new_tag()?;
            let handshake = [&tag.to_le_bytes(), channel.as_bytes()].concat();
            if handshake.len() > MAX_HANDSHAKE {
                return Err(format!(
                    "the name of the channel has {} bytes, which is too long",
                    channel.len()
                ));
            }
            for member in others.clone() {
                let message =
                    session.send(handshake.clone(), members[member] as c_int, HANDSHAKE_TAG)?;
                session.background.push(Box::new(message));
            }
            Ok(tag)
        });
        let tag = linked.map_err(|error| PeerDown {
            member: others.clone().next().unwrap_or(own),
            how: DisconnectReason::OutOfReach(error),
        })?;
        let peers = (0..members.len())
            .map(|member| (member != own).then(|| MpiPeer::new(members[member] as c_int)))
            .collect();
        Ok(Box::new(MpiConnections { channel: channel.into(), tag, peers, has_ended: false }))
    }
}

struct MpiConnections {
    channel: String,
    /// The tag of the messages that this rank sends.
    tag: c_int,
    /// The peers by position; None for this rank.
    peers: Vec<Option<MpiPeer>>,
    /// The other members know that this rank sends nothing more.
    has_ended: bool,
}

struct MpiPeer {
    rank: c_int,
    queues: QueuePair,
    outgoing: VecDeque<Request>,
    /// Messages that come in, once the peer's tag is known.
    incoming: VecDeque<Request>,
    tag: Option<c_int>,
    /// The first that has come, and what of it is still to be copied.
    come: Option<(Request, Range<usize>)>,
    reason: Option<DisconnectReason>,
    /// Nothing more is wanted from it than word of its reason.
    is_aborted: bool,
}

impl MpiPeer {
    fn new(rank: c_int) -> Self {
        Self {
            rank,
            queues: QueuePair::default(),
            outgoing: VecDeque::new(),
            incoming: VecDeque::new(),
            tag: None,
            come: None,
            reason: None,
            is_aborted: false,
        }
    }

    /// Moves what can be moved now; whether that was anything.
    fn progress_now(
        &mut self,
        session: &mut Session,
        channel: &str,
        tag: c_int,
    ) -> Result<bool, DisconnectReason> {
        let moved = self
            .progress_sends(session, tag)
            .and_then(|sent| Ok(self.progress_receives(session, channel)? || sent));
        let moved = moved.map_err(DisconnectReason::OutOfReach)?;
        match &self.reason {
            Some(how) if !self.queues.is_empty() => Err(how.clone()),
            _ => Ok(moved),
        }
    }

    fn progress_sends(&mut self, session: &Session, tag: c_int) -> Result<bool, String> {
        let mut moved = false;
        while let Some(first) = self.outgoing.front_mut() {
            if session.test(first)?.is_none() {
                break;
            }
            self.outgoing.pop_front();
        }
        while !self.queues.sending.parts.is_empty() && self.outgoing.len() < DEPTH {
            let mut buffer = vec![DATA];
            while let Some(part) =
                self.queues.sending.parts.front().filter(|_| buffer.len() <= CHUNK)
            {
                let rest = &part.bytes()[self.queues.sending.offset..];
                let count = rest.len().min(CHUNK + 1 - buffer.len());
                buffer.extend_from_slice(&rest[..count]);
                self.queues.sending.skip(count);
            }
            self.outgoing.push_back(session.send(buffer, self.rank, tag)?);
            moved = true;
        }
        Ok(moved)
    }

    fn progress_receives(&mut self, session: &mut Session, channel: &str) -> Result<bool, String> {
        let mut moved = false;
        if self.tag.is_none() {
            self.tag = session.tags.remove(&(self.rank, channel.to_string()));
            for _ in 0..self.tag.map_or(0, |_| DEPTH) {
                self.expect(session, vec![0; CHUNK + 1])?;
            }
        }
        while self.reason.is_none() {
            let Some((mut message, mut rest)) = self.come.take() else {
                let Some(first) = self.incoming.front_mut() else { break };
                let Some(status) = session.test(first)? else { break };
                let Some(message) = self.incoming.pop_front() else { break };
                match message.buffer[0] {
                    DATA => self.come = Some((message, 1..status.bytes)),
                    CLOSED => self.reason = Some(DisconnectReason::Left),
                    _ if status.bytes == 1 => self.reason = Some(DisconnectReason::Ended),
                    _ => {
                        let why = String::from_utf8_lossy(&message.buffer[1..status.bytes]);
                        self.reason = Some(DisconnectReason::Failed(why.into_owned()));
                    }
                }
                continue;
            };
            let Some(part) = self.queues.receiving.parts.front_mut() else {
                if self.is_aborted {
                    self.expect(session, std::mem::take(&mut message.buffer))?;
                    continue;
                }
                self.come = Some((message, rest));
                break;
            };
            let to = &mut part.bytes_mut()[self.queues.receiving.offset..];
            let count = to.len().min(rest.len());
            to[..count].copy_from_slice(&message.buffer[rest.start..rest.start + count]);
            rest.start += count;
            self.queues.receiving.skip(count);
            moved = true;
            if rest.is_empty() {
                self.expect(session, std::mem::take(&mut message.buffer))?;
            } else {
                self.come = Some((message, rest));
            }
        }
        Ok(moved)
    }

    /// Forgets all parts; what else comes in is of no interest.
    fn abort(&mut self) {
        self.queues = QueuePair::default();
        self.is_aborted = true;
    }

    fn expect(&mut self, session: &Session, buffer: Vec<u8>) -> Result<(), String> {
        if let Some(tag) = self.tag {
            self.incoming.push_back(session.receive(buffer, self.rank, tag)?);
        }
        Ok(())
    }
}

impl MpiConnections {
    fn progress_now(&mut self) -> Result<bool, PeerDown> {
        let Self { channel, tag, peers, .. } = self;
        // A failure of MPI itself needs a member to blame.
        let mut last = peers.iter().position(Option::is_some).unwrap_or_default();
        let moved = with_session(|session| {
            session.progress()?;
            let mut moved = false;
            for (member, peer) in peers
                .iter_mut()
                .enumerate()
                .filter_map(|(member, peer)| Some((member, peer.as_mut()?)))
            {
                last = member;
                match peer.progress_now(session, channel, *tag) {
                    Ok(some) => moved |= some,
                    Err(how) => return Ok(Err(PeerDown { member, how })),
                }
            }
            Ok(Ok(moved))
        });
        moved.unwrap_or_else(|error| {
            Err(PeerDown { member: last, how: DisconnectReason::OutOfReach(error) })
        })
    }

    /// Tells the others, once, that nothing more is sent, and why.
    fn end(&mut self, kind: u8, why: &str) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        // At the end of the process nobody listens.
        let _ = with_session(|session| {
            for peer in self.peers.iter_mut().flatten() {
                let goodbye = session.send([&[kind], why.as_bytes()].concat(), peer.rank, self.tag);
                for message in peer.outgoing.drain(..).chain(goodbye) {
                    session.background.push(Box::new(message));
                }
            }
            Ok(())
        });
    }
}

impl Connections for MpiConnections {
    fn with_queues(&mut self, member: usize, action: &mut dyn FnMut(&mut QueuePair)) {
        if let Some(peer) = &mut self.peers[member] {
            action(&mut peer.queues);
        }
    }

    fn progress(&mut self, time: Duration) -> Result<(), PeerDown> {
        let begin = Instant::now();
        let mut backoff = Duration::from_micros(10);
        while !self.progress_now()? && begin.elapsed() < time {
            std::thread::sleep(backoff);
            backoff = (2 * backoff).min(MAX_BACKOFF);
        }
        Ok(())
    }

    fn disconnect_reason(&mut self, member: usize) -> Option<DisconnectReason> {
        match self.progress_now() {
            Err(loss) if loss.member == member => Some(loss.how),
            _ => self.peers[member].as_ref()?.reason.clone(),
        }
    }

    fn abort(&mut self, why: &str) {
        self.end(ABORTED, why);
        self.peers.iter_mut().flatten().for_each(MpiPeer::abort);
    }

    fn shutdown(&mut self) {
        self.end(CLOSED, "");
    }
}

impl Drop for MpiConnections {
    fn drop(&mut self) {
        self.end(ABORTED, "");
        let _ = with_session(|session| {
            for mut peer in self.peers.drain(..).flatten() {
                peer.abort();
                session.background.push(Box::new(Draining { peer, channel: self.channel.clone() }));
            }
            Ok(())
        });
    }
}

/// A peer that has yet to say that it sends nothing more. Until then somebody has to take what
/// comes, or MPI would keep it for good.
struct Draining {
    peer: MpiPeer,
    channel: String,
}

impl BackgroundRequest for Draining {
    fn is_done(&mut self, session: &mut Session) -> bool {
        let is_done = self.peer.progress_receives(session, &self.channel).is_err()
            || self.peer.reason.is_some();
        if is_done {
            self.cancel(session);
        }
        is_done
    }

    fn cancel(&mut self, session: &Session) {
        self.peer.incoming.drain(..).for_each(|message| session.cancel(message));
    }
}
