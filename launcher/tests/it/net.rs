//! The machines that tests of several nodes run on.

use flow_harness::cli::{is_alive, run, until};
use flow_harness::net::{Net, ipv4, ipv6};

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::Duration;

fn connects(net: &Net, from: usize, address: &str) -> Result<(), ErrorKind> {
    let address = address.parse().unwrap();
    net.within(from, || {
        // Long enough to send a lost packet again.
        TcpStream::connect_timeout(&address, Duration::from_secs(3)).map(drop).map_err(|e| e.kind())
    })
}

#[test]
fn nodes_reach_each_other_until_a_link_is_cut() {
    let Some(net) = Net::new(3) else { return };
    for address in [format!("{}:500", ipv4(0)), format!("[{}]:500", ipv6(0))] {
        assert_eq!(connects(&net, 1, &address), Err(ErrorKind::ConnectionRefused));
        let _listener = net.within(0, || TcpListener::bind(&address).unwrap());
        assert_eq!([0, 1, 2].map(|node| connects(&net, node, &address)), [Ok(()); 3]);
        net.cut(1);
        assert_eq!(connects(&net, 1, &address), Err(ErrorKind::TimedOut));
        assert_eq!(connects(&net, 2, &address), Ok(()));
        net.restore(1);
        until("the link is back", || connects(&net, 1, &address).is_ok());
    }
}

#[test]
fn a_node_is_a_machine_of_its_own() {
    let Some(net) = Net::new(2) else { return };
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "echo $VALUE >&2; hostname; ls /dev/shm; touch /dev/shm/mine; getent hosts node0; sleep \
         1000",
    ]);
    let agent = net.start(1, command.env("VALUE", "passed on"));
    agent.until_says(&["node1", &format!("{}        node0", ipv4(0))]);
    until("it sleeps", || net.processes(1).len() == 2);
    assert!(net.processes(1).contains(&agent.pid) && net.processes(0).is_empty());
    net.power_off(1);
    let finished = agent.finish();
    assert_eq!((finished.code, finished.stderr.as_str()), (None, "passed on\n"));
    assert!(run(Command::new("ls").arg("/dev/shm/mine")).code != Some(0));
}

/// As when the test is killed: nothing of it runs any more.
#[test]
fn a_net_goes_with_its_thread() {
    let made = thread::spawn(|| {
        let net = Net::new(1)?;
        let pid = net.start(0, Command::new("sleep").arg("1000")).pid;
        std::mem::forget(net);
        Some(pid)
    });
    let Some(pid) = made.join().unwrap() else { return };
    until("its processes are gone", || !is_alive(pid));
}
