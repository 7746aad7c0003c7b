//! A client's connection, and what must stay the same of it when it leads to another server.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

use super::blocking_socket::BlockingSocket;
use super::protocol::Request;

/// A client's connection to a store.
pub struct Connection {
    pub socket: Box<dyn BlockingSocket>,
    /// If there may be another server after this one.
    session: Option<Session>,
}

/// What tells a request that is sent again from others.
struct Session {
    client: u64,
    /// The number of the last request that must not be done twice.
    number: u64,
}

impl Connection {
    /// Makes a connection. `may_move`: the client was sent to this server by another one.
    ///
    /// # Errors
    /// There are no random numbers.
    pub fn new(socket: Box<dyn BlockingSocket>, may_move: bool) -> io::Result<Connection> {
        let mut session = None;
        if may_move {
            let mut client = [0; 8];
            // So few bytes are never given in part.
            getrandom(&mut client, GetRandomFlags::empty())?;
            session = Some(Session { client: u64::from_ne_bytes(client), number: 0 });
        }
        Ok(Connection { socket, session })
    }

    /// Whether there may be another server after this one.
    pub fn may_move(&self) -> bool {
        self.session.is_some()
    }

    /// Returns the frame of a request, which may be sent more than once.
    pub fn encode(&mut self, request: &Request) -> Vec<u8> {
        let frame = request.encode();
        let Some(session) = &mut self.session else { return frame };
        match request {
            Request::Set { .. }
            | Request::Add { .. }
            | Request::CompareAndSet { .. }
            | Request::Delete { .. } => {
                session.number += 1;
                let Session { client, number } = *session;
                Request::Once { client, number, request: &frame[4..] }.encode()
            }
            _ => frame,
        }
    }
}
