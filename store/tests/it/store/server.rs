//! Addresses, several stores at one of them, and how a server ends.

use super::*;

#[test]
fn abstract_unix_address() {
    let address: Address = format!("unix://flow-test-{}", std::process::id()).parse().unwrap();
    let error = Store::connect(&address, TOKEN, SHORT).unwrap_err();
    assert!(
        matches!(error, Error::Connect { .. }) && error.to_string().contains(&address.to_string()),
        "{error}"
    );
    let server = Server::start(&address, TOKEN).unwrap();
    assert_eq!(server.address(), &address);
    let error = Server::start(&address, TOKEN).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    client(&server).set("key", b"value").unwrap();
    assert_eq!(client(&server).get("key", LONG).unwrap(), b"value");
    drop(server);
    Server::start(&address, TOKEN).expect("nothing is left of the first server");
}

#[test]
fn addresses_as_text() {
    for text in [
        "tcp://127.0.0.1:29500",
        "tcp://[::1]:0",
        "tcp://node-1:80",
        "tcp://[fe80::1%eth0]:80",
        "unix://flow",
    ] {
        assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
    }
    for text in [
        "",
        "127.0.0.1:29500",
        "tcp://",
        "tcp://host",
        "tcp://:80",
        "tcp://host:99999",
        "tcp://::1:80",
        "tcp://[::1]",
        "tcp://[::1:80",
        "tcp://[]:80",
        "tcp://[host]:80",
        "unix://",
        "http://a:1",
    ] {
        let error = text.parse::<Address>().unwrap_err();
        assert!(
            error
                .to_string()
                .contains("give tcp://HOST:PORT or unix://NAME, an IPv6 host in brackets"),
            "{error}"
        );
    }
}

#[test]
fn the_server_may_start_after_its_clients() {
    let address = serve().address().clone();
    thread::scope(|scope| {
        let store = scope.spawn(|| Store::connect(&address, TOKEN, LONG).unwrap());
        thread::sleep(SHORT);
        let server = Server::start(&address, TOKEN).unwrap();
        server.set("key", b"value");
        assert_eq!(store.join().unwrap().get("key", LONG).unwrap(), b"value");
    });
}

#[test]
fn ipv6() {
    if TcpListener::bind("[::1]:0").is_err() {
        println!("SKIPPED: IPv6: no [::1] here");
        return;
    }
    let server = Server::start(&"tcp://[::1]:0".parse().unwrap(), TOKEN).unwrap();
    let Address::Tcp(host_and_port) = server.address() else { panic!("not served by TCP") };
    assert!(
        host_and_port.starts_with("[::1]:") && !host_and_port.ends_with(":0"),
        "{host_and_port}"
    );
    assert_eq!(client(&server).add("n", 1).unwrap(), 1);

    let server = Server::start(&"tcp://[::]:0".parse().unwrap(), TOKEN).unwrap();
    let Address::Tcp(host_and_port) = server.address() else { panic!("not served by TCP") };
    let port = host_and_port.strip_prefix("[::]:").unwrap();
    for (host, n) in [("[::1]", 1), ("127.0.0.1", 2), ("localhost", 3)] {
        let store = Store::connect(&Address::Tcp(format!("{host}:{port}")), TOKEN, LONG).unwrap();
        assert_eq!(store.add("n", 1).unwrap(), n);
    }
}

#[test]
fn many_clients() {
    const CLIENTS: usize = 1000;
    raise_file_limit();
    let server = serve();
    let names: Vec<String> = (0..CLIENTS).map(|i| format!("rank/{i}")).collect();
    thread::scope(|scope| {
        for name in &names {
            let (server, names) = (&server, &names);
            thread::Builder::new()
                .stack_size(128 << 10)
                .spawn_scoped(scope, move || {
                    let store = client(server);
                    store.set(name, b"").unwrap();
                    store.add("joined", 1).unwrap();
                    store.wait(names, LONG).unwrap();
                    store.get("go", LONG).unwrap();
                })
                .unwrap();
        }
        let store = client(&server);
        store.wait(&names, LONG).unwrap();
        store.set("go", b"").unwrap();
    });
    assert_eq!(client(&server).get("joined", LONG).unwrap(), CLIENTS.to_string().as_bytes());
}

#[test]
fn a_stopping_server_ends_all_waits() {
    let server = serve();
    let address = server.address().to_string();
    let (store, idle) = (client(&server), client(&server));
    thread::scope(|scope| {
        let wait = scope.spawn(|| {
            let error = store.get("never", Duration::MAX).unwrap_err();
            (error, store.set("key", b"").unwrap_err())
        });
        thread::sleep(SHORT);
        drop(server);
        let (first, second) = wait.join().unwrap();
        for (error, operation) in [(&first, "get \"never\""), (&second, "set \"key\"")] {
            assert!(matches!(error, Error::Lost { .. }), "{error}");
            assert!(
                error.to_string().contains(operation) && error.to_string().contains(&address),
                "{error}"
            );
        }
        assert!(second.to_string().contains("failed earlier (get \"never\""), "{second}");
    });
    assert!(matches!(idle.try_get("key").unwrap_err(), Error::Lost { .. }));
}

#[test]
fn stores_beside_each_other_have_nothing_in_common() {
    const OTHER: &str = "the other store's token";
    let server = serve();
    let beside = server.beside(OTHER).unwrap();
    assert_eq!(beside.address(), server.address());
    let connect = |token| Store::connect(server.address(), token, LONG).unwrap();
    let (a, b) = (connect(TOKEN), connect(OTHER));
    a.set("key", b"a").unwrap();
    beside.set("key", b"b");
    assert_eq!(
        (a.get("key", LONG).unwrap(), b.get("key", LONG).unwrap()),
        (b"a".to_vec(), b"b".to_vec())
    );
    assert_eq!((a.delete(&["key"]).unwrap(), b.try_get("key").unwrap()), (1, Some(b"b".to_vec())));
    b.send(b"hello").unwrap();
    assert_eq!(next_message(&beside), "hello");
    b.will(b"gone", LONG).unwrap();
    drop(b);
    assert_eq!(next_message(&beside), "gone");
    no_post(&server);

    let b = connect(OTHER);
    b.will(b"not executed", LONG).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| b.get("never", LONG).unwrap_err());
        thread::sleep(SHORT);
        a.set("never", b"of the other store").unwrap();
        drop(beside);
        let error = waits.join().unwrap();
        assert!(matches!(error, Error::Lost { .. }), "{error}");
    });
    let error = Store::connect(server.address(), OTHER, LONG).unwrap_err();
    assert!(matches!(error, Error::Denied { .. }), "{error}");
    // The token is free again, and leads to a store that knows nothing of the one before.
    let beside = server.beside(OTHER).unwrap();
    assert_eq!(connect(OTHER).try_get("key").unwrap(), None);
    assert_eq!(a.add("n", 1).unwrap(), 1);

    // The last handle ends it, whichever that is.
    let address = server.address().clone();
    drop(server);
    assert!(matches!(a.try_get("n").unwrap_err(), Error::Lost { .. }));
    Store::connect(&address, OTHER, LONG).unwrap().set("key", b"value").unwrap();
    assert_eq!(Server::start(&address, TOKEN).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    drop(beside);
    Server::start(&address, TOKEN).expect("nothing is left");
}

#[test]
fn a_store_beside_another_needs_a_token_of_its_own() {
    let server = serve();
    let beside = server.beside("other").unwrap();
    for (server, token) in [(&server, TOKEN), (&server, "other"), (&beside, TOKEN), (&server, "")] {
        let error = server.beside(token).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains(&server.address().to_string()), "{error}");
    }
    drop(beside);
    server.beside("other").expect("the token is free again");
}

#[test]
fn a_client_that_dies_while_it_waits_is_forgotten() {
    let server = serve();
    let mut stream = admitted(&server);
    stream
        .write_all(&frame(
            &[&[2], &3u32.to_le_bytes()[..], b"key", &60_000_000u64.to_le_bytes()].concat(),
        ))
        .unwrap();
    drop(stream);
    let store = client(&server);
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key", LONG).unwrap(), b"value");
}

/// In a process of its own, as the limit is the process's.
#[test]
fn a_server_without_free_file_descriptors_goes_on() {
    if runs_apart(a_server_without_free_file_descriptors_goes_on, &[]) {
        return;
    }
    let limit = Rlimit { current: Some(100), maximum: Some(100) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let server = serve();
    let first = client(&server);
    // Both ends of each connection count, so the clients reach the limit, too.
    let Address::Tcp(host_and_port) = server.address() else { panic!("not served by TCP") };
    let strangers: Vec<TcpStream> =
        (0..100).map_while(|_| TcpStream::connect(host_and_port).ok()).collect();
    assert!(strangers.len() < 100);
    assert_eq!(first.add("n", 1).unwrap(), 1);
    drop(strangers);

    let more: Vec<Store> =
        (0..100).map_while(|_| Store::connect(server.address(), TOKEN, 10 * SHORT).ok()).collect();
    assert!(more.len() < 100);
    assert_eq!(first.add("n", 1).unwrap(), 2);
    drop(more);
    assert_eq!(client(&server).add("n", 1).unwrap(), 3);
}
