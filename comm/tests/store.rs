//! The store over real sockets: what its calls do, and what strangers cannot do to it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use flow_comm::store::{Address, Error, Server, Store};
use hmac::{Hmac, Mac};
use nix::sys::resource::{getrlimit, setrlimit, Resource};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::process::{kill_process, Pid, Signal};
use sha2::Sha256;

const TOKEN: &str = "0123456789abcdef";
const VERSION: u8 = 3;
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

/// For the tests with many connections; returns the limit.
fn raise_file_limit() -> u64 {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
    most
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

fn hello(version: u8) -> Vec<u8> {
    frame(&[&[0], &b"FLOW"[..], &[version]].concat())
}

/// Sends a request and reads the frame that answers it, without its length.
fn ask(stream: &mut TcpStream, request: &[u8]) -> Vec<u8> {
    stream.write_all(request).unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut reply = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut reply).unwrap();
    reply
}

/// The answer to the server's challenge.
fn proof(challenge: &[u8], token: &str) -> Vec<u8> {
    assert_eq!((challenge[0], challenge.len()), (6, 17));
    let mac = Hmac::<Sha256>::new_from_slice(token.as_bytes())
        .unwrap()
        .chain_update(&challenge[1..])
        .finalize();
    frame(&[&[8], &32u32.to_le_bytes()[..], &mac.into_bytes()].concat())
}

/// A client by hand.
fn admitted(server: &Server) -> TcpStream {
    let mut stream = stranger(server);
    let challenge = ask(&mut stream, &hello(VERSION));
    assert_eq!(ask(&mut stream, &proof(&challenge, TOKEN)), [0]);
    stream
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
fn wrong_tokens_are_refused_at_once() {
    let server = serve();
    for token in ["", "0123456789abcdeX", "0123456789abcdef0", "0"] {
        let error = Store::connect(server.address(), token, LONG).unwrap_err();
        assert!(
            matches!(error, Error::Denied { .. }) && error.to_string().contains("FLOW_TOKEN"),
            "{error}"
        );
    }
    let mut stream = stranger(&server);
    let said = ask(&mut stream, &hello(9));
    assert_eq!(read_to_close(stream), b"");
    assert!(String::from_utf8_lossy(&said).contains(&format!("version {VERSION} of")), "{said:?}");
    assert!(Server::start(&Address::Tcp("127.0.0.1:0".to_string()), "").is_err());
}

#[test]
fn garbage_closes_only_its_own_connection() {
    let server = serve();
    let store = client(&server);
    let request_before_hello =
        frame(&[&[1], &1u32.to_le_bytes()[..], b"k", &1u32.to_le_bytes(), b"v"].concat());
    let garbage: [&[u8]; 7] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 64],
        &[255; 100_000],
        &frame(&[0; 2000]),
        &frame(b"\0WOLF\x02"),
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
    for bytes in [frame(&[77]), endless_list, not_utf8, too_long, hello(VERSION)] {
        let mut stream = admitted(&server);
        let _ = stream.write_all(&bytes);
        assert_eq!(read_to_close(stream), b"", "{:?}", &bytes[..bytes.len().min(32)]);
    }
    assert_eq!(store.try_get("k").unwrap(), None);
}

#[test]
fn half_a_frame_then_silence() {
    let server = serve();
    let mut before_hello = stranger(&server);
    before_hello.write_all(&hello(VERSION)[..7]).unwrap();
    let mut before_proof = stranger(&server);
    let challenge = ask(&mut before_proof, &hello(VERSION));
    before_proof.write_all(&proof(&challenge, TOKEN)[..20]).unwrap();
    let mut admitted = admitted(&server);
    admitted.write_all(&frame(&[1; 1000])[..500]).unwrap();
    let store = client(&server);
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key", LONG).unwrap(), b"value");
    assert_eq!(read_to_close(before_hello), b"");
    assert_eq!(read_to_close(before_proof), b"");
    store.set("key", b"value").unwrap();
}

#[test]
fn idle_strangers_do_not_keep_clients_out() {
    const WANTED: usize = 10_000;
    /// What the server and the tests beside this one need.
    const OTHERS: usize = 5_000;
    let most = raise_file_limit();
    let count = WANTED.min((most as usize).saturating_sub(OTHERS)).max(700);
    if count < WANTED {
        println!("SKIPPED: {WANTED} idle connections: the limit on open files is {most}; {count} instead");
    }
    let server = serve();
    let before = client(&server);
    let mut strangers: Vec<TcpStream> = (0..count)
        .map(|i| {
            if i % 100 == 0 {
                before.add("n", 1).unwrap();
            }
            stranger(&server)
        })
        .collect();
    let begin = Instant::now();
    let store = client(&server);
    println!("a client got in after {:?}, past {count} idle connections", begin.elapsed());
    assert_eq!(store.add("n", 1).unwrap(), (count / 100) as i64 + 1);
    // The oldest had to go.
    assert_eq!(read_to_close(strangers.swap_remove(0)), b"");
}

#[test]
fn strangers_that_come_and_go_or_dribble() {
    let server = serve();
    let store = client(&server);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = stranger(&server);
            // In time, a hello may come byte by byte.
            for byte in hello(VERSION) {
                stream.write_all(&[byte]).unwrap();
                thread::sleep(SHORT);
            }
            let challenge = ask(&mut stream, &[]);
            assert_eq!(ask(&mut stream, &proof(&challenge, TOKEN)), [0]);
        });
        scope.spawn(|| {
            let mut stream = stranger(&server);
            // Not so if it takes forever.
            let huge = [&60u32.to_le_bytes()[..], &[0; 60]].concat();
            assert!(huge.iter().any(|byte| {
                thread::sleep(10 * SHORT);
                stream.write_all(&[*byte]).is_err()
            }));
        });
        for _ in 0..1000 {
            drop(stranger(&server));
        }
        store.set("key", b"value").unwrap();
        assert_eq!(client(&server).get("key", LONG).unwrap(), b"value");
    });
}

#[test]
fn a_proof_is_good_for_its_own_challenge_only() {
    let server = serve();
    let mut heard = stranger(&server);
    let challenge = ask(&mut heard, &hello(VERSION));
    let mut stream = stranger(&server);
    ask(&mut stream, &hello(VERSION));
    let said = ask(&mut stream, &proof(&challenge, TOKEN));
    assert!(String::from_utf8_lossy(&said).contains("wrong token"), "{said:?}");
    assert_eq!(read_to_close(stream), b"");
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
    b.post(b"post").unwrap();
    assert_eq!(next_post(&beside), "post");
    b.will(b"gone", LONG).unwrap();
    drop(b);
    assert_eq!(next_post(&beside), "gone");
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
    const CHILD: &str = "FLOW_TEST_FILE_LIMIT";
    if std::env::var_os(CHILD).is_none() {
        let test = "a_server_without_free_file_descriptors_goes_on";
        let mut command = Command::new(std::env::current_exe().unwrap());
        let output =
            command.args(["--exact", test, "--nocapture"]).env(CHILD, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    setrlimit(Resource::RLIMIT_NOFILE, 100, 100).unwrap();
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

/// Whether a post comes within `timeout`, by the file descriptor.
fn has_post(server: &Server, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).unwrap();
    poll(&mut [PollFd::new(server.inbox(), PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

fn next_post(server: &Server) -> String {
    assert!(has_post(server, LONG), "no post in time");
    String::from_utf8(server.inbox().try_next().expect("it was readable")).unwrap()
}

/// Asserts that nothing is posted for a while.
fn no_post(server: &Server) {
    assert!(!has_post(server, 4 * SHORT));
    assert_eq!(server.inbox().try_next(), None);
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
    assert!(
        matches!(error, Error::Rejected { .. }) && error.to_string().contains("unread"),
        "{error}"
    );
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
    for then in [
        frame(&[77]),
        frame(&[&[2], &3u32.to_le_bytes()[..], b"key", &60_000_000u64.to_le_bytes()].concat()),
    ] {
        let mut stream = admitted(&server);
        assert_eq!(ask(&mut stream, &frame(&will("gone", LONG))), [0]);
        stream.write_all(&then).unwrap();
        drop(stream);
        assert_eq!(next_post(&server), "gone");
    }
    no_post(&server);
}

fn will(message: &str, silence: Duration) -> Vec<u8> {
    let silence = silence.as_micros() as u64;
    [&[7], &(message.len() as u32).to_le_bytes()[..], message.as_bytes(), &silence.to_le_bytes()]
        .concat()
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
            gone.extend(server.inbox().try_next());
        }
        assert_eq!(gone, [&b"idle"[..], b"waiting"]);
        assert!(begin.elapsed() >= silence);
    });
    assert!(matches!(idle.try_get("key").unwrap_err(), Error::Lost { .. }));
    drop(alive);
    assert_eq!(next_post(&server), "alive");
}

/// A server whose process was stopped for longer than a client may be silent has not heard it, but
/// it was not silent.
#[test]
fn a_stopped_server_takes_no_client_for_silent() {
    const CHILD: &str = "FLOW_TEST_STOPPED_SERVER";
    const SILENCE: Duration = Duration::from_secs(2);
    if std::env::var_os(CHILD).is_some() {
        let server = serve();
        println!("served at {}", server.address());
        loop {
            let message = next_post(&server);
            server.set("posted", message.as_bytes());
        }
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "a_stopped_server_takes_no_client_for_silent", "--nocapture"])
        .env(CHILD, "1");
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let address = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .find_map(|line| {
            line.unwrap().split_once("served at ").map(|(_, address)| address.parse().unwrap())
        })
        .unwrap();
    let connect = || Store::connect(&address, TOKEN, LONG).unwrap();
    let signal = |signal| kill_process(Pid::from_child(&child), signal).unwrap();
    let (waiting, asking, end) = (connect(), connect(), AtomicBool::new(false));
    for store in [&waiting, &asking] {
        store.will(b"gone", SILENCE).unwrap();
        store.set_reply_timeout(LONG);
    }
    thread::scope(|scope| {
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                waiting.get("never", 2 * SHORT).unwrap_err();
            }
        });
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                asking.try_get("never").unwrap();
                thread::sleep(SHORT);
            }
        });
        thread::sleep(4 * SHORT);
        signal(Signal::STOP);
        thread::sleep(2 * SILENCE);
        signal(Signal::CONT);
        thread::sleep(4 * SHORT);
        end.store(true, Ordering::Relaxed);
    });
    for store in [&waiting, &asking] {
        assert_eq!(store.try_get("posted").unwrap(), None);
    }
    drop(waiting);
    assert_eq!(asking.get("posted", LONG).unwrap(), b"gone");
    child.kill().unwrap();
    child.wait().unwrap();
}

/// As soon as the address is there, when there is no store yet.
#[test]
fn who_comes_while_the_server_starts_is_admitted() {
    for i in 0..300 {
        let name = format!("flow-test-start-{}-{i}", std::process::id());
        let (address, socket) =
            (Address::Unix(name.clone()), SocketAddr::from_abstract_name(&name).unwrap());
        thread::scope(|scope| {
            let clients: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        while UnixStream::connect_addr(&socket).is_err() {}
                        Store::connect(&address, TOKEN, LONG).map(drop)
                    })
                })
                .collect();
            let _server = Server::start(&address, TOKEN).unwrap();
            clients.into_iter().for_each(|client| client.join().unwrap().unwrap());
        });
    }
}

#[test]
fn patience_ends() {
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
