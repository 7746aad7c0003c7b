//! PyTorch's TCPStore: its clients are served as by PyTorch's own server (that of libuv, the
//! default).
//!
//! They speak first with a number that is no secret, so they are not authenticated. Whoever reaches
//! the port can read and change what is kept here. It is a key space of its own, from which there
//! is no way to Flow's stores.
//!
//! | request | fields | reply |
//! |---|---|---|
//! | 0 validate | 0x3c85f7ce (u32) | |
//! | 1 set | key, value | |
//! | 2 compare set | key, expected, desired | the value thereafter; `expected` if there is none |
//! | 3 get | key | value, empty if there is none |
//! | 4 add | key, i64 | the sum (i64), kept as decimal text |
//! | 5 check | keys | 0 if all are there, else 1 (u8) |
//! | 6 wait | keys | 0 (u8) as soon as all are there |
//! | 7 number of keys | | i64 |
//! | 8 delete | key | 1 if it was there, else 0 (i64) |
//! | 9 append | key, value | |
//! | 10 multi get | keys | values |
//! | 11 multi set | keys, each with its value | |
//! | 12 cancel wait | | 1 (u8), after the reply to the wait if there was one |
//! | 13 ping | u32 | the same |
//! | 14 queue push | key, value | |
//! | 15 queue pop | key | length before (i64), and the oldest entry unless it is 0 |
//! | 16 queue length | key | i64 |
//! | 17 list keys | | keys |
//! | 18 barrier | key, number of clients (i64) | 0 (u8) as soon as so many have asked |
//!
//! Keys and values are preceded by their length (u64), lists by theirs. A client need not wait for
//! a reply before it sends the next request.
//!
//! It differs from PyTorch's server where that one wakes clients by mistake. A compare set that
//! sets nothing wakes nobody. A queue does not wake those that it has woken before and that wait
//! for another key now. And its memory is bounded: a client that would have it take more, or that
//! does not read, is closed.

mod values;
mod waits;
mod wire;

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::io::{self, ErrorKind};
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use rustix::process::{Resource, getrlimit};

use super::service::{Outbox, Service};
use values::TcpValues;
use waits::PendingWaits;
use wire::{Decoder, TcpRequest, TcpValue};

pub use wire::VALIDATION;

/// All that is kept or is on its way to clients, and what they have sent of incomplete requests,
/// takes no more memory.
const MAX_SIZE: usize = 1 << 30;
/// A client that asks more while so much is unsent does not read.
const MAX_UNSENT: usize = 1 << 20;

/// The first bytes of replies to wait and cancel wait.
const STOP_WAITING: u8 = 0;
const WAIT_CANCELED: u8 = 1;

/// A TCPStore, as the server's thread serves it to PyTorch's clients.
pub struct TcpStoreService {
    max_size: usize,
    values: TcpValues,
    waits: PendingWaits,
    clients: HashMap<usize, TcpClient>,
    /// The size of all incomplete requests.
    held: usize,
    complaints: Complaints,
}

/// Each is made once, as their number is the clients' choice. The log may be a pipe that nobody
/// reads, for which this thread would wait.
#[derive(Default)]
struct Complaints {
    clients: OnceCell<()>,
    memory: OnceCell<()>,
    deaf: OnceCell<()>,
}

#[derive(Default)]
struct TcpClient {
    decoder: Decoder,
    /// The size of its incomplete request.
    held: usize,
}

impl Default for TcpStoreService {
    fn default() -> TcpStoreService {
        TcpStoreService::bounded(MAX_SIZE)
    }
}

impl TcpStoreService {
    fn bounded(max_size: usize) -> TcpStoreService {
        TcpStoreService {
            max_size,
            values: TcpValues::default(),
            waits: PendingWaits::default(),
            clients: HashMap::new(),
            held: 0,
            complaints: Complaints::default(),
        }
    }

    /// Carries out a request.
    ///
    /// # Errors
    /// That is impossible, which PyTorch's server ends the connection for as well.
    fn handle(&mut self, id: usize, request: TcpRequest, outbox: &mut Outbox) -> io::Result<()> {
        match request {
            TcpRequest::Set { key, value } => {
                self.values.set(&key, value);
                self.wake(&key, outbox);
            }
            TcpRequest::CompareSet { key, expected, desired } => {
                let present = self.values.get(&key);
                if present.map_or(expected.bytes().is_empty(), |present| *present == expected) {
                    self.values.set(&key, desired);
                    self.wake(&key, outbox);
                }
                outbox.send(
                    id,
                    self.values.get(&key).map_or(expected.0, |value| Arc::clone(&value.0)),
                );
            }
            TcpRequest::Get { key } => self.get(id, &key, outbox),
            TcpRequest::MultiGet { keys } => keys.iter().for_each(|key| self.get(id, key, outbox)),
            TcpRequest::Add { key, amount } => {
                let sum = self.values.add(&key, amount).ok_or(ErrorKind::InvalidData)?;
                send_number(id, sum, outbox);
                self.wake(&key, outbox);
            }
            TcpRequest::Check { keys } => {
                let is_missing = !keys.iter().all(|key| self.values.has(key));
                outbox.send(id, Arc::new(vec![u8::from(is_missing)]));
            }
            TcpRequest::Wait { keys } => {
                let missing = keys.into_iter().filter(|key| !self.values.has(key));
                self.wait(id, missing.collect(), outbox);
            }
            TcpRequest::NumKeys => send_number(id, self.values.len() as i64, outbox),
            TcpRequest::Delete { key } => {
                send_number(id, i64::from(self.values.remove(&key)), outbox)
            }
            TcpRequest::Append { key, value } => {
                self.values.append(&key, value);
                self.wake(&key, outbox);
            }
            TcpRequest::CancelWait => {
                self.waits.cancel(id);
                outbox.send(id, Arc::new(vec![WAIT_CANCELED]));
            }
            TcpRequest::Ping { nonce } => outbox.send(id, Arc::new(nonce.to_vec())),
            TcpRequest::QueuePush { key, value } => {
                self.values.push(&key, value);
                if let Some(woken) = self.waits.wake_one(&key) {
                    outbox.send(woken, Arc::new(vec![STOP_WAITING]));
                }
            }
            TcpRequest::QueuePop { key } => {
                send_number(id, self.values.queue_len(&key) as i64, outbox);
                if let Some(value) = self.values.pop(&key) {
                    outbox.send(id, value.0);
                }
            }
            TcpRequest::QueueLen { key } => {
                send_number(id, self.values.queue_len(&key) as i64, outbox)
            }
            TcpRequest::ListKeys => {
                self.make_room(self.values.list_cost(), 0)?;
                outbox.send(id, self.values.list());
            }
            TcpRequest::Barrier { key, world_size } => {
                if self.values.add(&key, 1).ok_or(ErrorKind::InvalidData)? < world_size {
                    self.wait(id, [key].into(), outbox);
                } else {
                    self.wake(&key, outbox);
                    outbox.send(id, Arc::new(vec![STOP_WAITING]));
                }
            }
        }
        Ok(())
    }

    fn get(&self, id: usize, key: &[u8], outbox: &mut Outbox) {
        outbox.send(
            id,
            self.values.get(key).map_or_else(|| TcpValue::new(b"").0, |value| Arc::clone(&value.0)),
        );
    }

    fn wait(&mut self, id: usize, missing: HashSet<Vec<u8>>, outbox: &mut Outbox) {
        if missing.is_empty() {
            outbox.send(id, Arc::new(vec![STOP_WAITING]));
        } else {
            self.waits.add(id, missing);
        }
    }

    fn wake(&mut self, key: &[u8], outbox: &mut Outbox) {
        let woken = self.waits.wake_all(key);
        if !woken.is_empty() {
            let reply = Arc::new(vec![STOP_WAITING]);
            woken.into_iter().for_each(|id| outbox.send(id, Arc::clone(&reply)));
        }
    }

    fn size(&self) -> usize {
        self.values.size() + self.waits.size() + self.held
    }

    /// Sees to it that `more` can be kept, or at least that no more is kept than `before`.
    ///
    /// # Errors
    /// It is too much.
    fn make_room(&mut self, more: usize, before: usize) -> io::Result<()> {
        if self.size() + more > self.max_size {
            self.values.forget_list();
            self.values.sweep();
        }
        if self.size() + more <= self.max_size.max(before) {
            return Ok(());
        }
        self.complaints.memory.get_or_init(|| {
            log::warn!(
                "TCPStore: a client of PyTorch's is closed: it would have the store take more than \
                 {} bytes",
                self.max_size
            );
        });
        Err(ErrorKind::OutOfMemory.into())
    }

    /// Notes the size of a client's incomplete request.
    fn hold(&mut self, id: usize, held: usize) {
        let before =
            self.clients.get_mut(&id).map_or(0, |client| mem::replace(&mut client.held, held));
        self.held = self.held - before + held;
    }
}

fn send_number(id: usize, number: i64, outbox: &mut Outbox) {
    outbox.send(id, Arc::new(number.to_le_bytes().to_vec()));
}

impl Service for TcpStoreService {
    /// PyTorch's clients get at most half of the file descriptors, and connections that have not
    /// authenticated a quarter, so that Flow's own clients find some.
    fn join(&mut self, id: usize, _now: Instant, _outbox: &mut Outbox) -> io::Result<()> {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let count = self.clients.len();
        if count as u64 >= files / 2 {
            self.complaints.clients.get_or_init(|| {
                log::warn!(
                    "TCPStore: {count} clients of PyTorch's are connected, and no more are \
                     accepted: the limit on open files is {files} (ulimit -n)"
                );
            });
            return Err(ErrorKind::QuotaExceeded.into());
        }
        self.clients.insert(id, TcpClient::default());
        Ok(())
    }

    fn receive(
        &mut self,
        id: usize,
        input: &[u8],
        unsent: usize,
        _: Instant,
        outbox: &mut Outbox,
    ) -> io::Result<usize> {
        if unsent > MAX_UNSENT {
            self.complaints.deaf.get_or_init(|| {
                log::warn!(
                    "TCPStore: a client of PyTorch's is closed: it sends requests and does not \
                     read the replies"
                );
            });
            return Err(ErrorKind::InvalidData.into());
        }
        let before = self.size();
        let client = self.clients.get_mut(&id).ok_or(ErrorKind::NotFound)?;
        let (taken, request) = client.decoder.decode(input)?;
        if let Some(request) = request {
            self.handle(id, request, outbox)?;
        }
        let rest = input.len() - taken;
        let held = self.clients.get(&id).map_or(0, |client| client.decoder.size() + rest);
        self.hold(id, held);
        self.make_room(0, before)?;
        Ok(taken)
    }

    fn due(&self, _id: usize) -> Option<Instant> {
        None
    }

    fn expire(&mut self, _id: usize, _now: Instant, _outbox: &mut Outbox) {}

    fn leave(&mut self, id: usize) {
        self.waits.cancel(id);
        self.hold(id, 0);
        self.clients.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: usize = 100_000;

    /// A request with one key and perhaps a value.
    fn request(operation: u8, key: &str, value: Option<usize>) -> Vec<u8> {
        let mut wire = vec![operation];
        wire::put(&mut wire, key.as_bytes());
        if let Some(length) = value {
            wire::put(&mut wire, &vec![0; length]);
        }
        wire
    }

    fn store() -> TcpStoreService {
        let mut store = TcpStoreService::bounded(MAX);
        for id in 0..3 {
            store.join(id, Instant::now(), &mut Outbox::default()).unwrap();
        }
        store
    }

    /// Whether a client may have sent this.
    fn accepts(store: &mut TcpStoreService, id: usize, wire: &[u8]) -> bool {
        store.receive(id, wire, 0, Instant::now(), &mut Outbox::default()).is_ok()
    }

    #[test]
    fn values_and_queues_take_so_much_memory_and_no_more() {
        for operation in [1, 9, 14] {
            let mut store = store();
            let count = (0..1000)
                .take_while(|i| {
                    accepts(&mut store, 0, &request(operation, &i.to_string(), Some(900)))
                })
                .count();
            assert!((MAX / 2000..MAX / 900).contains(&count), "{count}");
            store.leave(0);
            // What takes no more is possible for others, and what makes room, and then what takes
            // it.
            assert!(accepts(&mut store, 1, &request(3, "0", None)));
            assert!(!accepts(&mut store, 1, &request(operation, "another", Some(900))));
            let remove = if operation == 14 { 15 } else { 8 };
            for i in 0..3 {
                assert!(accepts(&mut store, 2, &request(remove, &i.to_string(), None)));
            }
            assert!(accepts(&mut store, 2, &request(operation, "another", Some(900))));
        }
    }

    #[test]
    fn empty_keys_and_values_take_memory_as_well() {
        let mut store = store();
        let count =
            (0..MAX).take_while(|_| accepts(&mut store, 0, &request(14, "", Some(0)))).count();
        assert!(count < MAX / 100, "{count}");
    }

    #[test]
    fn a_list_of_keys_takes_memory_once() {
        let mut store = store();
        let key = "k".repeat(1000);
        (0..40).for_each(|i| {
            assert!(accepts(&mut store, 0, &request(1, &format!("{key}{i}"), Some(0))))
        });
        let before = store.size();
        let mut outbox = Outbox::default();
        for id in 0..3 {
            assert_eq!(store.receive(id, &[17], 0, Instant::now(), &mut outbox).unwrap(), 1);
        }
        let (_, list) = &outbox.0[0];
        assert!(outbox.0.iter().all(|(_, other)| Arc::ptr_eq(list, other)));
        assert_eq!(store.size(), before + list.len());
        // It is kept no more, but on its way; a second one is too much, until the first has been
        // sent.
        assert!(accepts(&mut store, 0, &request(1, "another", Some(0))));
        assert!(!accepts(&mut store, 1, &[17]));
        outbox.0.clear();
        assert!(accepts(&mut store, 1, &[17]));
        // Values need the room more.
        assert!(accepts(&mut store, 0, &request(1, "large", Some(40_000))));
    }

    #[test]
    fn what_is_incomplete_or_waits_counts() {
        let mut store = store();
        let wire = request(1, "key", Some(MAX));
        assert!(accepts(&mut store, 0, &wire[..MAX / 2]));
        assert!(!accepts(&mut store, 1, &wire[..MAX - MAX / 4]));
        store.leave(1);
        let wait = |count: u64| {
            let mut wire = [&[6][..], &count.to_le_bytes()].concat();
            (0..count).for_each(|i| wire::put(&mut wire, &i.to_le_bytes()));
            wire
        };
        assert!(accepts(&mut store, 2, &wait(100)));
        assert!(!accepts(&mut store, 2, &wait(1000)));
        store.leave(0);
        store.leave(2);
        assert_eq!(store.size(), 0);
    }
}
