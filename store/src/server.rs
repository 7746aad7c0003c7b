//! The stores' server: one thread, one event loop, any number of clients.

use std::io::{self, ErrorKind};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mio::{Poll, Waker};

use super::event_loop::{Command, EventLoop, LISTENER, WAKER};
use super::inbox::Inbox;
use super::listener::Listener;
use super::service::ServiceId;
use super::Address;
use crate::fork::ForkSafe;

/// So long the thread may take to end. One that waits for somebody to read the log is left.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// So long the thread may take to answer its owner.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A store being served, until dropped.
///
/// Dropping it closes the connections of its clients; those that wait get an error at
/// once, and forgets its values. With the last store at an address, its thread is over and the
/// address is free. (Not in a process that is forked from this one, where there is no such thread.)
///
/// Each client takes one file descriptor. The limit (`ulimit -n`) is the process's; at the limit
/// the server keeps serving those it has, and accepts others as soon as it can.
#[derive(Debug)]
pub struct Server {
    host: Arc<Host>,
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
        Host::start(address).and_then(|host| Server::open(Arc::new(host), token)).map_err(|error| {
            io::Error::new(error.kind(), format!("store {address}: cannot be served: {error}"))
        })
    }

    /// Serves another store at the same address, from the same thread, to clients that know its own
    /// `token`. The two have nothing in common: no keys, no inbox, no wills.
    ///
    /// # Errors
    /// `InvalidInput` if the token is empty, or that of another store at this address.
    pub fn beside(&self, token: &str) -> io::Result<Server> {
        Server::open(Arc::clone(&self.host), token).map_err(|error| {
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
    pub fn serve_tcp_store(&self) -> io::Result<TcpStore> {
        let failed = |kind, reason: &str| {
            io::Error::new(
                kind,
                format!("store {}: PyTorch's clients cannot be served: {reason}", self.address()),
            )
        };
        let Address::Tcp(_) = self.address() else {
            return Err(failed(
                ErrorKind::InvalidInput,
                "they come by TCP only; serve the store at a TCP address",
            ));
        };
        let (answer, opened) = mpsc::channel();
        self.host.command(Command::OpenTcpStore { answer });
        let opened = wait_for_thread(&opened)?;
        let service = opened.ok_or_else(|| failed(ErrorKind::AlreadyExists, "they are already"))?;
        Ok(TcpStore { host: Arc::clone(&self.host), service })
    }

    fn open(host: Arc<Host>, token: &str) -> io::Result<Server> {
        if token.is_empty() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "the token is empty"));
        }
        let inbox = Arc::new(Inbox::new()?);
        let (answer, opened) = mpsc::channel();
        host.command(Command::Open { token: token.to_string(), inbox: Arc::clone(&inbox), answer });
        let taken = || {
            io::Error::new(
                ErrorKind::InvalidInput,
                "another store has this token; give each its own",
            )
        };
        let store = wait_for_thread(&opened)?.ok_or_else(taken)?;
        Ok(Server { host, store, inbox })
    }

    /// Where the store is served, with the port that was taken.
    pub fn address(&self) -> &Address {
        &self.host.address
    }

    /// What clients have sent to this process. It need not be read: when there is too much,
    /// clients are refused.
    pub fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Sets `key` to `value`, as a client would. It does not wait for the server's thread to do so.
    pub fn set(&self, key: &str, value: &[u8]) {
        self.host.command(Command::Set {
            store: self.store,
            key: key.to_string(),
            value: value.to_vec(),
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.host.command(Command::Close(self.store));
    }
}

/// A store for PyTorch's clients being served, until dropped: then their connections are closed and
/// its values forgotten.
///
/// It behaves as PyTorch's own server. At most half of the file descriptors that the process may
/// have are theirs, and all values together may take 1 GiB: a client beyond that is closed, with a
/// line in the log.
#[derive(Debug)]
pub struct TcpStore {
    host: Arc<Host>,
    service: ServiceId,
}

impl Drop for TcpStore {
    fn drop(&mut self) {
        self.host.command(Command::Close(self.service));
    }
}

/// An address that is served, and the thread that does so, until dropped.
#[derive(Debug)]
struct Host {
    address: Address,
    waker: Waker,
    thread: ForkSafe<Thread>,
}

#[derive(Debug)]
struct Thread {
    commands: Sender<Command>,
    handle: Option<JoinHandle<()>>,
}

impl Host {
    fn start(address: &Address) -> io::Result<Host> {
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
        Ok(Host { address, waker, thread: ForkSafe::new(Thread { commands, handle }) })
    }

    /// Has the thread do something, if there is one.
    fn command(&self, command: Command) {
        if self.thread.is_ours() && self.thread.commands.send(command).is_ok() {
            // It fails only if the kernel has no memory, and then the next command's wakes the
            // thread.
            let _ = self.waker.wake();
        }
    }
}

/// The answer of the server's thread to a command.
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

impl Drop for Host {
    fn drop(&mut self) {
        if !self.thread.is_ours() {
            return;
        }
        self.command(Command::Stop);
        if let Some(thread) = self.thread.handle.take() {
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
