//! The connection of this process with another one, which all their groups share.
//!
//! It consists of two sockets. Over the *data* socket go frames, each the next bytes of a channel.
//! The thread that waits for a channel moves its bytes. It reads whatever comes before them: bytes
//! of another channel go where that expects them, or are kept until it does. A channel keeps at
//! most [`WINDOW`] bytes, because its sender may only send so many more than the receiver expects.
//! The receiver tells it the limit, in the frames that it sends itself. Where there are none, the
//! limit goes over the *control* socket, as the end of a channel does. The endpoint's thread reads
//! that socket, so these notices arrive whatever the program does, and however full the data socket
//! is.
//!
//! The control socket is nearly always idle. So the kernel's keep-alive reports within ten seconds
//! that the other machine, or the network, is gone. A process that is merely slow, or stopped, is
//! alive to it. (`TCP_USER_TIMEOUT` on the data would take a stopped reader for dead.)
//!
//! The kernel chooses the sizes of buffers: its bound is higher than what it grants to those who ask.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::channel::{Channel, Channels, WINDOW};
use super::control::{self, ChannelId, GroupId, Notice, Sockets};
use super::incoming::{IncomingFrame, READ_AHEAD};
use super::outgoing::OutgoingFrame;
use super::waker::Waker;
use crate::transport::DisconnectReason;
use crate::transport::queue::QueuePair;

/// The time that the notice of a channel's end may be behind the end of the data.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);
/// The time in which everything that a process has sent before it went must come.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The connection to another process.
#[derive(Default)]
pub struct Pair {
    pub state: PairState,
    channels: Channels,
    outgoing: OutgoingFrame,
    incoming: IncomingFrame,
    /// The part of a notice that the control socket has brought, and the notices that it is still
    /// to take.
    control_in: Vec<u8>,
    control_out: Vec<u8>,
    /// The way in which the control socket has ended, and the time since when nothing has come.
    control_end: Option<(DisconnectReason, Instant)>,
}

/// The state of a connection.
#[derive(Default)]
pub enum PairState {
    #[default]
    Unconnected,
    Connecting,
    Connected(Sockets),
    Down(DisconnectReason),
}

/// The result of [`Pair::progress`].
#[derive(Default)]
pub struct Progress {
    pub moved: bool,
    pub waits: Waits,
}

/// Whether the data socket has nothing to read, and no room.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Waits {
    pub read: bool,
    pub write: bool,
}

impl Pair {
    /// Notes that the connection is there.
    pub fn connected(&mut self, sockets: Sockets) {
        self.state = PairState::Connected(sockets);
        let mut notices = Vec::new();
        for (&id, channel) in &self.channels {
            let open = channel.group.map(Notice::Open);
            let end = channel.own_end.clone().map(|how| Notice::End(how, channel.sent));
            notices.extend(open.into_iter().chain(end).map(|notice| (id, notice)));
        }
        notices.into_iter().for_each(|(id, notice)| self.notify(id, &notice));
        self.wake_all();
    }

    /// Notes that the connection has ended.
    pub fn down(&mut self, how: DisconnectReason) {
        self.state = PairState::Down(how);
        self.channels.retain(|_, channel| !channel.is_closed);
        self.wake_all();
    }

    /// Returns the number of channels that are not over.
    #[cfg(test)]
    pub fn channel_count(&self) -> usize {
        self.channels.len()
    }

    fn wake_all(&self) {
        self.channels.values().for_each(Channel::wake);
    }

    /// Returns the socket that data goes over, if it is connected.
    pub fn data(&self) -> Option<Arc<TcpStream>> {
        self.sockets().map(|sockets| sockets.data)
    }

    fn sockets(&self) -> Option<Sockets> {
        match &self.state {
            PairState::Connected(sockets) => Some(sockets.clone()),
            _ => None,
        }
    }

    /// Takes part in a channel; `waker` is called when another thread has something for it.
    pub fn open(&mut self, id: ChannelId, group: GroupId, waker: &Arc<Waker>) {
        let channel = self.channels.entry(id).or_default();
        channel.group = Some(group);
        channel.waker = Some(Arc::clone(waker));
        self.notify(id, &Notice::Open(group));
    }

    /// Closes the channels of a group that this rank has left, also those that only the other
    /// process has opened.
    pub fn leave(&mut self, group: GroupId) {
        let channels = self.channels.iter().filter(|(_, channel)| channel.group == Some(group));
        let ids: Vec<ChannelId> = channels.map(|(&id, _)| id).collect();
        for id in ids {
            self.end(id, &DisconnectReason::Left);
            self.close(id);
            // Who connects later, and opens the channel, learns it from the group.
            let own_end = self.channels.get(&id).and_then(|channel| channel.own_end.as_ref());
            if matches!(self.state, PairState::Unconnected)
                && matches!(own_end, Some(DisconnectReason::Left))
            {
                self.channels.remove(&id);
            }
        }
    }

    /// Returns the segments that a channel has to send and to receive.
    pub fn queues(&mut self, id: ChannelId) -> &mut QueuePair {
        &mut self.channels.entry(id).or_default().queues
    }

    /// Tells the other process how this rank leaves the channel; the first time counts.
    pub fn end(&mut self, id: ChannelId, how: &DisconnectReason) {
        let Some(channel) = self.channels.get_mut(&id) else { return };
        if channel.own_end.is_none() {
            channel.own_end = Some(how.clone());
            let notice = Notice::End(how.clone(), channel.sent);
            self.notify(id, &notice);
        }
    }

    /// Sends no more, and discards what comes: a socket that is closed with unread bytes would take
    /// back what it has not sent yet. Whether there was anything, and there may be more.
    pub fn drain(&mut self) -> bool {
        let Some(Sockets { data, .. }) = self.sockets() else { return false };
        let _ = data.shutdown(Shutdown::Write);
        let mut buffer = [0; READ_AHEAD];
        let mut has_unread = false;
        loop {
            match (&*data).read(&mut buffer) {
                Ok(1..) => has_unread = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return has_unread,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => return false,
            }
        }
    }

    /// Removes a channel that both processes have left, and in which nothing is under way.
    fn remove_if_over(&mut self, id: ChannelId) {
        let Some(channel) = self.channels.get(&id) else { return };
        // Once connected, the other process has been sent how this one left.
        let is_settled = match self.state {
            PairState::Unconnected | PairState::Connecting => false,
            PairState::Connected(_) => {
                channel.is_closed
                    && channel.own_end.is_some()
                    && channel.end.as_ref().is_some_and(|(_, sent)| channel.arrived >= *sent)
            }
            PairState::Down(_) => channel.is_closed,
        };
        if is_settled {
            self.channels.remove(&id);
        }
    }

    /// Forgets a channel's segments: from now on nobody touches their memory.
    pub fn close(&mut self, id: ChannelId) {
        self.outgoing.adopt(&mut self.channels, id);
        let Some(channel) = self.channels.get_mut(&id) else { return };
        channel.queues = QueuePair::default();
        channel.kept = VecDeque::new();
        channel.is_closed = true;
        channel.waker = None;
        self.remove_if_over(id);
    }

    /// Moves what can be moved now.
    ///
    /// # Errors
    /// Nothing of the channel can be, and something is due in it that will not come, or go, any
    /// more.
    pub fn progress(&mut self, id: ChannelId) -> Result<Progress, DisconnectReason> {
        let before = self.bytes_left(id);
        let mut progress = Progress { moved: self.take_kept(id), ..Progress::default() };
        if let PairState::Connected(sockets) = &self.state {
            let (sent, is_full) = self.outgoing.flush(&mut self.channels, id, &sockets.data);
            let (filled, is_empty) = self.incoming.fill(&mut self.channels, id, &sockets.data);
            if filled && let Some((_, last_receive)) = &mut self.control_end {
                *last_receive = Instant::now();
            }
            for id in std::mem::take(&mut self.incoming.discarded) {
                self.remove_if_over(id);
            }
            progress.waits = Waits { read: is_empty, write: is_full };
            progress.moved |= sent | filled;
        }
        self.grant(id);
        if self.bytes_left(id) != before {
            return Ok(progress);
        }
        match self.reason_of_due(id) {
            Some(how) => Err(how),
            None => Ok(progress),
        }
    }

    /// Returns how many bytes of a channel are still to be sent, and to be received.
    fn bytes_left(&mut self, id: ChannelId) -> (usize, usize) {
        let queues = self.queues(id);
        (queues.sending.bytes, queues.receiving.bytes)
    }

    /// Gives the receiver what was kept.
    fn take_kept(&mut self, id: ChannelId) -> bool {
        let channel = self.channels.entry(id).or_default();
        let kept = &mut channel.kept;
        let receiving = &mut channel.queues.receiving;
        let mut moved = false;
        while !kept.is_empty() && !receiving.parts.is_empty() {
            let count = kept.len().min(receiving.bytes);
            for slice in receiving.slices_mut(count) {
                // A VecDeque is a reader that never fails.
                let _ = kept.read_exact(slice);
            }
            receiving.skip(count);
            moved = true;
        }
        if kept.is_empty() {
            *kept = VecDeque::new();
        }
        moved
    }

    /// Writes the rest of a frame whose channel is closed, as far as there is room.
    pub fn flush_orphan(&mut self) {
        if let PairState::Connected(sockets) = &self.state {
            self.outgoing.flush_orphan(&sockets.data);
        }
    }

    /// Whether the rest of a frame is to be sent whose channel is closed.
    pub fn has_orphan(&self) -> bool {
        self.outgoing.has_orphan()
    }

    /// Tells the sender of a channel how much it may send.
    fn grant(&mut self, id: ChannelId) {
        let Some(channel) = self.channels.get_mut(&id).filter(|channel| !channel.is_closed) else {
            return;
        };
        let limit = channel.next_limit();
        if limit >= channel.granted + WINDOW / 2 && matches!(self.state, PairState::Connected(_)) {
            channel.granted = limit;
            self.notify(id, &Notice::Limit(limit));
        }
    }

    fn notify(&mut self, id: ChannelId, notice: &Notice) {
        if matches!(self.state, PairState::Connected(_)) {
            notice.encode(id, &mut self.control_out);
            self.flush_control();
        }
    }

    /// Writes notices. Whether there are more.
    pub fn flush_control(&mut self) -> bool {
        let Some(Sockets { control, .. }) = self.sockets() else { return false };
        while !self.control_out.is_empty() {
            match (&*control).write(&self.control_out) {
                Ok(count) => drop(self.control_out.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                // Reading reports what is wrong.
                Err(_) => self.control_out.clear(),
            }
        }
        false
    }

    /// Whether the other process is still to learn, over a connection that is there or being made,
    /// how this one has left a channel.
    pub fn owes_ends(&self) -> bool {
        match self.state {
            PairState::Connecting => {
                self.channels.values().any(|channel| channel.own_end.is_some())
            }
            PairState::Connected(_) => self.has_notices() || self.has_orphan(),
            PairState::Unconnected | PairState::Down(_) => false,
        }
    }

    /// Whether there is something to tell the other process.
    pub fn has_notices(&self) -> bool {
        !self.control_out.is_empty()
    }

    /// Whether the control socket may bring more.
    pub fn hears(&self) -> bool {
        self.control_end.is_none()
    }

    /// Reads notices, and whether the control socket has ended.
    pub fn read_control(&mut self, is_member: &dyn Fn(GroupId) -> bool) {
        let Some(Sockets { control, .. }) = self.sockets().filter(|_| self.hears()) else { return };
        let end = loop {
            let mut buffer = [0; READ_AHEAD];
            match (&*control).read(&mut buffer) {
                Ok(0) => break DisconnectReason::Ended,
                Ok(count) => self.control_in.extend(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return self.take_notices(is_member);
                }
                Err(error) => break control::reason(&error),
            }
        };
        self.take_notices(is_member);
        self.control_end = Some((end, Instant::now()));
        self.wake_all();
    }

    fn take_notices(&mut self, is_member: &dyn Fn(GroupId) -> bool) {
        while let Some((id, notice)) = Notice::decode(&mut self.control_in) {
            let channel = self.channels.entry(id).or_default();
            match notice {
                Notice::Open(group) => {
                    channel.group = Some(group);
                    if !is_member(group) {
                        self.leave(group);
                    }
                    continue;
                }
                Notice::Limit(limit) => channel.limit = channel.limit.max(limit),
                Notice::End(how, sent) => channel.end = Some((how, sent)),
            }
            channel.wake();
            self.remove_if_over(id);
        }
    }

    /// Returns why what is due in a channel will not come, or go.
    fn reason_of_due(&self, id: ChannelId) -> Option<DisconnectReason> {
        let channel = self.channels.get(&id).filter(|channel| !channel.queues.is_empty())?;
        if let PairState::Down(how) = &self.state {
            return Some(how.clone());
        }
        let only_sends = channel.queues.receiving.parts.is_empty();
        let over = self.incoming.end.or(self.outgoing.end.filter(|_| only_sends));
        if let Some((how, sent)) = &channel.end
            && (only_sends || over.is_some() || channel.arrived >= *sent)
        {
            return Some(how.clone());
        }
        match (&self.control_end, over) {
            (Some((how @ DisconnectReason::OutOfReach(_), _)), _) => Some(how.clone()),
            (Some((how, _)), _) if only_sends => Some(how.clone()),
            (Some((how, _)), Some(_)) => Some(how.clone()),
            (None, Some(since)) if since.elapsed() >= CLOSE_TIMEOUT => {
                Some(DisconnectReason::Ended)
            }
            // After a reset, as by a machine that has started again, the data may never end.
            (Some((how, last)), None) if last.elapsed() >= DRAIN_TIMEOUT => Some(how.clone()),
            _ => None,
        }
    }

    /// Returns how the other process has left a channel in which nothing is due: after all that it
    /// has sent.
    pub fn reason(&self, id: ChannelId) -> Option<DisconnectReason> {
        let channel = self.channels.get(&id)?;
        let sockets = match &self.state {
            PairState::Down(how) => return Some(how.clone()),
            PairState::Connected(sockets) => sockets,
            _ => return None,
        };
        match (&channel.end, &self.control_end) {
            (_, Some((how @ DisconnectReason::OutOfReach(_), _))) => Some(how.clone()),
            (Some((how, _)), _) if channel.is_closed => Some(how.clone()),
            (Some((how, sent)), _) if channel.arrived >= *sent && channel.kept.is_empty() => {
                Some(how.clone())
            }
            // Nobody may ever read what lies in the data socket.
            (None, Some((how, last))) if last.elapsed() >= DRAIN_TIMEOUT => Some(how.clone()),
            (None, Some((how, _))) if channel.kept.is_empty() => {
                match sockets.data.peek(&mut [0]) {
                    Ok(1..) if !channel.is_closed => None,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
                    _ => Some(how.clone()),
                }
            }
            _ => None,
        }
    }
}
