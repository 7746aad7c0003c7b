//! Virtual time, the network, and what goes wrong.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::client::{Client, Seen};
use super::leader::Role;
use super::node::Node;

/// The time with faults, and the time after which all must be well again.
const FAULTS: Duration = Duration::from_secs(60);
const END: Duration = Duration::from_secs(240);
/// How long a message is on its way at most.
const DELAY: Duration = Duration::from_millis(100);

/// Who has opened a connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Owner {
    Client(usize),
    /// The replica with this number on a node.
    Replica(usize, u64),
}

pub struct Connection {
    pub owner: Owner,
    pub server: usize,
    pub is_open_at_server: bool,
    pub is_open_at_owner: bool,
    /// Nothing arrives any more.
    pub is_cut: bool,
    /// When the last message arrives at the server, and at the owner.
    arrivals: [Duration; 2],
}

#[derive(Debug)]
pub enum Event {
    /// A connection begins, and messages on it, to the server and to the owner; None when it ends.
    Connect(usize),
    Request(usize, Option<Vec<u8>>),
    Reply(usize, Option<Arc<Vec<u8>>>),
    /// Something may be due about a connection.
    Timer(usize),
    /// The owner has waited long enough for the reply to a request with this number.
    Overdue(usize, u64),
    /// A client does something.
    Act(usize),
    /// A node looks after its replica, as the leader of this term.
    Look(usize, usize),
    /// A majority knows the record that the leader of this term has sent so many times.
    Known(usize, u64),
    /// The leader notices that another member is lost.
    Lost(usize),
    /// A node gets the order to be the replica with this number, as this member.
    Replicate(usize, u64, usize),
    /// The leader of this term is lost, and another one is elected.
    Elect(usize),
    /// A client learns who serves.
    Follow(usize, usize),
    Crash(usize),
    Fault,
}

pub struct Cluster {
    pub random: Rng,
    begin: Instant,
    pub now: Duration,
    events: BTreeMap<(Duration, u64), Event>,
    next_event: u64,
    pub nodes: Vec<Node>,
    pub connections: Vec<Connection>,
    pub clients: Vec<Client>,
    pub seen: Seen,
    /// The node that leads, and how many have led.
    pub leader: usize,
    pub term: usize,
    /// The leader's term is to end: no majority knows any more what it says.
    pub is_deposed: bool,
    /// The member that has all, as a majority knows.
    pub record: Option<usize>,
    /// A node that was started again is another member.
    pub members: usize,
    pub replicas: usize,
    /// Nobody has all any more: the job is started anew.
    pub is_lost: bool,
    pub failure: Option<String>,
    is_verbose: bool,
}

impl Cluster {
    pub fn new(seed: u64, is_verbose: bool) -> Self {
        let mut random = Rng::with_seed(seed);
        let nodes = random.usize(2..=5);
        let clients = random.usize(1..=5);
        let faults = random.usize(..10);
        let mut cluster = Self {
            random,
            begin: Instant::now(),
            now: Duration::ZERO,
            events: BTreeMap::new(),
            next_event: 0,
            nodes: (0..nodes).map(Node::new).collect(),
            connections: Vec::new(),
            clients: (0..clients).map(Client::new).collect(),
            seen: Seen::default(),
            leader: 0,
            term: 0,
            is_deposed: false,
            record: None,
            members: nodes,
            replicas: 0,
            is_lost: false,
            failure: None,
            is_verbose,
        };
        cluster.lead(0);
        for client in 0..clients {
            cluster.after(Duration::ZERO, Event::Act(client));
        }
        for _ in 0..faults {
            let time = cluster.up_to(FAULTS);
            cluster.after(time, Event::Fault);
        }
        cluster
    }

    pub fn run(&mut self) {
        while self.failure.is_none() && !self.is_lost {
            let Some(((time, _), event)) = self.events.pop_first() else { break };
            self.now = time;
            if self.now > END {
                break;
            }
            self.happen(event);
        }
        if self.failure.is_none() && !self.is_lost {
            self.check_end();
        }
    }

    fn happen(&mut self, event: Event) {
        // A node that is frozen goes on later; what has come meanwhile is before what is due.
        let node = match &event {
            Event::Connect(connection) | Event::Request(connection, _) => {
                Some((self.connections[*connection].server, Duration::ZERO))
            }
            Event::Timer(connection) => {
                Some((self.connections[*connection].server, Duration::from_micros(1)))
            }
            Event::Reply(connection, _) | Event::Overdue(connection, _) => {
                match self.connections[*connection].owner {
                    Owner::Replica(node, _) => Some((node, Duration::ZERO)),
                    Owner::Client(_) => None,
                }
            }
            Event::Look(node, _) | Event::Replicate(node, ..) => {
                Some((*node, Duration::from_micros(2)))
            }
            _ => None,
        };
        if let Some((node, late)) = node
            && self.nodes[node].frozen_until > self.now
        {
            let wait = self.nodes[node].frozen_until - self.now;
            return self.after(wait + late, event);
        }
        match event {
            Event::Connect(connection) => self.accept(connection),
            Event::Request(connection, frame) => self.serve(connection, frame),
            Event::Reply(connection, frame) => match self.connections[connection].owner {
                Owner::Client(client) => self.client_hears(client, connection, frame),
                Owner::Replica(node, _) => self.replica_hears(node, connection, frame),
            },
            Event::Timer(connection) => self.expire(connection),
            Event::Overdue(connection, number) => match self.connections[connection].owner {
                Owner::Client(client) => self.client_gives_up(client, connection, number),
                Owner::Replica(node, _) => self.replica_gives_up(node, connection, number),
            },
            Event::Act(client) => self.act(client),
            Event::Look(node, term) => self.look(node, term),
            Event::Known(term, number) => self.know(term, number),
            Event::Lost(member) => self.lose_replica_of(member),
            Event::Replicate(node, number, member) => self.replicate(node, number, member),
            Event::Elect(term) => self.elect(term),
            Event::Follow(client, node) => self.clients[client].leader = node,
            Event::Crash(node) => self.crash(node),
            Event::Fault => self.fault(),
        }
    }

    fn fault(&mut self) {
        let node = self.random.usize(..self.nodes.len());
        let node = if self.random.bool() { self.leader } else { node };
        match self.random.u8(..6) {
            0 => self.crash(node),
            1 => self.nodes[node].crashes_at_change = true,
            2 => {
                let time = self.up_to(Duration::from_secs(12));
                self.log(|| format!("node {node} freezes for {time:?}"));
                self.nodes[node].frozen_until = self.now + time;
            }
            // Nothing arrives on some connections any more, or all late, or they end.
            kind => {
                let rate = self.random.f64();
                for connection in 0..self.connections.len() {
                    let Connection { server, owner, .. } = self.connections[connection];
                    let is_at_node =
                        server == node || matches!(owner, Owner::Replica(at, _) if at == node);
                    if !is_at_node || self.random.f64() > rate {
                        continue;
                    }
                    match kind {
                        3 => self.connections[connection].is_cut = true,
                        4 => self.break_off(connection),
                        _ => {
                            let late = self.now + self.up_to(Duration::from_secs(20));
                            self.connections[connection].arrivals = [late; 2];
                        }
                    }
                }
                self.log(|| format!("connections of node {node} fail ({kind}, {rate:.2})"));
            }
        }
        self.notice_leader();
    }

    /// Ends a connection at both sides, which notice it some time.
    pub fn break_off(&mut self, connection: usize) {
        for event in [Event::Request(connection, None), Event::Reply(connection, None)] {
            let delay = self.up_to(DELAY);
            self.after(delay, event);
        }
        self.connections[connection].is_cut = true;
    }

    /// Ends a node, which starts anew.
    fn crash(&mut self, node: usize) {
        self.log(|| format!("node {node} crashes"));
        if node == self.leader {
            self.lose_leader();
        }
        let notice = self.up_to(Duration::from_secs(2));
        self.after(notice, Event::Lost(self.nodes[node].member));
        self.nodes[node] = Node::new(self.members);
        self.members += 1;
        for connection in 0..self.connections.len() {
            let Connection { server, owner, .. } = self.connections[connection];
            if server == node {
                self.connections[connection].is_open_at_server = false;
                self.break_off(connection);
            }
            if matches!(owner, Owner::Replica(at, _) if at == node) {
                self.connections[connection].is_open_at_owner = false;
                self.break_off(connection);
            }
        }
    }

    pub fn connect(&mut self, owner: Owner, server: usize) -> usize {
        let connection = self.connections.len();
        self.connections.push(Connection {
            owner,
            server,
            is_open_at_server: false,
            is_open_at_owner: true,
            is_cut: false,
            arrivals: [self.now; 2],
        });
        self.send_to_server(connection, Event::Connect(connection));
        connection
    }

    pub fn send_to_server(&mut self, connection: usize, event: Event) {
        self.send(connection, 0, event);
    }

    pub fn send_to_owner(&mut self, connection: usize, event: Event) {
        self.send(connection, 1, event);
    }

    fn send(&mut self, connection: usize, direction: usize, event: Event) {
        let most = if self.random.u8(..8) == 0 { DELAY } else { DELAY / 20 };
        let delay = self.up_to(most);
        let Connection { is_cut, arrivals, .. } = &mut self.connections[connection];
        if *is_cut {
            return;
        }
        arrivals[direction] = arrivals[direction].max(self.now + delay);
        let delay = arrivals[direction] - self.now;
        self.after(delay, event);
    }

    pub fn after(&mut self, delay: Duration, event: Event) {
        self.events.insert((self.now + delay, self.next_event), event);
        self.next_event += 1;
    }

    pub fn instant(&self) -> Instant {
        self.begin + self.now
    }

    /// Returns when an instant is.
    pub fn time_of(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.begin)
    }

    pub fn up_to(&mut self, most: Duration) -> Duration {
        most.mul_f64(self.random.f64())
    }

    pub fn log(&self, text: impl FnOnce() -> String) {
        if self.is_verbose {
            println!("{:?} {}", self.now, text());
        }
    }

    pub fn fail(&mut self, failure: String) {
        self.failure.get_or_insert(failure);
    }

    /// Whether a node leads now, as those that have elected it know.
    pub fn leads(&self, node: usize) -> bool {
        self.leader == node
            && matches!(&self.nodes[node].role, Role::Leader(leader) if leader.term == self.term)
    }
}
