//! Where connections come in: whoever waits for one accepts them all, and files those that say a right hello.
//!
//! A hello is its length (u32, little-endian), the job's token, a line feed, and the name of the connection. Nothing of
//! it is believed, and nothing else is read, before the token is right; who says something else, or nothing, is cut off.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{listen, Backlog};
use rustix::event::{PollFd, PollFlags, Timespec};

/// The longest hello.
const MAX_HELLO: usize = 2048;
/// Connections that have not said all of their hello: more are not kept, nor are they for longer.
const MAX_PENDING: usize = 256;
const HELLO_TIME: Duration = Duration::from_secs(10);

pub struct Lobby {
    listener: TcpListener,
    token: String,
    guests: Mutex<Guests>,
}

#[derive(Default)]
struct Guests {
    pending: VecDeque<Pending>,
    /// By name.
    admitted: HashMap<String, TcpStream>,
}

struct Pending {
    stream: TcpStream,
    since: Instant,
    hello: Vec<u8>,
}

impl Lobby {
    pub fn open(address: IpAddr, token: &str) -> io::Result<Self> {
        let listener = TcpListener::bind((address, 0))?;
        // Again, for the longest queue: nobody accepts while nobody waits.
        listen(&listener, Backlog::MAXALLOWABLE)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, token: token.into(), guests: Mutex::default() })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Connects to another rank's lobby under a name.
    pub fn knock(&self, address: SocketAddr, name: &str, time: Duration) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect_timeout(&address, time)?;
        if stream.local_addr()? == stream.peer_addr()? {
            // While nobody listens there, a socket can get connected to itself.
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let mut hello = ((self.token.len() + 1 + name.len()) as u32).to_le_bytes().to_vec();
        hello.extend([self.token.as_bytes(), b"\n", name.as_bytes()].concat());
        stream.write_all(&hello)?;
        Ok(stream)
    }

    /// The connection of this name, if it has come, else waits a moment.
    pub fn take(&self, name: &str, time: Duration) -> io::Result<Option<TcpStream>> {
        if let Some(stream) = self.look(name)? {
            return Ok(Some(stream));
        }
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
        let _ = rustix::event::poll(&mut [PollFd::new(&self.listener.as_fd(), PollFlags::IN)], Some(&time));
        self.look(name)
    }

    fn look(&self, name: &str) -> io::Result<Option<TcpStream>> {
        let guests = &mut *self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    guests.pending.push_back(Pending { stream, since: Instant::now(), hello: Vec::new() });
                    guests.pending.retain_mut(|pending| pending.go_on(&self.token, &mut guests.admitted));
                    if guests.pending.len() > MAX_PENDING {
                        guests.pending.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The connection may have ended again while it waited.
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {
                }
                Err(error) => return Err(error),
            }
        }
        guests.pending.retain_mut(|pending| pending.go_on(&self.token, &mut guests.admitted));
        Ok(guests.admitted.remove(name))
    }
}

impl Pending {
    /// Reads on, and files the connection when its hello is complete. Whether it is still pending.
    fn go_on(&mut self, token: &str, admitted: &mut HashMap<String, TcpStream>) -> bool {
        loop {
            let wanted = match self.hello.first_chunk::<4>() {
                None => 4,
                Some(&length) => match u32::from_le_bytes(length) as usize {
                    length @ 0..=MAX_HELLO => 4 + length,
                    _ => return false,
                },
            };
            if self.hello.len() == wanted {
                return self.file(token, admitted);
            }
            let mut buffer = [0; MAX_HELLO];
            let wanted = (wanted - self.hello.len()).min(buffer.len());
            match (&self.stream).read(&mut buffer[..wanted]) {
                Ok(0) => return false,
                Ok(count) => self.hello.extend(&buffer[..count]),
                Err(error) => {
                    return error.kind() == io::ErrorKind::WouldBlock && self.since.elapsed() < HELLO_TIME;
                }
            }
        }
    }

    fn file(&self, token: &str, admitted: &mut HashMap<String, TcpStream>) -> bool {
        let name = std::str::from_utf8(&self.hello[4..]).ok().and_then(|hello| hello.split_once('\n'));
        if let (Some((said, name)), Ok(stream)) = (name, self.stream.try_clone()) {
            if is_same(said, token) {
                admitted.insert(name.into(), stream);
            } else {
                log::warn!("a connection from {:?} was refused: wrong token", self.stream.peer_addr());
            }
        }
        false
    }
}

/// Takes as long for a token that is nearly right as for one that is all wrong.
fn is_same(said: &str, token: &str) -> bool {
    said.len() == token.len() && said.bytes().zip(token.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lobby() -> (Lobby, SocketAddr) {
        let lobby = Lobby::open(IpAddr::from([127, 0, 0, 1]), "secret").unwrap();
        let address = lobby.address().unwrap();
        (lobby, address)
    }

    fn come(lobby: &Lobby, name: &str) -> Option<TcpStream> {
        (0..200).find_map(|_| lobby.take(name, Duration::from_millis(10)).unwrap())
    }

    #[test]
    fn guests_are_known_by_name() {
        let (lobby, address) = lobby();
        let mut one = lobby.knock(address, "one", HELLO_TIME).unwrap();
        let _two = lobby.knock(address, "two", HELLO_TIME).unwrap();
        one.write_all(b"x").unwrap();
        assert!(come(&lobby, "two").is_some());
        let stream = come(&lobby, "one").unwrap();
        stream.set_nonblocking(false).unwrap();
        let mut byte = [0];
        (&stream).read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        assert!(lobby.take("one", Duration::ZERO).unwrap().is_none(), "it is taken");
    }

    #[test]
    fn strangers_do_no_harm() {
        let (lobby, address) = lobby();
        let strangers: Vec<TcpStream> = (0..600).map(|_| TcpStream::connect(address).unwrap()).collect();
        for (stranger, text) in strangers.iter().zip([&b"GET / HTTP/1.1\r\n\r\n"[..], &[255; 4096], &[0; 4096]]) {
            let _ = (&*stranger).write_all(text);
        }
        let other = Lobby { token: "Secret".into(), ..Lobby::open([127, 0, 0, 1].into(), "").unwrap() };
        let mut thief = other.knock(address, "one", HELLO_TIME).unwrap();
        let _one = lobby.knock(address, "one", HELLO_TIME).unwrap();
        assert!(come(&lobby, "one").is_some());
        assert!(lobby.guests.lock().unwrap().pending.len() <= MAX_PENDING);
        assert!(matches!(thief.read(&mut [0]), Ok(0) | Err(_)), "it is cut off");
    }
}
