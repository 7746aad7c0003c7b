//! Who serves the store, and who has its copy: what flow-launch's agents do about that (`control/leader/replication.rs`
//! and `control/election` there), without the votes.

use std::time::Duration;

use super::cluster::{Cluster, Event};
use super::node::{Node, Replica};
use crate::service::Outbox;

/// The interval at which a leader looks after its replica.
const LOOK: Duration = Duration::from_millis(100);
/// A leader drops a replica that is not complete after so long.
const LEASE: Duration = Duration::from_secs(8);
/// How long it takes at most until a majority knows a record.
const RECORD_DELAY: Duration = Duration::from_millis(300);

/// What a node is.
pub enum Role {
    /// It may be a replica.
    Follower(Option<Replica>),
    Leader(Leader),
}

pub struct Leader {
    pub term: usize,
    state: ReplicaState,
    /// The number of replicas that were asked for.
    asked: u64,
    /// The last record that was sent, how many were, and whether a majority knows it.
    record: Option<usize>,
    records: u64,
    is_known: bool,
    /// The number of tables that were put into the store.
    tables: u64,
}

#[derive(Clone, Copy, Debug)]
enum ReplicaState {
    None,
    Asked { member: usize, since: Duration },
    Complete { member: usize },
    Lost,
}

impl Cluster {
    /// Makes a node the leader, which serves what its store has.
    pub fn lead(&mut self, node: usize) {
        self.end_replica(node);
        self.leader = node;
        self.term += 1;
        self.is_deposed = false;
        self.nodes[node].service.serve();
        self.nodes[node].role = Role::Leader(Leader {
            term: self.term,
            state: ReplicaState::None,
            asked: 1000 * self.term as u64,
            record: self.record,
            records: 0,
            is_known: true,
            tables: 0,
        });
        while self.nodes[node].inbox.try_next().is_some() {}
        self.after(LOOK, Event::Look(node, self.term));
        for follower in (0..self.nodes.len()).filter(|&follower| follower != node) {
            if let Role::Follower(_) = self.nodes[follower].role {
                self.end_replica(follower);
                self.nodes[follower].service.send_elsewhere(format!("node {node}"));
            }
        }
        for client in 0..self.clients.len() {
            let delay = self.up_to(Duration::from_secs(1));
            self.after(delay, Event::Follow(client, node));
        }
    }

    /// Looks after the replica, as the leader of this term.
    pub fn look(&mut self, node: usize, term: usize) {
        let Role::Leader(leader) = &mut self.nodes[node].role else { return };
        if leader.term != term {
            return;
        }
        self.after(LOOK, Event::Look(node, term));
        if !self.leads(node) {
            return self.step_down(node);
        }
        self.read_inbox(node);
        let now = self.instant();
        let mut outbox = Outbox::default();
        let time = self.now;
        let is_table_new = self.random.u8(..8) == 0;
        let Role::Leader(leader) = &mut self.nodes[node].role else { return };
        if is_table_new {
            leader.tables += 1;
            let table = leader.tables.to_string();
            self.nodes[node].service.set("table", table.as_bytes(), now, &mut outbox);
        }
        let Role::Leader(leader) = &mut self.nodes[node].role else { return };
        if let ReplicaState::Asked { since, .. } = leader.state
            && time - since >= LEASE
        {
            leader.state = ReplicaState::Lost;
        }
        let mut record = None;
        if let ReplicaState::Complete { member } = leader.state {
            record = Some(member);
        }
        let mut sent = None;
        if record != leader.record {
            leader.record = record;
            leader.records += 1;
            leader.is_known = false;
            sent = Some(leader.records);
        }
        if leader.is_known && matches!(leader.state, ReplicaState::Lost) {
            leader.state = ReplicaState::None;
            self.nodes[node].service.go_alone(&mut outbox);
        }
        self.deliver(outbox);
        if let Some(number) = sent {
            let delay = self.up_to(RECORD_DELAY);
            self.after(delay, Event::Known(term, number));
        }
        self.ask_for_replica(node);
    }

    /// Asks another node for a copy, if none has been.
    fn ask_for_replica(&mut self, node: usize) {
        let others: Vec<usize> = (0..self.nodes.len()).filter(|&other| other != node).collect();
        let Some(other) = self.random.choice(others) else { return };
        let member = self.nodes[other].member;
        let since = self.now;
        let Role::Leader(leader) = &mut self.nodes[node].role else { return };
        if !leader.is_known || !matches!(leader.state, ReplicaState::None) {
            return;
        }
        leader.asked += 1;
        leader.state = ReplicaState::Asked { member, since };
        let number = leader.asked;
        self.nodes[node].service.admit_replica(number);
        self.replicas += 1;
        self.log(|| format!("node {other} is asked to be replica {number}"));
        let delay = self.up_to(Duration::from_millis(100));
        self.after(delay, Event::Replicate(other, number, member));
    }

    pub fn replicate(&mut self, node: usize, number: u64, member: usize) {
        let is_of_leader = number / 1000 == self.term as u64;
        if is_of_leader && self.nodes[node].member == member {
            self.begin_replica(node, number);
        }
    }

    /// Reads what replicas say of themselves.
    fn read_inbox(&mut self, node: usize) {
        while let Some(message) = self.nodes[node].inbox.try_next() {
            let message = String::from_utf8(message).unwrap();
            self.log(|| format!("node {node} hears: {message}"));
            let (what, number) = message.split_once(' ').unwrap();
            let Role::Leader(leader) = &mut self.nodes[node].role else { return };
            if number != leader.asked.to_string() {
                continue;
            }
            leader.state = match (leader.state, what) {
                (ReplicaState::Asked { member, .. }, "complete") => {
                    ReplicaState::Complete { member }
                }
                (ReplicaState::Asked { .. } | ReplicaState::Complete { .. }, "lost") => {
                    ReplicaState::Lost
                }
                (state, _) => state,
            };
        }
    }

    /// The leader of this term learns that a majority knows its record.
    pub fn know(&mut self, term: usize, number: u64) {
        let Role::Leader(leader) = &mut self.nodes[self.leader].role else { return };
        if leader.term == term && leader.records == number && !self.is_deposed {
            leader.is_known = true;
            self.record = leader.record;
            self.log(|| format!("record {number} is known: {:?}", self.record));
        }
    }

    /// The leader learns that another member is lost.
    pub fn lose_replica_of(&mut self, lost: usize) {
        let Role::Leader(leader) = &mut self.nodes[self.leader].role else { return };
        if let ReplicaState::Asked { member, .. } | ReplicaState::Complete { member } = leader.state
            && member == lost
        {
            leader.state = ReplicaState::Lost;
        }
    }

    /// Has another leader elected if this one is frozen for long; now and then without a reason that it knows.
    pub fn notice_leader(&mut self) {
        let frozen = self.nodes[self.leader].frozen_until.saturating_sub(self.now);
        if frozen > Duration::from_secs(4) || self.random.u8(..8) == 0 {
            self.lose_leader();
        }
    }

    /// The leader is lost. A record that is on its way may be known to those that elect the next one.
    pub fn lose_leader(&mut self) {
        if std::mem::replace(&mut self.is_deposed, true) {
            return;
        }
        let wait = Duration::from_secs(4) + self.up_to(Duration::from_secs(6));
        self.after(wait, Event::Elect(self.term));
        if let Role::Leader(leader) = &self.nodes[self.leader].role
            && self.random.bool()
        {
            self.record = leader.record;
        }
    }

    pub fn elect(&mut self, term: usize) {
        if self.term != term {
            return;
        }
        let next = (0..self.nodes.len()).find(|&node| {
            let Node { member, frozen_until, .. } = self.nodes[node];
            Some(member) == self.record && frozen_until <= self.now
        });
        let Some(next) = next else {
            self.log(|| "nobody has all".to_owned());
            self.is_lost = true;
            return;
        };
        self.log(|| format!("node {next} leads"));
        let last = self.leader;
        if self.nodes[last].frozen_until <= self.now {
            self.step_down(last);
        }
        self.lead(next);
    }

    /// A leader learns that it leads no more.
    fn step_down(&mut self, node: usize) {
        if let Role::Leader(_) = self.nodes[node].role {
            self.nodes[node].service.send_elsewhere(String::new());
            self.close_all(node);
            self.nodes[node].role = Role::Follower(None);
        }
    }
}
