//! The store over real sockets: what its calls do, and what strangers cannot do to it. Here is what
//! the tests share.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use flow_harness::{raise_file_limit, runs_apart};
use flow_store::{Address, Error, Server, Store};
use hmac::{Hmac, Mac};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};

use sha2::Sha256;

mod auth;
mod inbox;
mod replicas;
mod server;
mod values;

const TOKEN: &str = "0123456789abcdef";
const VERSION: u8 = 4;
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

/// Whether a message comes within `timeout`, by the file descriptor.
fn has_message(server: &Server, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).unwrap();
    poll(&mut [PollFd::new(server.inbox(), PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

fn next_message(server: &Server) -> String {
    assert!(has_message(server, LONG), "no message in time");
    String::from_utf8(server.inbox().try_next().expect("it was readable")).unwrap()
}

/// Asserts that no message comes for a while.
fn no_post(server: &Server) {
    assert!(!has_message(server, 4 * SHORT));
    assert_eq!(server.inbox().try_next(), None);
}
