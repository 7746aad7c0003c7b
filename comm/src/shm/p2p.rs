//! send and recv: a mailbox per ordered pair of ranks.
//!
//! Each part of a message raises `sent`, and `taken` when the receiver has it; two parts may be on
//! their way. Data in shared memory is one part, read in place.
//!
//! To a member on another node there is a link, made by the first message: the post, then the data.
//!
//! How messages find their receivers is in `p2p_receive`.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::PoisonError;

use flow_kernels::{DType, ReduceOp};

use super::contribution::BufferView;
use super::engine::{Engine, Link};
use super::internode_exchange::drive;
use super::io_segment::IoSegment;
use crate::descriptor::{DescriptorWords, Location, OpDescriptor};
use crate::error::Result;
use crate::kind::Kind;

/// Bytes that a link moves within the group's timeout.
pub const PIECE: usize = 8 << 20;

impl Engine {
    pub fn send(&self, data: BufferView, dtype: DType, to: usize, tag: u32) -> Result<()> {
        let mut link = self.outgoing[to].lock().unwrap_or_else(PoisonError::into_inner);
        let (peer, count) = (Some(self.ranks[to]), data.bytes / dtype.size());
        let what = MessageDescriptor { verb: "send to", peer, count, dtype, tag };
        self.check_poison(&what)?;
        let mut operation = self.operation(Kind::Send, dtype, ReduceOp::Sum, to, count);
        operation.layout = u64::from(tag);
        let Some(receiver) = self.locals.iter().position(|&local| local == to) else {
            return self.send_to_other_node(&mut link, data, &operation, to, &what);
        };
        let mailbox = self.control.mailbox(self.local, receiver);
        let own = self.locate(data.data, data.bytes);
        let mut part = mailbox.sent.value.load(Ordering::Relaxed);
        operation.sequence = u64::from(part);
        let missing = || vec![to];
        let mut start = 0;
        loop {
            // The post and both fragments are free when at most one part is on its way.
            self.wait(&mailbox.taken, part.wrapping_sub(1), &what, &missing)?;
            let (fragment, capacity) = self.control.fragment(self.local, receiver, part);
            let len =
                if own == Location::Staged { capacity.min(data.bytes - start) } else { data.bytes };
            if own == Location::Staged {
                // SAFETY: the range is inside the caller's memory and fits the fragment, which was
                // taken.
                unsafe { super::bytes::copy(data.data.add(start), fragment, len) };
            }
            if start == 0 {
                // The post of the message before must have been read.
                self.wait(&mailbox.taken, part, &what, &missing)?;
                operation.write(own, &mailbox.descriptor);
            }
            mailbox.sent.raise(part.wrapping_add(1));
            self.control.rank(to).doorbell.ring();
            part = part.wrapping_add(1);
            start += len;
            if start == data.bytes {
                break;
            }
        }
        if own != Location::Staged {
            self.wait(&mailbox.taken, part, &what, &missing)?;
        }
        Ok(())
    }

    fn send_to_other_node(
        &self,
        link: &mut Link,
        data: BufferView,
        operation: &OpDescriptor,
        to: usize,
        what: &MessageDescriptor,
    ) -> Result<()> {
        let mut post = DescriptorWords::default();
        operation.write(Location::Staged, &post);
        let ends = Endpoints { sender: self.rank, receiver: to };
        // SAFETY: nobody writes the post until it is sent.
        let post = unsafe { IoSegment::of_descriptor(&mut post) };
        let mut pieces = pieces(data);
        self.transfer(link, ends, what, std::iter::once(post).chain(pieces.next()))?;
        pieces.try_for_each(|piece| self.transfer(link, ends, what, [piece]))
    }

    /// Has parts sent or received over the link between two ranks, which is made first if there is
    /// none yet. Nobody watches the sender: all that it has sent comes before the end of the link.
    pub fn transfer(
        &self,
        link: &mut Link,
        ends: Endpoints,
        what: &MessageDescriptor,
        parts: impl IntoIterator<Item = IoSegment>,
    ) -> Result<()> {
        let own = usize::from(ends.sender == self.rank);
        let peer = if own == 1 { ends.receiver } else { ends.sender };
        let mut wire = match link.take() {
            Some(wire) => wire,
            None => self.connect(&ends.channel(), &ends.members(), own, what)?,
        };
        for part in parts {
            match own {
                1 => wire.send(0, part),
                _ => wire.receive(1, part),
            };
        }
        let mut departure = None;
        let moved = self.wait_until(what, &|| vec![peer], &|| None, &mut |time| {
            drive(&mut *wire, time, &mut |wire| wire.is_idle(1 - own)).or_else(|loss| {
                departure = Some(loss.how);
                Ok(true)
            })
        });
        let moved = match departure {
            Some(how) => Err(self.handle_disconnect(peer, how, what)),
            None => moved,
        };
        if moved.is_err() {
            self.abandon(&mut *wire);
        }
        *link = Some(wire);
        moved
    }
}

/// Parts of a message that are waited for one by one.
pub fn pieces(data: BufferView) -> impl Iterator<Item = IoSegment> {
    let starts = (0..data.bytes).step_by(PIECE);
    // SAFETY: they are inside the caller's memory, which is valid for the length of the call.
    starts.map(move |start| unsafe {
        IoSegment::new(data.data.add(start), PIECE.min(data.bytes - start))
    })
}

/// The ends of a link.
#[derive(Clone, Copy)]
pub struct Endpoints {
    pub sender: usize,
    pub receiver: usize,
}

impl Endpoints {
    pub fn channel(self) -> String {
        format!("messages/{}-{}", self.sender, self.receiver)
    }

    /// Of the two the last, which does not wait for the other, is the sender.
    pub fn members(self) -> [usize; 2] {
        [self.receiver, self.sender]
    }
}

/// One side of a message. Ranks are those in the job.
pub struct MessageDescriptor {
    pub verb: &'static str,
    /// None for any.
    pub peer: Option<usize>,
    pub count: usize,
    pub dtype: DType,
    pub tag: u32,
}

impl fmt::Display for MessageDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.peer {
            Some(peer) => write!(f, "{} rank {peer}", self.verb)?,
            None => write!(f, "{} any rank", self.verb)?,
        }
        write!(f, " ({} x {}", self.count, self.dtype)?;
        if self.tag != 0 {
            write!(f, ", tag {}", self.tag)?;
        }
        write!(f, ")")
    }
}
