//! Where connections come in: whoever waits for one accepts them all, and files those that say a
//! right handshake.
//!
//! A handshake is its length (u32, little-endian), a proof of knowing the job's token, and the name of
//! the connection. The proof is HMAC-SHA256 of the acceptor's address and that name with the token as
//! key: the token is not sent, and at another acceptor the handshake is worth nothing. (A challenge would
//! have to be answered by somebody, and nobody accepts while nobody waits.) Nothing of the handshake is
//! believed, and nothing else is read, before the proof is right; who says something else, or
//! nothing, is cut off.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use nix::sys::socket::{listen, Backlog};
use rustix::event::{PollFd, PollFlags, Timespec};
use sha2::Sha256;

use crate::store::prove;

/// The bytes of a proof, and of the longest handshake.
const PROOF: usize = 32;
const MAX_HANDSHAKE: usize = 2048;
/// Connections that have not said all of their handshake: more are not accepted, nor are they kept for
/// longer; while others cannot be accepted, not even for so long.
const MAX_PENDING: usize = 256;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const CROWDED_TIMEOUT: Duration = Duration::from_secs(1);

pub struct Acceptor {
    listener: TcpListener,
    address: SocketAddr,
    token: String,
    connections: Mutex<PendingConnections>,
}

#[derive(Default)]
struct PendingConnections {
    /// In the order in which they came.
    pending: VecDeque<Pending>,
    /// By name.
    admitted: HashMap<String, TcpStream>,
}

struct Pending {
    stream: TcpStream,
    since: Instant,
    handshake: Vec<u8>,
}

/// What became of a connection that was read on.
enum Outcome {
    Pending,
    Named(String),
    Rejected,
}

impl Acceptor {
    pub fn open(address: IpAddr, token: &str) -> io::Result<Self> {
        let listener = TcpListener::bind((address, 0))?;
        // Again, for the longest queue: nobody accepts while nobody waits.
        listen(&listener, Backlog::MAXALLOWABLE)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            address: listener.local_addr()?,
            listener,
            token: token.into(),
            connections: Mutex::default(),
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to another rank's acceptor under a name.
    pub fn connect(
        &self,
        address: SocketAddr,
        name: &str,
        time: Duration,
    ) -> io::Result<TcpStream> {
        if PROOF + name.len() > MAX_HANDSHAKE {
            let (length, most) = (name.len(), MAX_HANDSHAKE - PROOF);
            return Err(io::Error::other(format!(
                "its name has {length} bytes, and {most} at most are possible"
            )));
        }
        let mut stream = TcpStream::connect_timeout(&address, time)?;
        if stream.local_addr()? == stream.peer_addr()? {
            // While nobody listens there, a socket can get connected to itself.
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let mut handshake = ((PROOF + name.len()) as u32).to_le_bytes().to_vec();
        handshake.extend(proof(&self.token, address, name).finalize().into_bytes());
        handshake.extend(name.as_bytes());
        stream.write_all(&handshake)?;
        Ok(stream)
    }

    /// The connection of this name, if it has come, else waits a moment.
    pub fn accept(&self, name: &str, time: Duration) -> Option<TcpStream> {
        let (stream, has_accepted_all) = self.look(name);
        if stream.is_some() {
            return stream;
        }
        if has_accepted_all {
            let time =
                Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
            let _ = rustix::event::poll(
                &mut [PollFd::new(&self.listener.as_fd(), PollFlags::IN)],
                Some(&time),
            );
        } else {
            // Those who are still outside would end the wait at once.
            std::thread::sleep(time);
        }
        self.look(name).0
    }

    /// Whether the connections of all these names have come.
    pub fn have_connected(&self, names: &[String]) -> bool {
        let (connections, _) = self.admit();
        names.iter().all(|name| connections.admitted.contains_key(name))
    }

    /// The connection of this name, if it has come, and whether all have been accepted.
    fn look(&self, name: &str) -> (Option<TcpStream>, bool) {
        let (mut connections, has_accepted_all) = self.admit();
        (connections.admitted.remove(name), has_accepted_all)
    }

    /// Accepts those who wait, and says whether that was all.
    fn admit(&self) -> (MutexGuard<'_, PendingConnections>, bool) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let has_accepted_all = connections.accept(&self.listener);
        let cancel_check = if has_accepted_all { HANDSHAKE_TIMEOUT } else { CROWDED_TIMEOUT };
        connections.fill(&self.token, self.address, cancel_check);
        (connections, has_accepted_all)
    }
}

impl PendingConnections {
    /// Accepts those for whom there is room; whether that was all.
    fn accept(&mut self, listener: &TcpListener) -> bool {
        for _ in self.pending.len()..MAX_PENDING {
            match listener
                .accept()
                .and_then(|(stream, _)| stream.set_nonblocking(true).map(|()| stream))
            {
                Ok(stream) => self.pending.push_back(Pending {
                    stream,
                    since: Instant::now(),
                    handshake: Vec::new(),
                }),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                // The connection may have ended again while it waited.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted
                    ) => {}
                // Above all, when this process has no file descriptor left.
                Err(error) => {
                    static WARNING: Once = Once::new();
                    WARNING.call_once(|| {
                        log::warn!("cannot accept a connection: {error}; trying again (is ulimit -n high enough?)");
                    });
                    return false;
                }
            }
        }
        false
    }

    fn fill(&mut self, token: &str, address: SocketAddr, cancel_check: Duration) {
        for mut connection in std::mem::take(&mut self.pending) {
            match connection.fill(token, address) {
                Outcome::Pending if connection.since.elapsed() < cancel_check => {
                    self.pending.push_back(connection)
                }
                Outcome::Named(name) => drop(self.admitted.insert(name, connection.stream)),
                _ => {}
            }
        }
    }
}

impl Pending {
    fn fill(&mut self, token: &str, address: SocketAddr) -> Outcome {
        loop {
            let wanted = match self.handshake.first_chunk::<4>() {
                None => 4,
                Some(&length) => match u32::from_le_bytes(length) as usize {
                    length @ PROOF..=MAX_HANDSHAKE => 4 + length,
                    _ => return Outcome::Rejected,
                },
            };
            if self.handshake.len() == wanted {
                return self.authenticate(token, address);
            }
            let mut buffer = [0; MAX_HANDSHAKE];
            let wanted = (wanted - self.handshake.len()).min(buffer.len());
            match (&self.stream).read(&mut buffer[..wanted]) {
                Ok(0) => return Outcome::Rejected,
                Ok(count) => self.handshake.extend(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Outcome::Pending,
                Err(_) => return Outcome::Rejected,
            }
        }
    }

    /// Of a complete handshake.
    fn authenticate(&self, token: &str, address: SocketAddr) -> Outcome {
        let (proved, name) = self.handshake[4..].split_at(PROOF);
        match std::str::from_utf8(name) {
            Ok(name) if proof(token, address, name).verify_slice(proved).is_ok() => {
                Outcome::Named(name.into())
            }
            _ => {
                log::warn!(
                    "a connection from {:?} was refused: wrong token",
                    self.stream.peer_addr()
                );
                Outcome::Rejected
            }
        }
    }
}

/// The proof of knowing `token`, in a handshake at `address`. The text is longer than what the store
/// challenges with, so the one proof never passes for the other.
fn proof(token: &str, address: SocketAddr, name: &str) -> Hmac<Sha256> {
    prove(token, format!("connection to {address}: {name}").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acceptor() -> Acceptor {
        Acceptor::open(IpAddr::from([127, 0, 0, 1]), "secret").unwrap()
    }

    fn accepted(acceptor: &Acceptor, name: &str) -> Option<TcpStream> {
        (0..500).find_map(|_| acceptor.accept(name, Duration::from_millis(10)))
    }

    /// Whether the other end closes it, while those who connect at the acceptor are looked at.
    fn is_rejected(mut stream: TcpStream, acceptor: &Acceptor) -> bool {
        stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        (0..500).any(|_| {
            assert!(acceptor.accept("nobody", Duration::ZERO).is_none());
            match stream.read(&mut [0]) {
                Ok(count) => count == 0,
                Err(error) => error.kind() != io::ErrorKind::WouldBlock,
            }
        })
    }

    #[test]
    fn guests_are_known_by_name() {
        let acceptor = acceptor();
        let mut one = acceptor.connect(acceptor.address, "one", HANDSHAKE_TIMEOUT).unwrap();
        let _two = acceptor.connect(acceptor.address, "two", HANDSHAKE_TIMEOUT).unwrap();
        one.write_all(b"x").unwrap();
        assert!(accepted(&acceptor, "two").is_some());
        let stream = accepted(&acceptor, "one").unwrap();
        stream.set_nonblocking(false).unwrap();
        let mut byte = [0];
        (&stream).read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        assert!(acceptor.accept("one", Duration::ZERO).is_none(), "it is taken");
    }

    #[test]
    fn any_token_and_name_of_bearable_length_will_do() {
        let acceptor =
            Acceptor::open([127, 0, 0, 1].into(), &format!("of two\nlines{}", "!".repeat(5000)))
                .unwrap();
        let longest = "n".repeat(MAX_HANDSHAKE - PROOF);
        for name in ["a\nb", &longest] {
            let _guest = acceptor.connect(acceptor.address, name, HANDSHAKE_TIMEOUT).unwrap();
            assert!(accepted(&acceptor, name).is_some());
        }
        let error = acceptor
            .connect(acceptor.address, &(longest + "n"), HANDSHAKE_TIMEOUT)
            .unwrap_err()
            .to_string();
        assert!(error.contains("2017 bytes, and 2016 at most"), "{error}");
    }

    #[test]
    fn a_hello_shows_no_token_and_is_worth_nothing_elsewhere() {
        let (acceptor, elsewhere) = (acceptor(), acceptor());
        let spy = TcpListener::bind("127.0.0.1:0").unwrap();
        drop(acceptor.connect(spy.local_addr().unwrap(), "one", HANDSHAKE_TIMEOUT).unwrap());
        let mut handshake = Vec::new();
        spy.accept().unwrap().0.read_to_end(&mut handshake).unwrap();
        assert!(!handshake.windows(6).any(|bytes| bytes == b"secret"), "{handshake:?}");
        let mut replay = TcpStream::connect(elsewhere.address).unwrap();
        replay.write_all(&handshake).unwrap();
        assert!(is_rejected(replay, &elsewhere));
        assert!(elsewhere.accept("one", Duration::ZERO).is_none());
    }

    /// In a process of its own, which may open few files.
    #[test]
    fn without_file_descriptors_guests_are_accepted_later() {
        const NAME: &str =
            "transport::acceptor::tests::without_file_descriptors_guests_are_accepted_later";
        if std::env::var_os("FLOW_TEST_FEW_FILES").is_none() {
            let mut child = std::process::Command::new("sh");
            child
                .args(["-c", r#"ulimit -n 64; exec "$@""#, "sh"])
                .arg(std::env::current_exe().unwrap());
            let output =
                child.args(["--exact", NAME]).env("FLOW_TEST_FEW_FILES", "1").output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let acceptor = acceptor();
        let _strangers: Vec<TcpStream> =
            (0..10).map(|_| TcpStream::connect(acceptor.address).unwrap()).collect();
        let mut files: Vec<_> =
            std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        assert_eq!(acceptor.look("one").0.map(drop), None);
        assert!(
            acceptor.connections.lock().unwrap().pending.is_empty(),
            "there is no room for any"
        );
        files.truncate(files.len() - 4);
        let _one = acceptor.connect(acceptor.address, "one", HANDSHAKE_TIMEOUT).unwrap();
        assert!(accepted(&acceptor, "one").is_some());
    }

    #[test]
    fn strangers_do_no_harm() {
        let acceptor = acceptor();
        let strangers: Vec<TcpStream> =
            (0..600).map(|_| TcpStream::connect(acceptor.address).unwrap()).collect();
        for (stranger, text) in
            strangers.iter().zip([&b"GET / HTTP/1.1\r\n\r\n"[..], &[255; 4096], &[0; 4096]])
        {
            let _ = (&*stranger).write_all(text);
        }
        let other = Acceptor { token: "Secret".into(), ..self::acceptor() };
        let thief = other.connect(acceptor.address, "one", HANDSHAKE_TIMEOUT).unwrap();
        let _one = acceptor.connect(acceptor.address, "one", HANDSHAKE_TIMEOUT).unwrap();
        acceptor.accept("one", Duration::ZERO);
        assert_eq!(
            acceptor.listener.accept().map(drop).ok(),
            Some(()),
            "not all are accepted at once"
        );
        assert!(accepted(&acceptor, "one").is_some());
        assert!(acceptor.connections.lock().unwrap().pending.len() <= MAX_PENDING);
        assert!(is_rejected(thief, &acceptor));
    }
}
