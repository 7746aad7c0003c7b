//! Frames that come in over the data socket, one after another.
//!
//! Headers are read together with what follows them, so that a message takes one call. The next
//! segments that the reading channel expects are nearly always the next frames, so these are read
//! to where the segments go. What turns out to be something else is moved from there.

use std::io::{self, IoSliceMut, Read as _};
use std::net::TcpStream;
use std::time::Instant;

use smallvec::SmallVec;

use super::channel::{Channel, Channels};
use super::control::ChannelId;
use super::frame::{FrameHeader, HEADER, MAX_FRAMES, MAX_SLICES, cut};

/// Bytes that are read at once where nothing is expected.
pub const READ_AHEAD: usize = 4096;

/// The frame that comes in.
pub struct IncomingFrame {
    channel: ChannelId,
    /// Bytes of the frame that are still to be given to the channel.
    rest: usize,
    /// Bytes that were read ahead: those of the frame, or a header.
    ahead: Vec<u8>,
    /// Bytes of `ahead` that are given already.
    taken: usize,
    buffer: Box<[u8; READ_AHEAD]>,
    /// Closed channels to which something came.
    pub discarded: Vec<ChannelId>,
    /// Since when the socket brings nothing more.
    pub end: Option<Instant>,
}

impl Default for IncomingFrame {
    fn default() -> Self {
        let buffer = Box::new([0; READ_AHEAD]);
        Self {
            channel: 0,
            rest: 0,
            ahead: Vec::new(),
            taken: 0,
            buffer,
            discarded: Vec::new(),
            end: None,
        }
    }
}

impl IncomingFrame {
    /// Reads while channel `id` expects something, or may send no more. Whether anything came, and
    /// whether the socket has nothing.
    pub fn fill(
        &mut self,
        channels: &mut Channels,
        id: ChannelId,
        data: &TcpStream,
    ) -> (bool, bool) {
        let mut moved = false;
        while self.end.is_none() {
            let channel = channels.entry(id).or_default();
            // The limit that a blocked sender waits for may be in a header.
            let is_blocked = channel.credit() == 0 && channel.queues.sending.bytes > 0;
            let is_expecting = is_blocked || !channel.queues.receiving.parts.is_empty();
            // Nobody is woken for what was read ahead, so it must not stay there.
            if !is_expecting && !self.is_complete() {
                break;
            }
            match self.read(channels, id, data) {
                Ok(true) => moved = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return (moved, true),
                Ok(false) | Err(_) => self.end = Some(Instant::now()),
            }
        }
        (moved, false)
    }

    fn ahead(&self) -> &[u8] {
        &self.ahead[self.taken..]
    }

    /// Whether a step is possible without reading.
    fn is_complete(&self) -> bool {
        self.ahead().len() >= if self.rest == 0 { HEADER } else { 1 }
    }

    /// Takes what was read ahead, or reads more, for the thread of channel `own`; false at the end.
    fn read(
        &mut self,
        channels: &mut Channels,
        own: ChannelId,
        data: &TcpStream,
    ) -> io::Result<bool> {
        if self.rest == 0 {
            return match self.take_header() {
                Some(limit) => {
                    self.raise_limit(channels, own, limit);
                    Ok(true)
                }
                None => self.read_frames(channels, own, data),
            };
        }
        let channel = channels.entry(self.channel).or_default();
        let is_read = if self.ahead().is_empty() {
            self.read_rest(channel, data)?
        } else {
            self.give(channel)
        };
        if self.channel != own {
            channel.wake();
        }
        Ok(is_read)
    }

    /// Takes a header that was read. Returns how many bytes this process may send in its channel.
    fn take_header(&mut self) -> Option<u64> {
        let header = FrameHeader::decode(self.ahead())?;
        self.channel = header.channel;
        self.rest = header.bytes;
        self.taken += HEADER;
        Some(header.limit)
    }

    fn raise_limit(&self, channels: &mut Channels, own: ChannelId, limit: u64) {
        let channel = channels.entry(self.channel).or_default();
        channel.limit = channel.limit.max(limit);
        if self.channel != own {
            channel.wake();
        }
    }

    /// Reads headers and what follows them, for the thread of channel `own`. Its next segments are
    /// taken for the next frames.
    fn read_frames(
        &mut self,
        channels: &mut Channels,
        own: ChannelId,
        data: &TcpStream,
    ) -> io::Result<bool> {
        let channel = channels.entry(own).or_default();
        // Memory of a segment that is still to be sent may be expected to be filled later.
        let is_free = channel.takes_directly()
            && channel.queues.sending.parts.is_empty()
            && self.ahead().is_empty();
        let receiving = &mut channel.queues.receiving;
        let mut lengths = [0; MAX_FRAMES];
        if is_free {
            let frames = cut(receiving, 0, usize::MAX);
            lengths.iter_mut().zip(frames).for_each(|(length, frame)| *length = frame);
        }
        let guess = lengths.iter().sum();
        let mut headers = [[0; HEADER]; MAX_FRAMES];
        let mut slices: SmallVec<[IoSliceMut; MAX_SLICES]> = SmallVec::new();
        let mut headers = headers.iter_mut();
        slices.extend(headers.next().map(|header| IoSliceMut::new(header)));
        let mut frame = 0;
        let mut left = lengths[0];
        'segments: for mut segment in receiving.slices_mut(guess) {
            while !segment.is_empty() {
                if slices.len() + 2 > MAX_SLICES {
                    break 'segments;
                }
                if left == 0 {
                    frame += 1;
                    left = lengths[frame];
                    slices.extend(headers.next().map(|header| IoSliceMut::new(header)));
                }
                let part;
                (part, segment) = segment.split_at_mut(segment.len().min(left));
                left -= part.len();
                slices.push(IoSliceMut::new(part));
            }
        }
        lengths[frame] -= left;
        lengths[frame + 1..].fill(0);
        if guess == 0 {
            slices.push(IoSliceMut::new(&mut self.buffer[..]));
        }
        let bytes = rustix::io::readv(data, &mut slices)?;

        let mut read = Read { slices: slices.iter(), slice: &[], rest: bytes };
        self.ahead.drain(..self.taken);
        self.taken = 0;
        let mut direct = 0;
        let mut foreign = None;
        for length in lengths {
            read.take(HEADER, |bytes| self.ahead.extend_from_slice(bytes));
            let Some(header) = FrameHeader::decode(&self.ahead) else { break };
            self.ahead.drain(..HEADER);
            self.channel = header.channel;
            self.rest = header.bytes;
            if self.channel != own {
                foreign = Some(header.limit);
                break;
            }
            channel.limit = channel.limit.max(header.limit);
            let right = read.take(length.min(self.rest), |_| {});
            direct += right;
            self.rest -= right;
            if self.rest > 0 || right < length || length == 0 {
                break;
            }
        }
        read.take(usize::MAX, |bytes| self.ahead.extend_from_slice(bytes));
        drop(slices);
        channel.arrived += direct as u64;
        channel.queues.receiving.skip(direct);
        if let Some(limit) = foreign {
            self.raise_limit(channels, own, limit);
        }
        Ok(bytes > 0)
    }

    /// Reads more of a frame, to where its channel expects it.
    fn read_rest(&mut self, channel: &mut Channel, data: &TcpStream) -> io::Result<bool> {
        let expected = if channel.takes_directly() { self.rest } else { 0 };
        let segments = channel.queues.receiving.slices_mut(expected).take(MAX_SLICES);
        let mut slices: SmallVec<[_; MAX_SLICES]> = segments.map(IoSliceMut::new).collect();
        let room = slices.iter().map(|slice| slice.len()).sum();
        if room == 0 {
            slices.push(IoSliceMut::new(&mut self.buffer[..]));
        }
        let read = rustix::io::readv(data, &mut slices)?;
        drop(slices);
        let direct = read.min(room);
        channel.queues.receiving.skip(direct);
        channel.arrived += direct as u64;
        self.rest -= direct;
        self.ahead.clear();
        self.ahead.extend_from_slice(&self.buffer[..read - direct]);
        self.taken = 0;
        Ok(read > 0)
    }

    /// Gives a channel what was read ahead of its frame: there is some.
    fn give(&mut self, channel: &mut Channel) -> bool {
        let mut bytes = &self.ahead[self.taken..];
        let count = self.rest.min(bytes.len());
        let expected = channel.queues.receiving.bytes.min(count);
        let direct = if channel.takes_directly() { expected } else { 0 };
        for segment in channel.queues.receiving.slices_mut(direct) {
            // A slice is a reader that never fails, and it is long enough.
            let _ = bytes.read_exact(segment);
        }
        channel.queues.receiving.skip(direct);
        if channel.is_closed {
            self.discarded.push(self.channel);
        } else {
            channel.kept.extend(&bytes[..count - direct]);
        }
        self.taken += count;
        self.rest -= count;
        channel.arrived += count as u64;
        true
    }
}

/// The bytes that one call has read, in order.
struct Read<'a> {
    slices: std::slice::Iter<'a, IoSliceMut<'a>>,
    slice: &'a [u8],
    /// Bytes that are not taken.
    rest: usize,
}

impl Read<'_> {
    /// Takes so many bytes, or all that there are. Returns how many.
    fn take(&mut self, bytes: usize, mut action: impl FnMut(&[u8])) -> usize {
        let count = bytes.min(self.rest);
        let mut left = count;
        while left > 0 {
            if self.slice.is_empty() {
                let Some(next) = self.slices.next() else { break };
                self.slice = next;
            }
            let part;
            (part, self.slice) = self.slice.split_at(self.slice.len().min(left));
            action(part);
            left -= part.len();
        }
        self.rest -= count;
        count
    }
}
