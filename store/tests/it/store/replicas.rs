//! Stores that take the place of others that are lost.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread::ScopedJoinHandle;

use flow_store::{Replica, ReplicaMessages};
use proptest::prelude::*;

use super::*;

/// A server that sends its clients to `address`.
fn standby(address: Option<&Address>) -> Arc<Server> {
    let server = Arc::new(serve());
    server.send_elsewhere(address);
    server
}

/// Makes `standby` a replica of `server`, and waits until it has everything.
fn replicate(standby: &Arc<Server>, server: &Server) -> Replica {
    server.admit_replica(7);
    let messages = ReplicaMessages { complete: b"complete".into(), lost: b"lost".into() };
    let replica =
        Replica::start(standby, server.address().clone(), TOKEN, 7, messages, LONG).unwrap();
    assert_eq!(next_message(server), "complete");
    replica
}

#[test]
fn a_client_goes_where_it_is_sent() {
    let first = serve();
    let home = standby(Some(first.address()));
    let store = client(&home);
    store.set("key", b"value").unwrap();
    assert_eq!(client(&first).get("key", LONG).unwrap(), b"value");
    assert_eq!(first.get("key").unwrap().as_deref(), Some(&b"value"[..]));
    assert_eq!(home.get("key").unwrap(), None);

    // Nobody is there yet.
    home.send_elsewhere(None);
    let error = Store::connect(home.address(), TOKEN, SHORT).unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error}");
    drop(first);
    let error = Store::connect(home.address(), TOKEN, SHORT).unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error}");
    let waiting = thread::spawn(move || store.add("count", 2));
    let second = serve();
    home.send_elsewhere(Some(second.address()));
    assert_eq!(waiting.join().unwrap().unwrap(), 2);
    assert_eq!(client(&second).add("count", 1).unwrap(), 3);
}

#[test]
fn a_client_whose_address_is_gone_gives_up() {
    let first = serve();
    let home = standby(Some(first.address()));
    let store = client(&home);
    drop((first, home));
    let error = store.set("key", b"value").unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
}

#[test]
fn the_replica_serves_what_it_has() {
    let first = serve();
    let large = vec![7; 3 << 20];
    let store = client(&first);
    for number in 0..100 {
        store.set(&format!("before/{number}"), b"here").unwrap();
    }
    store.set("large", &large).unwrap();
    let home = standby(Some(first.address()));
    let replica = replicate(&home, &first);
    first.set("own", b"of the server's process");
    first.delete("before/1");
    store.set("after", b"here").unwrap();
    store.delete(&["before/0"]).unwrap();
    let waiting = {
        let store = client(&home);
        thread::spawn(move || store.get("later", LONG))
    };
    drop((store, first));
    home.serve().unwrap();
    drop(replica);
    let store = client(&home);
    assert_eq!(store.get("large", LONG).unwrap(), large);
    assert_eq!(store.get("own", LONG).unwrap(), b"of the server's process");
    assert_eq!(store.try_get("before/0").unwrap(), None);
    assert_eq!(store.try_get("before/1").unwrap(), None);
    store.wait(&["before/2", "before/99", "after"], Duration::ZERO).unwrap();
    store.set("later", b"value").unwrap();
    assert_eq!(waiting.join().unwrap().unwrap(), b"value");
}

#[test]
fn no_reply_leaves_before_the_replica_has_the_change() {
    let first = serve();
    let home = standby(Some(first.address()));
    let replica = replicate(&home, &first);
    let store = client(&first);
    store.set("key", b"before").unwrap();
    drop((replica, home));
    // It ends with the next change, which it does not take.
    first.set("other", b"");
    assert_eq!(next_message(&first), "lost");
    let [writing, reading] = [client(&first), client(&first)];
    let is_done = Arc::new(AtomicUsize::new(0));
    let done = Arc::clone(&is_done);
    let writing = thread::spawn(move || {
        writing.set("key", b"after").unwrap();
        done.fetch_add(1, Ordering::SeqCst);
        writing
    });
    while first.get("key").unwrap().as_deref() != Some(b"after") {
        thread::sleep(Duration::from_millis(1));
    }
    // What may still be lost is not to be seen.
    let done = Arc::clone(&is_done);
    let reading = thread::spawn(move || {
        assert_eq!(reading.get("key", LONG).unwrap(), b"after");
        done.fetch_add(1, Ordering::SeqCst);
    });
    thread::sleep(SHORT);
    assert_eq!(is_done.load(Ordering::SeqCst), 0);
    first.go_alone();
    let writing = writing.join().unwrap();
    reading.join().unwrap();
    writing.set("key", b"alone").unwrap();
    // Another replica has all of it.
    let other = standby(Some(first.address()));
    let _replica = replicate(&other, &first);
    assert_eq!(other.get("key").unwrap().as_deref(), Some(&b"alone"[..]));
}

/// What a client does, and the keys of a few.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Add(u8),
    Append(u8),
    Delete(u8),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => (0..3u8).prop_map(Operation::Add),
        4 => (0..3u8).prop_map(Operation::Append),
        1 => (0..3u8).prop_map(Operation::Delete),
    ]
}

/// Does the operations; returns how many keys it has deleted.
fn work(store: &Store, client: usize, operations: &[Operation], progress: &AtomicUsize) -> usize {
    let mut deleted = 0;
    for (number, operation) in operations.iter().enumerate() {
        match operation {
            Operation::Add(key) => {
                store.add(&format!("count/{key}"), 1).unwrap();
            }
            // A list to which each adds with compare_and_set.
            Operation::Append(key) => {
                let key = format!("list/{key}");
                let item = format!("{client}.{number} ");
                let mut present = store.try_get(&key).unwrap();
                loop {
                    let longer =
                        [present.clone().unwrap_or_default(), item.clone().into()].concat();
                    match store.compare_and_set(&key, present.as_deref(), &longer).unwrap() {
                        Ok(()) => break,
                        Err(other) => present = other,
                    }
                }
            }
            Operation::Delete(key) => {
                let key = format!("mark/{client}/{key}");
                store.set(&key, b"").unwrap();
                deleted += store.delete(&[key]).unwrap();
            }
        }
        progress.fetch_add(1, Ordering::SeqCst);
    }
    deleted
}

/// Waits until so much is done, or a worker has failed.
fn until(progress: &AtomicUsize, count: usize, working: &[ScopedJoinHandle<()>]) {
    while progress.load(Ordering::SeqCst) < count
        && !working.iter().all(ScopedJoinHandle::is_finished)
    {
        thread::yield_now();
    }
}

fn check(store: &Store, all: &[Vec<Operation>]) {
    for key in 0..3u8 {
        let count = |wanted: fn(&Operation, u8) -> bool| {
            all.iter().flatten().filter(|operation| wanted(operation, key)).count()
        };
        let adds = count(|operation, key| matches!(operation, Operation::Add(k) if *k == key));
        assert_eq!(store.add(&format!("count/{key}"), 0).unwrap(), adds as i64);
        let list = store.try_get(&format!("list/{key}")).unwrap().unwrap_or_default();
        let list = String::from_utf8(list).unwrap();
        let mut items: Vec<&str> = list.split_whitespace().collect();
        items.sort_unstable();
        let mut expected = Vec::new();
        for (client, operations) in all.iter().enumerate() {
            for (number, operation) in operations.iter().enumerate() {
                if matches!(operation, Operation::Append(k) if *k == key) {
                    expected.push(format!("{client}.{number}"));
                }
            }
        }
        expected.sort_unstable();
        assert_eq!(items, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Two servers are lost one after the other, whenever that is. Each request is done once.
    #[test]
    fn each_request_is_done_once_whichever_server_is_lost(
        all in prop::collection::vec(prop::collection::vec(operation(), 1..40), 1..5),
        losses in prop::array::uniform2(0..100usize),
    ) {
        let total: usize = all.iter().map(Vec::len).sum();
        let first = serve();
        let homes = [standby(Some(first.address())), standby(Some(first.address()))];
        let progress = AtomicUsize::new(0);
        thread::scope(|scope| {
            let mut working = Vec::new();
            for (number, operations) in all.iter().enumerate() {
                let store = client(&homes[number % 2]);
                let progress = &progress;
                working.push(scope.spawn(move || {
                    let deleted = work(&store, number, operations, progress);
                    let deletes =
                        operations.iter().filter(|it| matches!(it, Operation::Delete(_))).count();
                    assert_eq!(deleted, deletes);
                }));
            }
            let replica = replicate(&homes[0], &first);
            until(&progress, total * losses[0] / 100, &working);
            drop(first);
            homes[1].send_elsewhere(None);
            homes[0].serve().unwrap();
            drop(replica);
            homes[1].send_elsewhere(Some(homes[0].address()));
            let replica = replicate(&homes[1], &homes[0]);
            until(&progress, total * losses[1] / 100, &working);
            // Clients that came to it first have nowhere else to go.
            while !working.iter().step_by(2).all(|worker| worker.is_finished()) {
                thread::yield_now();
            }
            let [second, third] = homes;
            drop(second);
            third.serve().unwrap();
            drop(replica);
            for worker in working {
                worker.join().unwrap();
            }
            check(&client(&third), &all);
        });
    }
}
