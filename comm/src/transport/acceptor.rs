//! A listener: accepts connections, and files those that say a right handshake.
//!
//! A handshake is its length (u32, little-endian), a proof of knowing the job's token, and the name
//! of the connection. The proof is HMAC-SHA256 of the acceptor's address and that name with the
//! token as key. The token is not sent, and at another acceptor the handshake is worth nothing.
//! Nothing of the handshake is believed, and nothing else is read, before the proof is right. A
//! client that sends something else, or nothing, is cut off.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Once;
use std::time::{Duration, Instant};

use flow_store::proof;
use rustix::net::listen;

/// The size in bytes of the longest handshake.
const MAX_HANDSHAKE: usize = 2048;
/// The most connections that have not said all of their handshake. More are not accepted, nor are
/// they kept for longer. While others cannot be accepted, they are kept more briefly.
const MAX_PENDING: usize = 256;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const CROWDED_TIMEOUT: Duration = Duration::from_secs(1);

/// Accepts connections of processes that know the token.
pub struct Acceptor {
    listener: TcpListener,
    address: SocketAddr,
    token: String,
    /// The connections without a handshake, in the order in which they came.
    pending: VecDeque<PendingConnection>,
}

struct PendingConnection {
    stream: TcpStream,
    since: Instant,
    handshake: Vec<u8>,
}

/// The result of reading more from a connection.
enum Handshake {
    Incomplete,
    Named(String),
    Rejected,
}

/// Says the handshake at another process' acceptor: the connection gets this name.
pub fn introduce(
    stream: &mut TcpStream,
    token: &str,
    address: SocketAddr,
    name: &str,
) -> io::Result<()> {
    if stream.local_addr()? == stream.peer_addr()? {
        // While nobody listens there, a socket can get connected to itself.
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    let mut handshake = ((proof::SIZE + name.len()) as u32).to_le_bytes().to_vec();
    handshake.extend(proof::prove(token, &proved_message(address, name)));
    handshake.extend(name.as_bytes());
    // A new socket has room for it.
    stream.write_all(&handshake)
}

impl Acceptor {
    /// Listens at a free port of `address`.
    pub fn open(address: IpAddr, token: &str) -> io::Result<Self> {
        let listener = TcpListener::bind((address, 0))?;
        // Again, for the longest queue that the kernel allows.
        listen(&listener, i32::MAX)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address, token: token.into(), pending: VecDeque::new() })
    }

    /// Returns the address at which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the descriptors that are readable when [`Acceptor::accept`] has something to do.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let pending = self.pending.iter().map(|pending| pending.stream.as_fd());
        // While there is no room, those who are still outside would end every sleep.
        let listener = (pending.len() < MAX_PENDING).then(|| self.listener.as_fd());
        pending.chain(listener).collect()
    }

    /// Whether there are connections that have not said all of their handshake.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Accepts connections: returns those whose handshakes are right, with their names, and whether
    /// all that have come were looked at.
    pub fn accept(&mut self) -> (Vec<(String, TcpStream)>, bool) {
        let has_accepted_all = self.accept_pending();
        let timeout = if has_accepted_all { HANDSHAKE_TIMEOUT } else { CROWDED_TIMEOUT };
        let mut admitted = Vec::new();
        for mut connection in std::mem::take(&mut self.pending) {
            match connection.fill(&self.token, self.address) {
                Handshake::Incomplete if connection.since.elapsed() < timeout => {
                    self.pending.push_back(connection)
                }
                Handshake::Named(name) => admitted.push((name, connection.stream)),
                _ => {}
            }
        }
        (admitted, has_accepted_all)
    }

    /// Accepts clients while there is room; returns whether that was all of them.
    fn accept_pending(&mut self) -> bool {
        for _ in self.pending.len()..MAX_PENDING {
            match self
                .listener
                .accept()
                .and_then(|(stream, _)| stream.set_nonblocking(true).map(|()| stream))
            {
                Ok(stream) => self.pending.push_back(PendingConnection {
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
}

impl PendingConnection {
    fn fill(&mut self, token: &str, address: SocketAddr) -> Handshake {
        loop {
            let wanted = match self.handshake.first_chunk::<4>() {
                None => 4,
                Some(&length) => match u32::from_le_bytes(length) as usize {
                    length @ proof::SIZE..=MAX_HANDSHAKE => 4 + length,
                    _ => return Handshake::Rejected,
                },
            };
            if self.handshake.len() == wanted {
                return self.authenticate(token, address);
            }
            let mut buffer = [0; MAX_HANDSHAKE];
            let wanted = (wanted - self.handshake.len()).min(buffer.len());
            match (&self.stream).read(&mut buffer[..wanted]) {
                Ok(0) => return Handshake::Rejected,
                Ok(count) => self.handshake.extend(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Handshake::Incomplete;
                }
                Err(_) => return Handshake::Rejected,
            }
        }
    }

    /// Checks a complete handshake.
    fn authenticate(&self, token: &str, address: SocketAddr) -> Handshake {
        let (proved, name) = self.handshake[4..].split_at(proof::SIZE);
        match std::str::from_utf8(name) {
            Ok(name) if proof::is_right(proved, token, &proved_message(address, name)) => {
                Handshake::Named(name.into())
            }
            _ => {
                log::warn!(
                    "a connection from {:?} was refused: wrong token",
                    self.stream.peer_addr()
                );
                Handshake::Rejected
            }
        }
    }
}

/// Returns the text for which a handshake at `address` proves to know the token. The text is longer
/// than what the store challenges with, so the one proof never passes for the other.
fn proved_message(address: SocketAddr, name: &str) -> Vec<u8> {
    format!("connection to {address}: {name}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCALHOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn acceptor() -> Acceptor {
        Acceptor::open(LOCALHOST, "secret").unwrap()
    }

    fn connect(token: &str, address: SocketAddr, name: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).unwrap();
        introduce(&mut stream, token, address, name).unwrap();
        stream
    }

    fn connect_to(acceptor: &Acceptor, name: &str) -> TcpStream {
        connect(&acceptor.token, acceptor.address, name)
    }

    fn accepted(acceptor: &mut Acceptor, name: &str) -> Option<TcpStream> {
        (0..500).find_map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            let (admitted, _) = acceptor.accept();
            admitted.into_iter().find_map(|(other, stream)| (other == name).then_some(stream))
        })
    }

    /// Whether the other end closes it, while those who connect at the acceptor are looked at.
    fn is_rejected(mut stream: TcpStream, acceptor: &mut Acceptor) -> bool {
        stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        (0..500).any(|_| {
            assert!(acceptor.accept().0.is_empty());
            match stream.read(&mut [0]) {
                Ok(count) => count == 0,
                Err(error) => error.kind() != io::ErrorKind::WouldBlock,
            }
        })
    }

    #[test]
    fn guests_are_known_by_name() {
        let mut acceptor = acceptor();
        let mut one = connect_to(&acceptor, "one");
        one.write_all(b"x").unwrap();
        let stream = accepted(&mut acceptor, "one").unwrap();
        stream.set_nonblocking(false).unwrap();
        let mut byte = [0];
        (&stream).read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        let _two = connect_to(&acceptor, "two");
        assert!(accepted(&mut acceptor, "two").is_some());
    }

    #[test]
    fn any_token_and_name_of_bearable_length_will_do() {
        let token = format!("of two\nlines{}", "!".repeat(5000));
        let mut acceptor = Acceptor::open(LOCALHOST, &token).unwrap();
        for name in ["a\nb", &"n".repeat(MAX_HANDSHAKE - proof::SIZE)] {
            let _guest = connect_to(&acceptor, name);
            assert!(accepted(&mut acceptor, name).is_some());
        }
    }

    #[test]
    fn a_hello_shows_no_token_and_is_worth_nothing_elsewhere() {
        let mut elsewhere = acceptor();
        let spy = TcpListener::bind("127.0.0.1:0").unwrap();
        drop(connect("secret", spy.local_addr().unwrap(), "one"));
        let mut handshake = Vec::new();
        spy.accept().unwrap().0.read_to_end(&mut handshake).unwrap();
        assert!(!handshake.windows(6).any(|bytes| bytes == b"secret"), "{handshake:?}");
        let mut replay = TcpStream::connect(elsewhere.address).unwrap();
        replay.write_all(&handshake).unwrap();
        assert!(is_rejected(replay, &mut elsewhere));
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
        let mut acceptor = acceptor();
        let _strangers: Vec<TcpStream> =
            (0..10).map(|_| TcpStream::connect(acceptor.address).unwrap()).collect();
        let mut files: Vec<_> =
            std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        assert!(!acceptor.accept().1);
        assert!(acceptor.pending.is_empty(), "there is no room for any");
        files.truncate(files.len() - 4);
        let _one = connect_to(&acceptor, "one");
        assert!(accepted(&mut acceptor, "one").is_some());
    }

    #[test]
    fn strangers_do_no_harm() {
        let mut acceptor = acceptor();
        let strangers: Vec<TcpStream> =
            (0..600).map(|_| TcpStream::connect(acceptor.address).unwrap()).collect();
        for (stranger, text) in
            strangers.iter().zip([&b"GET / HTTP/1.1\r\n\r\n"[..], &[255; 4096], &[0; 4096]])
        {
            let _ = (&*stranger).write_all(text);
        }
        let thief = connect("Secret", acceptor.address, "one");
        let _one = connect_to(&acceptor, "one");
        assert!(!acceptor.accept().1, "not all are accepted at once");
        assert!(accepted(&mut acceptor, "one").is_some());
        assert!(acceptor.pending.len() <= MAX_PENDING);
        assert!(is_rejected(thief, &mut acceptor));
    }
}
