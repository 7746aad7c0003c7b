//! Frames: the next bytes of a channel on the data socket.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut, Read};
use std::net::TcpStream;
use std::ops::Range;

use super::control::ChannelId;
use crate::transport::queue::Queue;

/// A frame begins with the channel's number and the bytes that follow (u32), little-endian.
pub const HEADER: usize = 12;
/// A header is read with what follows it, as far as that fits here: then a small frame takes one call.
pub const READ_AHEAD: usize = 4096;
/// The most bytes of a frame: other channels' come between two.
const MAX_FRAME: usize = 1 << 20;

/// The bytes of a frame, which both ends derive from the segments that are to be moved: a large segment
/// has frames of its own, small ones share one.
pub fn frame_bytes(queue: &Queue) -> usize {
    match queue.first_bytes() {
        large if is_large(large) => large.min(MAX_FRAME),
        _ => queue.bytes.min(READ_AHEAD),
    }
}

/// Whether the receiver's memory is filled directly, and not by way of what is read ahead.
pub fn is_large(bytes: usize) -> bool {
    bytes >= READ_AHEAD
}

fn header(channel: ChannelId, rest: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&channel.to_le_bytes());
    header[8..].copy_from_slice(&(rest as u32).to_le_bytes());
    header
}

/// The frame that is under way.
pub struct Outgoing {
    pub channel: ChannelId,
    pub header: [u8; HEADER],
    /// Bytes of the header that are written.
    pub begun: usize,
    /// Bytes that follow the header, and, where their channel was closed meanwhile, those bytes.
    pub rest: usize,
    pub orphan: VecDeque<u8>,
}

/// The frame that comes in.
#[derive(Default)]
pub struct Incoming {
    pub channel: ChannelId,
    pub rest: usize,
    pub ahead: ReadAhead,
}

/// What was read ahead.
pub struct ReadAhead {
    buffer: Vec<u8>,
    bytes: Range<usize>,
}

impl Default for ReadAhead {
    fn default() -> Self {
        Self { buffer: vec![0; READ_AHEAD], bytes: 0..0 }
    }
}

impl ReadAhead {
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.bytes.clone()]
    }

    pub fn skip(&mut self, count: usize) {
        self.bytes.start += count;
    }

    /// Room for what comes next, after the bytes that are there.
    pub fn room(&mut self) -> &mut [u8] {
        self.buffer.copy_within(self.bytes.clone(), 0);
        self.bytes = 0..self.bytes.len();
        if self.bytes.is_empty() {
            self.buffer.truncate(READ_AHEAD);
        }
        &mut self.buffer[self.bytes.end..]
    }

    /// Takes over bytes that were taken for others, where nothing was read ahead.
    fn take(&mut self, bytes: Vec<u8>) {
        self.bytes = 0..bytes.len();
        self.buffer = bytes;
        self.buffer.resize(self.bytes.end.max(READ_AHEAD), 0);
    }

    /// So many bytes have come into the room.
    pub fn add(&mut self, count: usize) {
        self.bytes.end += count;
    }
}

impl Default for Outgoing {
    fn default() -> Self {
        let (header, orphan) = ([0; HEADER], VecDeque::new());
        Self { channel: 0, header, begun: HEADER, rest: 0, orphan }
    }
}

impl Outgoing {
    pub fn new(channel: ChannelId, rest: usize) -> Self {
        let header = header(channel, rest);
        Self { channel, header, begun: 0, rest, orphan: VecDeque::new() }
    }

    pub fn is_through(&self) -> bool {
        self.begun == HEADER && self.rest == 0
    }
}

impl Incoming {
    pub fn take_header(&mut self) -> Option<(ChannelId, usize)> {
        let (channel, rest) = self.ahead.bytes().split_first_chunk()?;
        let (count, _) = rest.split_first_chunk()?;
        let header = (u64::from_le_bytes(*channel), u32::from_le_bytes(*count) as usize);
        self.ahead.skip(HEADER);
        Some(header)
    }

    /// Whether a step is possible without reading.
    pub fn is_complete(&self) -> bool {
        self.ahead.bytes().len() >= if self.rest == 0 { HEADER } else { 1 }
    }

    /// Reads a frame of `channel` into `expected`, and what follows it ahead, where nothing was read
    /// ahead. Nearly always that is what comes; what else comes is read ahead. Returns how many bytes
    /// of `expected` are filled; None at the end.
    pub fn read_expected(
        &mut self,
        mut data: &TcpStream,
        channel: ChannelId,
        expected: &mut [u8],
    ) -> io::Result<Option<usize>> {
        let mut head = [0; HEADER];
        let mut slices = [
            IoSliceMut::new(&mut head),
            IoSliceMut::new(expected),
            IoSliceMut::new(self.ahead.room()),
        ];
        let count = data.read_vectored(&mut slices)?;
        let body = count.saturating_sub(HEADER).min(expected.len());
        self.ahead.add(count.saturating_sub(HEADER + body));
        if count >= HEADER && head == header(channel, expected.len()) {
            (self.channel, self.rest) = (channel, expected.len() - body);
            return Ok(Some(body));
        }
        let others = [&head[..count.min(HEADER)], &expected[..body], self.ahead.bytes()].concat();
        self.ahead.take(others);
        Ok((count > 0).then_some(0))
    }

    /// False at the end.
    pub fn read_ahead(&mut self, mut data: &TcpStream) -> io::Result<bool> {
        let count = data.read(self.ahead.room())?;
        self.ahead.add(count);
        Ok(count > 0)
    }
}
