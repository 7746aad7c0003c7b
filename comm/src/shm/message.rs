//! send and recv: a mailbox per ordered pair of ranks.
//!
//! Each part of a message raises `sent`, and `taken` when the receiver has it; two parts may be on their way. Data in
//! shared memory is one part, read in place.

use std::sync::PoisonError;

use flow_kernels::{DType, ReduceOp};

use super::engine::Engine;
use super::exchange::Raw;
use super::operation::{Kind, Location, Operation};
use crate::error::{Error, Result};

impl Engine {
    pub fn send(&self, data: Raw, dtype: DType, to: usize) -> Result<()> {
        let _one_at_a_time = self.mail[to][0].lock().unwrap_or_else(PoisonError::into_inner);
        let mailbox = self.control.mailbox(self.rank, to);
        let what = Transfer { verb: "send to", peer: self.ranks[to], count: data.bytes / dtype.size(), dtype };
        self.check_poison(&what)?;
        let mut operation = self.operation(Kind::Send, dtype, ReduceOp::Sum, to, data.bytes / dtype.size());
        let own = self.locate(data.data, data.bytes);
        let mut part = mailbox.sent.value.load(std::sync::atomic::Ordering::Relaxed);
        operation.sequence = u64::from(part);
        let missing = || vec![to];
        let mut start = 0;
        loop {
            // The post and both letters are free when at most one part is on its way.
            self.wait(&mailbox.taken, part.wrapping_sub(1), &what, &missing)?;
            let (letter, capacity) = self.control.letter(self.rank, to, part);
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
        let _one_at_a_time = self.mail[from][1].lock().unwrap_or_else(PoisonError::into_inner);
        let mailbox = self.control.mailbox(from, self.rank);
        let what = Transfer { verb: "recv from", peer: self.ranks[from], count: data.bytes / dtype.size(), dtype };
        self.check_poison(&what)?;
        let mut part = mailbox.taken.value.load(std::sync::atomic::Ordering::Relaxed);
        let missing = || vec![from];
        let mut location = Location::Staged;
        let mut start = 0;
        loop {
            self.wait(&mailbox.sent, part.wrapping_add(1), &what, &missing)?;
            if start == 0 {
                location = self.check_message(from, data, dtype)?;
            }
            let (letter, capacity) = self.control.letter(from, self.rank, part);
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

    fn check_message(&self, from: usize, data: Raw, dtype: DType) -> Result<Location> {
        let mismatch = |detail| self.fail(Error::Mismatch { rank: self.world.rank, detail });
        let (theirs, location) =
            Operation::read(&self.control.mailbox(from, self.rank).post).map_err(|e| mismatch(e.to_string()))?;
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
