//! Messages that have come before anybody asked for them: what MPI calls the queue of unexpected
//! messages.
//!
//! Each sender has a queue, which one thread of the receiving rank opens at a time. That thread
//! takes whatever comes next: a message with its own tag goes where it is wanted, others are kept
//! here. Nothing but memory limits how many.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use rustc_hash::FxHashMap;

use super::message::PeerConnection;
use crate::descriptor::{DescriptorWords, Location, OpDescriptor};
use crate::shm::bytes;
use crate::shm::control::Counter;
use crate::shm::io_segment::IoSegment;

/// The messages of one rank.
pub struct MessageQueue {
    /// The sender's number among the members on this node; None for one on another node.
    pub sender: Option<usize>,
    incoming: Mutex<ExpectedMessage>,
    /// A thread has found it open since it was last closed.
    is_wanted: AtomicBool,
    kept: Mutex<Kept>,
    /// The number of messages that are kept. Whoever has the queue open sees all of them.
    count: AtomicUsize,
}

/// The messages by tag, in the order in which they were sent; no queue is empty.
type Kept = FxHashMap<u32, VecDeque<KeptMessage>>;

/// The state of the messages that are still to come.
#[derive(Default)]
pub struct ExpectedMessage {
    /// The connection to a rank on another node. It is declared before the memory that it may be
    /// about to fill: fields are dropped in this order.
    pub connection: PeerConnection,
    /// The memory into which the connection puts the next message's descriptor.
    pub descriptor: Box<DescriptorWords>,
    /// The connection has memory for what comes next.
    pub is_expected: bool,
    /// The group has failed in the middle of a message from another node: what comes after it is no
    /// message.
    pub is_aborted: bool,
    /// The sender on another node has left, after all that it has sent.
    pub has_left: bool,
    /// A message that is kept once all of it has come.
    pub unfinished: Option<KeptMessage>,
}

/// A message that is kept, as far as it has come.
pub struct KeptMessage {
    pub operation: OpDescriptor,
    pub location: Location,
    pub data: Vec<u8>,
    bytes: usize,
}

/// A queue that this thread has open.
pub struct OpenQueue<'a> {
    incoming: MutexGuard<'a, ExpectedMessage>,
    // After the lock: fields are dropped in this order.
    closing: Closing<'a>,
}

struct Closing<'a> {
    queue: &'a MessageQueue,
    doorbell: &'a Counter,
}

impl MessageQueue {
    /// Returns an empty queue; `sender` is the rank's number among those on this node, if it is
    /// here.
    pub fn new(sender: Option<usize>) -> Self {
        Self {
            sender,
            incoming: Mutex::default(),
            is_wanted: AtomicBool::new(false),
            kept: Mutex::default(),
            count: AtomicUsize::new(0),
        }
    }

    /// Returns None while another thread has it open, which rings the doorbell when it closes it.
    pub fn open<'a>(&'a self, doorbell: &'a Counter) -> Option<OpenQueue<'a>> {
        let incoming = self.try_lock().or_else(|| {
            self.is_wanted.store(true, Ordering::SeqCst);
            self.try_lock()
        })?;
        Some(OpenQueue { incoming, closing: Closing { queue: self, doorbell } })
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, ExpectedMessage>> {
        match self.incoming.try_lock() {
            Ok(incoming) => Some(incoming),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Takes the first message with this tag that was kept.
    pub fn take(&self, tag: u32) -> Option<KeptMessage> {
        if self.count.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let Entry::Occupied(mut queue) = kept.entry(tag) else { return None };
        let message = queue.get_mut().pop_front()?;
        if queue.get().is_empty() {
            queue.remove();
        }
        self.count.fetch_sub(1, Ordering::SeqCst);
        Some(message)
    }

    /// Whether a message with this tag is kept.
    pub fn has(&self, tag: u32) -> bool {
        self.count.load(Ordering::SeqCst) != 0
            && self.kept.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&tag)
    }
}

impl OpenQueue<'_> {
    /// Keeps a message, as soon as all of it has come.
    pub fn put(&mut self, message: KeptMessage) {
        if message.missing() > 0 {
            self.unfinished = Some(message);
            return;
        }
        let Closing { queue, doorbell } = self.closing;
        let mut kept = queue.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.entry(message.operation.tag).or_default().push_back(message);
        queue.count.fetch_add(1, Ordering::SeqCst);
        drop(kept);
        doorbell.ring();
    }
}

impl Deref for OpenQueue<'_> {
    type Target = ExpectedMessage;

    fn deref(&self) -> &ExpectedMessage {
        &self.incoming
    }
}

impl DerefMut for OpenQueue<'_> {
    fn deref_mut(&mut self) -> &mut ExpectedMessage {
        &mut self.incoming
    }
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        if self.queue.is_wanted.load(Ordering::SeqCst)
            && self.queue.is_wanted.swap(false, Ordering::SeqCst)
        {
            self.doorbell.ring();
        }
    }
}

impl KeptMessage {
    /// Returns None if there is no memory for it.
    pub fn new(operation: OpDescriptor, location: Location) -> Option<Self> {
        let bytes = usize::try_from(operation.count).ok()?.checked_mul(operation.dtype.size())?;
        let mut data = Vec::new();
        data.try_reserve_exact(bytes).ok()?;
        Some(Self { operation, location, data, bytes })
    }

    /// Returns how many bytes are still to come.
    pub fn missing(&self) -> usize {
        self.bytes - self.data.len()
    }

    /// # Safety
    ///
    /// So many bytes are at `from`, and are still to come.
    pub unsafe fn append(&mut self, from: *const u8, count: usize) {
        let start = self.data.len();
        // SAFETY: the caller's promise, and memory was reserved for all of the message.
        unsafe { bytes::copy(from, self.data.as_mut_ptr().add(start), count) };
        // SAFETY: these bytes were written just now.
        unsafe { self.data.set_len(start + count) };
    }

    /// Returns where the next bytes, at most `most`, are to be put.
    ///
    /// # Safety
    ///
    /// Until the segment is filled or dropped, the message lives and nobody else looks at it.
    pub unsafe fn next_segment(&mut self, most: usize) -> IoSegment {
        let start = self.data.len();
        let count = self.missing().min(most);
        self.data.resize(start + count, 0);
        // SAFETY: the range is inside the data, whose memory was reserved for all of it, so that it
        // does not move.
        unsafe { IoSegment::new(self.data.as_mut_ptr().add(start), count) }
    }
}
