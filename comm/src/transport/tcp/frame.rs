//! Frames: the next bytes of a channel on the data socket.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::TcpStream;
use std::ops::Range;

use super::control::ChannelId;

/// A frame begins with the channel's number and the bytes that follow (u32), little-endian.
pub const HEADER: usize = 12;
/// A header is read with what follows it, as far as that fits here: then a small frame takes one call.
pub const READ_AHEAD: usize = 4096;

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
    buffer: Box<[u8; READ_AHEAD]>,
    bytes: Range<usize>,
}

impl Default for ReadAhead {
    fn default() -> Self {
        Self { buffer: Box::new([0; READ_AHEAD]), bytes: 0..0 }
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
        &mut self.buffer[self.bytes.end..]
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
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&channel.to_le_bytes());
        header[8..].copy_from_slice(&(rest as u32).to_le_bytes());
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

    /// False at the end.
    pub fn read_ahead(&mut self, mut data: &TcpStream) -> io::Result<bool> {
        let count = data.read(self.ahead.room())?;
        self.ahead.add(count);
        Ok(count > 0)
    }
}
