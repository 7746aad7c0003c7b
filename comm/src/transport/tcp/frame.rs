//! Frames: the next bytes of a channel on the data socket.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::TcpStream;

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
    /// What was read ahead.
    pub buffer: VecDeque<u8>,
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
        let mut header = [0; HEADER];
        (self.buffer.len() >= HEADER).then(|| self.buffer.read_exact(&mut header).ok())??;
        let (channel, count) = header.split_first_chunk()?;
        let count = u32::from_le_bytes(count.try_into().ok()?);
        Some((u64::from_le_bytes(*channel), count as usize))
    }

    /// Whether a step is possible without reading.
    pub fn is_complete(&self) -> bool {
        self.buffer.len() >= if self.rest == 0 { HEADER } else { 1 }
    }

    /// False at the end.
    pub fn read_ahead(&mut self, mut data: &TcpStream) -> io::Result<bool> {
        let mut buffer = [0; READ_AHEAD];
        let count = data.read(&mut buffer)?;
        self.buffer.extend(&buffer[..count]);
        Ok(count > 0)
    }
}
