//! Clients: each sends one request after the other, as [`Store`](crate::Store) does, and checks the replies.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::cluster::{Cluster, Event, Owner};
use crate::protocol::{Reply, Request};

/// So many requests has each client.
const REQUESTS: u64 = 40;
/// A client waits so much longer for a reply than the server is to.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

pub struct Client {
    index: usize,
    /// The node that serves, as it knows.
    pub leader: usize,
    connection: Option<usize>,
    /// Whether the server has taken the connection.
    is_admitted: bool,
    /// The number of requests that must not be done twice, of all requests, and of times that one was sent.
    number: u64,
    requests: u64,
    sent: u64,
    pending: Option<Pending>,
    /// What it has last seen at the end of the chain.
    chain: Option<Vec<u8>>,
    /// Whether its own key is there.
    has_key: bool,
}

struct Pending {
    operation: Operation,
    frame: Vec<u8>,
    timeout: Duration,
    /// What all knew of the number that is read when the request was first sent.
    floor: u64,
}

#[derive(Clone, Debug)]
enum Operation {
    /// Counts in a key of its own.
    Set(u64),
    Add,
    /// Replaces the last value of a chain.
    Chain(Option<Vec<u8>>, Vec<u8>),
    Put,
    /// Leaves another key.
    Step(u64),
    /// Deletes a key; whether it is there.
    Delete(bool),
    /// Reads what a client has counted to.
    Get(usize),
    /// Waits for a key that a client leaves.
    Wait(usize, u64),
}

/// What clients have seen.
#[derive(Default)]
pub struct Seen {
    counts: Counts,
    steps: Counts,
    sums: BTreeSet<i64>,
    /// Each value of the chain that was replaced, and the next one.
    chain: BTreeMap<Option<Vec<u8>>, Vec<u8>>,
}

/// What each client has counted to.
#[derive(Default)]
struct Counts {
    /// What was acknowledged, or seen.
    known: BTreeMap<usize, u64>,
    begun: BTreeMap<usize, u64>,
}

impl Client {
    pub fn new(index: usize) -> Self {
        Self {
            index,
            leader: 0,
            connection: None,
            is_admitted: false,
            number: 0,
            requests: 0,
            sent: 0,
            pending: None,
            chain: None,
            has_key: false,
        }
    }
}

impl Cluster {
    /// A client connects, or sends its next request.
    pub fn act(&mut self, client: usize) {
        let Client { connection, is_admitted, leader, requests, .. } = self.clients[client];
        if connection.is_none() {
            let connection = self.connect(Owner::Client(client), leader);
            self.clients[client].connection = Some(connection);
            self.wait_for(client, connection, REPLY_TIMEOUT);
            return;
        }
        if is_admitted && self.clients[client].pending.is_none() && requests < REQUESTS {
            self.clients[client].requests += 1;
            self.next_request(client);
            self.send_pending(client);
        }
    }

    fn next_request(&mut self, client: usize) {
        let other = self.random.usize(..self.clients.len());
        let Client { number, requests, chain, has_key, .. } = &self.clients[client];
        let operation = match self.random.u8(..8) {
            0 => Operation::Set(self.seen.counts.begin(client)),
            1 => Operation::Add,
            2 => {
                let value = format!("{client}.{requests} {}", "x".repeat(self.random.usize(..150)));
                Operation::Chain(chain.clone(), value.into_bytes())
            }
            3 => Operation::Put,
            4 => Operation::Delete(*has_key),
            5 => Operation::Get(other),
            6 => Operation::Step(self.seen.steps.begin(client)),
            _ => Operation::Wait(other, self.seen.steps.known(other) + self.random.u64(..3)),
        };
        let floor = match operation {
            Operation::Wait(other, _) => self.seen.steps.known(other),
            _ => self.seen.counts.known(other),
        };
        let timeout = self.random.u32(..3) * Duration::from_secs(1);
        let own = format!("count/{client}");
        let of_other = format!("count/{other}");
        let key = format!("key/{client}");
        let text;
        let steps: Vec<String>;
        let request = match &operation {
            Operation::Set(count) => {
                text = count.to_string();
                Request::Set { key: &own, value: text.as_bytes() }
            }
            Operation::Add => Request::Add { key: "sum", increment: 1 },
            Operation::Chain(expected, new) => {
                Request::CompareAndSet { key: "chain", expected: expected.as_deref(), new }
            }
            Operation::Put => Request::Set { key: &key, value: b"" },
            Operation::Delete(_) => Request::Delete { keys: vec![&key] },
            Operation::Get(_) => Request::Get { key: &of_other, timeout },
            Operation::Step(step) => {
                text = format!("step/{client}/{step}");
                Request::Set { key: &text, value: b"" }
            }
            Operation::Wait(other, step) => {
                steps = (1..=*step).map(|step| format!("step/{other}/{step}")).collect();
                Request::Wait { keys: steps.iter().map(String::as_str).collect(), timeout }
            }
        };
        let mut frame = request.encode();
        if !matches!(operation, Operation::Get(_) | Operation::Wait(..)) {
            let number = number + 1;
            let once = Request::Once { client: client as u64, number, request: &frame[4..] };
            frame = once.encode();
            self.clients[client].number = number;
        }
        self.log(|| format!("client {client}: {operation:?}"));
        self.clients[client].pending = Some(Pending { operation, frame, timeout, floor });
    }

    fn send_pending(&mut self, client: usize) {
        let Some(pending) = &self.clients[client].pending else { return };
        let Some(connection) = self.clients[client].connection else { return };
        let frame = pending.frame.clone();
        let wait = pending.timeout + REPLY_TIMEOUT;
        self.send_to_server(connection, Event::Request(connection, Some(frame)));
        self.wait_for(client, connection, wait);
    }

    fn wait_for(&mut self, client: usize, connection: usize, time: Duration) {
        self.clients[client].sent += 1;
        self.after(time, Event::Overdue(connection, self.clients[client].sent));
    }

    /// A client gives a server up that does not answer.
    pub fn client_gives_up(&mut self, client: usize, connection: usize, number: u64) {
        let state = &self.clients[client];
        let waits = state.pending.is_some() || !state.is_admitted;
        if state.connection == Some(connection) && state.sent == number && waits {
            self.connections[connection].is_open_at_owner = false;
            self.send_to_server(connection, Event::Request(connection, None));
            self.connect_again(client);
        }
    }

    fn connect_again(&mut self, client: usize) {
        self.clients[client].connection = None;
        self.clients[client].is_admitted = false;
        let pause = self.up_to(Duration::from_millis(500));
        self.after(pause, Event::Act(client));
    }

    /// A client has a reply, or its connection has ended.
    pub fn client_hears(&mut self, client: usize, connection: usize, frame: Option<Arc<Vec<u8>>>) {
        if self.clients[client].connection != Some(connection) {
            return;
        }
        let Some(frame) = frame else { return self.connect_again(client) };
        let reply = Reply::decode(&frame[4..]).unwrap();
        if !self.clients[client].is_admitted {
            match reply {
                Reply::Done if self.clients[client].pending.is_some() => {
                    self.clients[client].is_admitted = true;
                    return self.send_pending(client);
                }
                Reply::Done => self.clients[client].is_admitted = true,
                // It closes the connection.
                _ => return,
            }
        } else if let Some(pending) = self.clients[client].pending.take() {
            let is_current = self.leads(self.connections[connection].server);
            if let Err(failure) = self.check(client, &pending, &reply, is_current) {
                self.fail(format!("client {client}, {:?}: {failure}", pending.operation));
            }
        }
        let pause = self.up_to(Duration::from_millis(700));
        self.after(pause, Event::Act(client));
    }

    /// Checks a reply. What a server says that is no leader any more may be old.
    fn check(
        &mut self,
        client: usize,
        pending: &Pending,
        reply: &Reply<'_>,
        is_current: bool,
    ) -> Result<(), String> {
        let floor = if is_current { pending.floor } else { 0 };
        match (&pending.operation, reply) {
            (Operation::Set(count), Reply::Done) => {
                self.seen.counts.note(client, *count);
            }
            (Operation::Add, Reply::Number(sum)) => {
                if !self.seen.sums.insert(*sum) {
                    return Err(format!("{sum} twice"));
                }
            }
            (Operation::Chain(expected, new), Reply::Done) => {
                self.clients[client].chain = Some(new.clone());
                if self.seen.chain.insert(expected.clone(), new.clone()).is_some() {
                    return Err("the value was replaced before".to_owned());
                }
            }
            (Operation::Chain(expected, _), Reply::Differs(present))
                if *present != expected.as_deref() =>
            {
                self.clients[client].chain = present.map(<[u8]>::to_vec);
            }
            (Operation::Step(step), Reply::Done) => self.seen.steps.note(client, *step),
            (Operation::Put, Reply::Done) => self.clients[client].has_key = true,
            (Operation::Delete(is_there), Reply::Number(count)) => {
                self.clients[client].has_key = false;
                if *count != i64::from(*is_there) {
                    return Err(format!("{count} keys"));
                }
            }
            (Operation::Get(other), Reply::Value(value)) => {
                let count = parse(value);
                if count < floor || count > self.seen.counts.begun(*other) {
                    return Err(format!("{count}, and it was {floor}"));
                }
                self.seen.counts.note(*other, count);
            }
            (Operation::Get(_), Reply::Missing(_)) if floor == 0 => {}
            (Operation::Wait(_, step), Reply::Missing(_)) if *step > floor || !is_current => {}
            (Operation::Wait(other, step), Reply::Done) => {
                self.seen.steps.note(*other, *step);
                if *step > self.seen.steps.begun(*other) {
                    return Err("the key is not there".to_owned());
                }
            }
            (_, reply) => return Err(format!("a wrong reply: {:?}", reply.encode())),
        }
        Ok(())
    }

    /// All requests are answered, and the store has what was acknowledged.
    pub fn check_end(&mut self) {
        for client in 0..self.clients.len() {
            let Client { requests, pending, index, .. } = &self.clients[client];
            if *requests < REQUESTS || pending.is_some() {
                let failure = format!("client {index} is not done: {requests} requests");
                return self.fail(failure);
            }
        }
        let service = &self.nodes[self.leader].service;
        let sum = service.get("sum").map_or(0, parse);
        let sums: BTreeSet<i64> = (1..=sum as i64).collect();
        let counts = self.seen.counts.begun.iter().all(|(client, count)| {
            service.get(&format!("count/{client}")).map(parse) == Some(*count)
        });
        let steps = self.seen.steps.begun.iter().all(|(client, last)| {
            (1..=*last).all(|step| service.get(&format!("step/{client}/{step}")).is_some())
        });
        let mut links = 0;
        let mut last = None;
        while let Some(next) = self.seen.chain.get(&last) {
            last = Some(next.clone());
            links += 1;
        }
        let is_chain = links == self.seen.chain.len();
        let is_last = service.get("chain") == last.as_deref();
        if sums != self.seen.sums || !counts || !steps || !is_chain || !is_last {
            let failure = format!(
                "sums: {}, counts: {counts}, steps: {steps}, chain: {is_chain}, its end: {is_last}",
                sums == self.seen.sums
            );
            self.fail(failure);
        }
    }
}

impl Counts {
    fn known(&self, client: usize) -> u64 {
        self.known.get(&client).copied().unwrap_or_default()
    }

    fn begun(&self, client: usize) -> u64 {
        self.begun.get(&client).copied().unwrap_or_default()
    }

    /// Returns what a client counts to next.
    fn begin(&mut self, client: usize) -> u64 {
        let count = self.begun(client) + 1;
        self.begun.insert(client, count);
        count
    }

    fn note(&mut self, client: usize, count: u64) {
        let known = self.known.entry(client).or_default();
        *known = count.max(*known);
    }
}

fn parse(value: &[u8]) -> u64 {
    std::str::from_utf8(value).unwrap().parse().unwrap()
}
