//! A node: the server's side of connections, and a replica's.

use std::sync::Arc;
use std::time::Duration;

use super::cluster::{Cluster, Connection, Event, Owner};
use super::leader::Role;
use crate::inbox::Inbox;
use crate::protocol::{ALL_CHANGES, Reply, Request};
use crate::service::{Outbox, Service};
use crate::store_service::StoreService;

/// A replica and its server count as lost for each other if nothing is heard for so long.
pub const SILENCE: Duration = Duration::from_secs(4);

pub struct Node {
    pub member: usize,
    pub service: StoreService,
    pub inbox: Arc<Inbox>,
    pub role: Role,
    /// It does nothing before this, and then goes on as if nothing had been.
    pub frozen_until: Duration,
    /// It crashes when its replica has got a change, but maybe not all.
    pub crashes_at_change: bool,
}

/// A replica's side of its connection, as `replica::follow` is one.
pub struct Replica {
    pub connection: usize,
    pub number: u64,
    /// The number of the last change that it has.
    after: u64,
    is_complete: bool,
    /// The number of requests so far, and what the reply to the last one is for.
    requests: u64,
    asked: Asked,
}

enum Asked {
    Connection,
    Will,
    Changes,
    Complete,
}

impl Node {
    pub fn new(member: usize) -> Self {
        let inbox = Arc::new(Inbox::new().unwrap());
        let mut service = StoreService::new(Arc::clone(&inbox));
        service.send_elsewhere(String::new());
        let role = Role::Follower(None);
        Self {
            member,
            service,
            inbox,
            role,
            frozen_until: Duration::ZERO,
            crashes_at_change: false,
        }
    }
}

impl Cluster {
    /// Takes a connection that was opened.
    pub fn accept(&mut self, connection: usize) {
        if self.connections[connection].is_cut {
            return;
        }
        let now = self.instant();
        let mut outbox = Outbox::default();
        let server = self.connections[connection].server;
        let joined = self.nodes[server].service.join(connection, now, &mut outbox);
        self.connections[connection].is_open_at_server = joined.is_ok();
        self.deliver(outbox);
        if joined.is_err() {
            self.send_to_owner(connection, Event::Reply(connection, None));
        }
    }

    /// Serves a request, or notes that the owner has left.
    pub fn serve(&mut self, connection: usize, frame: Option<Vec<u8>>) {
        if !self.connections[connection].is_open_at_server {
            return;
        }
        let Some(frame) = frame else { return self.close(connection) };
        let now = self.instant();
        let mut outbox = Outbox::default();
        let service = &mut self.nodes[self.connections[connection].server].service;
        let received = service.receive(connection, &frame, 0, now, &mut outbox);
        self.deliver(outbox);
        match received {
            Ok(_) => self.set_timer(connection),
            Err(_) => self.close(connection),
        }
    }

    /// Does what is due for a connection.
    pub fn expire(&mut self, connection: usize) {
        if !self.connections[connection].is_open_at_server {
            return;
        }
        let now = self.instant();
        let mut outbox = Outbox::default();
        let server = self.connections[connection].server;
        self.nodes[server].service.expire(connection, now, &mut outbox);
        self.deliver(outbox);
        if self.nodes[server].service.due(connection).is_some_and(|due| due <= now) {
            return self.close(connection);
        }
        self.set_timer(connection);
    }

    /// Ends a connection at the server, which the owner notices.
    fn close(&mut self, connection: usize) {
        let server = self.connections[connection].server;
        self.connections[connection].is_open_at_server = false;
        self.nodes[server].service.leave(connection);
        self.send_to_owner(connection, Event::Reply(connection, None));
    }

    /// Ends all connections to a server.
    pub fn close_all(&mut self, server: usize) {
        for connection in 0..self.connections.len() {
            let is_open = self.connections[connection].is_open_at_server;
            if is_open && self.connections[connection].server == server {
                self.close(connection);
            }
        }
    }

    pub fn deliver(&mut self, outbox: Outbox) {
        for (connection, reply) in outbox.0 {
            let Connection { owner, server, .. } = self.connections[connection];
            if let Owner::Replica(..) = owner
                && std::mem::take(&mut self.nodes[server].crashes_at_change)
            {
                let delay = self.up_to(Duration::from_millis(20));
                self.after(delay, Event::Crash(server));
            }
            self.send_to_owner(connection, Event::Reply(connection, Some(reply)));
            self.set_timer(connection);
        }
    }

    fn set_timer(&mut self, connection: usize) {
        let service = &self.nodes[self.connections[connection].server].service;
        if let Some(due) = service.due(connection) {
            let wait = self.time_of(due).saturating_sub(self.now);
            self.after(wait, Event::Timer(connection));
        }
    }

    /// Begins a replica, in place of the one before.
    pub fn begin_replica(&mut self, node: usize, number: u64) {
        self.end_replica(node);
        let connection = self.connect(Owner::Replica(node, number), self.leader);
        let mut replica = Replica {
            connection,
            number,
            after: ALL_CHANGES,
            is_complete: false,
            requests: 0,
            asked: Asked::Connection,
        };
        self.wait_for_reply(&mut replica, SILENCE);
        self.nodes[node].role = Role::Follower(Some(replica));
    }

    /// Ends the replica of a node, which follows nobody for now.
    pub fn end_replica(&mut self, node: usize) {
        if let Role::Follower(Some(replica)) = &self.nodes[node].role {
            let connection = replica.connection;
            self.connections[connection].is_open_at_owner = false;
            self.send_to_server(connection, Event::Request(connection, None));
        }
        self.nodes[node].role = Role::Follower(None);
    }

    fn wait_for_reply(&mut self, replica: &mut Replica, time: Duration) {
        replica.requests += 1;
        self.after(time, Event::Overdue(replica.connection, replica.requests));
    }

    /// A replica has an answer, or its connection has ended.
    pub fn replica_hears(&mut self, node: usize, connection: usize, frame: Option<Arc<Vec<u8>>>) {
        let Role::Follower(replica) = &mut self.nodes[node].role else { return };
        let Some(mut replica) = replica.take_if(|replica| replica.connection == connection) else {
            return;
        };
        let goes_on = frame.is_some_and(|frame| {
            let reply = Reply::decode(&frame[4..]).unwrap();
            self.go_on(node, &mut replica, reply)
        });
        self.nodes[node].role = Role::Follower(Some(replica));
        if !goes_on {
            self.log(|| format!("node {node} is no replica any more"));
            self.end_replica(node);
        }
    }

    fn go_on(&mut self, node: usize, replica: &mut Replica, reply: Reply<'_>) -> bool {
        let number = replica.number;
        let mut wait = SILENCE;
        let mut request =
            Request::Changes { replica: number, after: replica.after, timeout: SILENCE / 4 };
        let will = format!("lost {number}");
        let complete = format!("complete {number}");
        match (&replica.asked, reply) {
            (Asked::Connection, Reply::Done) => {
                replica.asked = Asked::Will;
                request = Request::Will { message: will.as_bytes(), silence: SILENCE };
            }
            (Asked::Will | Asked::Complete, Reply::Done) => {
                replica.asked = Asked::Changes;
                wait += SILENCE / 4;
            }
            (Asked::Changes, Reply::Changes { number, more, changes }) => {
                let changes: Vec<Vec<u8>> = changes.into_iter().map(<[u8]>::to_vec).collect();
                let all = replica.after == ALL_CHANGES;
                let now = self.instant();
                let mut outbox = Outbox::default();
                let service = &mut self.nodes[node].service;
                let taken = service.take_changes(all, &changes, now, &mut outbox);
                self.deliver(outbox);
                if !taken {
                    return false;
                }
                replica.after = number;
                request = Request::Changes {
                    replica: replica.number,
                    after: number,
                    timeout: SILENCE / 4,
                };
                wait += SILENCE / 4;
                if !more && !replica.is_complete {
                    replica.is_complete = true;
                    replica.asked = Asked::Complete;
                    request = Request::Send { message: complete.as_bytes() };
                }
            }
            _ => return false,
        }
        let connection = replica.connection;
        self.send_to_server(connection, Event::Request(connection, Some(request.encode())));
        self.wait_for_reply(replica, wait);
        true
    }

    /// A replica has waited too long.
    pub fn replica_gives_up(&mut self, node: usize, connection: usize, request: u64) {
        if let Role::Follower(Some(replica)) = &self.nodes[node].role
            && replica.connection == connection
            && replica.requests == request
        {
            self.end_replica(node);
        }
    }
}
