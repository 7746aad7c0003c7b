//! A channel: the bytes of one group between two processes.

use std::collections::VecDeque;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::control::{ChannelId, GroupId};
use super::waker::Waker;
use crate::transport::DisconnectReason;
use crate::transport::queue::QueuePair;

/// Bytes that a channel takes from its sender before its receiver expects any.
pub const WINDOW: u64 = 32 << 20;

/// The channels of a connection.
pub type Channels = FxHashMap<ChannelId, Channel>;

/// The bytes that two ranks of one group have under way.
pub struct Channel {
    /// None until this process, or the other, has opened the channel.
    pub group: Option<GroupId>,
    pub queues: QueuePair,
    /// Bytes in frames that have begun, and how many the other process takes in all.
    pub sent: u64,
    pub limit: u64,
    /// Bytes that have come, and how many the other process may send in all.
    pub arrived: u64,
    pub granted: u64,
    /// Bytes that came before they were expected.
    pub kept: VecDeque<u8>,
    /// The way in which this rank, and the other, has left the channel; the other after so many
    /// bytes.
    pub own_end: Option<DisconnectReason>,
    pub end: Option<(DisconnectReason, u64)>,
    /// Nobody expects anything more here.
    pub is_closed: bool,
    pub waker: Option<Arc<Waker>>,
}

impl Default for Channel {
    fn default() -> Self {
        Self {
            group: None,
            queues: QueuePair::default(),
            sent: 0,
            limit: WINDOW,
            arrived: 0,
            granted: WINDOW,
            kept: VecDeque::new(),
            own_end: None,
            end: None,
            is_closed: false,
            waker: None,
        }
    }
}

impl Channel {
    /// Returns how many more bytes this process may send.
    pub fn credit(&self) -> usize {
        usize::try_from(self.limit.saturating_sub(self.sent)).unwrap_or(usize::MAX)
    }

    /// Returns how many bytes the other process may send in all, from now on.
    pub fn next_limit(&self) -> u64 {
        let taken = self.arrived - self.kept.len() as u64;
        taken + self.queues.receiving.bytes as u64 + WINDOW
    }

    /// Whether what comes goes where it is expected: what is kept goes first.
    pub fn takes_directly(&self) -> bool {
        self.kept.is_empty() && !self.is_closed
    }

    /// Wakes the thread that waits for the channel.
    pub fn wake(&self) {
        if let Some(waker) = &self.waker {
            waker.wake();
        }
    }
}
