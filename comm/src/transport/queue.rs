//! What a wire is still to move to, or from, a member.

use std::collections::VecDeque;

use crate::shm::io_segment::IoSegment;

/// Parts in order, of the first of which so many bytes are through.
#[derive(Default)]
pub struct Queue {
    pub parts: VecDeque<IoSegment>,
    pub offset: usize,
    /// Parts that ever were in it, and those that are through.
    pub queued: u64,
    pub done: u64,
}

impl Queue {
    pub fn push(&mut self, part: IoSegment) -> u64 {
        self.queued += 1;
        self.parts.push_back(part);
        self.skip(0);
        self.queued
    }

    /// `count` more bytes are through; empty parts are at once.
    pub fn skip(&mut self, count: usize) {
        self.offset += count;
        while let Some(first) =
            self.parts.front().filter(|first| first.bytes().len() <= self.offset)
        {
            self.offset -= first.bytes().len();
            self.parts.pop_front();
            self.done += 1;
        }
    }
}
