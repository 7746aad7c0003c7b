//! Messages find their receivers: by sender and tag, as in MPI.
//!
//! A receive takes what comes from a sender in order, and keeps messages with other tags until they
//! are asked for (see `queue`). All threads of a rank that wait for one sender sleep on its `sent`.
//! The first to open the queue takes what has come, with whatever tag. Threads that find a queue
//! open, and those that wait for any sender, sleep on the rank's doorbell. It is rung by senders,
//! by whoever closes a queue that another thread wants, and by whoever keeps a message.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::message::{Endpoints, PIECE, pieces, transfer};
use super::queue::{ExpectedMessage, KeptMessage, MessageQueue, OpenQueue};
use crate::descriptor::{DescriptorWords, Elements, Location, MessageDescriptor, OpDescriptor};
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::group::core::GroupCore;
use crate::internode::connect::{Connector, progress};
use crate::label::Label;
use crate::memory::BufferView;
use crate::shm::bytes;
use crate::shm::control::{Control, Counter};
use crate::shm::io_segment::IoSegment;
use crate::transport::DisconnectReason;
use crate::world::LIVENESS_INTERVAL;

/// A message with the tag that is wanted.
pub enum Found<'a> {
    /// It was kept.
    Kept(KeptMessage),
    /// It comes next from its sender; its data is still to be taken.
    Next(OpenQueue<'a>, OpDescriptor, Location),
}

/// The result of a look for a message of a sender, as of MPI's matched probe.
pub enum Probe<'a> {
    Found(Found<'a>),
    /// Nothing yet. The next message makes `sent` this, unless it comes from another node.
    Nothing(u32),
    /// Another thread has the queue open.
    Busy,
    /// The sender on another node is gone.
    Gone(DisconnectReason),
}

/// The time that a probe of a sender on another node waits.
#[derive(Clone, Copy)]
pub enum ProbeWait {
    /// So long.
    For(Duration),
    None,
}

/// Matches what comes from each rank with what is asked for.
pub struct Matcher {
    pub core: Arc<GroupCore>,
    pub failure: Arc<Failure>,
    pub control: Arc<Control>,
    connector: Connector,
    pub queues: Vec<MessageQueue>,
}

impl Matcher {
    /// Returns a matcher that has received nothing.
    pub fn new(failure: &Arc<Failure>) -> Self {
        let core = Arc::clone(&failure.core);
        let queues = (0..core.size())
            .map(|rank| MessageQueue::new(core.locals.iter().position(|&local| local == rank)))
            .collect();
        Self {
            failure: Arc::clone(failure),
            control: Arc::clone(&failure.control),
            connector: Connector::new(failure),
            queues,
            core,
        }
    }

    /// Takes what has come from a rank until that is what is wanted.
    pub fn probe(
        &self,
        from: usize,
        what: &MessageDescriptor,
        wait: ProbeWait,
    ) -> Result<Probe<'_>> {
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
        mut open: OpenQueue<'a>,
        what: &MessageDescriptor,
    ) -> Result<Probe<'a>> {
        let mailbox = self.control.mailbox(sender, self.core.local);
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
                    (operation, location) if operation.tag == what.tag => {
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
        mut open: OpenQueue<'a>,
        what: &MessageDescriptor,
        wait: ProbeWait,
    ) -> Result<Probe<'a>> {
        let ends = Endpoints { sender: from, receiver: self.core.rank };
        if open.connection.is_none() {
            open.connection =
                Some(self.connector.connect(&ends.channel(), &ends.members(), 0, what)?);
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
            // If it was aborted, the group has failed.
            let ExpectedMessage {
                connection: Some(connections),
                is_aborted: false,
                descriptor,
                is_expected,
                unfinished,
                ..
            } = &mut *open
            else {
                return Ok(Probe::Nothing(0));
            };
            if !std::mem::replace(is_expected, true) {
                // SAFETY: nobody looks at the descriptor, or at the message, until it is
                // filled; both outlive the connection.
                let segment = unsafe {
                    unfinished.as_mut().map_or_else(
                        || IoSegment::of_descriptor(descriptor),
                        |message| message.next_segment(PIECE),
                    )
                };
                connections.receive(1, segment);
            }
            match progress(&mut **connections, time, &mut |peer| peer.is_idle(1)) {
                Ok(true) => *is_expected = false,
                Ok(false) => return Ok(Probe::Nothing(0)),
                Err(loss) => {
                    open.has_left = matches!(loss.how, DisconnectReason::Left);
                    return Ok(Probe::Gone(loss.how));
                }
            }
            let message = match unfinished.take() {
                Some(message) => message,
                None => match self.read_descriptor(from, descriptor)? {
                    (operation, location) if operation.tag == what.tag => {
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

    /// Moves the data of a message to where it is wanted.
    pub fn finish(
        &self,
        found: Found,
        from: usize,
        data: BufferView,
        what: &MessageDescriptor,
    ) -> Result<()> {
        let (Found::Kept(KeptMessage { operation, .. }) | Found::Next(_, operation, _)) = &found;
        let is_same = operation.dtype == what.dtype
            && operation.count == what.count as u64
            && Label::has_same_elements(operation.label, what.label);
        if !is_same {
            let tag =
                if what.tag == 0 { String::new() } else { format!(", both with tag {}", what.tag) };
            let error = self.message_mismatch(format!(
                "rank {} sends {}, rank {} receives {}{tag}",
                self.core.ranks[from],
                Elements(operation.count, operation.dtype, operation.label),
                self.core.world.rank,
                Elements(what.count as u64, what.dtype, what.label)
            ));
            if let Found::Next(mut open, ..) = found {
                open.is_aborted = true;
            }
            return Err(error);
        }
        match (found, self.queues[from].sender) {
            (Found::Kept(message), _) => {
                // SAFETY: the caller's memory is as long as the message.
                unsafe { bytes::copy(message.data.as_ptr(), data.data, data.bytes) };
                Ok(())
            }
            (Found::Next(_open, _, location), Some(sender)) => {
                self.take_parts(from, sender, location, data, what)
            }
            (Found::Next(mut open, ..), None) => {
                let ends = (Endpoints { sender: from, receiver: self.core.rank }, self.core.rank);
                let by = (&self.connector, &*self.failure);
                let moved = pieces(data)
                    .try_for_each(|piece| transfer(by, &mut open.connection, ends, what, [piece]));
                open.is_aborted = moved.is_err();
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
        let mailbox = self.control.mailbox(sender, self.core.local);
        let mut part = mailbox.taken.value.load(Ordering::Relaxed);
        let mut start = 0;
        loop {
            self.failure.wait(&mailbox.sent, part.wrapping_add(1), what, &|| vec![from])?;
            let (source, capacity) = self.part(sender, part, location);
            let count = capacity.min(data.bytes - start);
            // SAFETY: the sender leaves the source alone until it is taken; the range is inside the
            // caller's memory.
            unsafe { bytes::copy(source, data.data.add(start), count) };
            part = part.wrapping_add(1);
            mailbox.taken.raise(part);
            start += count;
            if start == data.bytes {
                return Ok(());
            }
        }
    }

    /// Returns where a part of a message lies, and how many bytes it has at most.
    fn part(&self, sender: usize, part: u32, location: Location) -> (*const u8, usize) {
        match location {
            Location::Shared(offset) => (self.core.world.arena.at(offset), usize::MAX),
            Location::Staged => {
                let (fragment, capacity) = self.control.fragment(sender, self.core.local, part);
                (fragment, capacity)
            }
        }
    }

    fn read_descriptor(
        &self,
        from: usize,
        words: &DescriptorWords,
    ) -> Result<(OpDescriptor, Location)> {
        let (operation, location) =
            OpDescriptor::read(words).map_err(|reason| self.message_mismatch(reason.into()))?;
        let bytes = usize::try_from(operation.count)
            .ok()
            .and_then(|count| count.checked_mul(operation.dtype.size()));
        match (location, bytes) {
            (Location::Staged, Some(_)) => Ok((operation, location)),
            (Location::Shared(offset), Some(bytes))
                if self.core.is_reachable(from, offset, bytes) =>
            {
                Ok((operation, location))
            }
            _ => Err(self.message_mismatch(format!(
                "rank {} sends from outside the shared memory",
                self.core.ranks[from]
            ))),
        }
    }

    /// Keeps the beginning of a message that nobody has asked for yet.
    fn keep(
        &self,
        from: usize,
        operation: OpDescriptor,
        location: Location,
        what: &MessageDescriptor,
    ) -> Result<KeptMessage> {
        KeptMessage::new(operation, location).ok_or_else(|| {
            let OpDescriptor { count, dtype, .. } = operation;
            let reason = format!(
                "no memory to keep {count} x {dtype} with tag {} of rank {} until they are asked \
                 for: receive them earlier",
                operation.tag, self.core.ranks[from]
            );
            self.failure.fail(Error::System {
                rank: self.core.world.rank,
                operation: what.to_string(),
                reason,
            })
        })
    }

    fn message_mismatch(&self, detail: String) -> Error {
        self.failure.fail(Error::Mismatch { rank: self.core.world.rank, detail })
    }

    /// Whether nothing with this tag comes any more from a sender that is gone. False while another
    /// thread has the queue open, as it may be about to keep the message.
    pub fn has_nothing(&self, from: usize, tag: u32) -> bool {
        let queue = &self.queues[from];
        let Some(_open) = queue.open(self.doorbell()) else { return false };
        if queue.has(tag) {
            return false;
        }
        let Some(sender) = queue.sender else { return true };
        let mailbox = self.control.mailbox(sender, self.core.local);
        !mailbox.sent.reached(mailbox.taken.value.load(Ordering::Relaxed).wrapping_add(1))
    }

    /// Whether a rank on another node has not sent this one anything in the group.
    pub fn has_never_sent(&self, rank: usize) -> bool {
        self.queues[rank].sender.is_none()
            && self.queues[rank].open(self.doorbell()).is_some_and(|mut open| {
                open.connection.as_mut().is_none_or(|connections| connections.moved(1).1 == 0)
            })
    }

    /// Connects to a rank on another node that has never sent anything, without waiting. Returns
    /// how it has gone, once that is known.
    pub fn connect_to_silent(&self, rank: usize) -> Option<DisconnectReason> {
        if !self.has_never_sent(rank) {
            return None;
        }
        let mut open = self.queues[rank].open(self.doorbell())?;
        // From the position of the receiver.
        open.connection.as_mut()?.disconnect_reason(1)
    }

    /// Aborts the connection from a rank: it forgets where to put what was to come, and nobody
    /// takes that for received.
    pub fn abort_connection(&self, from: usize) {
        let Some(mut open) = self.queues[from].open(self.doorbell()) else { return };
        if let Some(connections) = &mut open.connection {
            self.failure.abort_connections(&mut **connections);
            open.unfinished = None;
            open.is_expected = false;
            open.is_aborted = true;
        }
    }

    /// Returns this rank's doorbell.
    pub fn doorbell(&self) -> &Counter {
        &self.control.rank(self.core.rank).doorbell
    }
}

impl Drop for Matcher {
    fn drop(&mut self) {
        for queue in &self.queues {
            let Some(mut open) = queue.open(self.doorbell()) else { continue };
            if let Some(connections) = &mut open.connection {
                self.failure.close(&mut **connections);
            }
        }
    }
}
