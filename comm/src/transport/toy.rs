//! A second transport over TCP, as plain as can be: it shows, and tests, that a transport is a file
//! and a line in the table. It trusts whoever connects.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::queue::QueuePair;
use super::{CancelCheck, ConnectError, Connections, DisconnectReason, PeerDown, Transport};
use crate::bootstrap::PeerInfo;
use crate::env::Membership;

struct ToyTransport {
    rank: usize,
    listener: TcpListener,
    peers: Vec<SocketAddr>,
    /// Connections that have come, by channel and rank.
    accepted: Mutex<HashMap<String, TcpStream>>,
}

pub fn open(membership: &Membership) -> Result<Box<dyn Transport>, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|e| e.to_string())?;
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    let (peers, accepted) = (Vec::new(), Mutex::default());
    Ok(Box::new(ToyTransport { rank: membership.rank, listener, peers, accepted }))
}

impl ToyTransport {
    fn accept(&self, name: &str) -> Option<TcpStream> {
        let mut accepted = self.accepted.lock().unwrap();
        while let Ok((mut stream, _)) = self.listener.accept() {
            stream.set_nonblocking(false).unwrap();
            let mut length = [0];
            stream.read_exact(&mut length).unwrap();
            let mut name = vec![0; length[0].into()];
            stream.read_exact(&mut name).unwrap();
            accepted.insert(String::from_utf8(name).unwrap(), stream);
        }
        accepted.remove(name)
    }

    fn dial(&self, rank: usize, name: &str) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect(self.peers[rank])?;
        stream.write_all(&[&[name.len() as u8], name.as_bytes()].concat())?;
        Ok(stream)
    }
}

impl Transport for ToyTransport {
    fn name(&self) -> &'static str {
        "toy"
    }

    /// Other bytes than those of the transport "tcp": only this one understands them.
    fn address(&self) -> Vec<u8> {
        let port = self.listener.local_addr().map_or(0, |address| address.port());
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

    fn connect(
        &self,
        channel: &str,
        members: &[usize],
        own: usize,
        cancel_check: CancelCheck,
    ) -> Result<Box<dyn Connections>, ConnectError> {
        let mut peers = Vec::new();
        for (member, &rank) in members.iter().enumerate() {
            let stream = match member {
                _ if member == own => None,
                _ if member < own => {
                    let dialed = self.dial(rank, &format!("{channel}/{}", self.rank));
                    let lost = |error: io::Error| {
                        let how = DisconnectReason::OutOfReach(error.to_string());
                        ConnectError::PeerDown(PeerDown { member, how })
                    };
                    Some(dialed.map_err(lost)?)
                }
                _ => loop {
                    if let Some(stream) = self.accept(&format!("{channel}/{rank}")) {
                        break Some(stream);
                    }
                    cancel_check(&[member]).map_err(ConnectError::Cancelled)?;
                    std::thread::sleep(Duration::from_millis(1));
                },
            };
            peers.push(stream.map(|stream| {
                stream.set_nonblocking(true).unwrap();
                (stream, QueuePair::default())
            }));
        }
        Ok(Box::new(ToyConnections { peers }))
    }

    fn have_connected(&self, _: &str, _: &[usize], _: usize) -> bool {
        false
    }
}

struct ToyConnections {
    peers: Vec<Option<(TcpStream, QueuePair)>>,
}

impl ToyConnections {
    fn progress_now(&mut self) -> Result<bool, PeerDown> {
        let mut moved = false;
        for (member, peer) in self.peers.iter_mut().enumerate() {
            let Some((stream, queues)) = peer else { continue };
            let down = |how| PeerDown { member, how };
            while let Some(part) = queues.sending.parts.front() {
                match stream.write(&part.bytes()[queues.sending.offset..]) {
                    Ok(count) => queues.sending.skip(count),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => return Err(down(DisconnectReason::Ended)),
                }
                moved = true;
            }
            while let Some(part) = queues.receiving.parts.front_mut() {
                match stream.read(&mut part.bytes_mut()[queues.receiving.offset..]) {
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
    fn size(&self) -> usize {
        self.peers.len()
    }

    fn queues(&self, member: usize) -> Option<&QueuePair> {
        self.peers[member].as_ref().map(|(_, queues)| queues)
    }

    fn queues_mut(&mut self, member: usize) -> Option<&mut QueuePair> {
        self.peers[member].as_mut().map(|(_, queues)| queues)
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
        for (stream, queues) in self.peers.iter_mut().flatten() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
            *queues = QueuePair::default();
        }
    }

    fn shutdown(&mut self) {}
}

mod tests {
    use std::process::{Command, Stdio};

    use crate::{ProcessGroup, ReduceOp};

    const NAME: &str = "transport::toy::tests::a_job_over_another_transport";

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
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && said.contains("over the toy transport"),
                "{said}{}",
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
        println!("over the toy transport");
    }
}
