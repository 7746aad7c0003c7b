//! Where connections come in: whoever waits for one accepts them all, and files those that say a
//! right hello.
//!
//! A hello is its length (u32, little-endian), a proof of knowing the job's token, and the name of
//! the connection. The proof is HMAC-SHA256 of the lobby's address and that name with the token as
//! key: the token is not sent, and at another lobby the hello is worth nothing. (A challenge would
//! have to be answered by somebody, and nobody accepts while nobody waits.) Nothing of the hello is
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

/// The bytes of a proof, and of the longest hello.
const PROOF: usize = 32;
const MAX_HELLO: usize = 2048;
/// Connections that have not said all of their hello: more are not accepted, nor are they kept for
/// longer; while others cannot be accepted, not even for so long.
const MAX_PENDING: usize = 256;
const HELLO_TIME: Duration = Duration::from_secs(10);
const CROWDED_TIME: Duration = Duration::from_secs(1);

pub struct Lobby {
    listener: TcpListener,
    address: SocketAddr,
    token: String,
    guests: Mutex<Guests>,
}

#[derive(Default)]
struct Guests {
    /// In the order in which they came.
    pending: VecDeque<Pending>,
    /// By name.
    admitted: HashMap<String, TcpStream>,
}

struct Pending {
    stream: TcpStream,
    since: Instant,
    hello: Vec<u8>,
}

/// What became of a connection that was read on.
enum Outcome {
    Pending,
    Named(String),
    CutOff,
}

impl Lobby {
    pub fn open(address: IpAddr, token: &str) -> io::Result<Self> {
        let listener = TcpListener::bind((address, 0))?;
        // Again, for the longest queue: nobody accepts while nobody waits.
        listen(&listener, Backlog::MAXALLOWABLE)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            address: listener.local_addr()?,
            listener,
            token: token.into(),
            guests: Mutex::default(),
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to another rank's lobby under a name.
    pub fn knock(&self, address: SocketAddr, name: &str, time: Duration) -> io::Result<TcpStream> {
        if PROOF + name.len() > MAX_HELLO {
            let (length, most) = (name.len(), MAX_HELLO - PROOF);
            return Err(io::Error::other(format!(
                "its name has {length} bytes, and {most} at most are possible"
            )));
        }
        let mut stream = TcpStream::connect_timeout(&address, time)?;
        if stream.local_addr()? == stream.peer_addr()? {
            // While nobody listens there, a socket can get connected to itself.
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let mut hello = ((PROOF + name.len()) as u32).to_le_bytes().to_vec();
        hello.extend(proof(&self.token, address, name).finalize().into_bytes());
        hello.extend(name.as_bytes());
        stream.write_all(&hello)?;
        Ok(stream)
    }

    /// The connection of this name, if it has come, else waits a moment.
    pub fn take(&self, name: &str, time: Duration) -> Option<TcpStream> {
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
    pub fn have_come(&self, names: &[String]) -> bool {
        let (guests, _) = self.admit();
        names.iter().all(|name| guests.admitted.contains_key(name))
    }

    /// The connection of this name, if it has come, and whether all have been accepted.
    fn look(&self, name: &str) -> (Option<TcpStream>, bool) {
        let (mut guests, has_accepted_all) = self.admit();
        (guests.admitted.remove(name), has_accepted_all)
    }

    /// Accepts those who wait, and says whether that was all.
    fn admit(&self) -> (MutexGuard<'_, Guests>, bool) {
        let mut guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        let has_accepted_all = guests.accept(&self.listener);
        let patience = if has_accepted_all { HELLO_TIME } else { CROWDED_TIME };
        guests.read_on(&self.token, self.address, patience);
        (guests, has_accepted_all)
    }
}

impl Guests {
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
                    hello: Vec::new(),
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

    fn read_on(&mut self, token: &str, address: SocketAddr, patience: Duration) {
        for mut guest in std::mem::take(&mut self.pending) {
            match guest.read_on(token, address) {
                Outcome::Pending if guest.since.elapsed() < patience => {
                    self.pending.push_back(guest)
                }
                Outcome::Named(name) => drop(self.admitted.insert(name, guest.stream)),
                _ => {}
            }
        }
    }
}

impl Pending {
    fn read_on(&mut self, token: &str, address: SocketAddr) -> Outcome {
        loop {
            let wanted = match self.hello.first_chunk::<4>() {
                None => 4,
                Some(&length) => match u32::from_le_bytes(length) as usize {
                    length @ PROOF..=MAX_HELLO => 4 + length,
                    _ => return Outcome::CutOff,
                },
            };
            if self.hello.len() == wanted {
                return self.judge(token, address);
            }
            let mut buffer = [0; MAX_HELLO];
            let wanted = (wanted - self.hello.len()).min(buffer.len());
            match (&self.stream).read(&mut buffer[..wanted]) {
                Ok(0) => return Outcome::CutOff,
                Ok(count) => self.hello.extend(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Outcome::Pending,
                Err(_) => return Outcome::CutOff,
            }
        }
    }

    /// Of a complete hello.
    fn judge(&self, token: &str, address: SocketAddr) -> Outcome {
        let (proved, name) = self.hello[4..].split_at(PROOF);
        match std::str::from_utf8(name) {
            Ok(name) if proof(token, address, name).verify_slice(proved).is_ok() => {
                Outcome::Named(name.into())
            }
            _ => {
                log::warn!(
                    "a connection from {:?} was refused: wrong token",
                    self.stream.peer_addr()
                );
                Outcome::CutOff
            }
        }
    }
}

/// The proof of knowing `token`, in a hello at `address`. The text is longer than what the store
/// challenges with, so the one proof never passes for the other.
fn proof(token: &str, address: SocketAddr, name: &str) -> Hmac<Sha256> {
    prove(token, format!("connection to {address}: {name}").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lobby() -> Lobby {
        Lobby::open(IpAddr::from([127, 0, 0, 1]), "secret").unwrap()
    }

    fn come(lobby: &Lobby, name: &str) -> Option<TcpStream> {
        (0..500).find_map(|_| lobby.take(name, Duration::from_millis(10)))
    }

    /// Whether the other end closes it, while those who knock at the lobby are looked at.
    fn is_cut_off(mut stream: TcpStream, lobby: &Lobby) -> bool {
        stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        (0..500).any(|_| {
            assert!(lobby.take("nobody", Duration::ZERO).is_none());
            match stream.read(&mut [0]) {
                Ok(count) => count == 0,
                Err(error) => error.kind() != io::ErrorKind::WouldBlock,
            }
        })
    }

    #[test]
    fn guests_are_known_by_name() {
        let lobby = lobby();
        let mut one = lobby.knock(lobby.address, "one", HELLO_TIME).unwrap();
        let _two = lobby.knock(lobby.address, "two", HELLO_TIME).unwrap();
        one.write_all(b"x").unwrap();
        assert!(come(&lobby, "two").is_some());
        let stream = come(&lobby, "one").unwrap();
        stream.set_nonblocking(false).unwrap();
        let mut byte = [0];
        (&stream).read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        assert!(lobby.take("one", Duration::ZERO).is_none(), "it is taken");
    }

    #[test]
    fn any_token_and_name_of_bearable_length_will_do() {
        let lobby =
            Lobby::open([127, 0, 0, 1].into(), &format!("of two\nlines{}", "!".repeat(5000)))
                .unwrap();
        let longest = "n".repeat(MAX_HELLO - PROOF);
        for name in ["a\nb", &longest] {
            let _guest = lobby.knock(lobby.address, name, HELLO_TIME).unwrap();
            assert!(come(&lobby, name).is_some());
        }
        let error =
            lobby.knock(lobby.address, &(longest + "n"), HELLO_TIME).unwrap_err().to_string();
        assert!(error.contains("2017 bytes, and 2016 at most"), "{error}");
    }

    #[test]
    fn a_hello_shows_no_token_and_is_worth_nothing_elsewhere() {
        let (lobby, elsewhere) = (lobby(), lobby());
        let spy = TcpListener::bind("127.0.0.1:0").unwrap();
        drop(lobby.knock(spy.local_addr().unwrap(), "one", HELLO_TIME).unwrap());
        let mut hello = Vec::new();
        spy.accept().unwrap().0.read_to_end(&mut hello).unwrap();
        assert!(!hello.windows(6).any(|bytes| bytes == b"secret"), "{hello:?}");
        let mut replay = TcpStream::connect(elsewhere.address).unwrap();
        replay.write_all(&hello).unwrap();
        assert!(is_cut_off(replay, &elsewhere));
        assert!(elsewhere.take("one", Duration::ZERO).is_none());
    }

    /// In a process of its own, which may open few files.
    #[test]
    fn without_file_descriptors_guests_are_accepted_later() {
        const NAME: &str =
            "nodes::lobby::tests::without_file_descriptors_guests_are_accepted_later";
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
        let lobby = lobby();
        let _strangers: Vec<TcpStream> =
            (0..10).map(|_| TcpStream::connect(lobby.address).unwrap()).collect();
        let mut files: Vec<_> =
            std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        assert_eq!(lobby.look("one").0.map(drop), None);
        assert!(lobby.guests.lock().unwrap().pending.is_empty(), "there is no room for any");
        files.truncate(files.len() - 4);
        let _one = lobby.knock(lobby.address, "one", HELLO_TIME).unwrap();
        assert!(come(&lobby, "one").is_some());
    }

    #[test]
    fn strangers_do_no_harm() {
        let lobby = lobby();
        let strangers: Vec<TcpStream> =
            (0..600).map(|_| TcpStream::connect(lobby.address).unwrap()).collect();
        for (stranger, text) in
            strangers.iter().zip([&b"GET / HTTP/1.1\r\n\r\n"[..], &[255; 4096], &[0; 4096]])
        {
            let _ = (&*stranger).write_all(text);
        }
        let other = Lobby { token: "Secret".into(), ..self::lobby() };
        let thief = other.knock(lobby.address, "one", HELLO_TIME).unwrap();
        let _one = lobby.knock(lobby.address, "one", HELLO_TIME).unwrap();
        lobby.take("one", Duration::ZERO);
        assert_eq!(
            lobby.listener.accept().map(drop).ok(),
            Some(()),
            "not all are accepted at once"
        );
        assert!(come(&lobby, "one").is_some());
        assert!(lobby.guests.lock().unwrap().pending.len() <= MAX_PENDING);
        assert!(is_cut_off(thief, &lobby));
    }
}
