//! The store's server: one thread, one event loop, any number of clients.

use std::io::{self, ErrorKind};
use std::sync::mpsc::{self, Sender};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use mio::{Poll, Waker};

use super::event_loop::{Command, EventLoop, LISTENER, WAKER};
use super::listener::Listener;
use super::posts::Posts;
use super::Address;
use crate::shm::fork::ForkSafe;

/// A store being served, until dropped.
///
/// Dropping it stops the thread and closes all connections: a client that waits gets an error at once. (Not in a process
/// that is forked from this one, where there is no such thread.)
///
/// Each client takes one file descriptor. The limit (`ulimit -n`) is the process's; at the limit the server keeps
/// serving those it has, and accepts others as soon as it can.
#[derive(Debug)]
pub struct Server {
    address: Address,
    posts: Arc<Posts>,
    waker: Waker,
    thread: ForkSafe<Thread>,
}

#[derive(Debug)]
struct Thread {
    commands: Sender<Command>,
    handle: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts to serve a store at `address` to clients that know `token`. TCP port 0 is any free port.
    ///
    /// # Errors
    /// The address cannot be served (`AddrInUse`: something is there already), or the token is empty.
    pub fn start(address: &Address, token: &str) -> io::Result<Server> {
        if token.is_empty() {
            return Err(io::Error::new(ErrorKind::InvalidInput, format!("store {address}: the token is empty")));
        }
        Server::bind(address, token)
            .map_err(|error| io::Error::new(error.kind(), format!("store {address}: cannot be served: {error}")))
    }

    fn bind(address: &Address, token: &str) -> io::Result<Server> {
        let poll = Poll::new()?;
        let (mut listener, address) = Listener::bind(address)?;
        listener.register(poll.registry(), LISTENER)?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let (commands, receiver) = mpsc::channel();
        let posts = Arc::new(Posts::new()?);
        let mut event_loop = EventLoop::new(poll, listener, token, Arc::clone(&posts), receiver);
        let handle = Some(thread::Builder::new().name("flow-store".to_string()).spawn(move || event_loop.run())?);
        Ok(Server { address, posts, waker, thread: ForkSafe::new(Thread { commands, handle }) })
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
        self.thread.is_ours() && self.thread.commands.send(command).is_ok() && self.waker.wake().is_ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.thread.is_ours() {
            return;
        }
        self.command(Command::Stop);
        if let Some(thread) = self.thread.handle.take() {
            // A panic there has been printed, and there is nobody to tell here.
            let _ = thread.join();
        }
    }
}
