//! PyTorch's TCPStore over real sockets, byte by byte as its clients send it: what each request
//! does, and what a client can do to others. Here is what the tests share.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use flow_harness::python::{have, python, startup};
use flow_harness::raise_file_limit;
use flow_store::{Address, Error, Server, Store, TcpStoreServer};
use rustix::process::{Resource, Rlimit, setrlimit};

mod limits;
mod requests;

const TOKEN: &str = "0123456789abcdef";
const LONG: Duration = Duration::from_secs(60);
const VALIDATE: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];
/// What a wait is answered with, and its end before that.
const STOP_WAITING: &[u8] = &[0];
const WAIT_CANCELED: &[u8] = &[1];

fn serve() -> (Server, TcpStoreServer) {
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

    fn send(&mut self, sent: &[u8]) {
        self.0.write_all(sent).unwrap();
    }

    #[track_caller]
    fn expect(&mut self, reply: &[u8]) {
        let mut said = vec![0; reply.len()];
        self.0.read_exact(&mut said).unwrap();
        assert_eq!(said, reply);
    }

    #[track_caller]
    fn ask(&mut self, sent: &[u8], reply: &[u8]) {
        self.send(sent);
        self.expect(reply);
    }

    /// Asserts that nothing was said that was not expected.
    #[track_caller]
    fn ping(&mut self) {
        self.ask(&[13, 1, 2, 3, 4], &[1, 2, 3, 4]);
    }

    /// Sends what the server closes the connection for, or has already.
    #[track_caller]
    fn expect_close(mut self, sent: &[u8]) {
        let _ = self.0.write_all(sent);
        assert_eq!(read_to_close(self.0), b"", "{:?}", &sent[..sent.len().min(32)]);
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
