//! What the store's server writes to the log, which clients cause and which perhaps nobody reads.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use flow_harness::runs_apart;
use flow_store::{Address, Server};
use log::{LevelFilter, Log, Metadata, Record};

const TOKEN: &str = "0123456789abcdef";
const LONG: Duration = Duration::from_secs(60);

/// A log that is no longer read once it is `stuck`, as a pipe can be.
struct Unread {
    lines: AtomicUsize,
    stuck: AtomicBool,
}

static LOG: Unread = Unread { lines: AtomicUsize::new(0), stuck: AtomicBool::new(false) };

impl Log for Unread {
    fn enabled(&self, _metadata: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        println!("{}", record.args());
        self.lines.fetch_add(1, SeqCst);
        while self.stuck.load(SeqCst) {
            thread::park();
        }
    }

    fn flush(&self) {}
}

/// A client of PyTorch's that asks for much and reads nothing.
fn deaf(address: &Address) -> TcpStream {
    let Address::Tcp(host_and_port) = address else { panic!("not served by TCP") };
    let mut stream = TcpStream::connect(host_and_port).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let key = [&1u64.to_le_bytes()[..], b"k"].concat();
    let value = [&(8u64 << 20).to_le_bytes()[..], &vec![0; 8 << 20]].concat();
    let get = [&[3][..], &key].concat();
    let sent = [&[0, 0xce, 0xf7, 0x85, 0x3c, 1][..], &key, &value, &get.repeat(8)].concat();
    stream.write_all(&sent).unwrap();
    stream
}

#[test]
fn a_log_that_nobody_reads_stops_nobody() {
    if runs_apart(a_log_that_nobody_reads_stops_nobody, &[]) {
        return;
    }
    log::set_logger(&LOG).unwrap();
    log::set_max_level(LevelFilter::Warn);
    let serve = || {
        let server = Server::start(&Address::Tcp("127.0.0.1:0".to_string()), TOKEN).unwrap();
        let tcp_store = server.serve_tcp_store().unwrap();
        (server, tcp_store)
    };

    let (server, tcp_store) = serve();
    for _ in 0..5 {
        // To its end, where the server has closed it.
        let _ = deaf(server.address()).read_to_end(&mut Vec::new());
    }
    assert_eq!(LOG.lines.load(SeqCst), 1, "a complaint is made once");
    drop((server, tcp_store));

    LOG.stuck.store(true, SeqCst);
    let (server, tcp_store) = serve();
    let _deaf = deaf(server.address());
    let begin = Instant::now();
    while LOG.lines.load(SeqCst) < 2 {
        assert!(begin.elapsed() < LONG, "no complaint");
        thread::sleep(Duration::from_millis(1));
    }
    drop((server, tcp_store));
    assert!(begin.elapsed() < LONG);
}
