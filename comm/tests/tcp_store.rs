//! PyTorch's TCPStore over real sockets, byte by byte as its clients send it: what each request
//! does, and what a client can do to others.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use flow_comm::store::{Address, Error, Server, Store, TcpStore};
use flow_harness::python::{have, python};
use nix::sys::resource::{getrlimit, setrlimit, Resource};

const TOKEN: &str = "0123456789abcdef";
const LONG: Duration = Duration::from_secs(60);
const VALIDATE: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];
/// What a wait is answered with, and its end before that.
const STOP_WAITING: &[u8] = &[0];
const WAIT_CANCELED: &[u8] = &[1];

fn serve() -> (Server, TcpStore) {
    let server = Server::start(&Address::Tcp("127.0.0.1:0".to_string()), TOKEN).unwrap();
    let tcp_store = server.serve_tcp_store().unwrap();
    (server, tcp_store)
}

fn connect(address: &Address) -> TcpStream {
    let Address::Tcp(host_and_port) = address else { panic!("not served by TCP") };
    let stream = TcpStream::connect(host_and_port).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// A client of PyTorch's, by hand.
struct Client(TcpStream);

impl Client {
    fn new(server: &Server) -> Client {
        Client::at(server.address())
    }

    fn at(address: &Address) -> Client {
        let mut client = Client(connect(address));
        client.send(&VALIDATE);
        client
    }

    fn send(&mut self, wire: &[u8]) {
        self.0.write_all(wire).unwrap();
    }

    #[track_caller]
    fn expect(&mut self, reply: &[u8]) {
        let mut said = vec![0; reply.len()];
        self.0.read_exact(&mut said).unwrap();
        assert_eq!(said, reply);
    }

    #[track_caller]
    fn ask(&mut self, wire: &[u8], reply: &[u8]) {
        self.send(wire);
        self.expect(reply);
    }

    /// Asserts that nothing was said that was not expected.
    #[track_caller]
    fn ping(&mut self) {
        self.ask(&[13, 1, 2, 3, 4], &[1, 2, 3, 4]);
    }

    /// Sends what the server closes the connection for, or has already.
    #[track_caller]
    fn expect_close(mut self, wire: &[u8]) {
        let _ = self.0.write_all(wire);
        assert_eq!(read_to_close(self.0), b"", "{:?}", &wire[..wire.len().min(32)]);
    }
}

#[track_caller]
fn read_to_close(mut stream: TcpStream) -> Vec<u8> {
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Ok(_) => {}
        Err(error) => assert!(
            matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
            "{error}"
        ),
    }
    said
}

/// Starts a process that serves a store until its input ends, and says where.
fn start_server(command: &mut Command) -> (Child, Address) {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let address = BufReader::new(child.stdout.as_mut().unwrap())
        .lines()
        .find_map(|line| {
            line.unwrap().split_once("served at ").map(|(_, address)| address.parse().unwrap())
        })
        .unwrap();
    (child, address)
}

/// A key or value as it is sent.
fn text(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&number(text.len() as i64), text].concat()
}

fn number(number: i64) -> Vec<u8> {
    number.to_le_bytes().to_vec()
}

/// A request of an operation and keys or values.
fn request(operation: u8, texts: &[&str]) -> Vec<u8> {
    let texts: Vec<u8> = texts.iter().flat_map(text).collect();
    [vec![operation], texts].concat()
}

/// A request of an operation, the number of its keys, and these.
fn counted(operation: u8, count: usize, texts: &[&str]) -> Vec<u8> {
    [&[operation], &number(count as i64)[..], &request(0, texts)[1..]].concat()
}

fn set(key: &str, value: &str) -> Vec<u8> {
    request(1, &[key, value])
}

fn get(key: &str) -> Vec<u8> {
    request(3, &[key])
}

fn add(key: &str, amount: i64) -> Vec<u8> {
    [request(4, &[key]), number(amount)].concat()
}

fn wait(keys: &[&str]) -> Vec<u8> {
    counted(6, keys.len(), keys)
}

fn cancel() -> Vec<u8> {
    vec![12]
}

fn push(key: &str, value: &str) -> Vec<u8> {
    request(14, &[key, value])
}

fn barrier(key: &str, world_size: i64) -> Vec<u8> {
    [request(18, &[key]), number(world_size)].concat()
}

/// Every request, with its reply.
fn conversation() -> Vec<(Vec<u8>, Vec<u8>)> {
    let none = Vec::new;
    vec![
        (vec![13, 9, 8, 7, 6], vec![9, 8, 7, 6]),
        (set("a", "1"), none()),
        (get("a"), text("1")),
        (get("missing"), text("")),
        (set("\u{e9}", ""), none()),
        (get("\u{e9}"), text("")),
        (vec![7], number(2)),
        (request(2, &["c", "", "x"]), text("x")),
        (request(2, &["c", "x", "y"]), text("y")),
        (request(2, &["c", "x", "z"]), text("y")),
        (request(2, &["none", "x", "z"]), text("x")),
        (add("n", 40), number(40)),
        (add("n", 2), number(42)),
        (get("n"), text("42")),
        (set("n", i64::MAX.to_string().as_str()), none()),
        (add("n", 1), number(i64::MIN)),
        (counted(5, 2, &["a", "c"]), vec![0]),
        (counted(5, 2, &["a", "none"]), vec![1]),
        (counted(5, 0, &[]), vec![0]),
        (wait(&["a", "c"]), STOP_WAITING.to_vec()),
        (wait(&[]), STOP_WAITING.to_vec()),
        (wait(&["none"]), none()),
        (cancel(), WAIT_CANCELED.to_vec()),
        (request(8, &["c"]), number(1)),
        (request(8, &["c"]), number(0)),
        (request(9, &["l", "one"]), none()),
        (request(9, &["l", "two"]), none()),
        (get("l"), text("onetwo")),
        (counted(11, 2, &["m", "1", "o", "2"]), none()),
        (counted(11, 0, &[]), none()),
        (counted(10, 3, &["o", "none", "m"]), [text("2"), text(""), text("1")].concat()),
        (counted(10, 0, &[]), none()),
        (push("q", "first"), none()),
        (push("q", "second"), none()),
        (request(16, &["q"]), number(2)),
        (counted(5, 1, &["q"]), vec![0]),
        (wait(&["q", "a"]), STOP_WAITING.to_vec()),
        (vec![7], number(6)),
        (request(15, &["q"]), [number(2), text("first")].concat()),
        (request(15, &["q"]), [number(1), text("second")].concat()),
        (request(15, &["q"]), number(0)),
        (request(16, &["q"]), number(0)),
        (counted(5, 1, &["q"]), vec![1]),
        (barrier("b", 1), STOP_WAITING.to_vec()),
        (get("b"), text("1")),
    ]
}

#[test]
fn every_request() {
    let (server, _tcp_store) = serve();
    let mut client = Client::new(&server);
    for (wire, reply) in conversation() {
        println!("{wire:?}");
        client.ask(&wire, &reply);
    }
    let mut single = Client::new(&server);
    let mut keys: Vec<String> = Vec::new();
    single.ask(&[17], &number(7));
    for _ in 0..7 {
        let mut length = [0; 8];
        single.0.read_exact(&mut length).unwrap();
        let mut key = vec![0; u64::from_le_bytes(length) as usize];
        single.0.read_exact(&mut key).unwrap();
        keys.push(String::from_utf8(key).unwrap());
    }
    keys.sort_unstable();
    assert_eq!(keys, ["a", "b", "l", "m", "n", "o", "\u{e9}"]);
}

#[test]
fn pytorchs_server_gives_the_same_replies() {
    const SERVER: &str = "
import sys, torch.distributed as dist
store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
# Its own client leaves nothing.
assert store.num_keys() == 0
print('served at tcp://127.0.0.1:%d' % store.port, flush=True)
sys.stdin.read()
";
    if !have("torch") {
        return;
    }
    let (mut child, address) = start_server(Command::new(python()).args(["-c", SERVER]));
    let mut client = Client::at(&address);
    for (wire, reply) in conversation() {
        // Not before 2.13.
        if wire[0] != 18 && wire != get("b") {
            println!("{wire:?}");
            client.ask(&wire, &reply);
        }
    }
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn requests_may_come_in_one_piece_or_byte_by_byte() {
    let wire: Vec<u8> = conversation().into_iter().flat_map(|(wire, _)| wire).collect();
    let replies: Vec<u8> = conversation().into_iter().flat_map(|(_, reply)| reply).collect();
    for size in [1, 3, wire.len() + VALIDATE.len()] {
        let (server, _tcp_store) = serve();
        let mut client = Client(connect(server.address()));
        [&VALIDATE[..], &wire].concat().chunks(size).for_each(|piece| client.send(piece));
        client.expect(&replies);
        client.ping();
    }
}

#[test]
fn waits_end_with_the_last_key() {
    let (server, _tcp_store) = serve();
    let (mut waiting, mut client) = (Client::new(&server), Client::new(&server));
    waiting.send(&wait(&["a", "b", "b", "c", "d", "q"]));
    client.send(
        &[set("a", ""), request(9, &["b", "x"]), request(2, &["d", "", "y"]), push("q", "z")]
            .concat(),
    );
    client.expect(&text("y"));
    waiting.ping();
    client.ask(&add("c", 1), &number(1));
    waiting.expect(STOP_WAITING);
    waiting.send(&wait(&["e", "f"]));
    waiting.ping();
    client.send(&counted(11, 2, &["e", "", "f", ""]));
    waiting.expect(STOP_WAITING);
}

#[test]
fn a_deleted_key_is_waited_for_until_it_is_set_again() {
    let (server, _tcp_store) = serve();
    let (mut waiting, mut client) = (Client::new(&server), Client::new(&server));
    client.send(&set("key", "1"));
    client.ask(&request(8, &["key"]), &number(1));
    waiting.send(&wait(&["key"]));
    waiting.ping();
    client.ask(&request(8, &["key"]), &number(0));
    waiting.ping();
    client.send(&set("key", "2"));
    waiting.expect(STOP_WAITING);
    waiting.ask(&get("key"), &text("2"));
}

#[test]
fn a_canceled_wait_is_over() {
    let (server, _tcp_store) = serve();
    let (mut waiting, mut client) = (Client::new(&server), Client::new(&server));
    waiting.send(&wait(&["key"]));
    waiting.ask(&cancel(), WAIT_CANCELED);
    client.send(&set("key", ""));
    client.ping();
    waiting.ping();
    // If the reply was under way already, both come.
    waiting.send(&wait(&["other"]));
    waiting.ping();
    client.send(&set("other", ""));
    client.ping();
    waiting.ask(&cancel(), &[STOP_WAITING, WAIT_CANCELED].concat());
    waiting.ask(&cancel(), WAIT_CANCELED);
}

#[test]
fn compare_set_wakes_for_what_it_sets() {
    let (server, _tcp_store) = serve();
    let (mut waiting, mut client) = (Client::new(&server), Client::new(&server));
    waiting.send(&wait(&["key"]));
    waiting.ping();
    client.ask(&request(2, &["key", "not this", "new"]), &text("not this"));
    waiting.ping();
    client.ask(&request(2, &["key", "", "new"]), &text("new"));
    waiting.expect(STOP_WAITING);
}

#[test]
fn queues_wake_one_client_for_each_entry() {
    let (server, _tcp_store) = serve();
    let mut waiting: Vec<Client> = (0..3).map(|_| Client::new(&server)).collect();
    let mut client = Client::new(&server);
    for waiting in &mut waiting {
        waiting.send(&wait(&["q"]));
        waiting.ping();
    }
    for (i, value) in ["a", "b"].iter().enumerate() {
        client.send(&push("q", value));
        waiting[i].expect(STOP_WAITING);
        waiting[i].ask(&request(15, &["q"]), &[number(1), text(value)].concat());
        // Whoever was woken by the queue is not again, whatever he waits for.
        waiting[i].send(&wait(&["another key"]));
        waiting[i].ping();
    }
    waiting[2].ping();
    waiting.swap_remove(2);
    client.send(&[push("q", "c"), push("q", "d"), push("q", "e")].concat());
    client.ask(&request(16, &["q"]), &number(3));
    waiting.iter_mut().for_each(Client::ping);
    client.send(&set("another key", ""));
    waiting.iter_mut().for_each(|waiting| waiting.expect(STOP_WAITING));
}

#[test]
fn a_barrier_holds_until_all_are_there() {
    let (server, _tcp_store) = serve();
    let mut clients: Vec<Client> = (0..4).map(|_| Client::new(&server)).collect();
    for client in &mut clients[..2] {
        client.send(&barrier("b", 4));
        client.ping();
    }
    // One that has given up counts: PyTorch's server does not take it back.
    clients[2].send(&barrier("b", 4));
    clients[2].ask(&cancel(), WAIT_CANCELED);
    clients[3].ask(&barrier("b", 4), STOP_WAITING);
    clients[..2].iter_mut().for_each(|client| client.expect(STOP_WAITING));
    clients[2].ping();
    clients[3].ask(&get("b"), &text("4"));
    clients[3].send(&set("b", "no number"));
    clients.swap_remove(3).expect_close(&barrier("b", 4));
}

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
    for wire in [
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
        Client::new(&server).expect_close(&wire);
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
    let wire = set("dribbled", &value);
    wire.chunks(1000).for_each(|piece| client.send(piece));
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
            let wire = add("n", 1).repeat(1000);
            let mut sink = endless.0.try_clone().unwrap();
            thread::spawn(move || std::io::copy(&mut sink, &mut std::io::sink()));
            while endless.0.write_all(&wire).is_ok() {}
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
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
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
            let wire = [set("new", ""), vec![17], request(8, &["new"]), vec![7; 65_000]].concat();
            crowd.iter_mut().for_each(|client| client.0.set_nonblocking(true).unwrap());
            let mut replies = vec![0; 1 << 20];
            while !is_over.load(Ordering::Relaxed) && begin.elapsed() < 2 * LONG {
                for client in &mut crowd {
                    // Where it ends is of no interest, nor whether the server has had enough of it.
                    let _ = client.0.read(&mut replies);
                    let _ = client.0.write(&wire);
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
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
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
        setrlimit(Resource::RLIMIT_NOFILE, 100, 100).unwrap();
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
        .args(["--exact", "file_descriptors_are_left_for_others", "--nocapture"])
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
