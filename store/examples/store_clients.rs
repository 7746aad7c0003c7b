//! How long it takes many clients to join a store on loopback: each connects, says hello, sets a
//! key of its own, waits for one that the last of them sets, and gets a value.
//!
//!     cargo run --release -p flow-store --example store_clients [CLIENTS [RUNS]]

use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};
use std::{env, thread};

use flow_harness::raise_file_limit;
use flow_store::{Address, Server, Store};
use rustix::time::{ClockId, clock_gettime};

const TOKEN: &str = "0123456789abcdef";
const TIMEOUT: Duration = Duration::from_secs(60);
/// The clients are threads of so many processes, as one might not be allowed so many threads and
/// file descriptors.
const PROCESSES: usize = 4;
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
    let processes: Vec<Child> = (0..PROCESSES)
        .map(|process| {
            let own = clients / PROCESSES + usize::from(process < clients % PROCESSES);
            Command::new(env::current_exe().unwrap())
                .args([own.to_string(), clients.to_string()])
                .env(STORE, server.address().to_string())
                .stdin(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    let store = Store::connect(server.address(), TOKEN, TIMEOUT).unwrap();
    let ready: Vec<String> =
        processes.iter().map(|process| format!("ready/{}", process.id())).collect();
    store.wait(&ready, TIMEOUT).unwrap();
    let begin = Instant::now();
    store.set("begin", b"").unwrap();
    for mut process in processes {
        assert!(process.wait().unwrap().success());
    }
    begin.elapsed().as_secs_f64()
}

/// Seconds that this process, and so the server, has used.
fn processor_time() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// `own` of all `clients`.
fn join(address: &Address, own: usize, clients: usize) {
    let store = Store::connect(address, TOKEN, TIMEOUT).unwrap();
    let barrier = Barrier::new(own + 1);
    let client = || {
        barrier.wait();
        let store = Store::connect(address, TOKEN, TIMEOUT).unwrap();
        let number = store.add("clients", 1).unwrap();
        store.set(&format!("client/{number}"), b"here").unwrap();
        if number as usize == clients {
            store.set("all", b"").unwrap();
        }
        store.wait(&["all"], TIMEOUT).unwrap();
        assert_eq!(store.get("value", TIMEOUT).unwrap(), [7; 100]);
    };
    thread::scope(|scope| {
        for _ in 0..own {
            thread::Builder::new().stack_size(128 << 10).spawn_scoped(scope, client).unwrap();
        }
        store.set(&format!("ready/{}", std::process::id()), b"").unwrap();
        store.wait(&["begin"], TIMEOUT).unwrap();
        barrier.wait();
    });
}
