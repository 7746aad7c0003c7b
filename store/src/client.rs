//! The client's side of the store.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::blocking_socket::{describe, exchange};
use super::connect::{Reached, may_pass, reach};
use super::patience::{Impatient, Patience};
use super::protocol::{MAX_FRAME, MAX_TIMEOUT, Reply, Request};
use super::session::Connection;
use super::{Address, Error, Result, list};
use crate::fork::Process;

/// [`Store::set_reply_timeout`] at first.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// A wait for the server this long is worth a line in the log.
const FIRST_WARNING: Duration = Duration::from_secs(30);
/// The time that an answer may be late, after which a wait for it asks whether it is to go on.
const OVERDUE: Duration = Duration::from_millis(500);
/// The time in which another server must take the place of one that is lost, if the address answers.
const FAILOVER_TIMEOUT: Duration = Duration::from_secs(600);
/// Pauses between attempts to connect grow from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// A connection to a store.
///
/// It may be shared between threads, but serves one call after the other. A thread that waits long
/// for a key keeps the others from theirs, and should have a `Store` of its own. When a call has
/// failed with [`Error::Lost`], all later ones fail at once.
///
/// The server at the address may send its clients to another one ([`Server::send_elsewhere`]). When
/// that one is lost, the client asks at the address again, and sends its request to the server that it
/// is named then. No request is done twice but [`Store::send`]. A will is not taken along.
///
/// [`Server::send_elsewhere`]: crate::Server::send_elsewhere
pub struct Store {
    address: Address,
    token: String,
    /// The connection, or why there is none any more.
    connection: Mutex<std::result::Result<Connection, String>>,
    /// The time to wait for a reply, in microseconds.
    reply_timeout: AtomicU64,
    /// Whether the program wants to stop waiting for a server that does not answer.
    is_interrupted: fn() -> bool,
    /// The process whose connection it is: in a forked child the requests of two would mix.
    process: Process,
}

impl Store {
    /// Connects, and retries until `timeout`, as the server may start later than its clients.
    ///
    /// # Errors
    /// [`Error::Connect`] after the timeout; [`Error::Denied`] at once where the token or the user
    /// is wrong.
    pub fn connect(address: &Address, token: &str, timeout: Duration) -> Result<Store> {
        Self::connect_unless(|| false, address, token, timeout)
    }

    /// Connects as [`Store::connect`] does, unless `is_interrupted`, which it calls some times a
    /// second, says that the program wants to stop waiting. Later calls ask it when the server's
    /// answer is overdue.
    ///
    /// # Errors
    /// [`Error::Interrupted`] as well.
    pub fn connect_unless(
        is_interrupted: fn() -> bool,
        address: &Address,
        token: &str,
        timeout: Duration,
    ) -> Result<Store> {
        let deadline = Instant::now() + timeout.min(MAX_TIMEOUT);
        let patience = Patience::new(is_interrupted, deadline);
        let mut pause = PAUSES.0;
        let mut warning = Instant::now() + FIRST_WARNING;
        loop {
            let error = match reach(address, token, &patience) {
                Ok(Reached::Store(connection)) => {
                    return Ok(Store {
                        address: address.clone(),
                        token: token.to_string(),
                        connection: Mutex::new(Ok(connection)),
                        reply_timeout: AtomicU64::new(REPLY_TIMEOUT.as_micros() as u64),
                        is_interrupted,
                        process: Process::current(),
                    });
                }
                Ok(Reached::Denied(reason)) => {
                    return Err(Error::Denied { address: address.clone(), reason });
                }
                Ok(Reached::NotYet(error)) | Err(error) => error,
            };
            if patience.is_over() {
                let operation = "connect".into();
                return Err(Error::Interrupted { address: address.clone(), operation });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if !may_pass(error.kind()) || left.is_zero() {
                return Err(Error::Connect {
                    address: address.clone(),
                    timeout,
                    cause: describe(&error),
                });
            }
            if Instant::now() >= warning {
                log::warn!("store {address}: no connection yet: {}", describe(&error));
                warning += FIRST_WARNING;
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Returns the address that this client is connected to.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Sets how much later than an operation's own timeout the answer may come: 10 s at first.
    /// After that the server counts as dead, and the call fails with [`Error::Lost`].
    pub fn set_reply_timeout(&self, reply_timeout: Duration) {
        self.reply_timeout
            .store(reply_timeout.min(MAX_TIMEOUT).as_micros() as u64, Ordering::Relaxed);
    }

    /// Sets `key` to `value` (at most 64 MiB with the key).
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let request = Request::Set { key, value };
        self.call(named("set", key), &request, Duration::ZERO, |reply| {
            matches!(reply, Reply::Done).then_some(())
        })
    }

    /// Waits for the value of `key` and returns it.
    ///
    /// # Errors
    /// [`Error::Timeout`] if the key is not set in time.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.call(named("get", key), &Request::Get { key, timeout }, timeout, |reply| match reply {
            Reply::Value(value) => Some(value.to_vec()),
            _ => None,
        })
    }

    /// Returns the value of `key`, `None` if it is not set.
    pub fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        match self.get(key, Duration::ZERO) {
            Err(Error::Timeout { .. }) => Ok(None),
            value => value.map(Some),
        }
    }

    /// Adds `increment` to the number under `key` (0 if there is none) and returns the sum. It is
    /// kept as decimal text.
    ///
    /// # Errors
    /// [`Error::Rejected`] if the value is no number, or the sum does not fit.
    pub fn add(&self, key: &str, increment: i64) -> Result<i64> {
        let request = Request::Add { key, increment };
        self.call(named("add", key), &request, Duration::ZERO, |reply| match reply {
            Reply::Number(sum) => Some(sum),
            _ => None,
        })
    }

    /// Sets `key` to `new` if its value is `expected` (`None`: if it is not set). The inner `Err`
    /// is the value that it has instead, and keeps.
    pub fn compare_and_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        new: &[u8],
    ) -> Result<std::result::Result<(), Option<Vec<u8>>>> {
        let request = Request::CompareAndSet { key, expected, new };
        self.call(named("compare_and_set", key), &request, Duration::ZERO, |reply| match reply {
            Reply::Done => Some(Ok(())),
            Reply::Differs(present) => Some(Err(present.map(<[u8]>::to_vec))),
            _ => None,
        })
    }

    /// Deletes `keys`, as far as they are set; returns how many were.
    pub fn delete(&self, keys: &[impl AsRef<str>]) -> Result<usize> {
        let keys: Vec<&str> = keys.iter().map(AsRef::as_ref).collect();
        let operation = format!("delete {}", list(&keys));
        self.call(operation, &Request::Delete { keys }, Duration::ZERO, |reply| match reply {
            Reply::Number(count) => usize::try_from(count).ok(),
            _ => None,
        })
    }

    /// Waits until all of `keys` are set.
    ///
    /// # Errors
    /// [`Error::Timeout`], with the keys that are missing.
    pub fn wait(&self, keys: &[impl AsRef<str>], timeout: Duration) -> Result<()> {
        let keys: Vec<&str> = keys.iter().map(AsRef::as_ref).collect();
        let operation = format!("wait for {}", list(&keys));
        let request = Request::Wait { keys, timeout };
        self.call(operation, &request, timeout, |reply| matches!(reply, Reply::Done).then_some(()))
    }

    /// Sends `message` to the inbox of the process that serves the store, behind those sent before.
    ///
    /// # Errors
    /// [`Error::Rejected`] if that process leaves its messages unread.
    pub fn send(&self, message: &[u8]) -> Result<()> {
        let request = Request::Send { message };
        self.call("send".to_string(), &request, Duration::ZERO, |reply| {
            matches!(reply, Reply::Done).then_some(())
        })
    }

    /// Tells the server to put `message` (at most 64 KiB) into its inbox once this client is gone,
    /// and only once. The client is gone when its connection ends in whatever way, or when it says
    /// nothing for `silence`: the server then closes the connection. It replaces the will before;
    /// an empty message takes it back. A server that stops executes no wills.
    ///
    /// A client that waits for a key says nothing: it must ask again before `silence` is over, with
    /// a timeout well below.
    ///
    /// # Errors
    /// [`Error::Rejected`] if the message is too long, or the process that serves leaves its
    /// messages unread.
    pub fn will(&self, message: &[u8], silence: Duration) -> Result<()> {
        let request = Request::Will { message, silence };
        self.call("will".to_string(), &request, Duration::ZERO, |reply| {
            matches!(reply, Reply::Done).then_some(())
        })
    }

    /// Returns changes of the store beyond those up to the number `after`, and their last one's number,
    /// once there are some, or after `timeout`. For the replica with this number.
    pub(crate) fn changes(&self, replica: u64, after: u64, timeout: Duration) -> Result<Changes> {
        let request = Request::Changes { replica, after, timeout };
        self.call("changes".to_string(), &request, timeout, |reply| match reply {
            Reply::Changes { number, more, changes } => {
                let changes = changes.into_iter().map(<[u8]>::to_vec).collect();
                Some(Changes { number, more, changes })
            }
            _ => None,
        })
    }

    /// Sends a request and has `accept` take the reply, or return `None` where it does not answer
    /// the request.
    fn call<T>(
        &self,
        operation: String,
        request: &Request,
        timeout: Duration,
        accept: impl FnOnce(Reply) -> Option<T>,
    ) -> Result<T> {
        let address = self.address.clone();
        if !self.process.is_current() {
            let reason =
                "the connection is that of the process that this one was forked from: connect anew"
                    .into();
            return Err(Error::Rejected { address, operation, reason });
        }
        let mut guard = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let connection = match &mut *guard {
            Ok(connection) => connection,
            Err(cause) => {
                let cause = format!("the connection failed earlier ({cause})");
                return Err(Error::Lost { address, operation, cause });
            }
        };
        let frame = connection.encode(request);
        if frame.len() - 4 > MAX_FRAME {
            let reason = format!(
                "the request is {} bytes, and at most {MAX_FRAME} are possible",
                frame.len() - 4
            );
            return Err(Error::Rejected { address, operation, reason });
        }
        let cause = match self.exchange(connection, &frame, timeout) {
            Err(Failure::Interrupted) => {
                *guard = Err(format!("{operation}: the program was interrupted"));
                return Err(Error::Interrupted { address, operation });
            }
            Err(Failure::Lost(cause)) => cause,
            Ok(frame) => match Reply::decode(&frame) {
                Some(Reply::Missing(keys)) => {
                    let missing = keys.into_iter().map(String::from).collect();
                    return Err(Error::Timeout { address, operation, timeout, missing });
                }
                Some(Reply::Refused(reason)) => {
                    return Err(Error::Rejected { address, operation, reason: reason.to_string() });
                }
                reply => match reply.and_then(accept) {
                    Some(result) => return Ok(result),
                    None => "malformed reply: it does not answer the request".to_string(),
                },
            },
        };
        *guard = Err(format!("{operation}: {cause}"));
        Err(Error::Lost { address, operation, cause })
    }

    /// Sends a frame and returns the reply: of another server if this one is lost, and another takes
    /// its place.
    fn exchange(
        &self,
        connection: &mut Connection,
        frame: &[u8],
        timeout: Duration,
    ) -> std::result::Result<Vec<u8>, Failure> {
        let reply_timeout = Duration::from_micros(self.reply_timeout.load(Ordering::Relaxed));
        let wait_of_server = timeout.min(MAX_TIMEOUT);
        let patience = Patience::new(self.is_interrupted, Instant::now() + 2 * MAX_TIMEOUT);
        let mut deadline = None;
        loop {
            let mut impatient = Impatient {
                socket: connection.socket.as_mut(),
                patience: &patience,
                limit: wait_of_server + reply_timeout,
                unasked: wait_of_server + OVERDUE,
            };
            match exchange(&mut impatient, frame) {
                Ok(reply) => return Ok(reply),
                Err(_) if patience.was_interrupted() => return Err(Failure::Interrupted),
                Err(error)
                    if !connection.may_move() || error.kind() == io::ErrorKind::InvalidData =>
                {
                    return Err(Failure::Lost(describe(&error)));
                }
                Err(error) => {
                    let address = &self.address;
                    log::info!("store {address}: {}; asking there again", describe(&error));
                    let deadline =
                        *deadline.get_or_insert_with(|| Instant::now() + FAILOVER_TIMEOUT);
                    self.reconnect(connection, deadline)?;
                }
            }
        }
    }

    /// Connects to the server that has taken the place of a lost one, once the address names it.
    fn reconnect(
        &self,
        connection: &mut Connection,
        deadline: Instant,
    ) -> std::result::Result<(), Failure> {
        let patience = Patience::new(self.is_interrupted, deadline);
        let mut pause = PAUSES.0;
        loop {
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSES.1);
            let error = match reach(&self.address, &self.token, &patience) {
                Ok(Reached::Store(Connection { socket, .. })) => {
                    connection.socket = socket;
                    return Ok(());
                }
                Ok(Reached::Denied(reason)) => return Err(Failure::Lost(reason)),
                Ok(Reached::NotYet(error)) => error,
                Err(_) if patience.was_interrupted() => return Err(Failure::Interrupted),
                // Nobody is there any more.
                Err(error)
                    if !may_pass(error.kind())
                        || error.kind() == io::ErrorKind::ConnectionRefused =>
                {
                    return Err(Failure::Lost(describe(&error)));
                }
                Err(error) => error,
            };
            if patience.is_over() {
                return Err(Failure::Interrupted);
            }
            if Instant::now() >= deadline {
                return Err(Failure::Lost(describe(&error)));
            }
        }
    }
}

/// Changes of a store.
pub(crate) struct Changes {
    /// The number of the last one.
    pub number: u64,
    /// Whether more follow.
    pub more: bool,
    /// The requests that make them.
    pub changes: Vec<Vec<u8>>,
}

/// Why there is no reply.
enum Failure {
    Interrupted,
    Lost(String),
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("address", &self.address).finish_non_exhaustive()
    }
}

fn named(operation: &str, key: &str) -> String {
    format!("{operation} \"{key}\"")
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// The server says hello, and then nothing any more.
    #[test]
    fn a_call_to_a_server_that_is_stopped_can_be_interrupted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp(listener.local_addr().unwrap().to_string());
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut frame = [0; 64];
            assert!(stream.read(&mut frame).unwrap() > 0);
            stream.write_all(&Reply::Done.encode()).unwrap();
            while stream.read(&mut frame).unwrap() > 0 {}
        });
        static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);
        let check = || IS_INTERRUPTED.load(Ordering::SeqCst);
        let store = Store::connect_unless(check, &address, "token", MAX_TIMEOUT).unwrap();
        store.set_reply_timeout(MAX_TIMEOUT);
        IS_INTERRUPTED.store(true, Ordering::SeqCst);
        let error = store.set("key", b"value").unwrap_err();
        assert!(matches!(error, Error::Interrupted { .. }), "{error}");
        let error = store.set("key", b"value").unwrap_err();
        assert!(error.to_string().contains("the program was interrupted"), "{error}");
        drop(store);
        server.join().unwrap();
    }
}
