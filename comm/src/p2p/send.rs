//! Sending: into a mailbox. Each ordered pair of ranks on a node has one.
//!
//! Each part of a message raises `sent`, and `taken` when the receiver has it; two parts may be on
//! their way. Data in shared memory is one part, read in place.
//!
//! To a member on another node there is a connection, made by the first message: the descriptor,
//! then the data.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use super::message::{Endpoints, PeerConnection, pieces, transfer};
use crate::descriptor::{DescriptorWords, Location, MessageDescriptor, OpDescriptor};
use crate::error::Result;
use crate::failure::Failure;
use crate::group::core::GroupCore;
use crate::internode::connect::Connector;
use crate::kind::Kind;
use crate::memory::BufferView;
use crate::shm::bytes;
use crate::shm::control::Control;
use crate::shm::io_segment::IoSegment;

/// Sends messages.
pub struct Sender {
    core: Arc<GroupCore>,
    failure: Arc<Failure>,
    control: Arc<Control>,
    connector: Connector,
    /// Held while sending to each rank; with the connection to a rank on another node.
    outgoing: Vec<Mutex<PeerConnection>>,
}

impl Sender {
    /// Returns a sender that has sent nothing.
    pub fn new(failure: &Arc<Failure>) -> Self {
        Self {
            core: Arc::clone(&failure.core),
            failure: Arc::clone(failure),
            control: Arc::clone(&failure.control),
            connector: Connector::new(failure),
            outgoing: failure.core.ranks.iter().map(|_| Mutex::default()).collect(),
        }
    }

    /// Sends a message, which may be on its way when this returns.
    pub fn send(&self, data: BufferView, what: &MessageDescriptor, to: usize) -> Result<()> {
        let mut connection = self.outgoing[to].lock().unwrap_or_else(PoisonError::into_inner);
        let mut operation =
            OpDescriptor::new(Kind::Send, what.dtype, what.count).peer(to, what.tag);
        operation.label = what.label;
        match self.core.locals.iter().position(|&local| local == to) {
            Some(receiver) => self.send_on_node(data, operation, (to, receiver), what),
            None => self.send_to_other_node(&mut connection, data, &operation, to, what),
        }
    }

    /// Rank `to` has the number `receiver` among the members on this node.
    fn send_on_node(
        &self,
        data: BufferView,
        mut operation: OpDescriptor,
        (to, receiver): (usize, usize),
        what: &MessageDescriptor,
    ) -> Result<()> {
        let core = &self.core;
        let control = &self.control;
        let failure = &self.failure;
        let mailbox = control.mailbox(core.local, receiver);
        let own = core.locate(data.data, data.bytes);
        let mut part = mailbox.sent.value.load(Ordering::Relaxed);
        operation.sequence = u64::from(part);
        let missing = || vec![to];
        let mut start = 0;
        loop {
            // The descriptor and both fragments are free when at most one part is on its way.
            failure.wait(&mailbox.taken, part.wrapping_sub(1), what, &missing)?;
            let (fragment, capacity) = control.fragment(core.local, receiver, part);
            let len = match own {
                Location::Staged => capacity.min(data.bytes - start),
                Location::Shared(_) => data.bytes,
            };
            if own == Location::Staged {
                // SAFETY: the range is inside the caller's memory and fits the fragment, which was
                // taken.
                unsafe { bytes::copy(data.data.add(start), fragment, len) };
            }
            if start == 0 {
                // The descriptor of the message before must have been read.
                failure.wait(&mailbox.taken, part, what, &missing)?;
                operation.write(own, &mailbox.descriptor);
            }
            mailbox.sent.raise(part.wrapping_add(1));
            control.rank(to).doorbell.ring();
            part = part.wrapping_add(1);
            start += len;
            if start == data.bytes {
                break;
            }
        }
        if own != Location::Staged {
            failure.wait(&mailbox.taken, part, what, &missing)?;
        }
        Ok(())
    }

    fn send_to_other_node(
        &self,
        connection: &mut PeerConnection,
        data: BufferView,
        operation: &OpDescriptor,
        to: usize,
        what: &MessageDescriptor,
    ) -> Result<()> {
        let mut words = DescriptorWords::default();
        operation.write(Location::Staged, &words);
        let own = self.core.rank;
        let ends = (Endpoints { sender: own, receiver: to }, own);
        let by = (&self.connector, &*self.failure);
        // SAFETY: nobody writes the descriptor until it is sent.
        let words = unsafe { IoSegment::of_descriptor(&mut words) };
        let mut pieces = pieces(data);
        transfer(by, connection, ends, what, std::iter::once(words).chain(pieces.next()))?;
        pieces.try_for_each(|piece| transfer(by, connection, ends, what, [piece]))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        for connection in &mut self.outgoing {
            let connection = connection.get_mut().unwrap_or_else(PoisonError::into_inner);
            if let Some(connections) = connection {
                self.failure.close(&mut **connections);
            }
        }
    }
}
