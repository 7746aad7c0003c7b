//! Messages from clients to the process that serves the store.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::protocol::MAX_FRAME;

/// The number of unread messages at which more are refused, as at so many bytes of them: the
/// server's owner may never read any.
const MAX_UNREAD: usize = 1 << 16;
const MAX_UNREAD_BYTES: usize = MAX_FRAME;

/// Messages that clients have sent, and the wills of those that are gone, in the order of arrival.
///
/// Its file descriptor is readable while there is a message: for `poll` and the like, never to be
/// read from.
#[derive(Debug)]
pub struct Inbox {
    unread: Mutex<Unread>,
    ready: OwnedFd,
}

#[derive(Debug, Default)]
struct Unread {
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl Inbox {
    /// Makes an empty inbox.
    pub(super) fn new() -> io::Result<Inbox> {
        let ready = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Inbox { unread: Mutex::default(), ready })
    }

    /// Takes the oldest message that has not been taken yet.
    pub fn try_next(&self) -> Option<Vec<u8>> {
        let mut unread = self.lock();
        let message = unread.messages.pop_front()?;
        unread.bytes -= message.len();
        if unread.messages.is_empty() {
            // It cannot fail: it is above zero, as there was a message.
            let _ = rustix::io::read(&self.ready, &mut [0; 8]);
        }
        Some(message)
    }

    /// Whether a message of `length` bytes may be added.
    pub(super) fn has_room(&self, length: usize) -> bool {
        let unread = self.lock();
        unread.messages.len() < MAX_UNREAD && unread.bytes + length <= MAX_UNREAD_BYTES
    }

    /// Adds a message, whether or not there is room.
    pub(super) fn add(&self, message: Vec<u8>) {
        let mut unread = self.lock();
        if unread.messages.is_empty() {
            // It cannot fail: it is zero, as there was no message.
            let _ = rustix::io::write(&self.ready, &1u64.to_ne_bytes());
        }
        unread.bytes += message.len();
        unread.messages.push_back(message);
    }

    fn lock(&self) -> MutexGuard<'_, Unread> {
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}
