//! send and recv: a mailbox per ordered pair of ranks.
//!
//! Each part of a message raises `sent`, and `taken` when the receiver has it; two parts may be on their way. Data in
//! shared memory is one part, read in place.
//!
//! To a member on another node there is a link, made by the first message: the post, then the data.

use std::sync::PoisonError;

use flow_kernels::{DType, ReduceOp};

use super::carrying::drive;
use super::control::PostWords;
use super::engine::{Engine, Link};
use super::exchange::Raw;
use super::operation::{Kind, Location, Operation};
use super::Part;
use crate::error::{Error, Result};

/// Bytes that a link moves within the group's timeout.
const PIECE: usize = 8 << 20;

impl Engine {
    pub fn send(&self, data: Raw, dtype: DType, to: usize) -> Result<()> {
        let mut link = self.mail[to][0].lock().unwrap_or_else(PoisonError::into_inner);
        let what = Transfer { verb: "send to", peer: self.ranks[to], count: data.bytes / dtype.size(), dtype };
        self.check_poison(&what)?;
        let mut operation = self.operation(Kind::Send, dtype, ReduceOp::Sum, to, data.bytes / dtype.size());
        let Some(receiver) = self.locals.iter().position(|&local| local == to) else {
            return self.send_abroad(&mut link, data, &operation, to, &what);
        };
        let mailbox = self.control.mailbox(self.local, receiver);
        let own = self.locate(data.data, data.bytes);
        let mut part = mailbox.sent.value.load(std::sync::atomic::Ordering::Relaxed);
        operation.sequence = u64::from(part);
        let missing = || vec![to];
        let mut start = 0;
        loop {
            // The post and both letters are free when at most one part is on its way.
            self.wait(&mailbox.taken, part.wrapping_sub(1), &what, &missing)?;
            let (letter, capacity) = self.control.letter(self.local, receiver, part);
            let len = if own == Location::Staged { capacity.min(data.bytes - start) } else { data.bytes };
            if own == Location::Staged {
                // SAFETY: the range is inside the caller's memory and fits the letter, which was taken.
                unsafe { super::copy(data.data.add(start), letter, len) };
            }
            if start == 0 {
                // The post of the message before must have been read.
                self.wait(&mailbox.taken, part, &what, &missing)?;
                operation.write(own, &mailbox.post);
            }
            mailbox.sent.raise(part.wrapping_add(1));
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

    pub fn recv(&self, data: Raw, dtype: DType, from: usize) -> Result<()> {
        let mut link = self.mail[from][1].lock().unwrap_or_else(PoisonError::into_inner);
        let what = Transfer { verb: "recv from", peer: self.ranks[from], count: data.bytes / dtype.size(), dtype };
        self.check_poison(&what)?;
        let Some(sender) = self.locals.iter().position(|&local| local == from) else {
            return self.recv_abroad(&mut link, data, dtype, from, &what);
        };
        let mailbox = self.control.mailbox(sender, self.local);
        let mut part = mailbox.taken.value.load(std::sync::atomic::Ordering::Relaxed);
        let missing = || vec![from];
        let mut location = Location::Staged;
        let mut start = 0;
        loop {
            self.wait(&mailbox.sent, part.wrapping_add(1), &what, &missing)?;
            if start == 0 {
                location = self.check_message(from, &mailbox.post, data, dtype)?;
            }
            let (letter, capacity) = self.control.letter(sender, self.local, part);
            let (source, len) = match location {
                Location::Shared(offset) => (self.world.arena.at(offset), data.bytes),
                Location::Staged => (letter, capacity.min(data.bytes - start)),
            };
            // SAFETY: the sender leaves the source alone until it is taken; the range is inside the caller's memory.
            unsafe { super::copy(source, data.data.add(start), len) };
            part = part.wrapping_add(1);
            mailbox.taken.raise(part);
            start += len;
            if start == data.bytes {
                return Ok(());
            }
        }
    }

    fn send_abroad(&self, link: &mut Link, data: Raw, operation: &Operation, to: usize, what: &Transfer) -> Result<()> {
        let mut post = PostWords::default();
        operation.write(Location::Staged, &post);
        let ends = Ends { sender: self.rank, receiver: to };
        // SAFETY: nobody writes the post until it is sent.
        let post = unsafe { post.part() };
        let mut pieces = pieces(data);
        self.transfer(link, ends, what, std::iter::once(post).chain(pieces.next()))?;
        pieces.try_for_each(|piece| self.transfer(link, ends, what, [piece]))
    }

    fn recv_abroad(&self, link: &mut Link, data: Raw, dtype: DType, from: usize, what: &Transfer) -> Result<()> {
        let mut post = PostWords::default();
        let ends = Ends { sender: from, receiver: self.rank };
        // SAFETY: nobody touches the post until it is filled.
        self.transfer(link, ends, what, [unsafe { post.part() }])?;
        self.check_message(from, &post, data, dtype)?;
        pieces(data).try_for_each(|piece| self.transfer(link, ends, what, [piece]))
    }

    /// Has parts sent or received over the link between two ranks, which is made first if there is none yet. Nobody
    /// watches the sender: all that it has sent comes before the end of the link.
    fn transfer(
        &self,
        link: &mut Link,
        Ends { sender, receiver }: Ends,
        what: &Transfer,
        parts: impl IntoIterator<Item = Part>,
    ) -> Result<()> {
        // Of the two the last, which does not wait for the other, is the sender.
        let own = usize::from(sender == self.rank);
        let peer = if own == 1 { receiver } else { sender };
        let mut wire = match link.take() {
            Some(wire) => wire,
            None => self.connect(&format!("messages/{sender}-{receiver}"), &[receiver, sender], own, what)?,
        };
        for part in parts {
            match own {
                1 => wire.send(0, part),
                _ => wire.receive(1, part),
            };
        }
        let mut departure = None;
        let moved = self.wait_until(what, &|| vec![peer], &|| None, &mut |time| {
            drive(&mut *wire, time, &mut |wire| wire.is_idle()).or_else(|loss| {
                departure = Some(loss.how);
                Ok(true)
            })
        });
        let moved = match departure {
            Some(how) => Err(self.lose_member(peer, how, what)),
            None => moved,
        };
        if moved.is_err() {
            self.abandon(&mut *wire);
        }
        *link = Some(wire);
        moved
    }

    fn check_message(&self, from: usize, post: &PostWords, data: Raw, dtype: DType) -> Result<Location> {
        let mismatch = |detail| self.fail(Error::Mismatch { rank: self.world.rank, detail });
        let (theirs, location) = Operation::read(post).map_err(|e| mismatch(e.to_string()))?;
        let count = data.bytes / dtype.size();
        if theirs.dtype != dtype || theirs.count != count as u64 {
            return Err(mismatch(format!(
                "rank {} sends {} x {}, rank {} receives {count} x {dtype}",
                self.ranks[from], theirs.count, theirs.dtype, self.world.rank
            )));
        }
        match location {
            Location::Shared(offset) if !self.is_reachable(from, offset, data.bytes) => {
                Err(mismatch(format!("rank {} sends from outside the shared memory", self.ranks[from])))
            }
            location => Ok(location),
        }
    }
}

/// Parts of a message that are waited for one by one.
fn pieces(data: Raw) -> impl Iterator<Item = Part> {
    let starts = (0..data.bytes).step_by(PIECE);
    // SAFETY: they are inside the caller's memory, which is valid for the length of the call.
    starts.map(move |start| unsafe { Part::new(data.data.add(start), PIECE.min(data.bytes - start)) })
}

/// The ends of a link.
#[derive(Clone, Copy)]
struct Ends {
    sender: usize,
    receiver: usize,
}

struct Transfer {
    verb: &'static str,
    peer: usize,
    count: usize,
    dtype: DType,
}

impl std::fmt::Display for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} rank {} ({} x {})", self.verb, self.peer, self.count, self.dtype)
    }
}
