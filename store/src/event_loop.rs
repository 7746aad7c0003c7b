//! The server's thread: it serves all connections, one event after the other.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, ErrorKind};
use std::mem;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token};
use rustix::io::Errno;

use super::auth::{AuthOutcome, PendingAuth};
use super::connection::Connection;
use super::inbox::Inbox;
use super::listener::{Listener, Socket};
use super::protocol::Reply;
use super::service::{Outbox, Service, ServiceId};
use super::services::Services;
use super::store_service::StoreService;
use super::tcp_store::TcpStoreService;

/// Connections accepted in one go, before others are served.
const ACCEPT_BATCH: usize = 256;
/// The time until accepting is tried again after it has failed because a resource is exhausted. A
/// closed connection ends the pause.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);
/// The bytes that are read of one connection in one go, before others are served.
const READ_BATCH: usize = 64 << 10;
/// The server sends a client this many bytes before it handles that client's next request.
const SEND_BATCH: usize = 64 << 10;
/// PyTorch's clients, who prove nothing, are served for this long; then all others have a turn.
const TCP_STORE_TIME: Duration = Duration::from_millis(10);
/// This many requests of one of PyTorch's clients are handled before those of the next one.
const TCP_STORE_BATCH: usize = 256;

/// The listener's token in the poll.
pub const LISTENER: Token = Token(usize::MAX);
/// The waker's token in the poll.
pub const WAKER: Token = Token(usize::MAX - 1);

/// What the owner of a store has done about it.
pub type StoreAction = Box<dyn FnOnce(&mut StoreService, &mut Outbox) + Send>;

/// The requests of the stores' owners to their thread.
pub enum Command {
    /// Serve a store to those who know a token; the answer is its id, `None` if another one has
    /// that token.
    Open {
        token: String,
        inbox: Arc<Inbox>,
        answer: Sender<Option<ServiceId>>,
    },
    /// Serve a TCPStore to PyTorch's clients; the answer is its id, `None` if there is one.
    OpenTcpStore {
        answer: Sender<Option<ServiceId>>,
    },
    Act {
        store: ServiceId,
        action: StoreAction,
    },
    Close(ServiceId),
    Stop,
}

/// All of the server's state. Connections go by an id that is never used twice.
pub struct EventLoop {
    poll: Poll,
    listener: Listener,
    commands: Receiver<Command>,
    /// The time at which to accept, if there may be connections to accept.
    accept_at: Option<Instant>,
    /// The complaint that it cannot accept, which is made once: others choose how often it happens.
    complaint: Once,
    connections: HashMap<usize, Connection>,
    next_id: usize,
    pending: PendingAuth,
    services: Services,
    next_service: ServiceId,
    /// Connections with more to read, after others had their turn.
    unread: BTreeSet<usize>,
    /// Connections of PyTorch's clients that may have more to read, whether to their end, and the
    /// last that had its turn.
    tcp_store_clients: BTreeMap<usize, bool>,
    last_tcp_store_client: usize,
    outbox: Outbox,
    /// The times at which something is due, each with its connection.
    timers: BTreeSet<(Instant, usize)>,
    scratch: Vec<u8>,
}

impl EventLoop {
    /// Makes the loop of one address. Owners of its stores send `commands`.
    pub fn new(poll: Poll, listener: Listener, commands: Receiver<Command>) -> EventLoop {
        EventLoop {
            poll,
            listener,
            commands,
            accept_at: None,
            complaint: Once::new(),
            connections: HashMap::new(),
            next_id: 0,
            pending: PendingAuth::default(),
            services: Services::default(),
            next_service: 0,
            unread: BTreeSet::new(),
            tcp_store_clients: BTreeMap::new(),
            last_tcp_store_client: 0,
            outbox: Outbox::default(),
            timers: BTreeSet::new(),
            scratch: vec![0; READ_BATCH],
        }
    }

    /// Serves until it is stopped.
    pub fn run(&mut self) {
        // No client is read before there is a store that can admit it.
        match self.commands.recv() {
            Ok(Command::Stop) | Err(_) => return,
            Ok(first) => self.execute(first),
        }
        let mut events = Events::with_capacity(1024);
        loop {
            match self.poll.poll(&mut events, self.idle_time()) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    return log::error!(
                        "the store stops, as it cannot wait for its clients: {error}"
                    );
                }
                Ok(()) => {}
            }
            let unread = mem::take(&mut self.unread);
            for event in &events {
                match event.token() {
                    LISTENER => {
                        self.accept_at.get_or_insert_with(Instant::now);
                    }
                    WAKER => {
                        while let Ok(command) = self.commands.try_recv() {
                            if matches!(command, Command::Stop) {
                                return;
                            }
                            self.execute(command);
                        }
                    }
                    Token(id) => {
                        if event.is_writable() {
                            self.flush(id);
                        }
                        if event.is_readable() && !self.is_tcp_store_client(id) {
                            self.read(id, event.is_read_closed());
                        } else if event.is_readable() {
                            *self.tcp_store_clients.entry(id).or_default() |=
                                event.is_read_closed();
                        }
                    }
                }
            }
            for id in unread {
                self.read(id, true);
            }
            let now = Instant::now();
            if self.accept_at.is_some_and(|at| at <= now) {
                self.accept_at = self.accept(now);
            }
            while let Some(id) = self.pending.overdue(now) {
                self.close(id);
            }
            while let Some((_, id)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
                self.on_timer(id, now);
            }
            self.serve_tcp_store_clients(now + TCP_STORE_TIME);
        }
    }

    fn is_tcp_store_client(&self, id: usize) -> bool {
        let service = self.connections.get(&id).and_then(|connection| connection.service);
        service.is_some_and(|service| self.services.tcp_stores.contains_key(&service))
    }

    /// Serves PyTorch's clients, one after the other, until all are or it is `end`.
    fn serve_tcp_store_clients(&mut self, end: Instant) {
        let mut left = self.tcp_store_clients.len();
        while left > 0 && Instant::now() < end {
            let next = self
                .tcp_store_clients
                .range(self.last_tcp_store_client + 1..)
                .next()
                .or(self.tcp_store_clients.first_key_value());
            let Some((&id, &to_end)) = next else { return };
            self.tcp_store_clients.remove(&id);
            self.last_tcp_store_client = id;
            left -= 1;
            self.read(id, to_end);
        }
    }

    /// Returns how long nothing needs to be done if nothing happens.
    fn idle_time(&self) -> Option<Duration> {
        if !self.unread.is_empty() || !self.tcp_store_clients.is_empty() {
            return Some(Duration::ZERO);
        }
        let timer = self.timers.first().map(|(at, _)| *at);
        let next = [self.accept_at, self.pending.deadline(), timer].into_iter().flatten().min();
        next.map(|at| at.saturating_duration_since(Instant::now()))
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Open { token, inbox, answer } => {
                let id = self.next_service;
                self.next_service += 1;
                let is_open = self.pending.open(id, token);
                if is_open {
                    self.services.stores.insert(id, StoreService::new(inbox));
                }
                // Who asked waits for it.
                let _ = answer.send(is_open.then_some(id));
            }
            Command::OpenTcpStore { answer } => {
                let id = self.next_service;
                self.next_service += 1;
                let is_open = self.pending.open_to_pytorch(id);
                if is_open {
                    self.services.tcp_stores.insert(id, TcpStoreService::default());
                }
                let _ = answer.send(is_open.then_some(id));
            }
            Command::Act { store, action } => {
                if let Some(store) = self.services.stores.get_mut(&store) {
                    action(store, &mut self.outbox);
                    self.deliver();
                }
            }
            Command::Close(service) => {
                // First, so that no will is executed.
                self.services.remove(service);
                self.pending.shut(service);
                let mut ids = Vec::new();
                for (id, connection) in &self.connections {
                    if connection.service == Some(service) {
                        ids.push(*id);
                    }
                }
                for id in ids {
                    self.close(id);
                }
            }
            Command::Stop => {}
        }
    }

    /// Accepts what is there, and returns when to go on if that was not all.
    fn accept(&mut self, now: Instant) -> Option<Instant> {
        for _ in 0..ACCEPT_BATCH {
            if self.pending.is_full() {
                let Some(id) = self.pending.removable(now) else {
                    return self.pending.next_removable();
                };
                self.close(id);
            }
            let error = match self.listener.accept().and_then(|socket| self.register(socket, now)) {
                Ok(()) => continue,
                Err(error) => error,
            };
            match error.kind() {
                ErrorKind::WouldBlock => return None,
                ErrorKind::Interrupted
                | ErrorKind::ConnectionAborted
                | ErrorKind::PermissionDenied => continue,
                _ => {}
            }
            // If it is room that is wanted, a connection can make it.
            let errno = Errno::from_io_error(&error);
            let is_full = matches!(errno, Some(Errno::MFILE | Errno::NFILE));
            match self.pending.removable(now).filter(|_| is_full) {
                Some(id) => self.close(id),
                None => {
                    self.complaint.call_once(|| {
                        log::warn!(
                            "the store cannot accept connections for now: {error} (see also ulimit \
                             -n)"
                        );
                    });
                    return Some(now + ACCEPT_PAUSE);
                }
            }
        }
        Some(now)
    }

    fn register(&mut self, mut socket: Box<dyn Socket>, now: Instant) -> io::Result<()> {
        let id = self.next_id;
        self.next_id += 1;
        self.poll.registry().register(
            &mut socket,
            Token(id),
            Interest::READABLE | Interest::WRITABLE,
        )?;
        self.connections.insert(id, Connection::new(socket));
        self.pending.add(id, now);
        Ok(())
    }

    /// There is room for another connection.
    fn resume_accepting(&mut self) {
        self.accept_at = self.accept_at.map(|_| Instant::now());
    }

    /// Returns the service of a connection.
    fn service(&mut self, id: usize) -> Option<&mut dyn Service> {
        self.services.get_mut(self.connections.get(&id)?.service?)
    }

    fn close(&mut self, id: usize) {
        self.pending.remove(id);
        if let Some(service) = self.service(id) {
            service.leave(id);
        }
        let Some(mut connection) = self.connections.remove(&id) else { return };
        if let Some(at) = connection.timer {
            self.timers.remove(&(at, id));
        }
        // Closing the socket does it in any case.
        let _ = self.poll.registry().deregister(&mut connection.socket);
        self.resume_accepting();
    }

    fn flush(&mut self, id: usize) {
        if self.connections.get_mut(&id).is_some_and(|connection| connection.flush().is_err()) {
            self.close(id);
        }
    }

    /// Sends what is in the outbox. Who gets an answer may be due at another time than before.
    fn deliver(&mut self) {
        self.deliver_but_for(None);
    }

    /// Does the same, but what is for `busy` may wait for more.
    fn deliver_but_for(&mut self, busy: Option<usize>) {
        let mut replies = mem::take(&mut self.outbox.0);
        let mut left = replies.drain(..).peekable();
        while let Some((id, reply)) = left.next() {
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.enqueue(reply);
            let is_last = left.peek().is_none_or(|(next, _)| *next != id);
            if is_last && (busy != Some(id) || connection.unsent() > SEND_BATCH) {
                self.flush(id);
                self.set_timer(id);
            }
        }
        drop(left);
        self.outbox.0 = replies;
    }

    /// Handles what can be read, or as much of it as others need not wait long for. `to_end`: the
    /// client's side may be closed, and no other event reports that.
    ///
    /// Else a short read ends it, as the next bytes are another event.
    fn read(&mut self, id: usize, to_end: bool) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let count = if connection.is_backlog {
            0
        } else {
            match connection.receive(&mut self.scratch) {
                Ok(Some(count)) => count,
                Ok(None) => return,
                Err(_) => return self.close(id),
            }
        };
        if self.process(id).is_err() {
            // What it was answered before is still for it.
            self.deliver();
            self.flush(id);
            return self.close(id);
        }
        let is_backlog = self.connections.get(&id).is_some_and(|connection| connection.is_backlog);
        if count < self.scratch.len() && !to_end && !is_backlog {
            return;
        }
        if self.is_tcp_store_client(id) {
            self.tcp_store_clients.insert(id, true);
        } else {
            self.unread.insert(id);
        }
    }

    /// Handles the requests that have come, of PyTorch's clients so many.
    fn process(&mut self, id: usize) -> io::Result<()> {
        let begin = Instant::now();
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let input = mem::take(&mut connection.input);
        let mut used = 0;
        let mut requests = 0;
        let mut is_backlog = false;
        while used < input.len() {
            let is_long = requests >= TCP_STORE_BATCH || begin.elapsed() >= TCP_STORE_TIME;
            is_backlog = is_long && self.is_tcp_store_client(id);
            if is_backlog {
                break;
            }
            let count = self.receive(id, &input[used..])?;
            self.deliver_but_for(Some(id));
            if count == 0 {
                break;
            }
            used += count;
            requests += 1;
        }
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.is_backlog = is_backlog;
            // A copy, unless it is all of it: what was used takes no memory any more.
            connection.input = if used == 0 { input } else { input[used..].to_vec() };
        }
        self.flush(id);
        self.set_timer(id);
        Ok(())
    }

    fn receive(&mut self, id: usize, input: &[u8]) -> io::Result<usize> {
        let Some(connection) = self.connections.get(&id) else { return Ok(0) };
        let unsent = connection.unsent();
        let Some(service) = connection.service else { return self.handshake(id, input) };
        let service = self.services.get_mut(service).ok_or(ErrorKind::NotFound)?;
        service.receive(id, input, unsent, Instant::now(), &mut self.outbox)
    }

    fn handshake(&mut self, id: usize, input: &[u8]) -> io::Result<usize> {
        let reply = match self.pending.authenticate(id, input)? {
            AuthOutcome::Wait => return Ok(0),
            AuthOutcome::Admit { service, used } => return self.admit(id, service).map(|()| used),
            AuthOutcome::Challenge(nonce) => Reply::Challenge(nonce).encode(),
            AuthOutcome::Refuse(reason) => {
                self.outbox.send(id, Arc::new(Reply::Refused(&reason).encode()));
                return Err(ErrorKind::PermissionDenied.into());
            }
        };
        self.outbox.send(id, Arc::new(reply));
        Ok(input.len())
    }

    fn admit(&mut self, id: usize, service: ServiceId) -> io::Result<()> {
        self.pending.remove(id);
        self.resume_accepting();
        self.services.get_mut(service).ok_or(ErrorKind::NotFound)?.join(
            id,
            Instant::now(),
            &mut self.outbox,
        )?;
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.service = Some(service);
        }
        Ok(())
    }

    fn set_timer(&mut self, id: usize) {
        let due = self.service(id).and_then(|service| service.due(id));
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let before = mem::replace(&mut connection.timer, due);
        if due != before {
            before.map(|at| self.timers.remove(&(at, id)));
            due.map(|at| self.timers.insert((at, id)));
        }
    }

    /// Does what is due for a connection at `now`: a wait has timed out, or it has been silent for
    /// too long.
    fn on_timer(&mut self, id: usize, now: Instant) {
        let service = self.connections.get(&id).and_then(|connection| connection.service);
        if let Some(service) = service.and_then(|service| self.services.get_mut(service)) {
            service.expire(id, now, &mut self.outbox);
        }
        self.deliver();
        // What has come already counts: this thread may have been stopped.
        self.read(id, false);
        if self.service(id).and_then(|service| service.due(id)).is_some_and(|at| at <= now) {
            return self.close(id);
        }
        self.set_timer(id);
    }
}
