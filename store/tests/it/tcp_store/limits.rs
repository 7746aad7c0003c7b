//! What a client can do to others.

use super::*;

#[test]
fn what_is_no_request_closes_its_own_connection_only() {
    let (server, _tcp_store) = serve();
    let mut other = Client::new(&server);
    other.send(
        &[set("text", "many"), set("most", "9223372036854775808"), wait(&["never"])].concat(),
    );
    let length = |operation: u8, lengths: &[i64]| {
        [vec![operation], lengths.iter().flat_map(|length| number(*length)).collect()].concat()
    };
    let long_value = [request(1, &["key"]), number((8 << 20) + 1)].concat();
    for sent in [
        VALIDATE.to_vec(),
        vec![19],
        vec![255; 100_000],
        length(3, &[8193]),
        length(1, &[-1]),
        long_value,
        length(5, &[(128 << 10) + 1]),
        length(6, &[-1]),
        length(10, &[i64::MAX]),
        length(11, &[1, i64::MIN]),
        add("text", 1),
        add("most", 1),
    ] {
        Client::new(&server).expect_close(&sent);
    }
    // What was asked before it is answered.
    let mut client = Client::new(&server);
    client.send(&[13, 1, 2, 3, 4, 255]);
    assert_eq!(read_to_close(client.0), [1, 2, 3, 4]);
    other.ping();
    other.ask(&get("text"), &text("many"));
    other.ask(&[7], &number(2));
}

#[test]
fn the_longest_keys_and_values() {
    let (server, _tcp_store) = serve();
    let mut client = Client::new(&server);
    let (key, value) = ("k".repeat(8 << 10), "v".repeat(8 << 20));
    client.send(&set(&key, &value));
    client.ask(&get(&key), &text(&value));
    // In small pieces, too.
    let sent = set("dribbled", &value);
    sent.chunks(1000).for_each(|piece| client.send(piece));
    client.ask(&get("dribbled"), &text(&value));
    // Other requests behind it at once.
    // (and nothing behind the long reply, which might not fit into the sockets).
    client.send(&[set("a", &value), set("b", "b"), get("b"), get("a")].concat());
    client.expect(&[text("b"), text(&value)].concat());
    let keys: Vec<String> = (0..128 << 10).map(|i| i.to_string()).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    client.ask(&counted(5, keys.len(), &keys), &[1]);
    client.send(&wait(&keys));
    let pairs: Vec<&str> = keys.iter().flat_map(|key| [*key, "value"]).collect();
    Client::new(&server).send(&counted(11, keys.len(), &pairs));
    client.expect(STOP_WAITING);
    client.ask(&counted(10, keys.len(), &keys), &text("value").repeat(keys.len()));
    client.ping();
}

#[test]
fn half_a_request_then_silence() {
    let (server, _tcp_store) = serve();
    let mut half = Client::new(&server);
    half.send(&set("key", "value")[..20]);
    let mut client = Client::new(&server);
    client.ask(&get("key"), &text(""));
    half.send(&set("key", "value")[20..]);
    half.ping();
    client.ask(&get("key"), &text("value"));
    // Half a validation is not enough to stay.
    let mut stranger = connect(server.address());
    stranger.write_all(&VALIDATE[..3]).unwrap();
    assert_eq!(read_to_close(stranger), b"");
}

#[test]
fn strangers_do_no_harm() {
    let (server, _tcp_store) = serve();
    let garbage: [&[u8]; 6] = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\0\0",
        &[0, 0xce, 0xf7, 0x85, 0x3d],
        &[0; 100_000],
        &[255; 100_000],
        // Another request before validation.
        &[13, 1, 2, 3, 4],
    ];
    for bytes in garbage {
        let mut stream = connect(server.address());
        let _ = stream.write_all(bytes);
        assert_eq!(read_to_close(stream), b"", "{:?}", &bytes[..bytes.len().min(32)]);
    }
    Client::new(&server).ping();
}

#[test]
fn a_client_that_does_not_read_is_closed() {
    let (server, _tcp_store) = serve();
    let mut client = Client::new(&server);
    let value = "v".repeat(8 << 20);
    client.send(&set("key", &value));
    let mut deaf = Client::new(&server);
    let closed = (0..1_000_000).any(|_| deaf.0.write_all(&get("key")).is_err());
    assert!(closed, "1,000,000 replies of 8 MiB are unread");
    client.ask(&get("key"), &text(&value));
}

#[test]
fn a_client_that_never_ends_its_requests_keeps_nobody_from_his() {
    let (server, _tcp_store) = serve();
    let address = server.address().clone();
    thread::scope(|scope| {
        let mut endless = Client::new(&server);
        let sender = scope.spawn(move || {
            let sent = add("n", 1).repeat(1000);
            let mut sink = endless.0.try_clone().unwrap();
            thread::spawn(move || std::io::copy(&mut sink, &mut std::io::sink()));
            while endless.0.write_all(&sent).is_ok() {}
        });
        let mut client = Client::new(&server);
        for _ in 0..100 {
            client.ping();
        }
        Store::connect(&address, TOKEN, LONG).unwrap().set("key", b"value").unwrap();
        drop((_tcp_store, server));
        sender.join().unwrap();
    });
}

#[test]
fn a_crowd_of_clients_keeps_nobody_from_theirs() {
    const CROWD: usize = 300;
    raise_file_limit();
    let (server, _tcp_store) = serve();
    let keys: Vec<String> = (0..100_000).map(|i| i.to_string()).collect();
    let pairs: Vec<&str> = keys.iter().flat_map(|key| [key, "value"]).collect();
    let mut client = Client::new(&server);
    client.send(&counted(11, keys.len(), &pairs));
    client.ping();
    let mut crowd: Vec<Client> = (0..CROWD).map(|_| Client::new(&server)).collect();
    let (is_over, begin) = (AtomicBool::new(false), Instant::now());
    thread::scope(|scope| {
        scope.spawn(|| {
            // A new key, for which the list of all keys is made anew, and many short requests.
            let sent = [set("new", ""), vec![17], request(8, &["new"]), vec![7; 65_000]].concat();
            crowd.iter_mut().for_each(|client| client.0.set_nonblocking(true).unwrap());
            let mut replies = vec![0; 1 << 20];
            while !is_over.load(Ordering::Relaxed) && begin.elapsed() < 2 * LONG {
                for client in &mut crowd {
                    // Where it ends is of no interest, nor whether the server has had enough of it.
                    let _ = client.0.read(&mut replies);
                    let _ = client.0.write(&sent);
                }
            }
        });
        let store = Store::connect(server.address(), TOKEN, LONG).unwrap();
        for i in 1..=20 {
            assert_eq!(store.add("n", 1).unwrap(), i);
            client.ping();
        }
        assert!(begin.elapsed() < LONG);
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn both_protocols_at_one_port_and_nothing_in_common() {
    let (server, tcp_store) = serve();
    let beside = server.beside("another token").unwrap();
    let store = Store::connect(server.address(), TOKEN, LONG).unwrap();
    let mut client = Client::new(&server);
    store.set("key", b"of Flow").unwrap();
    client.send(&set("key", "of PyTorch"));
    client.ask(&get("key"), &text("of PyTorch"));
    assert_eq!(store.get("key", LONG).unwrap(), b"of Flow");
    client.ask(&request(8, &["key"]), &number(1));
    assert_eq!(store.get("key", LONG).unwrap(), b"of Flow");
    server.set("late", b"");
    beside.set("late", b"");
    client.send(&wait(&["late"]));
    client.ping();
    let error = server.serve_tcp_store().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");

    // Off, on and without what there was, while Flow's clients notice nothing.
    client.send(&set("key", "1"));
    client.ping();
    drop(tcp_store);
    assert_eq!(read_to_close(client.0), b"");
    Client::new(&server).expect_close(&[]);
    assert_eq!(store.get("key", LONG).unwrap(), b"of Flow");
    let tcp_store = beside.serve_tcp_store().unwrap();
    let mut client = Client::new(&server);
    client.ask(&[7], &number(0));

    // It stays when the others are gone, and the address with it.
    let address = server.address().clone();
    drop((server, beside));
    assert!(matches!(store.try_get("key").unwrap_err(), Error::Lost { .. }));
    client.ping();
    assert_eq!(Server::start(&address, TOKEN).unwrap_err().kind(), ErrorKind::AddrInUse);
    drop(tcp_store);
    Server::start(&address, TOKEN).expect("nothing is left");
}

#[test]
fn only_at_tcp_addresses() {
    let address = Address::Unix(format!("flow-test-tcp-store-{}", std::process::id()));
    let error = Server::start(&address, TOKEN).unwrap().serve_tcp_store().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[test]
fn thousands_wait_for_one_key() {
    const WANTED: usize = 4096;
    let most = raise_file_limit();
    // Both ends of each connection are here, and other tests beside this one.
    let count = WANTED.min((most as usize / 2).saturating_sub(1000)).max(100);
    if count < WANTED {
        println!("SKIPPED: {WANTED} clients: the limit on open files is {most}; {count} instead");
    }
    let (server, _tcp_store) = serve();
    let mut clients: Vec<Client> = (0..count).map(|_| Client::new(&server)).collect();
    for _ in 0..3 {
        clients.iter_mut().for_each(|client| client.send(&wait(&["all", "here"])));
        clients.iter_mut().for_each(Client::ping);
        let mut client = Client::new(&server);
        client.send(&[set("all", ""), set("here", "")].concat());
        clients.iter_mut().for_each(|client| client.expect(STOP_WAITING));
        client.ask(&request(8, &["all"]), &number(1));
    }
    clients.iter_mut().for_each(|client| client.send(&wait(&["all"])));
    clients.iter_mut().for_each(|client| client.ask(&cancel(), WAIT_CANCELED));
}

/// The server is in a process of its own, as the limit is the process's.
#[test]
fn file_descriptors_are_left_for_others() {
    const CHILD: &str = "FLOW_TEST_TCP_STORE_FILES";
    if std::env::var_os(CHILD).is_some() {
        let limit = Rlimit { current: Some(100), maximum: Some(100) };
        setrlimit(Resource::Nofile, limit).unwrap();
        let (server, _tcp_store) = serve();
        println!("served at {}", server.address());
        // Until the other process closes it, and whether some files can be opened whenever it says
        // something.
        while std::io::stdin().read_line(&mut String::new()).unwrap() > 0 {
            let files: Result<Vec<File>, _> = (0..10).map(|_| File::open("/dev/null")).collect();
            std::io::stdout().write_all(if files.is_ok() { b"y" } else { b"n" }).unwrap();
            std::io::stdout().flush().unwrap();
        }
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "tcp_store::limits::file_descriptors_are_left_for_others", "--nocapture"])
        .env(CHILD, "1");
    let (mut child, address) = start_server(&mut command);
    let try_one = || {
        let mut client = Client(connect(&address));
        client.0.write_all(&[&VALIDATE[..], &[13, 1, 2, 3, 4]].concat()).ok()?;
        client.0.read_exact(&mut [0; 4]).ok()?;
        Some(client)
    };
    let mut clients: Vec<Client> = (0..100).map_while(|_| try_one()).collect();
    assert_eq!(clients.len(), 50);
    // As many as are accepted of those who say nothing, and the others in the queue.
    let strangers: Vec<TcpStream> = (0..100).map(|_| connect(&address)).collect();
    for _ in 0..2 {
        Store::connect(&address, TOKEN, LONG).unwrap().set("key", b"value").unwrap();
        child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        let mut answer = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut answer).unwrap();
        assert_eq!(answer, *b"y", "there is no file descriptor left");
    }
    drop(strangers);
    clients.iter_mut().for_each(Client::ping);
    clients.pop();
    let begin = Instant::now();
    while try_one().is_none() {
        assert!(begin.elapsed() < LONG, "there is room for one");
    }
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}
