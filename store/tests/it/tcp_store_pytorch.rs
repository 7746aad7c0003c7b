//! PyTorch's own clients, and the store that we serve them: they cannot tell it from PyTorch's
//! server. PYTHON names an interpreter that has PyTorch, if python3 has none.

use std::process::{Child, Command, Output, Stdio};

use flow_harness::python::{have, python, startup};
use flow_store::{Address, Server, TcpStoreServer};

/// A store for PyTorch's clients, and its port.
fn serve() -> (Server, TcpStoreServer, String) {
    let server =
        Server::start(&Address::Tcp("127.0.0.1:0".to_string()), "0123456789abcdef").unwrap();
    let tcp_store = server.serve_tcp_store().unwrap();
    let Address::Tcp(host_and_port) = server.address() else { panic!("not served by TCP") };
    let port = host_and_port.rsplit_once(':').unwrap().1.to_string();
    (server, tcp_store, port)
}

/// A Python program of the folder `pytorch`.
fn script(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(python());
    command.arg(format!("{}/tests/pytorch/{name}", env!("CARGO_MANIFEST_DIR"))).args(arguments);
    command.env("PYTHONPATH", startup());
    command
}

/// What a program has printed; it must have succeeded.
fn printed(output: Output) -> String {
    let [stdout, stderr] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "{stdout}{stderr}");
    stdout
}

fn start(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn all_methods_do_what_they_do_with_pytorchs_server() {
    if !have("torch") {
        return;
    }
    for use_libuv in ["1", "0"] {
        let theirs = start(script("store_methods.py", &[use_libuv]));
        let (_server, _tcp_store, port) = serve();
        let ours =
            printed(script("store_methods.py", &[use_libuv, "127.0.0.1", &port]).output().unwrap());
        let theirs = printed(theirs.wait_with_output().unwrap());
        assert!(theirs.lines().count() > 60, "{theirs}");
        for (ours, theirs) in ours.lines().zip(theirs.lines()) {
            assert_eq!(ours, theirs, "use_libuv {use_libuv}");
        }
        assert_eq!(ours.lines().count(), theirs.lines().count());
    }
}

/// As torchrun's workers do: all of them are clients, also rank 0.
#[test]
fn gloo_groups_meet_through_it() {
    const RANKS: usize = 2;
    if !have("torch") {
        return;
    }
    for how in ["store", "tcp", "env"] {
        // All of them use the same keys.
        let (_server, _tcp_store, port) = serve();
        let workers: Vec<Child> = (0..RANKS)
            .map(|rank| {
                let (rank, ranks) = (rank.to_string(), RANKS.to_string());
                let mut command =
                    script("store_join.py", &[how, &rank, &ranks, "127.0.0.1", &port]);
                command.env("TORCHELASTIC_USE_AGENT_STORE", "True");
                start(command)
            })
            .collect();
        for (rank, worker) in workers.into_iter().enumerate() {
            let expected = format!("{rank} of [{{'rank': 0}}, {{'rank': 1}}]\n");
            assert_eq!(printed(worker.wait_with_output().unwrap()), expected, "{how}");
        }
    }
}
