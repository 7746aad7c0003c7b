//! The stores' server: one thread, one event loop, any number of clients.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mio::{Poll, Waker};

use super::Address;
use super::event_loop::{Command, EventLoop, LISTENER, WAKER};
use super::inbox::Inbox;
use super::listener::Listener;
use super::service::{Outbox, ServiceId};
use super::store_service::StoreService;
use crate::fork::ForkSafe;

/// So long the thread may take to end. One that waits for somebody to read the log is left.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// So long the thread may take to answer its owner.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A store being served, until dropped.
///
/// Dropping it forgets its values and closes the connections of its clients: those that wait get an
/// error at once. With the last store at an address, its thread is over and the address is free. (Not
/// in a process that is forked from this one, where there is no such thread.)
///
/// Each client takes one file descriptor. The limit (`ulimit -n`) is the process's; at the limit
/// the server keeps serving those it has, and accepts others as soon as it can.
#[derive(Debug)]
pub struct Server {
    thread: Arc<ServerThread>,
    store: ServiceId,
    inbox: Arc<Inbox>,
}

impl Server {
    /// Starts to serve a store at `address` to clients that know `token`. TCP port 0 is any free
    /// port.
    ///
    /// # Errors
    /// The address cannot be served (`AddrInUse`: something is there already), or the token is
    /// empty.
    pub fn start(address: &Address, token: &str) -> io::Result<Server> {
        let thread = ServerThread::start(address);
        let server = thread.and_then(|thread| Server::open(Arc::new(thread), token));
        server.map_err(|error| {
            io::Error::new(error.kind(), format!("store {address}: cannot be served: {error}"))
        })
    }

    /// Serves another store at the same address, from the same thread, to clients that know its own
    /// `token`. The two have nothing in common: no keys, no inbox, no wills.
    ///
    /// # Errors
    /// `InvalidInput` if the token is empty, or that of another store at this address.
    pub fn beside(&self, token: &str) -> io::Result<Server> {
        Server::open(Arc::clone(&self.thread), token).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("store {}: no other beside it: {error}", self.address()),
            )
        })
    }

    /// Serves PyTorch's clients as well, `torch.distributed.TCPStore(host, port, is_master=False)`,
    /// at this address.
    ///
    /// They have keys of their own, apart from all stores here: nobody asks them for a token.
    ///
    /// # Errors
    /// `InvalidInput` if the address is no TCP address, `AlreadyExists` if they are served already.
    pub fn serve_tcp_store(&self) -> io::Result<TcpStoreServer> {
        if !matches!(self.address(), Address::Tcp(_)) {
            let reason = "they come by TCP only; serve the store at a TCP address";
            return Err(self.cannot_serve_pytorch(ErrorKind::InvalidInput, reason));
        }
        let (answer, opened) = mpsc::channel();
        self.thread.command(Command::OpenTcpStore { answer });
        let Some(service) = wait_for_thread(&opened)? else {
            return Err(self.cannot_serve_pytorch(ErrorKind::AlreadyExists, "they are already"));
        };
        Ok(TcpStoreServer { thread: Arc::clone(&self.thread), service })
    }

    fn cannot_serve_pytorch(&self, kind: ErrorKind, reason: &str) -> io::Error {
        let address = self.address();
        let text = format!("store {address}: PyTorch's clients cannot be served: {reason}");
        io::Error::new(kind, text)
    }

    fn open(thread: Arc<ServerThread>, token: &str) -> io::Result<Server> {
        if token.is_empty() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "the token is empty"));
        }
        let inbox = Arc::new(Inbox::new()?);
        let (answer, opened) = mpsc::channel();
        thread.command(Command::Open {
            token: token.to_string(),
            inbox: Arc::clone(&inbox),
            answer,
        });
        let Some(store) = wait_for_thread(&opened)? else {
            let reason = "another store has this token; give each its own";
            return Err(io::Error::new(ErrorKind::InvalidInput, reason));
        };
        Ok(Server { thread, store, inbox })
    }

    /// Returns where the store is served, with the port that was taken.
    pub fn address(&self) -> &Address {
        &self.thread.address
    }

    /// Returns the messages that clients have sent to this process. It need not be read: when there
    /// is too much, clients are refused.
    pub fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Sets `key` to `value`, as a client would. It does not wait for the server's thread to do so.
    pub fn set(&self, key: &str, value: &[u8]) {
        let key = key.to_string();
        let value = value.to_vec();
        self.act(move |store, outbox| store.set(&key, &value, Instant::now(), outbox));
    }

    /// Deletes `key`, if it is there, as a client would. It does not wait for the server's thread to do so.
    pub fn delete(&self, key: &str) {
        let key = key.to_string();
        self.act(move |store, outbox| store.delete(&key, outbox));
    }

    /// Returns the value of `key`, `None` if it is not set.
    ///
    /// # Errors
    /// The server's thread is over, or does not answer.
    pub fn get(&self, key: &str) -> io::Result<Option<Vec<u8>>> {
        let key = key.to_string();
        let (answer, value) = mpsc::channel();
        self.act(move |store, _| {
            let _ = answer.send(store.get(&key).map(<[u8]>::to_vec));
        });
        wait_for_thread(&value)
    }

    /// Serves no clients from now on: sends those that come to the store at `address`, or has them
    /// ask again if that is `None`. They use their connections to that store and come back when it
    /// is lost.
    pub fn send_elsewhere(&self, address: Option<&Address>) {
        let address = address.map(Address::to_string).unwrap_or_default();
        self.act(move |store, _| store.send_elsewhere(address));
    }

    /// Serves clients again, with the values that it has. Waits until it does: a [`Replica`](crate::Replica) of it
    /// takes no change any more.
    ///
    /// # Errors
    /// The server's thread is over, or does not answer.
    pub fn serve(&self) -> io::Result<()> {
        let (answer, served) = mpsc::channel();
        self.act(move |store, _| {
            store.serve();
            let _ = answer.send(());
        });
        wait_for_thread(&served)
    }

    /// Lets the replica with this number come, once, and no other. It takes the place of the one before.
    pub fn admit_replica(&self, number: u64) {
        self.act(move |store, _| store.admit_replica(number));
    }

    /// Answers the clients whose replies wait for a replica, and goes on without one.
    ///
    /// Once there has been a replica, and it is lost, no client gets a reply until this is called, or
    /// there is another one. Until then nobody may take the lost replica for one: some of what it
    /// misses would be lost if this server were lost as well.
    pub fn go_alone(&self) {
        self.act(|store, outbox| store.go_alone(outbox));
    }

    /// Takes changes of the store that this one is a replica of. Returns false if it is none, or if the
    /// sender `is_over`: another replica may have begun.
    pub(crate) fn take_changes(
        &self,
        all: bool,
        changes: Vec<Vec<u8>>,
        is_over: &Arc<AtomicBool>,
    ) -> io::Result<bool> {
        let is_over = Arc::clone(is_over);
        let (answer, taken) = mpsc::channel();
        self.act(move |store, outbox| {
            let is_over = is_over.load(Ordering::SeqCst);
            let _ =
                answer.send(!is_over && store.take_changes(all, &changes, Instant::now(), outbox));
        });
        wait_for_thread(&taken)
    }

    fn act(&self, action: impl FnOnce(&mut StoreService, &mut Outbox) + Send + 'static) {
        self.thread.command(Command::Act { store: self.store, action: Box::new(action) });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.thread.command(Command::Close(self.store));
    }
}

/// A store for PyTorch's clients being served, until dropped: then their connections are closed and
/// its values forgotten.
///
/// It behaves as PyTorch's own server. At most half of the file descriptors that the process may
/// have are theirs, and all values together may take 1 GiB. A client beyond that is closed, with a
/// line in the log.
#[derive(Debug)]
pub struct TcpStoreServer {
    thread: Arc<ServerThread>,
    service: ServiceId,
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.thread.command(Command::Close(self.service));
    }
}

/// The thread that serves an address, until dropped.
#[derive(Debug)]
struct ServerThread {
    address: Address,
    waker: Waker,
    owned: ForkSafe<Owned>,
}

/// The parts that only the process that has started the thread may use.
#[derive(Debug)]
struct Owned {
    commands: Sender<Command>,
    handle: Option<JoinHandle<()>>,
}

impl ServerThread {
    fn start(address: &Address) -> io::Result<ServerThread> {
        let poll = Poll::new()?;
        let (mut listener, address) = Listener::bind(address)?;
        listener.register(poll.registry(), LISTENER)?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let (commands, receiver) = mpsc::channel();
        let mut event_loop = EventLoop::new(poll, listener, receiver);
        let handle = Some(
            thread::Builder::new()
                .name("flow-store".to_string())
                .spawn(move || event_loop.run())?,
        );
        Ok(ServerThread { address, waker, owned: ForkSafe::new(Owned { commands, handle }) })
    }

    /// Sends a command to the thread, if there is one.
    fn command(&self, command: Command) {
        if self.owned.is_ours() && self.owned.commands.send(command).is_ok() {
            // It fails only if the kernel has no memory, and then the next command's wakes the
            // thread.
            let _ = self.waker.wake();
        }
    }
}

/// Returns the answer of the server's thread to a command.
///
/// # Errors
/// The thread is over, or does not answer.
fn wait_for_thread<T>(answer: &Receiver<T>) -> io::Result<T> {
    answer.recv_timeout(ANSWER_TIMEOUT).map_err(|error| match error {
        RecvTimeoutError::Timeout => io::Error::new(
            ErrorKind::TimedOut,
            format!(
                "its thread has not answered within {ANSWER_TIMEOUT:?}; does anybody read the log \
                 that it writes?"
            ),
        ),
        RecvTimeoutError::Disconnected => {
            io::Error::new(ErrorKind::BrokenPipe, "its thread is over")
        }
    })
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        if !self.owned.is_ours() {
            return;
        }
        self.command(Command::Stop);
        if let Some(thread) = self.owned.handle.take() {
            let begin = Instant::now();
            while !thread.is_finished() {
                if begin.elapsed() > STOP_TIMEOUT {
                    return;
                }
                thread::sleep(Duration::from_millis(1));
            }
            // A panic there has been printed already, and `drop` has no caller to report it to.
            let _ = thread.join();
        }
    }
}
