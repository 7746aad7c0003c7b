//! Many clients that begin at once: threads of several processes, as one process might not be
//! allowed so many threads and file descriptors.

use std::process::{Child, Command};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use flow_store::Store;

const PROCESSES: usize = 4;
const TIMEOUT: Duration = Duration::from_secs(120);

/// Starts the processes. `command` starts one that is to be so many clients.
pub fn start(clients: usize, command: impl Fn(usize) -> Command) -> Vec<Child> {
    let mut processes = Vec::new();
    for process in 0..PROCESSES {
        let own = clients / PROCESSES + usize::from(process < clients % PROCESSES);
        processes.push(command(own).spawn().unwrap());
    }
    processes
}

/// Has all clients begin, by a store where the processes say that they are ready. Returns the
/// seconds until the last one ends.
pub fn run(store: &Store, processes: Vec<Child>) -> f64 {
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

/// Runs `count` of the clients: each a thread that does `client`, once all may begin.
pub fn join(store: &Store, count: usize, client: impl Fn() + Sync) {
    let barrier = Barrier::new(count + 1);
    let from_barrier = || {
        barrier.wait();
        client();
    };
    thread::scope(|scope| {
        for _ in 0..count {
            let small = thread::Builder::new().stack_size(128 << 10);
            small.spawn_scoped(scope, from_barrier).unwrap();
        }
        store.set(&format!("ready/{}", std::process::id()), b"").unwrap();
        store.wait(&["begin"], TIMEOUT).unwrap();
        barrier.wait();
    });
}
