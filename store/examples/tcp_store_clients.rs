//! Measures how long it takes many of PyTorch's clients to join a TCPStore on loopback, with our
//! server and with PyTorch's. Each connects, validates, pings and counts itself. It waits for a key
//! that the last of them sets, and gets it.
//!
//!     cargo run --release -p flow-store --example tcp_store_clients [CLIENTS [RUNS]]
//!
//! Each server is in a process of its own. The clients are the same for both, and not in Python,
//! which would be the most of it. The servers take turns, and which comes first in each. PYTHON
//! names an interpreter that has PyTorch.

mod clients;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use std::{env, fs, thread};

use flow_harness::raise_file_limit;
use flow_store::{Address, Server, Store};

const TOKEN: &str = "0123456789abcdef";
const TIMEOUT: Duration = Duration::from_secs(120);
/// What a process is for that this program has started: to serve, or to be clients.
const ROLE: &str = "ROLE";
/// It looks up the name of each client. On an IPv4 socket that is answered by /etc/hosts; else a
/// name server would be asked.
const PYTORCHS: &str = "
import socket, sys, torch.distributed as dist
listener = socket.create_server(('127.0.0.1', 0))
port = listener.getsockname()[1]
listen_fd = listener.detach()
store = dist.TCPStore('127.0.0.1', port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd)
print(store.port, flush=True)
sys.stdin.read()
";

fn main() {
    raise_file_limit();
    let arguments: Vec<String> = env::args().skip(1).collect();
    let clients = arguments.first().map_or(4096, |text| text.parse().expect("a number"));
    let runs = arguments.get(1).map_or(7, |text| text.parse().expect("a number"));
    match env::var(ROLE).as_deref() {
        Ok("server") => return serve(),
        Ok("clients") => return join(&arguments[2], &arguments[3], clients, runs),
        _ => {}
    }
    let names = ["ours", "PyTorch's"];
    let mut results = [Vec::new(), Vec::new()];
    for run in 0..runs {
        for which in [run % 2, 1 - run % 2] {
            let result = measure(clients, which == 0);
            println!(
                "run {run}: {:>9} {:.2} s, of which its processor {:.2} s",
                names[which], result.0, result.1
            );
            results[which].push(result);
        }
    }
    for (name, results) in names.iter().zip(results) {
        let (mut times, mut processor): (Vec<f64>, Vec<f64>) = results.into_iter().unzip();
        times.sort_by(f64::total_cmp);
        processor.sort_by(f64::total_cmp);
        println!(
            "{name:>9}: {clients} clients, {runs} runs: median {:.2} s, {:.2} to {:.2} s; server's processor time {:.2} s",
            times[runs / 2],
            times[0],
            times[runs - 1],
            processor[runs / 2]
        );
    }
}

/// Seconds from the start of the first client to the end of the last, and the server's processor
/// time.
fn measure(clients: usize, is_ours: bool) -> (f64, f64) {
    let mut command = if is_ours {
        let mut command = Command::new(env::current_exe().unwrap());
        command.env(ROLE, "server");
        command
    } else {
        let mut command = Command::new(env::var("PYTHON").unwrap_or_else(|_| "python3".into()));
        command.args(["-c", PYTORCHS]);
        command
    };
    let mut server = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut port = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut port).unwrap();
    let port: u16 = port.trim().parse().expect("PYTHON must have PyTorch");
    let before = processor_time(&server);

    let rendezvous = Server::start(&Address::Tcp("127.0.0.1:0".to_string()), TOKEN).unwrap();
    let processes = clients::start(clients, |own| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([own.to_string(), clients.to_string()]);
        command.args([rendezvous.address().to_string(), port.to_string()]).env(ROLE, "clients");
        command
    });
    let store = Store::connect(rendezvous.address(), TOKEN, TIMEOUT).unwrap();
    let elapsed = clients::run(&store, processes);
    let used = processor_time(&server) - before;
    drop(server.stdin.take());
    assert!(server.wait().unwrap().success());
    (elapsed, used)
}

/// Seconds that a process has used.
fn processor_time(process: &Child) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks: f64 = fields[11..13].iter().map(|field| field.parse::<f64>().unwrap()).sum();
    ticks / 100.0
}

/// Serves until the input ends.
fn serve() {
    let server = Server::start(&Address::Tcp("127.0.0.1:0".to_string()), TOKEN).unwrap();
    let _tcp_store = server.serve_tcp_store().unwrap();
    println!("{}", server.address().to_string().rsplit_once(':').unwrap().1);
    io::stdin().read_line(&mut String::new()).unwrap();
}

/// `own` of all `clients`.
fn join(rendezvous: &str, port: &str, own: usize, clients: usize) {
    let port: u16 = port.parse().unwrap();
    let store = Store::connect(&rendezvous.parse().unwrap(), TOKEN, TIMEOUT).unwrap();
    clients::join(&store, own, || {
        let mut stream = loop {
            // As PyTorch's client, it tries again where the server's queue is full.
            match connect(port) {
                Ok(stream) => break stream,
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        };
        // 4 add: the sum.
        let mut sum = [0; 8];
        ask(&mut stream, &[&[4], &key("clients")[..], &1i64.to_le_bytes()].concat(), &mut sum)
            .unwrap();
        if i64::from_le_bytes(sum) == clients as i64 {
            // 1 set: no reply.
            stream.write_all(&[&[1], &key("all")[..], &key("here")].concat()).unwrap();
        }
        // 6 wait: 0 when it is there; 3 get: the value.
        let mut done = [9];
        ask(&mut stream, &[&[6], &1u64.to_le_bytes()[..], &key("all")].concat(), &mut done)
            .unwrap();
        assert_eq!(done, [0]);
        let mut value = [0; 12];
        ask(&mut stream, &[&[3], &key("all")[..]].concat(), &mut value).unwrap();
        assert_eq!(value[..], key("here"));
    });
}

/// Connects, validates and pings.
fn connect(port: u16) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(&[0, 0xce, 0xf7, 0x85, 0x3c])?;
    let mut nonce = [0; 4];
    ask(&mut stream, &[13, 1, 2, 3, 4], &mut nonce)?;
    Ok(stream)
}

fn ask(stream: &mut TcpStream, request: &[u8], reply: &mut [u8]) -> io::Result<()> {
    stream.write_all(request)?;
    stream.read_exact(reply)
}

/// A key or a value as it is sent.
fn key(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}
