//! What the calls of a client do.

use super::*;

#[test]
fn values_are_kept() {
    let server = serve();
    let (a, b) = (client(&server), client(&server));
    a.set("key", b"value").unwrap();
    assert_eq!(b.get("key", LONG).unwrap(), b"value");
    a.set("key", b"other").unwrap();
    assert_eq!(b.get("key", LONG).unwrap(), b"other");
    assert_eq!(b.try_get("key").unwrap().as_deref(), Some(&b"other"[..]));
    assert_eq!(b.try_get("another").unwrap(), None);
    server.set("local", b"here");
    assert_eq!(b.get("local", LONG).unwrap(), b"here");
}

#[test]
fn empty_and_large_values() {
    let server = serve();
    let store = client(&server);
    store.set("empty", b"").unwrap();
    assert_eq!(store.get("empty", LONG).unwrap(), b"");
    assert_eq!(store.try_get("empty").unwrap(), Some(Vec::new()));
    let large: Vec<u8> = (0..20_000_000u32).map(|i| (i ^ (i >> 8)) as u8).collect();
    store.set("large", &large).unwrap();
    assert!(client(&server).get("large", LONG).unwrap() == large);
    let too_large = vec![0; (64 << 20) + 1];
    let error = store.set("too large", &too_large).unwrap_err();
    assert!(matches!(error, Error::Rejected { .. }), "{error}");
    assert!(error.to_string().contains("set \"too large\""), "{error}");
    assert_eq!(store.get("empty", LONG).unwrap(), b"", "the connection must stay usable");
}

#[test]
fn get_waits_for_set() {
    let server = serve();
    let (store, other) = (client(&server), client(&server));
    thread::scope(|scope| {
        let get = scope.spawn(|| store.get("late", LONG).unwrap());
        thread::sleep(SHORT);
        other.set("late", b"now").unwrap();
        assert_eq!(get.join().unwrap(), b"now");
        let wait = scope.spawn(|| store.wait(&["late", "a", "b", "local"], LONG).unwrap());
        for key in ["b", "a"] {
            thread::sleep(SHORT);
            other.set(key, b"").unwrap();
        }
        server.set("local", b"");
        wait.join().unwrap();
    });
}

#[test]
fn timeouts_name_the_missing_keys() {
    let server = serve();
    let store = client(&server);
    store.set("rank/0", b"").unwrap();
    let error = store.wait(&["rank/0", "rank/1", "rank/2"], SHORT).unwrap_err();
    let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
    assert_eq!(missing, &["rank/1", "rank/2"]);
    for part in ["\"rank/1\", \"rank/2\"", "50ms", &server.address().to_string()] {
        assert!(error.to_string().contains(part), "{error}");
    }
    let error = store.get("rank/3", SHORT).unwrap_err();
    assert!(error.to_string().contains("get \"rank/3\" timed out"), "{error}");
    // A wait that timed out leaves nothing behind that a later set would answer.
    store.set("rank/3", b"3").unwrap();
    assert_eq!(store.add("counter", 1).unwrap(), 1);
    assert_eq!(store.get("rank/3", Duration::MAX).unwrap(), b"3");
    store.wait(&[] as &[&str], SHORT).unwrap();
}

#[test]
fn adding_counts_each_client_once() {
    let server = serve();
    let mut sums: Vec<i64> = thread::scope(|scope| {
        let clients: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| client(&server)).join().unwrap())
            .map(|store| {
                scope.spawn(move || (0..50).map(|_| store.add("n", 1).unwrap()).collect::<Vec<_>>())
            })
            .collect();
        clients.into_iter().flat_map(|sums| sums.join().unwrap()).collect()
    });
    sums.sort_unstable();
    assert_eq!(sums, (1..=400).collect::<Vec<_>>());
    let store = client(&server);
    assert_eq!(store.add("n", -401).unwrap(), -1);
    assert_eq!(store.get("n", LONG).unwrap(), b"-1");
    store.set("text", b"many").unwrap();
    store.set("most", i64::MAX.to_string().as_bytes()).unwrap();
    for (key, reason) in [("text", "no number"), ("most", "does not fit")] {
        let error = store.add(key, 1).unwrap_err();
        assert!(
            matches!(error, Error::Rejected { .. }) && error.to_string().contains(reason),
            "{error}"
        );
    }
    assert_eq!(store.get("text", LONG).unwrap(), b"many");
}

#[test]
fn deleted_keys_are_as_if_never_set() {
    let server = serve();
    let store = client(&server);
    store.set("a", b"1").unwrap();
    store.set("b", b"2").unwrap();
    assert_eq!(store.delete(&["a", "b", "c"]).unwrap(), 2);
    assert_eq!(store.delete(&["a"]).unwrap(), 0);
    assert_eq!(store.delete(&[] as &[&str]).unwrap(), 0);
    assert_eq!(store.try_get("a").unwrap(), None);
    assert_eq!(store.add("a", 5).unwrap(), 5);
    assert_eq!(store.compare_and_set("b", None, b"new").unwrap(), Ok(()));
    // Whoever waits for a key does so until it is set again.
    store.delete(&["b"]).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client(&server).get("b", LONG));
        store.set("b", b"again").unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), b"again");
    });
}

#[test]
fn compare_and_set_has_one_winner() {
    let server = serve();
    let store = client(&server);
    assert_eq!(store.compare_and_set("leader", Some(b"x"), b"y").unwrap(), Err(None));
    let won: Vec<bool> = thread::scope(|scope| {
        let clients: Vec<_> = (0..8u8)
            .map(|i| (i, client(&server)))
            .map(|(i, store)| {
                scope.spawn(move || store.compare_and_set("leader", None, &[i]).unwrap().is_ok())
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert_eq!(won.iter().filter(|won| **won).count(), 1);
    let leader = store.get("leader", LONG).unwrap();
    assert!(won[leader[0] as usize]);
    assert_eq!(store.compare_and_set("leader", None, b"").unwrap(), Err(Some(leader.clone())));
    assert_eq!(store.compare_and_set("leader", Some(&leader), b"").unwrap(), Ok(()));
    assert_eq!(store.get("leader", LONG).unwrap(), b"");
}

#[test]
fn a_wait_for_a_missing_value_times_out() {
    // Like a server whose machine is stopped: it takes the connection, says done to hello, and no
    // more.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap().to_string());
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&[1, 0, 0, 0, 0]).unwrap();
        stream
    });
    let store = Store::connect(&address, TOKEN, LONG).unwrap();
    let _stream = server.join().unwrap();
    store.set_reply_timeout(2 * SHORT);
    let begin = Instant::now();
    let error = store.get("key", SHORT).unwrap_err();
    assert!(matches!(error, Error::Lost { .. }) && begin.elapsed() >= 3 * SHORT, "{error}");
}
