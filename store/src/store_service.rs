//! One store, as the server's thread serves it.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::inbox::Inbox;
use super::protocol::{self, ALL_CHANGES, MAX_FRAME, MAX_WILL, Reply, Request};
use super::replication::Replication;
use super::service::{Outbox, Service};
use super::values::{Value, Values};

const UNREAD: &str =
    "the process that serves the store leaves its messages unread; is it stopped or very busy?";

/// The values of a store and the clients that were admitted to it.
pub struct StoreService {
    inbox: Arc<Inbox>,
    values: Values,
    clients: HashMap<usize, StoreClient>,
    /// By client, the number of the last request that has changed something, and the reply to it.
    answered: HashMap<u64, (u64, Arc<Vec<u8>>)>,
    replication: Replication,
    /// The number of the replica that may come.
    admitted_replica: Option<u64>,
    /// Of a replica, the address to which clients are sent; empty if it is not known.
    elsewhere: Option<String>,
}

struct StoreClient {
    waiting: Option<Waiting>,
    will: Option<Will>,
    /// Since when it has said nothing, less the time for which it was the server that was late.
    last_activity: Instant,
}

/// A get or wait that is not answered yet.
struct Waiting {
    keys: Vec<String>,
    /// The first key that is missing, and the only one that is watched: those before it were there.
    next: usize,
    deadline: Instant,
    wants_value: bool,
}

/// The message that the inbox gets when a client is gone, or has been silent for so long.
struct Will {
    message: Vec<u8>,
    silence: Duration,
}

impl StoreService {
    /// Makes an empty store, whose messages go to `inbox`.
    pub fn new(inbox: Arc<Inbox>) -> StoreService {
        StoreService {
            inbox,
            values: Values::default(),
            clients: HashMap::new(),
            answered: HashMap::new(),
            replication: Replication::default(),
            admitted_replica: None,
            elsewhere: None,
        }
    }

    /// Returns the value of `key`.
    pub fn get(&self, key: &str) -> Option<&[u8]> {
        self.values.get(key).map(Value::bytes)
    }

    /// Sets `key`, and answers the clients that wait for it.
    pub fn set(&mut self, key: &str, value: &[u8], now: Instant, outbox: &mut Outbox) {
        self.put(key, value, now, outbox);
        self.replication.feed(outbox);
    }

    /// Deletes `key`, if it is there, as a client would.
    pub fn delete(&mut self, key: &str, outbox: &mut Outbox) {
        self.remove(&[key]);
        self.replication.feed(outbox);
    }

    /// Serves no clients: sends them to `address`.
    pub fn send_elsewhere(&mut self, address: String) {
        self.elsewhere = Some(address);
    }

    /// Serves clients from now on, with the values that it has.
    pub fn serve(&mut self) {
        self.elsewhere = None;
    }

    /// Takes changes of the store that this one is a replica of, `all` that there ever were or
    /// those that follow. Returns false if it is none, or no longer.
    pub fn take_changes(
        &mut self,
        all: bool,
        changes: &[Vec<u8>],
        now: Instant,
        outbox: &mut Outbox,
    ) -> bool {
        if self.elsewhere.is_none() {
            return false;
        }
        if all {
            self.values = Values::default();
            self.answered.clear();
        }
        for change in changes {
            match Request::decode(change) {
                Some(Request::Set { key, value }) => self.put(key, value, now, outbox),
                Some(Request::Delete { keys }) => {
                    self.remove(&keys);
                }
                Some(Request::Answered { client, number, reply }) => {
                    self.note_answer(client, number, Arc::new(reply.to_vec()))
                }
                _ => return false,
            }
        }
        true
    }

    /// Lets the replica with this number come, once, and no other.
    pub fn admit_replica(&mut self, number: u64) {
        self.admitted_replica = Some(number);
    }

    /// Sends the replies that wait for a replica, and goes on without one.
    pub fn go_alone(&mut self, outbox: &mut Outbox) {
        self.admitted_replica = None;
        self.replication.go_alone(outbox);
    }

    fn put(&mut self, key: &str, value: &[u8], now: Instant, outbox: &mut Outbox) {
        self.replication.add(&Request::Set { key, value });
        for id in self.values.set(key, value) {
            self.advance(id, now, outbox);
        }
    }

    /// Returns how many of these there were.
    fn remove(&mut self, keys: &[&str]) -> usize {
        self.replication.add(&Request::Delete { keys: keys.to_vec() });
        keys.iter().filter(|key| self.values.remove(key)).count()
    }

    fn note_answer(&mut self, client: u64, number: u64, reply: Arc<Vec<u8>>) {
        self.replication.add(&Request::Answered { client, number, reply: &reply });
        self.answered.insert(client, (number, reply));
    }

    /// Answers a request at once, if it can; `None` ends the connection.
    fn handle(
        &mut self,
        id: usize,
        request: Request,
        now: Instant,
        outbox: &mut Outbox,
    ) -> Option<()> {
        let reply = match request {
            Request::Get { key, timeout } => {
                let until = now + timeout;
                return self.wait(id, &[key], until, true, now, outbox);
            }
            Request::Wait { keys, timeout } => {
                let until = now + timeout;
                return self.wait(id, &keys, until, false, now, outbox);
            }
            Request::Changes { replica, after, timeout } => {
                if after == ALL_CHANGES {
                    self.admitted_replica.take_if(|number| *number == replica)?;
                }
                return self.ask(id, after, now + timeout, outbox);
            }
            Request::Once { client, number, request } => match self.answered.get(&client) {
                Some((last, reply)) if *last == number => Arc::clone(reply),
                // It has come late, by a connection that the client has given up.
                Some((last, _)) if *last > number => return None,
                _ => {
                    let reply = self.execute(id, Request::decode(request)?, now, outbox)?;
                    // Else nothing was done.
                    if let Reply::Done | Reply::Number(_) = Reply::decode(&reply[4..])? {
                        self.note_answer(client, number, Arc::clone(&reply));
                    }
                    reply
                }
            },
            request => self.execute(id, request, now, outbox)?,
        };
        self.replication.reply(id, reply, outbox);
        Some(())
    }

    /// Does what needs no wait; returns the reply.
    fn execute(
        &mut self,
        id: usize,
        request: Request,
        now: Instant,
        outbox: &mut Outbox,
    ) -> Option<Arc<Vec<u8>>> {
        let reply = match request {
            Request::Set { key, value } => {
                self.put(key, value, now, outbox);
                Reply::Done
            }
            Request::Add { key, increment } => match self.values.sum(key, increment) {
                Err(reason) => Reply::Refused(reason),
                Ok(sum) => {
                    self.put(key, sum.to_string().as_bytes(), now, outbox);
                    Reply::Number(sum)
                }
            },
            Request::CompareAndSet { key, expected, new } => {
                if self.values.get(key).map(Value::bytes) == expected {
                    self.put(key, new, now, outbox);
                    Reply::Done
                } else {
                    Reply::Differs(self.values.get(key).map(Value::bytes))
                }
            }
            Request::Delete { keys } => Reply::Number(self.remove(&keys) as i64),
            Request::Send { message } => {
                if self.inbox.has_room(message.len()) {
                    self.inbox.add(message.to_vec());
                    Reply::Done
                } else {
                    Reply::Refused(UNREAD)
                }
            }
            Request::Will { message, silence } => {
                if message.len() > MAX_WILL {
                    Reply::Refused("a will has at most 64 KiB")
                } else if !message.is_empty() && !self.inbox.has_room(message.len()) {
                    Reply::Refused(UNREAD)
                } else {
                    let will =
                        (!message.is_empty()).then(|| Will { message: message.to_vec(), silence });
                    self.clients.get_mut(&id)?.will = will;
                    Reply::Done
                }
            }
            _ => return None,
        };
        Some(Arc::new(reply.encode()))
    }

    /// Takes a replica's request for changes.
    fn ask(&mut self, id: usize, after: u64, until: Instant, outbox: &mut Outbox) -> Option<()> {
        if after == ALL_CHANGES {
            let sets = self.values.iter().map(|(key, value)| {
                let change = Request::Set { key, value: value.bytes() };
                change.encode()[4..].to_vec()
            });
            let answers = self.answered.iter().map(|(client, (number, reply))| {
                let change = Request::Answered { client: *client, number: *number, reply };
                change.encode()[4..].to_vec()
            });
            let mut all: Vec<Vec<u8>> = sets.chain(answers).collect();
            // Else each run of a simulation would differ.
            all.sort_unstable();
            self.replication.start(id, all, until, outbox);
            return Some(());
        }
        if !self.replication.is_replica(id) {
            return None;
        }
        self.replication.ask(after, until, outbox);
        Some(())
    }

    fn wait(
        &mut self,
        id: usize,
        keys: &[&str],
        deadline: Instant,
        wants_value: bool,
        now: Instant,
        outbox: &mut Outbox,
    ) -> Option<()> {
        let keys = keys.iter().map(ToString::to_string).collect();
        let waiting = Waiting { keys, next: 0, deadline, wants_value };
        self.clients.get_mut(&id)?.waiting = Some(waiting);
        self.advance(id, now, outbox);
        Some(())
    }

    /// Answers a waiting client if all its keys are set, else has it watch the first one that is
    /// not.
    fn advance(&mut self, id: usize, now: Instant, outbox: &mut Outbox) {
        let Some(waiting) = self.clients.get_mut(&id).and_then(|client| client.waiting.as_mut())
        else {
            return;
        };
        while let Some(key) = waiting.keys.get(waiting.next) {
            if self.values.get(key).is_none() {
                return self.values.watch(key, id);
            }
            waiting.next += 1;
        }
        let value = waiting
            .keys
            .first()
            .filter(|_| waiting.wants_value)
            .and_then(|key| self.values.get(key));
        let reply = value.map_or_else(|| Arc::new(Reply::Done.encode()), |value| value.reply());
        self.end_wait(id, reply, now, outbox);
    }

    fn end_wait(&mut self, id: usize, reply: Arc<Vec<u8>>, now: Instant, outbox: &mut Outbox) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Some(waiting) = client.waiting.take() else { return };
        // The client could not speak before the answer, so what this comes too late is not its
        // silence.
        client.last_activity += now.saturating_duration_since(waiting.deadline);
        self.unwatch(id, &waiting);
        self.replication.reply(id, reply, outbox);
    }

    fn unwatch(&mut self, id: usize, waiting: &Waiting) {
        if let Some(key) = waiting.keys.get(waiting.next) {
            self.values.unwatch(key, id);
        }
    }
}

impl Service for StoreService {
    fn join(&mut self, id: usize, now: Instant, outbox: &mut Outbox) -> io::Result<()> {
        if let Some(address) = &self.elsewhere {
            outbox.send(id, Arc::new(Reply::Elsewhere(address).encode()));
            return Err(ErrorKind::NotConnected.into());
        }
        self.clients.insert(id, StoreClient { waiting: None, will: None, last_activity: now });
        outbox.send(id, Arc::new(Reply::Done.encode()));
        Ok(())
    }

    fn receive(
        &mut self,
        id: usize,
        input: &[u8],
        unsent: usize,
        now: Instant,
        outbox: &mut Outbox,
    ) -> io::Result<usize> {
        let client = self.clients.get_mut(&id).ok_or(ErrorKind::InvalidData)?;
        // A client that sends before it has the last reply is none of ours.
        if client.waiting.is_some() || unsent > 0 {
            return Err(ErrorKind::InvalidData.into());
        }
        client.last_activity = now;
        let Some(frame) = protocol::unframe(input, MAX_FRAME)? else { return Ok(0) };
        let request = Request::decode(frame).ok_or(ErrorKind::InvalidData)?;
        self.handle(id, request, now, outbox).ok_or(ErrorKind::InvalidData)?;
        self.replication.feed(outbox);
        Ok(input.len())
    }

    fn due(&self, id: usize) -> Option<Instant> {
        let client = self.clients.get(&id)?;
        let wait = client.waiting.as_ref().map(|waiting| waiting.deadline);
        let silence = client.will.as_ref().map(|will| client.last_activity + will.silence);
        [wait, silence, self.replication.due(id)].into_iter().flatten().min()
    }

    fn expire(&mut self, id: usize, now: Instant, outbox: &mut Outbox) {
        self.replication.expire(id, now, outbox);
        let waiting = self.clients.get(&id).and_then(|client| client.waiting.as_ref());
        if let Some(waiting) = waiting.filter(|waiting| waiting.deadline <= now) {
            let missing = waiting
                .keys
                .iter()
                .map(String::as_str)
                .filter(|key| self.values.get(key).is_none());
            let reply = Reply::Missing(missing.collect()).encode();
            self.end_wait(id, Arc::new(reply), now, outbox);
        }
    }

    fn leave(&mut self, id: usize) {
        let Some(client) = self.clients.remove(&id) else { return };
        self.replication.leave(id);
        if let Some(waiting) = &client.waiting {
            self.unwatch(id, waiting);
        }
        if let Some(will) = client.will {
            self.inbox.add(will.message);
        }
    }
}
