//! How messages find their receivers: by sender and tag, as in MPI.
//!
//! A receive takes what comes from a sender in order, and keeps messages with other tags for those
//! who ask for them (see `message_queue`). All threads of a rank that wait for one sender sleep on its
//! `sent`; the first to open the queue takes what has come, whomever it is for. Threads that find
//! an queue open, and those that wait for any sender, sleep on the rank's doorbell, which is rung
//! by senders, by whoever closes an queue that another thread wants, and by whoever keeps a
//! message.

use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use flow_kernels::DType;

use super::contribution::BufferView;
use super::control::sleep_on;
use super::control::Counter;
use super::engine::Engine;
use super::internode::POLL_INTERVAL;
use super::internode_exchange::drive;
use super::io_segment::IoSegment;
use super::message_queue::{Incoming, Message, Open};
use super::p2p::{pieces, Endpoints, MessageDescriptor, PIECE};
use crate::descriptor::{DescriptorWords, Location, OpDescriptor};
use crate::error::{Error, Result};
use crate::transport::DisconnectReason;
use crate::world::LIVENESS_INTERVAL;

/// How long a receive from any rank sleeps at most before it looks at its links to other nodes.
const LINK_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How flow-launch tells of a process that ended well.
const ENDED_WELL: &str = "exit code 0";

/// A message with the tag that is wanted.
enum Found<'a> {
    /// It was kept.
    Kept(Message),
    /// It comes next from its sender; its data is still to be taken.
    Next(Open<'a>, OpDescriptor, Location),
}

/// What there is from a sender, as MPI's matched probe tells.
enum Probe<'a> {
    Found(Found<'a>),
    /// Nothing yet. What comes next makes `sent` this, unless it comes from another node.
    Nothing(u32),
    /// Another thread has the queue open.
    Busy,
    /// The sender on another node is gone.
    Gone(DisconnectReason),
}

/// How patient a probe of a sender on another node is.
#[derive(Clone, Copy)]
enum ProbeWait {
    /// So long.
    For(Duration),
    None,
}

/// What is known of senders on other nodes that have never sent anything.
#[derive(Default)]
struct NeverSent {
    asked: Option<Instant>,
    suspects: Vec<usize>,
    gone: Vec<(usize, DisconnectReason)>,
}

impl Engine {
    pub fn recv(&self, data: BufferView, dtype: DType, from: usize, tag: u32) -> Result<()> {
        let (peer, count) = (Some(self.ranks[from]), data.bytes / dtype.size());
        let what = MessageDescriptor { verb: "recv from", peer, count, dtype, tag };
        self.check_poison(&what)?;
        let found = match self.probe(from, &what, ProbeWait::None)? {
            Probe::Found(found) => found,
            probe => self.wait_for(from, probe, &what).inspect_err(|_| self.abandon_link(from))?,
        };
        self.finish(found, from, data, &what)
    }

    /// Returns the rank whose message it was.
    pub fn recv_any(&self, data: BufferView, dtype: DType, tag: u32) -> Result<usize> {
        let what = MessageDescriptor {
            verb: "recv from",
            peer: None,
            count: data.bytes / dtype.size(),
            dtype,
            tag,
        };
        self.check_poison(&what)?;
        let (from, found) = match self.probe_all(&what)? {
            Some(found) => found,
            None => self.wait_for_any(&what)?,
        };
        self.next_sender.store((from + 1) % self.size(), Ordering::Relaxed);
        self.finish(found, from, data, &what)?;
        Ok(from)
    }

    fn wait_for<'a>(
        &'a self,
        from: usize,
        mut probe: Probe<'a>,
        what: &MessageDescriptor,
    ) -> Result<Found<'a>> {
        let queue = &self.queues[from];
        let sent = queue.sender.map(|sender| &self.control.mailbox(sender, self.local).sent);
        let mut outcome = None;
        let is_suspect = Cell::new(false);
        let lost = || self.lost_sender(from, what.tag, &is_suspect);
        self.wait_until(what, &|| vec![from], &lost, &mut |time| {
            match (&probe, sent) {
                (Probe::Nothing(next), Some(sent)) if !comes(sent, *next, time) => {
                    return Ok(false)
                }
                (Probe::Busy, _) if time.is_zero() => std::thread::yield_now(),
                (Probe::Busy, _) => self.doorbell().sleep_unless(time, || {
                    queue.has(what.tag) || queue.open(self.doorbell()).is_some()
                }),
                _ => {}
            }
            match self.probe(from, what, ProbeWait::For(time)) {
                Ok(Probe::Found(found)) => outcome = Some(Ok(found)),
                Ok(Probe::Gone(how)) => {
                    outcome = Some(Err(self.handle_disconnect(from, how, what)))
                }
                Ok(nothing) => probe = nothing,
                Err(error) => outcome = Some(Err(error)),
            }
            Ok(outcome.is_some())
        })?;
        outcome.expect("the wait is over because of it") // invariant
    }

    fn wait_for_any<'a>(&'a self, what: &MessageDescriptor) -> Result<(usize, Found<'a>)> {
        let mut outcome = None;
        let (absent, deserted) = (RefCell::default(), Cell::new(false));
        let missing = || self.ranks_where(|rank| rank != self.rank && !self.has_left(rank));
        let lost = || {
            let (lost, is_last) = self.lost_senders(what.tag, &mut absent.borrow_mut())?;
            deserted.set(is_last);
            Some(lost)
        };
        let waited = self.wait_until(what, &missing, &lost, &mut |time| {
            let mut is_found = || {
                outcome = self.probe_all(what).transpose();
                outcome.is_some()
            };
            if time.is_zero() {
                return Ok(is_found());
            }
            let time = if self.inter_node.is_some() { time.min(LINK_POLL_INTERVAL) } else { time };
            let mut is_over = false;
            self.doorbell().sleep_unless(time, || {
                is_over = is_found();
                is_over
            });
            Ok(is_over || is_found())
        });
        match waited {
            Ok(()) => outcome.expect("the wait is over because of it"), // invariant
            Err(Error::PeerLost { rank, operation, peer }) if deserted.get() => {
                Err(Error::PeerLost {
                    rank,
                    operation,
                    peer: format!("nobody is left to send it: {peer}"),
                })
            }
            Err(error) => Err(error),
        }
    }

    /// What there is from any rank, beginning with the one after that which was served last.
    fn probe_all(&self, what: &MessageDescriptor) -> Result<Option<(usize, Found<'_>)>> {
        let first = self.next_sender.load(Ordering::Relaxed);
        let mut died = None;
        for from in (first..self.size()).chain(0..first).filter(|&rank| rank != self.rank) {
            match self.probe(from, what, ProbeWait::None)? {
                Probe::Found(found) => return Ok(Some((from, found))),
                // Others may still send.
                Probe::Nothing(_) | Probe::Busy | Probe::Gone(DisconnectReason::Left) => {}
                // It may have left before in good order.
                Probe::Gone(DisconnectReason::Ended | DisconnectReason::Refused(_))
                    if self.has_never_sent(from) => {}
                // Others may have sent.
                Probe::Gone(how) => died = died.or(Some((from, how))),
            }
        }
        died.map_or(Ok(None), |(from, how)| Err(self.handle_disconnect(from, how, what)))
    }

    /// Takes what has come from a rank until that is what is wanted.
    fn probe(&self, from: usize, what: &MessageDescriptor, wait: ProbeWait) -> Result<Probe<'_>> {
        let queue = &self.queues[from];
        match (queue.open(self.doorbell()), queue.sender) {
            (Some(open), Some(sender)) => self.probe_local(from, sender, open, what),
            (Some(open), None) => self.probe_remote(from, open, what, wait),
            (None, _) => Ok(queue
                .take(what.tag)
                .map_or(Probe::Busy, |message| Probe::Found(Found::Kept(message)))),
        }
    }

    fn probe_local<'a>(
        &'a self,
        from: usize,
        sender: usize,
        mut open: Open<'a>,
        what: &MessageDescriptor,
    ) -> Result<Probe<'a>> {
        let mailbox = self.control.mailbox(sender, self.local);
        let begin = Instant::now();
        loop {
            if let Some(message) = self.queues[from].take(what.tag) {
                return Ok(Probe::Found(Found::Kept(message)));
            }
            let part = mailbox.taken.value.load(Ordering::Relaxed);
            let next = part.wrapping_add(1);
            // However much comes, the caller has an eye on the clock.
            if !mailbox.sent.reached(next) || begin.elapsed() >= LIVENESS_INTERVAL {
                return Ok(Probe::Nothing(next));
            }
            let mut message = match open.unfinished.take() {
                Some(message) => message,
                None => match self.read_descriptor(from, &mailbox.descriptor)? {
                    (operation, location) if operation.tag() == what.tag => {
                        return Ok(Probe::Found(Found::Next(open, operation, location)));
                    }
                    (operation, location) => self.keep(from, operation, location, what)?,
                },
            };
            let (source, capacity) = self.part(sender, part, message.location);
            let count = capacity.min(message.missing());
            // SAFETY: the sender leaves the source alone until it is taken; so many bytes are still
            // to come.
            unsafe { message.append(source, count) };
            mailbox.taken.raise(next);
            open.put(message);
        }
    }

    fn probe_remote<'a>(
        &'a self,
        from: usize,
        mut open: Open<'a>,
        what: &MessageDescriptor,
        wait: ProbeWait,
    ) -> Result<Probe<'a>> {
        let ends = Endpoints { sender: from, receiver: self.rank };
        if open.link.is_none() {
            open.link = Some(self.connect(&ends.channel(), &ends.members(), 0, what)?);
        }
        let begin = Instant::now();
        let mut time = match wait {
            ProbeWait::For(time) => time,
            ProbeWait::None => Duration::ZERO,
        };
        loop {
            if let Some(message) = self.queues[from].take(what.tag) {
                return Ok(Probe::Found(Found::Kept(message)));
            }
            // Of an abandoned link the group's failure tells.
            let Incoming {
                link: Some(wire),
                is_abandoned: false,
                post,
                is_expected,
                unfinished,
                ..
            } = &mut *open
            else {
                return Ok(Probe::Nothing(0));
            };
            if !std::mem::replace(is_expected, true) {
                // SAFETY: nobody looks at the post, or at the message, until it is filled; both
                // outlive the link.
                let part = unsafe {
                    unfinished.as_mut().map_or_else(
                        || IoSegment::of_descriptor(post),
                        |message| message.next_part(PIECE),
                    )
                };
                wire.receive(1, part);
            }
            match drive(&mut **wire, time, &mut |wire| wire.is_idle(1)) {
                Ok(true) => *is_expected = false,
                Ok(false) => return Ok(Probe::Nothing(0)),
                Err(loss) => {
                    open.has_left = matches!(loss.how, DisconnectReason::Left);
                    return Ok(Probe::Gone(loss.how));
                }
            }
            let message = match unfinished.take() {
                Some(message) => message,
                None => match self.read_descriptor(from, post)? {
                    (operation, location) if operation.tag() == what.tag => {
                        return Ok(Probe::Found(Found::Next(open, operation, location)));
                    }
                    (operation, location) => self.keep(from, operation, location, what)?,
                },
            };
            open.put(message);
            // However much comes, the caller has an eye on the clock.
            if begin.elapsed() >= LIVENESS_INTERVAL {
                return Ok(Probe::Nothing(0));
            }
            time = Duration::ZERO;
        }
    }

    /// Has the data of a message moved to where it is wanted.
    fn finish(
        &self,
        found: Found,
        from: usize,
        data: BufferView,
        what: &MessageDescriptor,
    ) -> Result<()> {
        let (Found::Kept(Message { operation, .. }) | Found::Next(_, operation, _)) = &found;
        if operation.dtype != what.dtype || operation.count != what.count as u64 {
            let tag =
                if what.tag == 0 { String::new() } else { format!(", both with tag {}", what.tag) };
            let error = self.message_mismatch(format!(
                "rank {} sends {} x {}, rank {} receives {} x {}{tag}",
                self.ranks[from],
                operation.count,
                operation.dtype,
                self.world.rank,
                what.count,
                what.dtype
            ));
            if let Found::Next(mut open, ..) = found {
                open.is_abandoned = true;
            }
            return Err(error);
        }
        match (found, self.queues[from].sender) {
            (Found::Kept(message), _) => {
                // SAFETY: the caller's memory is as long as the message.
                unsafe { super::bytes::copy(message.data.as_ptr(), data.data, data.bytes) };
                Ok(())
            }
            (Found::Next(_open, _, location), Some(sender)) => {
                self.take_parts(from, sender, location, data, what)
            }
            (Found::Next(mut open, ..), None) => {
                let ends = Endpoints { sender: from, receiver: self.rank };
                let moved = pieces(data)
                    .try_for_each(|piece| self.transfer(&mut open.link, ends, what, [piece]));
                open.is_abandoned = moved.is_err();
                moved
            }
        }
    }

    fn take_parts(
        &self,
        from: usize,
        sender: usize,
        location: Location,
        data: BufferView,
        what: &MessageDescriptor,
    ) -> Result<()> {
        let mailbox = self.control.mailbox(sender, self.local);
        let mut part = mailbox.taken.value.load(Ordering::Relaxed);
        let mut start = 0;
        loop {
            self.wait(&mailbox.sent, part.wrapping_add(1), what, &|| vec![from])?;
            let (source, capacity) = self.part(sender, part, location);
            let count = capacity.min(data.bytes - start);
            // SAFETY: the sender leaves the source alone until it is taken; the range is inside the
            // caller's memory.
            unsafe { super::bytes::copy(source, data.data.add(start), count) };
            part = part.wrapping_add(1);
            mailbox.taken.raise(part);
            start += count;
            if start == data.bytes {
                return Ok(());
            }
        }
    }

    /// Where a part of a message lies, and how many bytes it has at most.
    fn part(&self, sender: usize, part: u32, location: Location) -> (*const u8, usize) {
        match location {
            Location::Shared(offset) => (self.world.arena.at(offset), usize::MAX),
            Location::Staged => {
                let (fragment, capacity) = self.control.fragment(sender, self.local, part);
                (fragment, capacity)
            }
        }
    }

    fn read_descriptor(
        &self,
        from: usize,
        post: &DescriptorWords,
    ) -> Result<(OpDescriptor, Location)> {
        let (operation, location) =
            OpDescriptor::read(post).map_err(|reason| self.message_mismatch(reason.into()))?;
        let bytes = usize::try_from(operation.count)
            .ok()
            .and_then(|count| count.checked_mul(operation.dtype.size()));
        match (location, bytes) {
            (Location::Staged, Some(_)) => Ok((operation, location)),
            (Location::Shared(offset), Some(bytes)) if self.is_reachable(from, offset, bytes) => {
                Ok((operation, location))
            }
            _ => Err(self.message_mismatch(format!(
                "rank {} sends from outside the shared memory",
                self.ranks[from]
            ))),
        }
    }

    /// The beginning of a message that nobody has asked for yet.
    fn keep(
        &self,
        from: usize,
        operation: OpDescriptor,
        location: Location,
        what: &MessageDescriptor,
    ) -> Result<Message> {
        Message::new(operation, location).ok_or_else(|| {
            let (rank, sender) = (self.world.rank, self.ranks[from]);
            let OpDescriptor { count, dtype, .. } = operation;
            let reason = format!(
                "no memory to keep {count} x {dtype} with tag {} of rank {sender} until they are asked for: receive \
                 them earlier",
                operation.tag()
            );
            self.fail(Error::System { rank, operation: what.to_string(), reason })
        })
    }

    fn message_mismatch(&self, detail: String) -> Error {
        self.fail(Error::Mismatch { rank: self.world.rank, detail })
    }

    /// Whether, and how, a sender is gone without having sent a message with this tag. The connection to
    /// one on another node reports that behind all that was sent over it; if that was nothing, the
    /// sender may have left the group, as the leaders know.
    fn lost_sender(
        &self,
        from: usize,
        tag: u32,
        is_suspect: &Cell<bool>,
    ) -> Option<(usize, DisconnectReason)> {
        if self.queues[from].sender.is_none() {
            let how = self.disconnect_reason(from).filter(|_| self.has_never_sent(from))?;
            // There is another look at its connection in between.
            return is_suspect.replace(true).then_some((from, how));
        }
        let lost = self.find_lost_peer(&|| vec![from])?;
        self.has_nothing(from, tag).then_some(lost)
    }

    /// Whether nothing with this tag comes any more from a sender that is gone. (That nothing is
    /// said of a sender whose queue another thread has open: it may be about to keep the message.)
    fn has_nothing(&self, from: usize, tag: u32) -> bool {
        let queue = &self.queues[from];
        let Some(_open) = queue.open(self.doorbell()) else { return false };
        let has_sent = |sender| {
            let mailbox = self.control.mailbox(sender, self.local);
            mailbox.sent.reached(mailbox.taken.value.load(Ordering::Relaxed).wrapping_add(1))
        };
        !queue.has(tag) && !queue.sender.is_some_and(has_sent)
    }

    /// Whether a sender has died, or all have left, without having sent a message with this tag:
    /// one of them, how it went, and whether nobody is left.
    fn lost_senders(
        &self,
        tag: u32,
        absent: &mut NeverSent,
    ) -> Option<((usize, DisconnectReason), bool)> {
        self.ask(absent);
        let ended = self.world.ended(&self.ranks, Duration::ZERO);
        // Only now is it certain that a rank that has ended, and has not left, has died.
        let how = |rank: usize| match self.queues[rank].sender {
            Some(_) if self.has_left(rank) => Some(DisconnectReason::Left),
            Some(_) => ended.contains(&self.ranks[rank]).then_some(DisconnectReason::Ended),
            None if self.queues[rank].open(self.doorbell())?.has_left => {
                Some(DisconnectReason::Left)
            }
            None => absent.gone.iter().find(|(gone, _)| *gone == rank).map(|(_, how)| how.clone()),
        };
        let senders = self.ranks_where(|rank| rank != self.rank);
        let gone: Vec<_> = senders.iter().filter_map(|&rank| Some((rank, how(rank)?))).collect();
        let is_last = gone.len() == senders.len();
        let died = gone.iter().find(|(_, how)| !matches!(how, DisconnectReason::Left));
        let lost = died.or(gone.last().filter(|_| is_last))?;
        let is_silent = gone.iter().all(|&(rank, _)| self.has_nothing(rank, tag));
        is_silent.then(|| (lost.clone(), is_last))
    }

    /// Asks now and then for those on other nodes that are gone and have never sent anything.
    fn ask(&self, absent: &mut NeverSent) {
        if self.inter_node.is_none()
            || absent.asked.is_some_and(|asked| asked.elapsed() < POLL_INTERVAL)
        {
            return;
        }
        absent.asked = Some(Instant::now());
        let strangers = self.ranks_where(|rank| self.has_never_sent(rank));
        let how = |rank: usize| match self.world.exit_report(self.ranks[rank], Duration::ZERO) {
            _ if self.has_left(rank) => Some(DisconnectReason::Left),
            Some(report) if report == ENDED_WELL => Some(DisconnectReason::Left),
            Some(_) => Some(DisconnectReason::Ended),
            None => match self.disconnect_reason(rank)? {
                // Nobody knows how it has ended.
                DisconnectReason::Refused(_) => Some(DisconnectReason::Left),
                how => Some(how),
            },
        };
        let gone: Vec<_> =
            strangers.into_iter().filter_map(|rank| Some((rank, how(rank)?))).collect();
        // Before it went it may have sent: there is another look at the connections in between.
        let suspects = gone.iter().map(|(rank, _)| *rank).collect();
        let suspects = std::mem::replace(&mut absent.suspects, suspects);
        absent.gone = gone.into_iter().filter(|(rank, _)| suspects.contains(rank)).collect();
    }

    /// Whether a rank on another node has not sent this one anything in the group.
    fn has_never_sent(&self, rank: usize) -> bool {
        self.queues[rank].sender.is_none()
            && self.queues[rank]
                .open(self.doorbell())
                .is_some_and(|mut open| open.link.as_mut().is_none_or(|link| link.moved(1).1 == 0))
    }

    /// Has the link forget where to put what was to come: nobody may take that for received.
    fn abandon_link(&self, from: usize) {
        let Some(mut open) = self.queues[from].open(self.doorbell()) else { return };
        if let Some(wire) = &mut open.link {
            self.abandon(&mut **wire);
            open.unfinished = None;
            open.is_expected = false;
            open.is_abandoned = true;
        }
    }

    /// This rank's.
    fn doorbell(&self) -> &Counter {
        &self.control.rank(self.rank).doorbell
    }
}

/// Whether `sent` has come to `next`; sleeps first if there is time for that.
fn comes(sent: &Counter, next: u32, time: Duration) -> bool {
    if !time.is_zero() {
        sleep_on(sent, next, time);
    }
    sent.reached(next)
}
