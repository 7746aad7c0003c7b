//! The server's thread: it serves all clients, one event after the other.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, ErrorKind};
use std::mem;
use std::sync::mpsc::Receiver;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token};
use nix::errno::Errno;

use super::admission::{Strangers, Verdict};
use super::connection::{Connection, Waiting, Will};
use super::listener::{Listener, Socket};
use super::posts::Posts;
use super::protocol::{Reply, Request, MAX_FRAME, MAX_HELLO, MAX_WILL};
use super::values::Values;

/// Connections accepted in one go, before others are served.
const ACCEPT_BATCH: usize = 256;
/// When accepting fails for want of a resource, it is tried again after this time, or when a connection is closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);
const UNREAD: &str = "the process that serves the store leaves its messages unread; is it stopped or very busy?";

pub const LISTENER: Token = Token(usize::MAX);
pub const WAKER: Token = Token(usize::MAX - 1);

/// What the owner of the server asks of its thread.
#[derive(Debug)]
pub enum Command {
    Set(String, Vec<u8>),
    Stop,
}

/// All of the server's state. Connections go by an id that is never used twice.
pub struct EventLoop {
    poll: Poll,
    listener: Listener,
    posts: Arc<Posts>,
    commands: Receiver<Command>,
    /// When to accept, if there may be connections to accept.
    accept_at: Option<Instant>,
    values: Values,
    connections: HashMap<usize, Connection>,
    next_id: usize,
    strangers: Strangers,
    /// When something is due for which connection.
    alarms: BTreeSet<(Instant, usize)>,
    scratch: Vec<u8>,
}

impl EventLoop {
    pub fn new(
        poll: Poll,
        listener: Listener,
        token: &str,
        posts: Arc<Posts>,
        commands: Receiver<Command>,
    ) -> EventLoop {
        EventLoop {
            poll,
            listener,
            posts,
            commands,
            accept_at: None,
            values: Values::default(),
            connections: HashMap::new(),
            next_id: 0,
            strangers: Strangers::new(token),
            alarms: BTreeSet::new(),
            scratch: vec![0; 64 << 10],
        }
    }

    /// Serves until told to stop.
    pub fn run(&mut self) {
        let mut events = Events::with_capacity(1024);
        loop {
            let alarm = self.alarms.first().map(|(at, _)| *at);
            let next = [self.accept_at, self.strangers.deadline(), alarm].into_iter().flatten().min();
            match self.poll.poll(&mut events, next.map(|at| at.saturating_duration_since(Instant::now()))) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return log::error!("the store stops, as it cannot wait for its clients: {error}"),
                Ok(()) => {}
            }
            for event in &events {
                match event.token() {
                    LISTENER => {
                        self.accept_at.get_or_insert_with(Instant::now);
                    }
                    WAKER => {
                        while let Ok(command) = self.commands.try_recv() {
                            match command {
                                Command::Set(key, value) => self.set(&key, &value),
                                Command::Stop => return,
                            }
                        }
                    }
                    Token(id) => {
                        if event.is_writable() {
                            self.with(id, Connection::flush);
                        }
                        if event.is_readable() {
                            self.read(id, event.is_read_closed());
                        }
                    }
                }
            }
            let now = Instant::now();
            if self.accept_at.is_some_and(|at| at <= now) {
                self.accept_at = self.accept(now);
            }
            while let Some(id) = self.strangers.overdue(now) {
                self.close(id);
            }
            while let Some((_, id)) = self.alarms.first().copied().filter(|(at, _)| *at <= now) {
                self.look_after(id, now);
            }
        }
    }

    /// Accepts what is there, and returns when to go on if that was not all.
    fn accept(&mut self, now: Instant) -> Option<Instant> {
        for _ in 0..ACCEPT_BATCH {
            if self.strangers.is_full() {
                let Some(id) = self.strangers.removable(now) else { return self.strangers.next_removable() };
                self.close(id);
            }
            let error = match self.listener.accept().and_then(|socket| self.welcome(socket, now)) {
                Ok(()) => continue,
                Err(error) => error,
            };
            match error.kind() {
                ErrorKind::WouldBlock => return None,
                ErrorKind::Interrupted | ErrorKind::ConnectionAborted | ErrorKind::PermissionDenied => continue,
                _ => {}
            }
            // If it is room that is wanted, a stranger can make it.
            let is_full =
                [Errno::EMFILE, Errno::ENFILE].map(|errno| Some(errno as i32)).contains(&error.raw_os_error());
            match self.strangers.removable(now).filter(|_| is_full) {
                Some(id) => self.close(id),
                None => {
                    log::warn!("the store cannot accept connections for now: {error} (see also ulimit -n)");
                    return Some(now + ACCEPT_PAUSE);
                }
            }
        }
        Some(now)
    }

    fn welcome(&mut self, mut socket: Box<dyn Socket>, now: Instant) -> io::Result<()> {
        let id = self.next_id;
        self.next_id += 1;
        self.poll.registry().register(&mut socket, Token(id), Interest::READABLE | Interest::WRITABLE)?;
        self.connections.insert(id, Connection::new(socket, now));
        self.strangers.add(id, now);
        Ok(())
    }

    /// There is room for another connection.
    fn resume_accepting(&mut self) {
        self.accept_at = self.accept_at.map(|_| Instant::now());
    }

    fn close(&mut self, id: usize) {
        self.strangers.remove(id);
        let Some(mut connection) = self.connections.remove(&id) else { return };
        if let Some(at) = connection.alarm {
            self.alarms.remove(&(at, id));
        }
        if let Some(waiting) = &connection.waiting {
            self.unwatch(id, waiting);
        }
        if let Some(will) = connection.will {
            self.posts.add(will.message);
        }
        // Closing the socket does it in any case.
        let _ = self.poll.registry().deregister(&mut connection.socket);
        self.resume_accepting();
    }

    /// Does something with a connection that closes it if it fails.
    fn with(&mut self, id: usize, action: impl FnOnce(&mut Connection) -> io::Result<()>) {
        if self.connections.get_mut(&id).is_some_and(|connection| action(connection).is_err()) {
            self.close(id);
        }
    }

    fn answer(&mut self, id: usize, reply: Reply) {
        self.with(id, |connection| connection.send(Arc::new(reply.encode())));
    }

    /// Handles the request that can be read. `to_end`: the client's side is closed.
    fn read(&mut self, id: usize, to_end: bool) {
        let limit = if self.strangers.contains(id) { MAX_HELLO } else { MAX_FRAME };
        while let Some(connection) = self.connections.get_mut(&id) {
            match connection.receive(&mut self.scratch, limit, to_end) {
                Ok(Some(frame)) => self.handle(id, &frame[4..]),
                Ok(None) => break,
                Err(_) => return self.close(id),
            }
            if !to_end {
                break;
            }
        }
        self.set_alarm(id);
    }

    fn handle(&mut self, id: usize, frame: &[u8]) {
        let request = Request::decode(frame);
        if self.strangers.contains(id) {
            return self.greet(id, request);
        }
        match request {
            None | Some(Request::Hello { .. } | Request::Proof { .. }) => self.close(id),
            Some(Request::Set { key, value }) => {
                self.set(key, value);
                self.answer(id, Reply::Done);
            }
            Some(Request::Get { key, timeout }) => self.wait(id, &[key], timeout, true),
            Some(Request::Wait { keys, timeout }) => self.wait(id, &keys, timeout, false),
            Some(Request::Add { key, increment }) => match self.values.sum(key, increment) {
                Err(reason) => self.answer(id, Reply::Refused(reason)),
                Ok(sum) => {
                    self.set(key, sum.to_string().as_bytes());
                    self.answer(id, Reply::Number(sum));
                }
            },
            Some(Request::CompareAndSet { key, expected, new }) => {
                let present = self.values.get(key).map(|value| value.bytes());
                if present == expected {
                    self.set(key, new);
                    self.answer(id, Reply::Done);
                } else {
                    let reply = Arc::new(Reply::Differs(present).encode());
                    self.with(id, |connection| connection.send(reply));
                }
            }
            Some(Request::Delete { keys }) => {
                let removed = keys.into_iter().filter(|key| self.values.remove(key)).count();
                self.answer(id, Reply::Number(removed as i64));
            }
            Some(Request::Post { message }) => {
                if self.posts.has_room(message.len()) {
                    self.posts.add(message.to_vec());
                    self.answer(id, Reply::Done);
                } else {
                    self.answer(id, Reply::Refused(UNREAD));
                }
            }
            Some(Request::Will { message, silence }) => {
                if message.len() > MAX_WILL {
                    self.answer(id, Reply::Refused("a will has at most 64 KiB"));
                } else if !message.is_empty() && !self.posts.has_room(message.len()) {
                    self.answer(id, Reply::Refused(UNREAD));
                } else {
                    let will = (!message.is_empty()).then(|| Will { message: message.to_vec(), silence });
                    self.with(id, |connection| {
                        connection.will = will;
                        connection.send(Arc::new(Reply::Done.encode()))
                    });
                }
            }
        }
    }

    fn greet(&mut self, id: usize, request: Option<Request>) {
        match self.strangers.judge(id, request) {
            Verdict::Challenge(nonce) => self.answer(id, Reply::Challenge(nonce)),
            Verdict::Admit => {
                self.strangers.remove(id);
                self.resume_accepting();
                self.answer(id, Reply::Done);
            }
            Verdict::Refuse(reason) => {
                self.answer(id, Reply::Refused(&reason));
                self.close(id);
            }
            Verdict::Close => self.close(id),
        }
    }

    fn set(&mut self, key: &str, value: &[u8]) {
        for id in self.values.set(key, value) {
            self.advance(id);
        }
    }

    fn wait(&mut self, id: usize, keys: &[&str], timeout: Duration, wants_value: bool) {
        if let Some(connection) = self.connections.get_mut(&id) {
            let keys = keys.iter().map(ToString::to_string).collect();
            connection.waiting = Some(Waiting { keys, next: 0, deadline: Instant::now() + timeout, wants_value });
            self.advance(id);
        }
    }

    /// Answers a waiting connection if all its keys are set, else has it watch the first one that is not.
    fn advance(&mut self, id: usize) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Some(waiting) = &mut connection.waiting else { return };
        while let Some(key) = waiting.keys.get(waiting.next) {
            if self.values.get(key).is_none() {
                return self.values.watch(key, id);
            }
            waiting.next += 1;
        }
        let value = waiting.keys.first().filter(|_| waiting.wants_value).and_then(|key| self.values.get(key));
        let reply = value.map_or_else(|| Arc::new(Reply::Done.encode()), |value| value.reply());
        self.end_wait(id, reply);
    }

    fn end_wait(&mut self, id: usize, reply: Arc<Vec<u8>>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Some(waiting) = connection.waiting.take() else { return };
        // The client could not speak before the answer, so what this comes too late is not its silence.
        connection.silent_since += Instant::now().saturating_duration_since(waiting.deadline);
        self.unwatch(id, &waiting);
        self.with(id, |connection| connection.send(reply));
        self.set_alarm(id);
    }

    fn unwatch(&mut self, id: usize, waiting: &Waiting) {
        if let Some(key) = waiting.keys.get(waiting.next) {
            self.values.unwatch(key, id);
        }
    }

    fn set_alarm(&mut self, id: usize) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let due = connection.due();
        let before = mem::replace(&mut connection.alarm, due);
        if due != before {
            before.map(|at| self.alarms.remove(&(at, id)));
            due.map(|at| self.alarms.insert((at, id)));
        }
    }

    /// Does what is due for a connection at `now`: a wait has timed out, or it has been silent for too long.
    fn look_after(&mut self, id: usize, now: Instant) {
        let Some(connection) = self.connections.get(&id) else { return };
        if let Some(waiting) = connection.waiting.as_ref().filter(|waiting| waiting.deadline <= now) {
            let missing = waiting.keys.iter().map(String::as_str).filter(|key| self.values.get(key).is_none());
            let reply = Reply::Missing(missing.collect()).encode();
            return self.end_wait(id, Arc::new(reply));
        }
        // What has come already counts: this thread may have been stopped.
        self.read(id, false);
        if self.connections.get(&id).and_then(Connection::due).is_some_and(|at| at <= now) {
            self.close(id);
        }
    }
}
