//! The store over real sockets: what its calls do, and what strangers cannot do to it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use flow_comm::store::{Address, Error, Server, Store};
use nix::sys::resource::{setrlimit, Resource};
use rustix::event::{poll, PollFd, PollFlags, Timespec};

const TOKEN: &str = "0123456789abcdef";
/// Longer than anything here takes, so that reaching it is a failure.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(50);

fn serve() -> Server {
    Server::start(&Address::Tcp("127.0.0.1:0".to_string()), TOKEN).unwrap()
}

fn client(server: &Server) -> Store {
    Store::connect(server.address(), TOKEN, LONG).unwrap()
}

/// A connection that is no store client.
fn stranger(server: &Server) -> TcpStream {
    let Address::Tcp(host_and_port) = server.address() else { panic!("not served by TCP") };
    let stream = TcpStream::connect(host_and_port).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// Asserts that the server closes a connection, and returns what it said before.
fn read_to_close(mut stream: TcpStream) -> Vec<u8> {
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
    }
    said
}

/// A request frame as documented in the protocol.
fn frame(payload: &[u8]) -> Vec<u8> {
    [&(payload.len() as u32).to_le_bytes(), payload].concat()
}

fn hello(version: u8, token: &str) -> Vec<u8> {
    frame(&[&[0], &b"FLOW"[..], &[version], &(token.len() as u32).to_le_bytes(), token.as_bytes()].concat())
}

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
            .map(|store| scope.spawn(move || (0..50).map(|_| store.add("n", 1).unwrap()).collect::<Vec<_>>()))
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
        assert!(matches!(error, Error::Rejected { .. }) && error.to_string().contains(reason), "{error}");
    }
    assert_eq!(store.get("text", LONG).unwrap(), b"many");
}

#[test]
fn compare_and_set_has_one_winner() {
    let server = serve();
    let store = client(&server);
    assert_eq!(store.compare_and_set("leader", Some(b"x"), b"y").unwrap(), Err(None));
    let won: Vec<bool> = thread::scope(|scope| {
        let clients: Vec<_> = (0..8u8)
            .map(|i| (i, client(&server)))
            .map(|(i, store)| scope.spawn(move || store.compare_and_set("leader", None, &[i]).unwrap().is_ok()))
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
fn abstract_unix_address() {
    let address: Address = format!("unix://flow-test-{}", std::process::id()).parse().unwrap();
    let error = Store::connect(&address, TOKEN, SHORT).unwrap_err();
    assert!(matches!(error, Error::Connect { .. }) && error.to_string().contains(&address.to_string()), "{error}");
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
    for text in ["tcp://127.0.0.1:29500", "tcp://[::1]:0", "tcp://node-1:80", "unix://flow"] {
        assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
    }
    for text in
        ["", "127.0.0.1:29500", "tcp://", "tcp://host", "tcp://:80", "tcp://host:99999", "unix://", "http://a:1"]
    {
        let error = text.parse::<Address>().unwrap_err();
        assert!(error.to_string().contains("give tcp://HOST:PORT or unix://NAME"), "{error}");
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
fn wrong_tokens_are_refused_at_once() {
    let server = serve();
    for token in ["", "0123456789abcdeX", "0123456789abcdef0", "0"] {
        let error = Store::connect(server.address(), token, LONG).unwrap_err();
        assert!(matches!(error, Error::Denied { .. }) && error.to_string().contains("FLOW_TOKEN"), "{error}");
    }
    let mut stream = stranger(&server);
    stream.write_all(&hello(9, TOKEN)).unwrap();
    let said = read_to_close(stream);
    assert!(String::from_utf8_lossy(&said).contains("version 2"), "{said:?}");
    assert!(Server::start(&Address::Tcp("127.0.0.1:0".to_string()), "").is_err());
}

#[test]
fn garbage_closes_only_its_own_connection() {
    let server = serve();
    let store = client(&server);
    let request_before_hello = frame(&[&[1], &1u32.to_le_bytes()[..], b"k", &1u32.to_le_bytes(), b"v"].concat());
    let garbage: [&[u8]; 7] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 64],
        &[255; 100_000],
        &frame(&[0; 2000]),
        &frame(b"\0WOLF\x01\0\0\0\0"),
        &frame(&[]),
        &request_before_hello,
    ];
    for bytes in garbage {
        let mut stream = stranger(&server);
        // It may be cut off before it has sent everything.
        let _ = stream.write_all(bytes);
        assert_eq!(read_to_close(stream), b"", "{:?}", &bytes[..bytes.len().min(32)]);
    }
    let endless_list = frame(&[&[3][..], &u32::MAX.to_le_bytes()].concat());
    let not_utf8 = frame(&[&[1], &1u32.to_le_bytes()[..], b"\xff", &0u32.to_le_bytes()].concat());
    let too_long = [&((64u32 << 20) + 1).to_le_bytes(), &[0; 100][..]].concat();
    for bytes in [frame(&[77]), endless_list, not_utf8, too_long, hello(2, TOKEN)] {
        let mut stream = stranger(&server);
        stream.write_all(&hello(2, TOKEN)).unwrap();
        let mut done = [0; 5];
        stream.read_exact(&mut done).unwrap();
        assert_eq!(done, [1, 0, 0, 0, 0]);
        let _ = stream.write_all(&bytes);
        assert_eq!(read_to_close(stream), b"", "{:?}", &bytes[..bytes.len().min(32)]);
    }
    assert_eq!(store.try_get("k").unwrap(), None);
}

#[test]
fn half_a_frame_then_silence() {
    let server = serve();
    let mut before_hello = stranger(&server);
    before_hello.write_all(&hello(2, TOKEN)[..9]).unwrap();
    let mut after_hello = stranger(&server);
    after_hello.write_all(&hello(2, TOKEN)).unwrap();
    after_hello.read_exact(&mut [0; 5]).unwrap();
    after_hello.write_all(&frame(&[1; 1000])[..500]).unwrap();
    let store = client(&server);
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key", LONG).unwrap(), b"value");
    assert_eq!(read_to_close(before_hello), b"");
    store.set("key", b"value").unwrap();
}

#[test]
fn idle_strangers_do_not_keep_clients_out() {
    let server = serve();
    let mut strangers: Vec<TcpStream> = (0..700).map(|_| stranger(&server)).collect();
    let store = client(&server);
    assert_eq!(store.add("n", 1).unwrap(), 1);
    // The oldest had to go.
    assert_eq!(read_to_close(strangers.swap_remove(0)), b"");
}

#[test]
fn many_clients() {
    const CLIENTS: usize = 500;
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
            assert!(error.to_string().contains(operation) && error.to_string().contains(&address), "{error}");
        }
        assert!(second.to_string().contains("failed earlier (get \"never\""), "{second}");
    });
    assert!(matches!(idle.try_get("key").unwrap_err(), Error::Lost { .. }));
}

#[test]
fn a_client_that_dies_while_it_waits_is_forgotten() {
    let server = serve();
    let mut stream = stranger(&server);
    stream.write_all(&hello(2, TOKEN)).unwrap();
    stream.read_exact(&mut [0; 5]).unwrap();
    stream.write_all(&frame(&[&[2], &3u32.to_le_bytes()[..], b"key", &60_000_000u64.to_le_bytes()].concat())).unwrap();
    drop(stream);
    let store = client(&server);
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key", LONG).unwrap(), b"value");
}

/// In a process of its own, as the limit is the process's.
#[test]
fn a_server_without_free_file_descriptors_goes_on() {
    const CHILD: &str = "FLOW_TEST_FILE_LIMIT";
    if std::env::var_os(CHILD).is_none() {
        let test = "a_server_without_free_file_descriptors_goes_on";
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--exact", test, "--nocapture"]).env(CHILD, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    setrlimit(Resource::RLIMIT_NOFILE, 100, 100).unwrap();
    let server = serve();
    let first = client(&server);
    // Both ends of each connection count, so the clients reach the limit, too.
    let Address::Tcp(host_and_port) = server.address() else { panic!("not served by TCP") };
    let strangers: Vec<TcpStream> = (0..100).map_while(|_| TcpStream::connect(host_and_port).ok()).collect();
    assert!(strangers.len() < 100);
    assert_eq!(first.add("n", 1).unwrap(), 1);
    drop(strangers);

    let more: Vec<Store> = (0..100).map_while(|_| Store::connect(server.address(), TOKEN, 10 * SHORT).ok()).collect();
    assert!(more.len() < 100);
    assert_eq!(first.add("n", 1).unwrap(), 2);
    drop(more);
    assert_eq!(client(&server).add("n", 1).unwrap(), 3);
}

/// Whether a post comes within `timeout`, by the file descriptor.
fn has_post(server: &Server, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).unwrap();
    poll(&mut [PollFd::new(server.posts(), PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

fn next_post(server: &Server) -> String {
    assert!(has_post(server, LONG), "no post in time");
    String::from_utf8(server.posts().try_next().expect("it was readable")).unwrap()
}

/// Asserts that nothing is posted for a while.
fn no_post(server: &Server) {
    assert!(!has_post(server, 4 * SHORT));
    assert_eq!(server.posts().try_next(), None);
}

#[test]
fn posts_arrive_in_order() {
    let server = serve();
    no_post(&server);
    let store = client(&server);
    for message in ["a", "", "c"] {
        store.post(message.as_bytes()).unwrap();
    }
    for message in ["a", "", "c"] {
        assert_eq!(next_post(&server), message);
    }
    no_post(&server);
    store.post(b"d").unwrap();
    assert_eq!(next_post(&server), "d");
}

#[test]
fn posts_that_nobody_reads_are_refused_at_some_point() {
    let server = serve();
    let store = client(&server);
    store.will(b"gone", LONG).unwrap();
    let message = vec![0; 20 << 20];
    let error = (0..10).find_map(|_| store.post(&message).err()).expect("200 MiB unread");
    assert!(matches!(error, Error::Rejected { .. }) && error.to_string().contains("unread"), "{error}");
    // The will that was accepted is executed even so.
    drop(store);
    while next_post(&server) != "gone" {}
    let store = client(&server);
    let error = (0..100_000).find_map(|_| store.post(b"").err()).expect("100,000 unread");
    assert!(matches!(error, Error::Rejected { .. }), "{error}");
    assert!(matches!(store.will(b"gone", LONG).unwrap_err(), Error::Rejected { .. }));
    assert!(matches!(store.will(&vec![0; 100_000], LONG).unwrap_err(), Error::Rejected { .. }));
    store.set("key", b"the connection stays usable").unwrap();
}

#[test]
fn a_will_is_executed_once_when_its_connection_ends() {
    let server = serve();
    let store = client(&server);
    store.will(b"not this", LONG).unwrap();
    store.will(b"gone", LONG).unwrap();
    no_post(&server);
    drop(store);
    assert_eq!(next_post(&server), "gone");
    let store = client(&server);
    store.will(b"not this", LONG).unwrap();
    store.will(b"", LONG).unwrap();
    drop(store);
    no_post(&server);
    // A client that is cut off for what it sends, and one that dies while it waits.
    for then in [frame(&[77]), frame(&[&[2], &3u32.to_le_bytes()[..], b"key", &60_000_000u64.to_le_bytes()].concat())] {
        let mut stream = stranger(&server);
        for request in [hello(2, TOKEN), frame(&will("gone", LONG))] {
            stream.write_all(&request).unwrap();
            stream.read_exact(&mut [0; 5]).unwrap();
        }
        stream.write_all(&then).unwrap();
        drop(stream);
        assert_eq!(next_post(&server), "gone");
    }
    no_post(&server);
}

fn will(message: &str, silence: Duration) -> Vec<u8> {
    let silence = silence.as_micros() as u64;
    [&[7], &(message.len() as u32).to_le_bytes()[..], message.as_bytes(), &silence.to_le_bytes()].concat()
}

#[test]
fn a_will_is_executed_when_its_client_is_silent() {
    let server = serve();
    let (idle, waiting, alive) = (client(&server), client(&server), client(&server));
    let silence = 60 * SHORT;
    alive.will(b"alive", silence).unwrap();
    idle.will(b"idle", 4 * SHORT).unwrap();
    let begin = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            waiting.will(b"waiting", silence).unwrap();
            waiting.get("never", LONG).unwrap_err()
        });
        let mut gone = Vec::new();
        while gone.len() < 2 {
            assert!(begin.elapsed() < LONG);
            alive.get("never", 2 * SHORT).unwrap_err();
            gone.extend(server.posts().try_next());
        }
        assert_eq!(gone, [&b"idle"[..], b"waiting"]);
        assert!(begin.elapsed() >= silence);
    });
    assert!(matches!(idle.try_get("key").unwrap_err(), Error::Lost { .. }));
    drop(alive);
    assert_eq!(next_post(&server), "alive");
}

#[test]
fn patience_ends() {
    // Like a server whose machine is stopped: it takes the connection, says done to hello, and no more.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap().to_string());
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&[1, 0, 0, 0, 0]).unwrap();
        stream
    });
    let store = Store::connect(&address, TOKEN, LONG).unwrap();
    let _stream = server.join().unwrap();
    store.set_patience(2 * SHORT);
    let begin = Instant::now();
    let error = store.get("key", SHORT).unwrap_err();
    assert!(matches!(error, Error::Lost { .. }) && begin.elapsed() >= 3 * SHORT, "{error}");
}
