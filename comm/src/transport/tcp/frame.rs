//! Frames: the next bytes of a channel on the data socket.

use super::control::ChannelId;
use crate::transport::queue::Queue;

/// Bytes of a frame's header.
pub const HEADER: usize = 20;
/// A frame ends with the segment by which it has so many bytes. Both sides have the same segments,
/// so the receiver knows where headers are likely to be, and reads several frames by one call.
const MIN_FRAME: usize = 4096;
/// The most bytes of a frame: other channels' come between two.
const MAX_FRAME: usize = 1 << 20;
/// The most frames that one call to the kernel moves, and pieces of memory.
pub const MAX_FRAMES: usize = 4;
/// The most pieces of memory of one call to the system.
pub const MAX_SLICES: usize = 64;

/// The beginning of a frame.
#[derive(Default)]
pub struct FrameHeader {
    pub channel: ChannelId,
    /// Bytes that follow the header.
    pub bytes: usize,
    /// The number of bytes that the receiver of the frame may send in this channel in all.
    pub limit: u64,
}

impl FrameHeader {
    /// Encodes it, little-endian; the number of bytes is a u32.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&self.channel.to_le_bytes());
        header[8..12].copy_from_slice(&(self.bytes as u32).to_le_bytes());
        header[12..].copy_from_slice(&self.limit.to_le_bytes());
        header
    }

    /// Reads the header that `bytes` begin with, if all of it is there.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (channel, rest) = bytes.split_first_chunk()?;
        let (count, rest) = rest.split_first_chunk()?;
        let (limit, _) = rest.split_first_chunk()?;
        Some(Self {
            channel: u64::from_le_bytes(*channel),
            bytes: u32::from_le_bytes(*count) as usize,
            limit: u64::from_le_bytes(*limit),
        })
    }
}

/// Cuts a queue into frames, after its first `skip` bytes and up to `limit`: returns their lengths.
pub fn cut(queue: &Queue, mut skip: usize, limit: usize) -> impl Iterator<Item = usize> + '_ {
    let mut segments = queue.slices(limit).map(<[u8]>::len).filter_map(move |bytes| {
        let skipped = bytes.min(skip);
        skip -= skipped;
        (bytes > skipped).then_some(bytes - skipped)
    });
    let mut left = 0;
    std::iter::from_fn(move || {
        let mut frame = 0;
        while frame < MIN_FRAME {
            if left == 0 {
                let Some(segment) = segments.next() else { break };
                left = segment;
            }
            let count = left.min(MAX_FRAME - frame);
            frame += count;
            left -= count;
        }
        (frame > 0).then_some(frame)
    })
}
