//! What a store owes its replica: the changes that the replica has yet to get, and the replies that
//! wait until it has them.
//!
//! No reply leaves before the replica has all changes that were made until then. So nobody knows of a
//! change that is lost with this server.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::protocol::{Reply, Request};
use super::service::Outbox;

/// So many bytes of changes go to the replica at once, or else one change. In this crate's simulation so few that
/// changes are in several batches.
const BATCH: usize = if cfg!(test) { 50 } else { 1 << 20 };

/// The replica of a store, as the store sees it.
#[derive(Default)]
pub struct Replication {
    replica: Option<Replica>,
    /// Replies wait for a replica: for this one, or the next if it is lost.
    is_on: bool,
    /// The changes that no replica has acknowledged, and the number of the last one.
    log: VecDeque<Vec<u8>>,
    number: u64,
    /// Replies to connections, each with the last change before it.
    held: VecDeque<(u64, usize, Arc<Vec<u8>>)>,
}

struct Replica {
    connection: usize,
    /// How long its request waits for changes; None if it has not asked again.
    waits_until: Option<Instant>,
}

impl Replication {
    /// Whether this is the connection of the replica.
    pub fn is_replica(&self, id: usize) -> bool {
        self.replica.as_ref().is_some_and(|replica| replica.connection == id)
    }

    /// Begins anew with the replica at this connection, which has asked for `all` changes.
    pub fn start(&mut self, id: usize, all: Vec<Vec<u8>>, until: Instant, outbox: &mut Outbox) {
        self.replica = Some(Replica { connection: id, waits_until: Some(until) });
        self.is_on = true;
        self.number += all.len() as u64;
        self.log = all.into();
        for (number, ..) in &mut self.held {
            *number = self.number;
        }
        self.answer(outbox);
    }

    /// Notes a change that was made.
    pub fn add(&mut self, change: &Request) {
        if self.is_on {
            self.log.push_back(change.encode()[4..].to_vec());
            self.number += 1;
        }
    }

    /// Replies to a connection, once the replica has all changes before.
    pub fn reply(&mut self, id: usize, reply: Arc<Vec<u8>>, outbox: &mut Outbox) {
        // The replica asks for these changes next.
        if self.log.is_empty() || self.is_replica(id) {
            outbox.send(id, reply);
        } else {
            self.held.push_back((self.number, id, reply));
        }
    }

    /// Takes the replica's request for changes, of which it has all up to number `after`.
    pub fn ask(&mut self, after: u64, waits_until: Instant, outbox: &mut Outbox) {
        if let Some(replica) = &mut self.replica {
            replica.waits_until = Some(waits_until);
        }
        while self.first() <= after && self.log.pop_front().is_some() {}
        let safe = self.held.partition_point(|(number, ..)| *number <= after);
        for (_, id, reply) in self.held.drain(..safe) {
            outbox.send(id, reply);
        }
        self.feed(outbox);
    }

    /// Returns the number of the first change in the log.
    fn first(&self) -> u64 {
        self.number - self.log.len() as u64 + 1
    }

    /// Answers the replica if it waits for changes and there are some.
    pub fn feed(&mut self, outbox: &mut Outbox) {
        if !self.log.is_empty() {
            self.answer(outbox);
        }
    }

    fn answer(&mut self, outbox: &mut Outbox) {
        let Some(replica) = self.replica.as_mut().filter(|it| it.waits_until.is_some()) else {
            return;
        };
        replica.waits_until = None;
        let mut bytes = 0;
        let mut changes: Vec<&[u8]> = Vec::new();
        for change in &self.log {
            bytes += change.len();
            // A change and the reply to it belong together.
            let belongs = is_answer(change) && changes.last().is_some_and(|last| !is_answer(last));
            if bytes > BATCH && !changes.is_empty() && !belongs {
                break;
            }
            changes.push(change);
        }
        let number = self.number - (self.log.len() - changes.len()) as u64;
        let reply = Reply::Changes { number, more: number < self.number, changes };
        outbox.send(replica.connection, Arc::new(reply.encode()));
    }

    /// Returns when the wait of the replica at this connection ends.
    pub fn due(&self, id: usize) -> Option<Instant> {
        self.replica.as_ref().filter(|replica| replica.connection == id)?.waits_until
    }

    /// Ends a wait of the replica that is over.
    pub fn expire(&mut self, id: usize, now: Instant, outbox: &mut Outbox) {
        if self.due(id).is_some_and(|until| until <= now) {
            self.answer(outbox);
        }
    }

    /// Notes that a connection has ended. If it is the replica's, replies wait.
    pub fn leave(&mut self, id: usize) {
        self.replica.take_if(|replica| replica.connection == id);
    }

    /// Goes on without a replica: nobody takes the one that is lost for one any more.
    pub fn go_alone(&mut self, outbox: &mut Outbox) {
        // It learns so when it asks again.
        self.answer(outbox);
        self.replica = None;
        self.is_on = false;
        self.log.clear();
        for (_, id, reply) in self.held.drain(..) {
            outbox.send(id, reply);
        }
    }
}

fn is_answer(change: &[u8]) -> bool {
    matches!(Request::decode(change), Some(Request::Answered { .. }))
}
