//! The segments that are still to be moved to, and from, a member.

use std::collections::VecDeque;

use crate::shm::io_segment::IoSegment;

/// Segments in order. `offset` bytes of the first are through.
#[derive(Default)]
pub struct Queue {
    pub parts: VecDeque<IoSegment>,
    pub offset: usize,
    /// Bytes that are not through.
    pub bytes: usize,
    /// Segments that ever were in it, and those that are through.
    pub queued: u64,
    pub done: u64,
}

impl Queue {
    /// Adds a segment. Returns the number of segments so far, which `done` reaches when it is
    /// moved.
    pub fn push(&mut self, part: IoSegment) -> u64 {
        self.queued += 1;
        self.bytes += part.bytes().len();
        self.parts.push_back(part);
        self.skip(0);
        self.queued
    }

    /// Notes that `count` more bytes are through; empty parts are at once.
    pub fn skip(&mut self, count: usize) {
        self.offset += count;
        self.bytes -= count;
        while let Some(first) =
            self.parts.front().filter(|first| first.bytes().len() <= self.offset)
        {
            self.offset -= first.bytes().len();
            self.parts.pop_front();
            self.done += 1;
        }
    }

    /// Returns the next bytes that are not through, at most `limit`, by segment.
    pub fn slices(&self, limit: usize) -> impl Iterator<Item = &[u8]> {
        let slices = self.parts.iter().scan((self.offset, limit), |(offset, left), part| {
            let bytes = part.bytes().get(std::mem::take(offset)..).filter(|_| *left > 0)?;
            let bytes = &bytes[..bytes.len().min(*left)];
            *left -= bytes.len();
            Some(bytes)
        });
        slices.filter(|bytes| !bytes.is_empty())
    }

    /// Returns the unfilled parts of the queued segments, for reading into.
    pub fn slices_mut(&mut self, limit: usize) -> impl Iterator<Item = &mut [u8]> {
        let slices = self.parts.iter_mut().scan((self.offset, limit), |(offset, left), part| {
            let bytes = part.bytes_mut().get_mut(std::mem::take(offset)..).filter(|_| *left > 0)?;
            let count = bytes.len().min(*left);
            *left -= count;
            Some(&mut bytes[..count])
        });
        slices.filter(|bytes| !bytes.is_empty())
    }
}

/// Both directions between this rank and a member.
#[derive(Default)]
pub struct QueuePair {
    pub sending: Queue,
    pub receiving: Queue,
}

impl QueuePair {
    /// Whether all segments are moved.
    pub fn is_empty(&self) -> bool {
        self.sending.parts.is_empty() && self.receiving.parts.is_empty()
    }
}
