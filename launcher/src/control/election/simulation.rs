//! A cluster in one process and in virtual time: random delays, lost and repeated messages,
//! partitions, nodes that crash, lose their power, freeze and come back. A seed decides everything, so
//! a run that fails can be repeated: `SIMULATION_SEED=n`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::{Election, JobRecord, Member, MemberId, Outcome, Progress, Vote, VoteRequest};

/// A leader takes a follower that is silent for so long for lost.
const LEASE: Duration = Duration::from_secs(8);
/// A follower takes a leader that is silent for so long for lost.
const PATIENCE: Duration = Duration::from_secs(4);
/// How long workers take to stop at most.
const GRACE: Duration = Duration::from_secs(30);
const PING: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(100);
/// How long a message is on its way at most.
const DELAY: Duration = Duration::from_millis(80);
/// The time with faults, and the time after which all must be well again.
const FAULTS: Duration = Duration::from_secs(100);
const RECOVERY: Duration = Duration::from_secs(200);

type Connection = u64;

#[derive(Clone, Debug)]
enum Message {
    /// Asks whom the receiver follows.
    Find,
    Found {
        leader: usize,
    },
    Join {
        connection: Connection,
        member: Member,
        term: u64,
        known: JobRecord,
    },
    Record {
        connection: Connection,
        record: JobRecord,
    },
    Acknowledge {
        connection: Connection,
        age: (u64, u64),
    },
    Ping {
        connection: Connection,
    },
    Pong {
        connection: Connection,
    },
    Closed {
        connection: Connection,
    },
    Request(VoteRequest),
    Answer(Vote),
}

enum Event {
    Message { from: usize, to: usize, message: Message },
    Tick { node: usize, process: MemberId },
    Fault,
}

struct Node {
    process: MemberId,
    is_alive: bool,
    election: Election,
    /// The connection to the leader, the leader, and when it was last heard of.
    following: Option<(Connection, usize, Duration)>,
    last_ping: Duration,
    /// The connection on which it waits for the record of a leader, and since when.
    joining: Option<(Connection, Duration)>,
    /// As a leader: when it last looked at its followers.
    last_tick: Duration,
    /// As a leader: each follower, its member and when it was last heard of.
    followers: BTreeMap<Connection, (usize, MemberId, Duration)>,
    /// While the workers of the last round are left.
    busy_until: Option<Duration>,
    /// It does nothing before this, and then goes on as if nothing had been.
    frozen_until: Duration,
    /// The place of the address that is tried next.
    tries: usize,
    last_try: Duration,
    wanted_progress: Progress,
}

struct Simulation {
    random: Rng,
    start: Instant,
    now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: BTreeMap<u64, Event>,
    next: u64,
    nodes: Vec<Node>,
    /// Nodes in different parts do not reach each other.
    part: Vec<u8>,
    loses: f64,
    /// Connections on which nothing arrives any more, and when each side's last message arrives.
    broken: BTreeSet<Connection>,
    arrivals: BTreeMap<(Connection, usize), Duration>,
    connections: Connection,
    processes: MemberId,
    /// The newest record that a majority of its members had when its leader acted.
    committed: JobRecord,
    leaders: usize,
}

fn address(node: usize, process: MemberId) -> String {
    format!("{node}:{process}")
}

fn place(address: &str) -> (usize, MemberId) {
    let (node, process) = address.split_once(':').unwrap();
    (node.parse().unwrap(), process.parse().unwrap())
}

impl Simulation {
    fn new(seed: u64, size: usize, loses: f64) -> Simulation {
        let start = Instant::now();
        let mut simulation = Simulation {
            random: Rng::with_seed(seed),
            start,
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            next: 0,
            nodes: Vec::new(),
            part: vec![0; size],
            loses,
            broken: BTreeSet::new(),
            arrivals: BTreeMap::new(),
            connections: 0,
            processes: 0,
            committed: JobRecord::default(),
            leaders: 0,
        };
        for index in 0..size {
            let node = simulation.process(index);
            simulation.nodes.push(node);
        }
        simulation.nodes[0].election.found(address(0, 1), start);
        simulation
    }

    fn process(&mut self, node: usize) -> Node {
        self.processes += 1;
        let process = self.processes;
        let delay = TICK.mul_f64(self.random.f64());
        self.after(delay, Event::Tick { node, process });
        Node {
            process,
            is_alive: true,
            election: Election::new(process, LEASE, GRACE, self.start + self.now),
            following: None,
            last_ping: self.now,
            joining: None,
            last_tick: self.now,
            followers: BTreeMap::new(),
            busy_until: None,
            frozen_until: Duration::ZERO,
            tries: 0,
            last_try: self.now,
            wanted_progress: Progress::default(),
        }
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.queue.push(Reverse((self.now + delay, self.next)));
        self.events.insert(self.next, event);
        self.next += 1;
    }

    fn instant(&self) -> Instant {
        self.start + self.now
    }

    fn reaches(&self, from: usize, to: usize) -> bool {
        self.part[from] == self.part[to]
    }

    /// Sends a message that may be lost, or come twice, or after a later one.
    fn send(&mut self, from: usize, to: usize, message: Message) {
        for _ in 0..self.random.usize(1..=2) {
            if self.reaches(from, to) && self.random.f64() >= self.loses {
                let delay = DELAY.mul_f64(self.random.f64());
                self.after(delay, Event::Message { from, to, message: message.clone() });
            }
        }
    }

    /// Sends a message on a connection: in order, and nothing after one that is lost.
    fn send_on(&mut self, connection: Connection, from: usize, to: usize, message: Message) {
        if !self.reaches(from, to) || self.random.f64() < self.loses / 20.0 {
            self.broken.insert(connection);
        }
        if self.broken.contains(&connection) {
            return;
        }
        let sent = self.now + DELAY.mul_f64(self.random.f64());
        let arrival = self.arrivals.entry((connection, to)).or_default();
        *arrival = sent.max(*arrival);
        let delay = *arrival - self.now;
        self.after(delay, Event::Message { from, to, message });
    }

    fn run(&mut self, until: Duration) {
        while let Some(Reverse((time, number))) = self.queue.peek().copied()
            && time <= until
        {
            self.queue.pop();
            self.now = time;
            match self.events.remove(&number) {
                Some(Event::Message { from, to, message }) => self.receive(from, to, message),
                Some(Event::Tick { node, process }) => self.tick(node, process),
                Some(Event::Fault) => self.fault(),
                None => {}
            }
        }
        self.now = until;
    }

    /// Gives up the leader, or the leadership.
    fn search(&mut self, node: usize) {
        let busy = GRACE.mul_f64(self.random.f64().powi(4));
        let followers = std::mem::take(&mut self.nodes[node].followers);
        for (connection, (follower, ..)) in followers {
            self.send_on(connection, node, follower, Message::Closed { connection });
        }
        let now = self.now;
        let this = &mut self.nodes[node];
        this.following = None;
        this.busy_until = Some(now + busy);
    }

    fn tick(&mut self, node: usize, process: MemberId) {
        if !self.nodes[node].is_alive || self.nodes[node].process != process {
            return;
        }
        self.after(TICK, Event::Tick { node, process });
        let now = self.now;
        let instant = self.instant();
        if self.nodes[node].frozen_until > now {
            return;
        }
        if let Some((connection, leader, heard)) = self.nodes[node].following {
            if now - heard > PATIENCE {
                self.send_on(connection, node, leader, Message::Closed { connection });
                self.nodes[node].election.lost(true, instant);
                self.search(node);
            } else if now - self.nodes[node].last_ping >= PING {
                self.nodes[node].last_ping = now;
                self.send_on(connection, node, leader, Message::Ping { connection });
            }
            return;
        }
        if self.nodes[node].election.is_leading() {
            return self.tick_leader(node);
        }
        if self.nodes[node].busy_until.is_some_and(|until| until <= now) {
            self.nodes[node].busy_until = None;
            self.nodes[node].election.may_stand(instant);
        }
        if let Some(request) = self.nodes[node].election.elapsed(instant) {
            self.ask(node, &request);
        }
        if now - self.nodes[node].last_try >= 3 * TICK && self.nodes[node].busy_until.is_none() {
            let members = &self.nodes[node].election.record().members;
            let known = members.iter().map(|member| place(&member.address).0);
            let candidates: Vec<usize> = known.chain([0]).filter(|other| *other != node).collect();
            let this = &mut self.nodes[node];
            this.last_try = now;
            this.tries += 1;
            if !candidates.is_empty() {
                let other = candidates[self.nodes[node].tries % candidates.len()];
                self.send(node, other, Message::Find);
            }
        }
    }

    fn ask(&mut self, node: usize, request: &VoteRequest) {
        for member in self.nodes[node].election.record().members.clone() {
            let (other, process) = place(&member.address);
            if other != node && self.nodes[other].process == process {
                self.send(node, other, Message::Request(request.clone()));
            }
        }
    }

    fn tick_leader(&mut self, node: usize) {
        let now = self.now;
        let instant = self.instant();
        self.notice_pause(node);
        let silent: Vec<Connection> = self.nodes[node]
            .followers
            .iter()
            .filter(|(_, (.., heard))| now - *heard > LEASE)
            .map(|(connection, _)| *connection)
            .collect();
        for connection in silent {
            let Some(&(follower, ..)) = self.nodes[node].followers.get(&connection) else { break };
            self.send_on(connection, node, follower, Message::Closed { connection });
            self.drop_follower(node, connection);
        }
        self.nodes[node].election.elapsed(instant);
        if !self.nodes[node].election.is_leading() {
            return self.search(node);
        }
        if self.random.u8(..) < 8 {
            self.nodes[node].wanted_progress.round =
                self.nodes[node].election.record().progress.round + 1;
        }
        let progress = self.nodes[node].wanted_progress.clone();
        if self.nodes[node].election.update(progress) {
            self.broadcast(node);
        }
        self.check(node);
    }

    /// A leader that was frozen first asks whether it still is the leader.
    fn notice_pause(&mut self, leader: usize) {
        let since = std::mem::replace(&mut self.nodes[leader].last_tick, self.now);
        if self.now - since > PATIENCE {
            let instant = self.instant();
            self.nodes[leader].election.doubt(instant);
            self.broadcast(leader);
        }
    }

    fn broadcast(&mut self, leader: usize) {
        let record = self.nodes[leader].election.record().clone();
        for (connection, (follower, ..)) in self.nodes[leader].followers.clone() {
            let record = record.clone();
            self.send_on(connection, leader, follower, Message::Record { connection, record });
        }
    }

    fn drop_follower(&mut self, leader: usize, connection: Connection) {
        let instant = self.instant();
        let Some((_, member, _)) = self.nodes[leader].followers.remove(&connection) else { return };
        if self.nodes[leader].followers.values().any(|(_, other, _)| *other == member) {
            return;
        }
        if self.nodes[leader].election.left(member, instant) {
            self.search(leader);
        }
    }

    fn receive(&mut self, from: usize, to: usize, message: Message) {
        if !self.nodes[to].is_alive {
            return;
        }
        let wait = self.nodes[to].frozen_until.saturating_sub(self.now);
        if !wait.is_zero() {
            return self.after(wait, Event::Message { from, to, message });
        }
        let now = self.now;
        let instant = self.instant();
        if self.nodes[to].election.is_leading() {
            self.notice_pause(to);
        }
        let this = &mut self.nodes[to];
        match message {
            Message::Find => {
                let leads = this.election.is_leading().then_some(to);
                let follows = this.following.map(|(_, leader, _)| leader);
                if let Some(leader) = leads.or(follows) {
                    self.send(to, from, Message::Found { leader });
                }
            }
            Message::Found { leader } => {
                let waits = this.joining.is_some_and(|(_, since)| now - since < PATIENCE);
                let follows = this.following.is_some() || this.election.is_leading();
                if !waits && !follows && leader != to {
                    self.connections += 1;
                    let connection = self.connections;
                    this.joining = Some((connection, now));
                    let member = Member { id: this.process, address: address(to, this.process) };
                    // Whether the other leads comes out with its first record.
                    let term = this.election.term();
                    let known = this.election.record().clone();
                    let join = Message::Join { connection, member, term, known };
                    self.send_on(connection, to, leader, join);
                }
            }
            Message::Join { connection, member, term, known } => {
                if this.election.heard_of(term, instant) || this.election.give_way(known, instant) {
                    self.send_on(connection, to, from, Message::Closed { connection });
                    return self.search(to);
                }
                if !this.election.is_leading() {
                    return self.send_on(connection, to, from, Message::Closed { connection });
                }
                this.followers.insert(connection, (from, member.id, now));
                this.election.joined(member);
                let record = this.election.record().clone();
                self.send_on(connection, to, from, Message::Record { connection, record });
            }
            Message::Record { connection, record } => {
                let is_known = this.following.is_some_and(|(known, ..)| known == connection)
                    || this.joining.is_some_and(|(known, _)| known == connection);
                let age = record.age();
                if this.election.is_leading() || !is_known || !this.election.follow(record, instant)
                {
                    return self.send_on(connection, to, from, Message::Closed { connection });
                }
                this.joining = None;
                this.following = Some((connection, from, now));
                this.busy_until = None;
                self.send_on(connection, to, from, Message::Acknowledge { connection, age });
            }
            Message::Acknowledge { connection, age } => {
                if let Some((_, member, heard)) = this.followers.get_mut(&connection) {
                    *heard = now;
                    let member = *member;
                    this.election.acknowledged(member, age);
                }
            }
            Message::Ping { connection } => {
                if let Some((.., heard)) = this.followers.get_mut(&connection) {
                    *heard = now;
                    self.send_on(connection, to, from, Message::Pong { connection });
                }
            }
            Message::Pong { connection } => {
                if let Some((known, _, heard)) = &mut this.following
                    && *known == connection
                {
                    *heard = now;
                }
            }
            Message::Closed { connection } => {
                if this.following.is_some_and(|(known, ..)| known == connection) {
                    this.election.lost(false, instant);
                    self.search(to);
                } else {
                    self.drop_follower(to, connection);
                }
            }
            Message::Request(request) => {
                let vote = this.election.vote(&request, instant);
                self.send(to, from, Message::Answer(vote));
            }
            Message::Answer(vote) => match this.election.count(vote, instant) {
                Outcome::Open => {}
                Outcome::Ask(request) => self.ask(to, &request),
                Outcome::Elected => {
                    this.last_tick = now;
                    this.wanted_progress = this.election.record().progress.clone();
                }
            },
        }
    }

    /// Never two leaders that act, and none that has forgotten what was committed.
    fn check(&mut self, node: usize) {
        // One that was frozen doubts before it does anything.
        let is_awake = |node: &Node| self.now - node.last_tick <= PATIENCE;
        let acts = |node: &Node| node.is_alive && is_awake(node) && node.election.acts();
        if !acts(&self.nodes[node]) {
            return;
        }
        let acting: Vec<usize> =
            (0..self.nodes.len()).filter(|index| acts(&self.nodes[*index])).collect();
        assert_eq!(acting, [node], "two leaders act at {:?}", self.now);
        let record = self.nodes[node].election.record();
        assert!(
            record.age() >= self.committed.age()
                && record.progress.round >= self.committed.progress.round,
            "at {:?} node {node} acts with {record:?} after {:?}",
            self.now,
            self.committed
        );
        let super::Role::Leading(leadership) = &self.nodes[node].election.role else { return };
        let has = |id| leadership.present.iter().any(|(m, age)| m.id == id && *age == record.age());
        if record.has_majority(has) {
            if record.term > self.committed.term {
                self.leaders += 1;
            }
            self.committed = record.clone();
        }
    }

    /// Ends a process. Others see that its connections end, unless its machine is off.
    fn end(&mut self, node: usize, is_visible: bool) {
        self.nodes[node].is_alive = false;
        let followers = std::mem::take(&mut self.nodes[node].followers);
        let following = self.nodes[node].following.take();
        let followers = followers.into_iter().map(|(connection, (other, ..))| (connection, other));
        let others = followers.chain(following.map(|(connection, leader, _)| (connection, leader)));
        for (connection, other) in others.collect::<Vec<_>>() {
            if is_visible {
                self.send_on(connection, node, other, Message::Closed { connection });
            }
            self.broken.insert(connection);
        }
    }

    fn fault(&mut self) {
        if self.now > FAULTS {
            return;
        }
        let delay = Duration::from_secs(20).mul_f64(self.random.f64().powi(2));
        self.after(delay, Event::Fault);
        let size = self.nodes.len();
        // The leader, more often than others.
        let leader = (0..size).find(|index| self.nodes[*index].election.acts());
        let any = self.random.usize(..size);
        let node = leader.filter(|_| self.random.bool()).unwrap_or(any);
        match self.random.u8(..8) {
            0 => self.end(node, true),
            1 => self.end(node, false),
            2 => {
                let time = Duration::from_secs(20).mul_f64(self.random.f64());
                self.nodes[node].frozen_until = self.now + time;
            }
            3 | 4 => self.part = (0..size).map(|_| self.random.u8(..2)).collect(),
            5 => self.part.fill(0),
            _ if !self.nodes[node].is_alive => {
                let process = self.process(node);
                self.nodes[node] = process;
            }
            _ => {}
        }
    }

    /// Ends the faults, and waits until all is well, if it can be.
    fn recover(&mut self) -> bool {
        self.part.fill(0);
        self.loses = 0.0;
        self.run(FAULTS + RECOVERY);
        let alive = |member: &Member| {
            let (node, process) = place(&member.address);
            self.nodes[node].is_alive && self.nodes[node].process == process
        };
        // Also of those that are newer and that no majority has yet.
        let records = self.nodes.iter().filter(|node| node.is_alive).map(|n| n.election.record());
        let newer = records.filter(|record| record.age() > self.committed.age());
        let has_majority = |record: &JobRecord| {
            let alive = record.members.iter().filter(|member| alive(member)).count();
            2 * alive > record.members.len()
        };
        if !newer.chain([&self.committed]).all(has_majority) {
            return false;
        }
        let leader = (0..self.nodes.len())
            .find(|index| self.nodes[*index].is_alive && self.nodes[*index].election.acts());
        let leader = leader.expect("a majority is alive: there must be a leader");
        for (index, node) in self.nodes.iter().enumerate() {
            // One that was away for long may know only addresses where nobody is any more.
            let knows = |other: usize| {
                other != index && (other == leader || self.nodes[other].following.is_some())
            };
            let mut members = node.election.record().members.iter();
            let can_find = (self.nodes[0].is_alive && knows(0))
                || members.any(|member| alive(member) && knows(place(&member.address).0));
            if index != leader && node.is_alive && can_find {
                let follows = node.following.map(|(_, leader, _)| leader);
                assert_eq!(follows, Some(leader), "node {index}");
            }
        }
        let present = 1 + self.nodes[leader].followers.len();
        let size = self.nodes[leader].election.record().members.len();
        let wanted = [1, 3, 5][(present > 2) as usize + (present > 4) as usize];
        assert_eq!(size, wanted, "members among {present} nodes");
        true
    }
}

fn simulate(seed: u64, size: usize, loses: f64) -> (bool, usize) {
    let mut simulation = Simulation::new(seed, size, loses);
    let delay = Duration::from_secs(10).mul_f64(simulation.random.f64());
    simulation.after(delay, Event::Fault);
    simulation.run(FAULTS);
    (simulation.recover(), simulation.leaders)
}

#[test]
fn there_is_one_leader_and_it_forgets_nothing() {
    let seeds: Vec<u64> = match std::env::var("SIMULATION_SEED") {
        Ok(seed) => vec![seed.parse().expect("SIMULATION_SEED is a number")],
        Err(_) => (0..1000).collect(),
    };
    let mut recovered = 0;
    let mut leaders = 0;
    for seed in &seeds {
        let mut random = Rng::with_seed(!seed);
        let size = random.usize(1..12);
        let loses = if random.bool() { 0.0 } else { random.f64() * 0.3 };
        println!("SIMULATION_SEED={seed}: {size} nodes, {loses:.2} of the messages are lost");
        let (is_well, terms) = simulate(*seed, size, loses);
        recovered += is_well as usize;
        leaders += terms;
    }
    println!("{recovered} of {} jobs went on, with {leaders} leaders in all", seeds.len());
    if seeds.len() > 1 {
        assert!(recovered > seeds.len() / 2 && leaders > 2 * recovered, "the faults are too hard");
    }
}

#[test]
fn ten_thousand_nodes_lose_their_leader() {
    let mut simulation = Simulation::new(1, 10_000, 0.0);
    simulation.run(Duration::from_secs(3));
    simulation.end(0, true);
    simulation.run(Duration::from_secs(10) + GRACE);
    let leader = (1..10_000).find(|index| simulation.nodes[*index].election.acts()).unwrap();
    assert_eq!(simulation.nodes[leader].followers.len(), 10_000 - 2);
    assert_eq!(simulation.leaders, 2);
}
