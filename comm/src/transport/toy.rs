//! A second transport over TCP, as plain as can be: it shows, and tests, that a transport is a file
//! and a line in the table. It trusts whoever connects.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::queue::QueuePair;
use super::{Connections, DisconnectReason, PeerDown, Transport};
use crate::bootstrap::PeerInfo;
use crate::env::Membership;

struct ToyTransport {
    rank: usize,
    peers: Vec<SocketAddr>,
    incoming: Arc<Incoming>,
}

struct Incoming {
    listener: TcpListener,
    /// Connections that have come, by channel and rank.
    accepted: Mutex<HashMap<String, TcpStream>>,
}

pub fn open(membership: &Membership) -> Result<Box<dyn Transport>, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|e| e.to_string())?;
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    let incoming = Arc::new(Incoming { listener, accepted: Mutex::default() });
    Ok(Box::new(ToyTransport { rank: membership.rank, peers: Vec::new(), incoming }))
}

impl Incoming {
    fn accept(&self, name: &str) -> Option<TcpStream> {
        let mut accepted = self.accepted.lock().unwrap();
        while let Ok((mut stream, _)) = self.listener.accept() {
            stream.set_nonblocking(false).unwrap();
            let mut length = [0];
            stream.read_exact(&mut length).unwrap();
            let mut name = vec![0; length[0].into()];
            stream.read_exact(&mut name).unwrap();
            stream.set_nonblocking(true).unwrap();
            accepted.insert(String::from_utf8(name).unwrap(), stream);
        }
        accepted.remove(name)
    }
}

fn dial(address: SocketAddr, name: &str) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(&[&[name.len() as u8], name.as_bytes()].concat())?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

impl Transport for ToyTransport {
    fn name(&self) -> &'static str {
        "toy"
    }

    /// Other bytes than those of the transport "tcp": only this one understands them.
    fn address(&self) -> Vec<u8> {
        let port = self.incoming.listener.local_addr().map_or(0, |address| address.port());
        [b"toy".as_slice(), &port.to_be_bytes()].concat()
    }

    fn set_peers(&mut self, peers: &[PeerInfo], _: &PeerInfo) -> Result<(), String> {
        let address = |peer: &PeerInfo| match &peer.address[..] {
            &[b't', b'o', b'y', high, low] => {
                Ok(SocketAddr::from(([127, 0, 0, 1], u16::from_be_bytes([high, low]))))
            }
            other => Err(format!("malformed address: got {other:?}")),
        };
        self.peers = peers.iter().map(address).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Each sends over a connection of its own: nobody waits for anybody.
    fn connect(
        &self,
        _: &str,
        channel: &str,
        members: &[usize],
        own: usize,
    ) -> Result<Box<dyn Connections>, PeerDown> {
        let peer = |(member, &rank): (usize, &usize)| {
            if member == own {
                return Ok(None);
            }
            let out = dial(self.peers[rank], &format!("{channel}/{}", self.rank));
            let lost = |error: io::Error| DisconnectReason::OutOfReach(error.to_string());
            let out = out.map_err(|error| PeerDown { member, how: lost(error) })?;
            let (name, queues) = (format!("{channel}/{rank}"), QueuePair::default());
            Ok(Some(Peer { name, out, input: None, queues }))
        };
        let peers = members.iter().enumerate().map(peer).collect::<Result<_, _>>()?;
        Ok(Box::new(ToyConnections { incoming: Arc::clone(&self.incoming), peers }))
    }
}

struct ToyConnections {
    incoming: Arc<Incoming>,
    peers: Vec<Option<Peer>>,
}

struct Peer {
    /// That of the connection that it sends over.
    name: String,
    out: TcpStream,
    input: Option<TcpStream>,
    queues: QueuePair,
}

impl ToyConnections {
    fn progress_now(&mut self) -> Result<bool, PeerDown> {
        let mut moved = false;
        for (member, peer) in self.peers.iter_mut().enumerate() {
            let Some(Peer { name, out, input, queues }) = peer else { continue };
            let down = |how| PeerDown { member, how };
            while let Some(part) = queues.sending.parts.front() {
                match out.write(&part.bytes()[queues.sending.offset..]) {
                    Ok(count) => queues.sending.skip(count),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => return Err(down(DisconnectReason::Ended)),
                }
                moved = true;
            }
            *input = input.take().or_else(|| self.incoming.accept(name));
            let Some(input) = input else { continue };
            while let Some(part) = queues.receiving.parts.front_mut() {
                match input.read(&mut part.bytes_mut()[queues.receiving.offset..]) {
                    Ok(0) => return Err(down(DisconnectReason::Ended)),
                    Ok(count) => queues.receiving.skip(count),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => return Err(down(DisconnectReason::Ended)),
                }
                moved = true;
            }
        }
        Ok(moved)
    }
}

impl Connections for ToyConnections {
    fn with_queues(&mut self, member: usize, action: &mut dyn FnMut(&mut QueuePair)) {
        action(&mut self.peers[member].as_mut().unwrap().queues);
    }

    fn progress(&mut self, time: Duration) -> Result<(), PeerDown> {
        let begin = Instant::now();
        while !self.progress_now()? && begin.elapsed() < time {
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    fn disconnect_reason(&mut self, _: usize) -> Option<DisconnectReason> {
        None
    }

    fn abort(&mut self, _: &str) {
        for peer in self.peers.iter_mut().flatten() {
            let _ = peer.out.shutdown(std::net::Shutdown::Both);
            peer.queues = QueuePair::default();
        }
    }

    fn shutdown(&mut self) {}
}

mod tests {
    use std::process::{Command, Stdio};

    use crate::{ProcessGroup, ReduceOp};

    const NAME: &str = "transport::toy::tests::a_job_over_another_transport";

    /// A rank prints this when it has run the job, and not none of the tests.
    const DONE: &str = "all over the toy transport";

    /// Two nodes of two ranks, each a process that runs this test.
    #[test]
    fn a_job_over_another_transport() {
        if std::env::var("FLOW_TRANSPORT").as_deref() == Ok("toy") {
            return rank();
        }
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port().to_string();
        drop(free);
        let start = |rank: usize| {
            let variables = [
                ("RANK", rank),
                ("WORLD_SIZE", 4),
                ("LOCAL_RANK", rank % 2),
                ("LOCAL_WORLD_SIZE", 2),
                ("GROUP_RANK", rank / 2),
            ];
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", NAME, "--nocapture"])
                .envs(variables.map(|(name, value)| (name, value.to_string())))
                .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)])
                .envs([("FLOW_TRANSPORT", "toy"), ("FLOW_TIMEOUT", "60")])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let ranks: Vec<_> = (0..4).map(start).collect();
        for rank in ranks {
            let output = rank.wait_with_output().unwrap();
            let printed = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && printed.contains(DONE),
                "{printed}{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }

    fn rank() {
        let group = ProcessGroup::from_env().unwrap();
        assert_eq!((group.world_size(), group.local_world_size()), (4, 2));
        let mut sum = vec![group.rank() as f32; 100_000];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert!(sum.iter().all(|&element| element == 6.0));
        let mut all = [0_i64; 4];
        group.all_gather(&[group.rank() as i64], &mut all).unwrap();
        assert_eq!(all, [0, 1, 2, 3]);
        group.barrier().unwrap();
        let records = group.flight_recorder();
        let transports: Vec<_> = records.iter().map(|record| record.backend).collect();
        assert_eq!(transports, ["toy"; 3]);
        println!("{DONE}");
    }
}
