//! Frames that go out over the data socket, one after another.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::time::Instant;

use smallvec::SmallVec;

use super::channel::{Channel, Channels};
use super::control::ChannelId;
use super::frame::{FrameHeader, HEADER, MAX_FRAMES, MAX_SLICES, cut};

/// The frame that is under way.
pub struct OutgoingFrame {
    channel: ChannelId,
    header: [u8; HEADER],
    /// Bytes of the header that are written.
    begun: usize,
    /// Bytes that follow the header, and, where their channel was closed meanwhile, those bytes.
    rest: usize,
    orphan: VecDeque<u8>,
    /// Since when the socket takes nothing more.
    pub end: Option<Instant>,
}

impl Default for OutgoingFrame {
    fn default() -> Self {
        Self {
            channel: 0,
            header: [0; HEADER],
            begun: HEADER,
            rest: 0,
            orphan: VecDeque::new(),
            end: None,
        }
    }
}

impl OutgoingFrame {
    /// Writes the frame under way, whichever channel has it, then frames of channel `id`. Whether
    /// anything went, and whether the socket has no room.
    pub fn flush(
        &mut self,
        channels: &mut Channels,
        id: ChannelId,
        data: &TcpStream,
    ) -> (bool, bool) {
        let mut moved = false;
        while self.end.is_none() {
            let Some(channel) = channels.get_mut(&id) else { break };
            if self.begun == HEADER && self.rest == 0 {
                let sending = &channel.queues.sending;
                let Some(bytes) = cut(sending, 0, channel.credit()).next() else { break };
                self.begin(id, channel, bytes);
            } else if channel.queues.sending.parts.is_empty() && self.channel != id {
                // Its own thread, or the endpoint's, sends the rest of another channel's frame.
                break;
            }
            match self.write(channels, Some(id), data) {
                Ok(()) => moved = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return (moved, true),
                Err(_) => self.end = Some(Instant::now()),
            }
        }
        (moved, false)
    }

    fn begin(&mut self, id: ChannelId, channel: &mut Channel, bytes: usize) {
        channel.sent += bytes as u64;
        channel.granted = channel.next_limit();
        let header = FrameHeader { channel: id, bytes, limit: channel.granted };
        self.channel = id;
        self.rest = bytes;
        self.header = header.encode();
        self.begun = 0;
    }

    /// Writes for the thread of channel `own`, or for the endpoint's: the frame under way, and, if
    /// that channel has it, the frames that follow.
    fn write(
        &mut self,
        channels: &mut Channels,
        own: Option<ChannelId>,
        data: &TcpStream,
    ) -> io::Result<()> {
        if !self.orphan.is_empty() {
            return self.write_orphan(data);
        }
        let channel = channels.entry(self.channel).or_default();
        let queue = &channel.queues.sending;
        let limit = channel.next_limit();
        let mut lengths = [self.rest; MAX_FRAMES];
        let mut headers = [self.header; MAX_FRAMES];
        let credit = if own == Some(self.channel) { channel.credit() } else { 0 };
        let mut frames = 1;
        for bytes in cut(queue, self.rest, self.rest + credit).take(MAX_FRAMES - 1) {
            lengths[frames] = bytes;
            headers[frames] = FrameHeader { channel: self.channel, bytes, limit }.encode();
            frames += 1;
        }
        let mut slices: SmallVec<[IoSlice; MAX_SLICES]> = SmallVec::new();
        slices.push(IoSlice::new(&headers[0][self.begun..]));
        let mut frame = 0;
        let mut left = self.rest;
        'segments: for mut segment in queue.slices(lengths[..frames].iter().sum()) {
            while !segment.is_empty() {
                if slices.len() + 2 > MAX_SLICES {
                    break 'segments;
                }
                if left == 0 {
                    frame += 1;
                    left = lengths[frame];
                    slices.push(IoSlice::new(&headers[frame]));
                }
                let part;
                (part, segment) = segment.split_at(segment.len().min(left));
                left -= part.len();
                slices.push(IoSlice::new(part));
            }
        }
        let mut written = rustix::io::writev(data, &slices)?;
        drop(slices);
        for (frame, &length) in lengths[..frames].iter().enumerate() {
            if frame > 0 {
                if written == 0 {
                    break;
                }
                self.begin(self.channel, channel, length);
            }
            let head = written.min(HEADER - self.begun);
            self.begun += head;
            let body = (written - head).min(self.rest);
            self.rest -= body;
            channel.queues.sending.skip(body);
            written -= head + body;
        }
        if Some(self.channel) != own {
            channel.wake();
        }
        Ok(())
    }

    /// Writes what is under way of a channel that is closed.
    fn write_orphan(&mut self, data: &TcpStream) -> io::Result<()> {
        let (first, second) = self.orphan.as_slices();
        let header = &self.header[self.begun..];
        let slices = [IoSlice::new(header), IoSlice::new(first), IoSlice::new(second)];
        let written = rustix::io::writev(data, &slices)?;
        let head = written.min(header.len());
        self.begun += head;
        self.rest -= written - head;
        self.orphan.drain(..written - head);
        Ok(())
    }

    /// Takes over what is under way of a channel that is closed: its memory is no longer lent.
    pub fn adopt(&mut self, channels: &mut Channels, id: ChannelId) {
        if self.channel == id && self.orphan.is_empty() {
            let channel = channels.entry(id).or_default();
            self.orphan = channel.queues.sending.slices(self.rest).flatten().copied().collect();
        }
    }

    /// Writes the rest of a frame whose channel is closed, as far as the socket has room.
    pub fn flush_orphan(&mut self, data: &TcpStream) {
        while self.has_orphan() {
            match self.write_orphan(data) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.end = Some(Instant::now()),
            }
        }
    }

    /// Whether the rest of a frame is to be sent whose channel is closed.
    pub fn has_orphan(&self) -> bool {
        !self.orphan.is_empty() && self.end.is_none()
    }
}
