//! Measures how long it takes many clients to join a store on loopback. Each connects, says hello
//! and sets a key of its own. It waits for one that the last of them sets, and gets a value.
//!
//!     cargo run --release -p flow-store --example store_clients [CLIENTS [RUNS]]

mod clients;

use std::env;
use std::process::{Command, Stdio};
use std::time::Duration;

use flow_harness::raise_file_limit;
use flow_store::{Address, Server, Store};
use rustix::time::{ClockId, clock_gettime};

const TOKEN: &str = "0123456789abcdef";
const TIMEOUT: Duration = Duration::from_secs(60);
/// Tells a process that it is one of those, and where the store is.
const STORE: &str = "STORE";

fn main() {
    raise_file_limit();
    let mut numbers = env::args().skip(1).map(|text| text.parse().expect("a number"));
    let clients = numbers.next().unwrap_or(4096);
    let runs = numbers.next().unwrap_or(7);
    if let Ok(address) = env::var(STORE) {
        return join(&address.parse().unwrap(), clients, runs);
    }
    let mut times: Vec<f64> = (0..runs).map(|_| measure(clients)).collect();
    times.sort_by(f64::total_cmp);
    let server = processor_time() / runs as f64;
    println!(
        "{clients} clients, {runs} runs: median {:.2} s, {:.2} to {:.2} s; server's processor time {server:.2} s a run",
        times[runs / 2],
        times[0],
        times[runs - 1]
    );
}

/// Seconds from the start of the first client to the end of the last.
fn measure(clients: usize) -> f64 {
    let server = Server::start(&Address::Tcp("127.0.0.1:0".to_string()), TOKEN).unwrap();
    server.set("value", &[7; 100]);
    let processes = clients::start(clients, |own| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([own.to_string(), clients.to_string()]);
        command.env(STORE, server.address().to_string()).stdin(Stdio::null());
        command
    });
    let store = Store::connect(server.address(), TOKEN, TIMEOUT).unwrap();
    clients::run(&store, processes)
}

/// Seconds that this process, and so the server, has used.
fn processor_time() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// `own` of all `clients`.
fn join(address: &Address, own: usize, clients: usize) {
    let store = Store::connect(address, TOKEN, TIMEOUT).unwrap();
    clients::join(&store, own, || {
        let store = Store::connect(address, TOKEN, TIMEOUT).unwrap();
        let number = store.add("clients", 1).unwrap();
        store.set(&format!("client/{number}"), b"here").unwrap();
        if number as usize == clients {
            store.set("all", b"").unwrap();
        }
        store.wait(&["all"], TIMEOUT).unwrap();
        assert_eq!(store.get("value", TIMEOUT).unwrap(), [7; 100]);
    });
}
