//! The store's server: one thread, one event loop, any number of clients.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, ErrorKind, Read, Write};
use std::mem;
use std::os::linux::net::SocketAddrExt;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mio::event::Source;
use mio::{Events, Interest, Poll, Token, Waker};
use nix::errno::Errno;
use nix::sys::socket::{listen, Backlog};

use super::posts::Posts;
use super::protocol::{Reply, Request, MAX_FRAME, MAX_HELLO, MAX_TOKEN, MAX_WILL, VERSION};
use super::{belongs_to_us, Address};

/// A connection that has not said a valid hello by then is closed.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// With more connections than this that have said no hello yet, the oldest of them is closed. It keeps idle strangers
/// from using up the process's file descriptors; a client that is hit tries again.
const MAX_STRANGERS: usize = 512;
/// Connections accepted in one go, before others are served.
const ACCEPT_BATCH: usize = 256;
/// When accepting fails for want of a resource, it is tried again after this time, or when a connection is closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

const UNREAD: &str = "the process that serves the store leaves its messages unread; is it stopped or very busy?";

const LISTENER: Token = Token(usize::MAX);
const WAKER: Token = Token(usize::MAX - 1);

/// A store being served, until dropped.
///
/// Dropping it stops the thread and closes all connections: a client that waits gets an error at once.
///
/// Each client takes one file descriptor. The limit (`ulimit -n`) is the process's; at the limit the server keeps
/// serving those it has, and accepts others as soon as it can.
#[derive(Debug)]
pub struct Server {
    address: Address,
    posts: Arc<Posts>,
    commands: Sender<Command>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Command {
    Set(String, Vec<u8>),
    Stop,
}

impl Server {
    /// Starts to serve a store at `address` to clients that know `token`. TCP port 0 is any free port.
    ///
    /// # Errors
    /// The address cannot be served (`AddrInUse`: something is there already), or the token is empty or over 512 bytes.
    pub fn start(address: &Address, token: &str) -> io::Result<Server> {
        if token.is_empty() || token.len() > MAX_TOKEN {
            let text = format!("store {address}: the token has {} bytes, give 1 to {MAX_TOKEN}", token.len());
            return Err(io::Error::new(ErrorKind::InvalidInput, text));
        }
        Server::bind(address, token)
            .map_err(|error| io::Error::new(error.kind(), format!("store {address}: cannot be served: {error}")))
    }

    fn bind(address: &Address, token: &str) -> io::Result<Server> {
        let poll = Poll::new()?;
        let (mut listener, address) = Listener::bind(address)?;
        match &mut listener {
            Listener::Tcp(listener) => poll.registry().register(listener, LISTENER, Interest::READABLE)?,
            Listener::Unix(listener) => poll.registry().register(listener, LISTENER, Interest::READABLE)?,
        }
        let waker = Waker::new(poll.registry(), WAKER)?;
        let (commands, receiver) = mpsc::channel();
        let posts = Arc::new(Posts::new()?);
        let mut event_loop = EventLoop {
            poll,
            listener,
            token: token.to_string(),
            posts: Arc::clone(&posts),
            commands: receiver,
            accept_at: None,
            values: HashMap::new(),
            connections: HashMap::new(),
            next_id: 0,
            strangers: BTreeMap::new(),
            watchers: HashMap::new(),
            deadlines: BTreeSet::new(),
            silences: BTreeSet::new(),
        };
        let thread = thread::Builder::new().name("flow-store".to_string()).spawn(move || event_loop.run())?;
        Ok(Server { address, posts, commands, waker, thread: Some(thread) })
    }

    /// Where the store is served, with the port that was taken.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// What clients have posted to this process. It need not be read: when there is too much, clients are refused.
    pub fn posts(&self) -> &Posts {
        &self.posts
    }

    /// Sets `key` to `value`, as a client would. It does not wait for the server's thread to do so.
    pub fn set(&self, key: &str, value: &[u8]) {
        self.command(Command::Set(key.to_string(), value.to_vec()));
    }

    /// Whether the server's thread will see the command.
    fn command(&self, command: Command) -> bool {
        self.commands.send(command).is_ok() && self.waker.wake().is_ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.command(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed, and there is nobody to tell here.
            let _ = thread.join();
        }
    }
}

enum Listener {
    Tcp(mio::net::TcpListener),
    Unix(mio::net::UnixListener),
}

impl Listener {
    /// A listener, with the address that it got.
    fn bind(address: &Address) -> io::Result<(Listener, Address)> {
        match address {
            Address::Tcp(host_and_port) => {
                let listener = std::net::TcpListener::bind(host_and_port)?;
                // Again, for the longest queue of connections not yet accepted: the standard library's is 128.
                listen(&listener, Backlog::MAXALLOWABLE)?;
                listener.set_nonblocking(true)?;
                let host = host_and_port.rsplit_once(':').map_or(host_and_port.as_str(), |(host, _)| host);
                let address = Address::Tcp(format!("{host}:{}", listener.local_addr()?.port()));
                Ok((Listener::Tcp(mio::net::TcpListener::from_std(listener)), address))
            }
            Address::Unix(name) => {
                let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
                let listener = mio::net::UnixListener::bind_addr(&address)?;
                listen(&listener, Backlog::MAXALLOWABLE)?;
                Ok((Listener::Unix(listener), Address::Unix(name.clone())))
            }
        }
    }

    /// `PermissionDenied` where another user's process has connected.
    fn accept(&self) -> io::Result<Box<dyn Socket>> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                Ok(Box::new(stream))
            }
            Listener::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                if !belongs_to_us(&stream)? {
                    return Err(ErrorKind::PermissionDenied.into());
                }
                Ok(Box::new(stream))
            }
        }
    }
}

/// A connected, non-blocking socket.
trait Socket: Read + Write + Source + Send {}
impl<T: Read + Write + Source + Send> Socket for T {}

struct Connection {
    socket: Box<dyn Socket>,
    /// The beginning of a request.
    input: Vec<u8>,
    /// The reply, until the socket has taken all of it.
    output: Vec<u8>,
    /// What the socket has taken of it.
    written: usize,
    waiting: Option<Waiting>,
    will: Option<Will>,
    /// Since when it has said nothing, less the time for which it was this thread that was late.
    silent_since: Instant,
}

/// What to post when a client is gone, or has been silent for so long.
struct Will {
    message: Vec<u8>,
    silence: Duration,
    /// When to look again how long the client has been silent.
    look_at: Instant,
}

/// A get or wait that is not answered yet.
struct Waiting {
    keys: Vec<String>,
    /// The first key that is missing, and the only one that is watched. Keys are never removed, so those before it stay.
    next: usize,
    deadline: Instant,
    wants_value: bool,
}

/// All of the server's state. Connections go by an id that is never used twice.
struct EventLoop {
    poll: Poll,
    listener: Listener,
    token: String,
    posts: Arc<Posts>,
    commands: Receiver<Command>,
    /// When to accept, if there may be connections to accept.
    accept_at: Option<Instant>,
    values: HashMap<String, Vec<u8>>,
    connections: HashMap<usize, Connection>,
    next_id: usize,
    /// Connections without a valid hello, oldest first, and when they will be closed.
    strangers: BTreeMap<usize, Instant>,
    /// The connections that wait for a key.
    watchers: HashMap<String, Vec<usize>>,
    /// The connections that wait, by their deadlines.
    deadlines: BTreeSet<(Instant, usize)>,
    /// The connections with a will, by when to look whether they have been silent for too long.
    silences: BTreeSet<(Instant, usize)>,
}

impl EventLoop {
    fn run(&mut self) {
        let mut events = Events::with_capacity(1024);
        let mut scratch = vec![0; 64 << 10];
        loop {
            let timeout = self.next_deadline().map(|at| at.saturating_duration_since(Instant::now()));
            match self.poll.poll(&mut events, timeout) {
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
                                Command::Set(key, value) => self.set(&key, value),
                                Command::Stop => return,
                            }
                        }
                    }
                    Token(id) => {
                        if event.is_writable() {
                            self.flush(id);
                        }
                        if event.is_readable() {
                            self.read(id, &mut scratch);
                        }
                    }
                }
            }
            let now = Instant::now();
            if self.accept_at.is_some_and(|at| at <= now) {
                self.accept_at = self.accept(now);
            }
            self.expire(now);
            self.close_silent(now, &mut scratch);
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let hello = self.oldest_stranger().map(|(_, at)| at);
        let wait = self.deadlines.first().map(|(at, _)| *at);
        let silence = self.silences.first().map(|(at, _)| *at);
        [self.accept_at, hello, wait, silence].into_iter().flatten().min()
    }

    /// Accepts what is there, and returns when to go on if that was not all.
    fn accept(&mut self, now: Instant) -> Option<Instant> {
        for _ in 0..ACCEPT_BATCH {
            let error = match self.listener.accept() {
                Ok(socket) => match self.welcome(socket, now) {
                    Ok(()) => continue,
                    Err(error) => error,
                },
                Err(error) => error,
            };
            match error.kind() {
                ErrorKind::WouldBlock => return None,
                ErrorKind::Interrupted | ErrorKind::ConnectionAborted | ErrorKind::PermissionDenied => continue,
                _ => {}
            }
            // Those who have had some time to say hello make room, if it is room that is wanted.
            let is_full =
                [Errno::EMFILE, Errno::ENFILE].map(|errno| Some(errno as i32)).contains(&error.raw_os_error());
            if !(is_full && self.close_strangers(now + HELLO_TIMEOUT - ACCEPT_PAUSE)) {
                log::warn!("the store cannot accept connections for now: {error}");
                return Some(now + ACCEPT_PAUSE);
            }
        }
        Some(now)
    }

    fn welcome(&mut self, mut socket: Box<dyn Socket>, now: Instant) -> io::Result<()> {
        if let Some((oldest, _)) = self.oldest_stranger().filter(|_| self.strangers.len() >= MAX_STRANGERS) {
            self.close(oldest);
        }
        let id = self.next_id;
        self.next_id += 1;
        self.poll.registry().register(&mut socket, Token(id), Interest::READABLE | Interest::WRITABLE)?;
        let connection = Connection {
            socket,
            input: Vec::new(),
            output: Vec::new(),
            written: 0,
            waiting: None,
            will: None,
            silent_since: now,
        };
        self.connections.insert(id, connection);
        self.strangers.insert(id, now + HELLO_TIMEOUT);
        Ok(())
    }

    /// Closes the strangers whose time is over at `now`, and returns whether there were any.
    fn close_strangers(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some((id, _)) = self.oldest_stranger().filter(|(_, at)| *at <= now) {
            self.close(id);
            any = true;
        }
        any
    }

    fn oldest_stranger(&self) -> Option<(usize, Instant)> {
        self.strangers.first_key_value().map(|(id, at)| (*id, *at))
    }

    fn close(&mut self, id: usize) {
        self.strangers.remove(&id);
        if let Some(mut connection) = self.connections.remove(&id) {
            if let Some(waiting) = connection.waiting {
                self.forget(id, &waiting);
            }
            if let Some(will) = connection.will {
                self.silences.remove(&(will.look_at, id));
                self.posts.add(will.message);
            }
            // Closing the socket does it in any case.
            let _ = self.poll.registry().deregister(&mut connection.socket);
            self.accept_at = self.accept_at.map(|_| Instant::now());
        }
    }

    /// Reads all there is and handles the request when it is complete.
    fn read(&mut self, id: usize, scratch: &mut [u8]) {
        while let Some(connection) = self.connections.get_mut(&id) {
            let count = match connection.socket.read(scratch) {
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return self.close(id),
            };
            // A client that sends before it has the last reply is none of ours.
            if count == 0 || connection.waiting.is_some() || !connection.output.is_empty() {
                return self.close(id);
            }
            connection.silent_since = Instant::now();
            connection.input.extend_from_slice(&scratch[..count]);
            let limit = if self.strangers.contains_key(&id) { MAX_HELLO } else { MAX_FRAME };
            let Some((length, rest)) = connection.input.split_first_chunk() else { continue };
            let length = u32::from_le_bytes(*length) as usize;
            if length > limit || rest.len() > length {
                return self.close(id);
            }
            if rest.len() == length {
                let input = mem::take(&mut connection.input);
                self.handle(id, &input[4..]);
            }
        }
    }

    fn handle(&mut self, id: usize, frame: &[u8]) {
        let request = Request::decode(frame);
        if self.strangers.contains_key(&id) {
            return self.greet(id, request);
        }
        match request {
            None | Some(Request::Hello { .. }) => self.close(id),
            Some(Request::Set { key, value }) => {
                self.set(key, value.to_vec());
                self.answer(id, Reply::Done.encode());
            }
            Some(Request::Get { key, timeout }) => self.wait(id, vec![key.to_string()], timeout, true),
            Some(Request::Wait { keys, timeout }) => {
                self.wait(id, keys.into_iter().map(String::from).collect(), timeout, false);
            }
            Some(Request::Add { key, increment }) => {
                let sum = match self.values.get(key) {
                    None => Ok(increment),
                    Some(value) => match std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok()) {
                        None => Err("the value is no number"),
                        Some(number) => number.checked_add(increment).ok_or("the sum does not fit 64 bits"),
                    },
                };
                match sum {
                    Err(reason) => self.answer(id, Reply::Refused(reason).encode()),
                    Ok(sum) => {
                        self.set(key, sum.to_string().into_bytes());
                        self.answer(id, Reply::Number(sum).encode());
                    }
                }
            }
            Some(Request::CompareAndSet { key, expected, new }) => {
                let present = self.values.get(key).map(Vec::as_slice);
                if present == expected {
                    self.set(key, new.to_vec());
                    self.answer(id, Reply::Done.encode());
                } else {
                    let reply = Reply::Differs(present).encode();
                    self.answer(id, reply);
                }
            }
            Some(Request::Post { message }) => {
                let reply = if self.posts.has_room(message.len()) {
                    self.posts.add(message.to_vec());
                    Reply::Done
                } else {
                    Reply::Refused(UNREAD)
                };
                self.answer(id, reply.encode());
            }
            Some(Request::Will { message, silence }) => {
                let reply = if message.len() > MAX_WILL {
                    Reply::Refused("a will has at most 64 KiB")
                } else if !(message.is_empty() || self.posts.has_room(message.len())) {
                    Reply::Refused(UNREAD)
                } else {
                    self.replace_will(id, message, silence);
                    Reply::Done
                };
                self.answer(id, reply.encode());
            }
        }
    }

    /// Admits a stranger that says a valid hello. All else is closed, after a reason if it seems to be one of us.
    fn greet(&mut self, id: usize, request: Option<Request>) {
        let refusal = match request {
            Some(Request::Hello { version: VERSION, token }) if is_same_secret(token, self.token.as_bytes()) => {
                self.strangers.remove(&id);
                return self.answer(id, Reply::Done.encode());
            }
            Some(Request::Hello { version: VERSION, .. }) => {
                Some("wrong token; FLOW_TOKEN must be that of the job which serves the store".to_string())
            }
            Some(Request::Hello { version, .. }) => Some(format!(
                "it speaks version {VERSION} of its protocol, this program version {version}; use one version of Flow in a job"
            )),
            _ => None,
        };
        if let Some(reason) = refusal {
            self.answer(id, Reply::Refused(&reason).encode());
        }
        self.close(id);
    }

    fn set(&mut self, key: &str, value: Vec<u8>) {
        self.values.insert(key.to_string(), value);
        for id in self.watchers.remove(key).unwrap_or_default() {
            self.advance(id);
        }
    }

    fn wait(&mut self, id: usize, keys: Vec<String>, timeout: Duration, wants_value: bool) {
        let deadline = Instant::now() + timeout;
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.waiting = Some(Waiting { keys, next: 0, deadline, wants_value });
            self.deadlines.insert((deadline, id));
            self.advance(id);
        }
    }

    /// Answers a waiting connection if all its keys are set, else has it watch the first one that is not.
    fn advance(&mut self, id: usize) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Some(waiting) = &mut connection.waiting else { return };
        while let Some(key) = waiting.keys.get(waiting.next) {
            if !self.values.contains_key(key) {
                self.watchers.entry(key.clone()).or_default().push(id);
                return;
            }
            waiting.next += 1;
        }
        let value = waiting.keys.first().filter(|_| waiting.wants_value).and_then(|key| self.values.get(key));
        let reply = value.map_or(Reply::Done, |value| Reply::Value(value)).encode();
        self.end_wait(id, reply);
    }

    fn end_wait(&mut self, id: usize, reply: Vec<u8>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Some(waiting) = connection.waiting.take() else { return };
        // The client could not speak before the answer, so what this comes too late is not its silence.
        connection.silent_since += Instant::now().saturating_duration_since(waiting.deadline);
        self.forget(id, &waiting);
        self.answer(id, reply);
    }

    /// Ends waits and hellos that took too long.
    fn expire(&mut self, now: Instant) {
        self.close_strangers(now);
        while let Some((_, id)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.deadlines.pop_first();
            let waiting = self.connections.get(&id).and_then(|connection| connection.waiting.as_ref());
            if let Some(waiting) = waiting {
                let missing = waiting.keys.iter().map(String::as_str).filter(|key| !self.values.contains_key(*key));
                let reply = Reply::Missing(missing.collect()).encode();
                self.end_wait(id, reply);
            }
        }
    }

    fn replace_will(&mut self, id: usize, message: &[u8], silence: Duration) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if let Some(will) = connection.will.take() {
            self.silences.remove(&(will.look_at, id));
        }
        if !message.is_empty() {
            let look_at = connection.silent_since + silence;
            connection.will = Some(Will { message: message.to_vec(), silence, look_at });
            self.silences.insert((look_at, id));
        }
    }

    /// Closes the connections with a will that have been silent for too long at `now`.
    fn close_silent(&mut self, now: Instant, scratch: &mut [u8]) {
        while let Some((_, id)) = self.silences.first().copied().filter(|(at, _)| *at <= now) {
            // What has come already counts: this thread may have been stopped.
            self.read(id, scratch);
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            let Some(will) = &mut connection.will else { continue };
            self.silences.remove(&(will.look_at, id));
            will.look_at = connection.silent_since + will.silence;
            self.silences.insert((will.look_at, id));
            if will.look_at <= now {
                self.close(id);
            }
        }
    }

    /// Removes the traces of a wait that ends.
    fn forget(&mut self, id: usize, waiting: &Waiting) {
        self.deadlines.remove(&(waiting.deadline, id));
        let Some(key) = waiting.keys.get(waiting.next) else { return };
        if let Some(watchers) = self.watchers.get_mut(key) {
            watchers.retain(|watcher| *watcher != id);
            if watchers.is_empty() {
                self.watchers.remove(key);
            }
        }
    }

    fn answer(&mut self, id: usize, reply: Vec<u8>) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.output = reply;
            self.flush(id);
        }
    }

    /// Writes what the socket takes of a reply.
    fn flush(&mut self, id: usize) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        while connection.written < connection.output.len() {
            match connection.socket.write(&connection.output[connection.written..]) {
                Ok(count) if count > 0 => connection.written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => return self.close(id),
            }
        }
        connection.output = Vec::new();
        connection.written = 0;
    }
}

/// Compares in a time that does not depend on where the two differ.
fn is_same_secret(given: &[u8], secret: &[u8]) -> bool {
    let difference = given.iter().zip(secret).fold(0, |difference, (a, b)| std::hint::black_box(difference | (a ^ b)));
    given.len() == secret.len() && difference == 0
}
