//! Admission: connections prove a token and become clients.
//!
//! Anybody can connect, so nobody is trusted before a proof that they know the token. What they can
//! use up until then is bounded: bytes, time and file descriptors.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};
use rustix::rand::{GetRandomFlags, getrandom};

use super::proof;
use super::protocol::{self, MAX_HELLO, Nonce, Request, VERSION};
use super::service::ServiceId;
use super::tcp_store::VALIDATION;

/// A connection that is not admitted by then is closed.
const AUTH_TIMEOUT: Duration = Duration::from_secs(5);
/// The number of connections not yet admitted at which the oldest of them has to go before another
/// is accepted. A quarter of the process's file descriptors is another such limit. This keeps idle
/// connections from using up all; a client that is hit tries again.
const MAX_PENDING: u64 = 512;
/// But it may stay so long: when many clients come at once, they wait in the listener's queue
/// instead.
const MIN_STAY: Duration = Duration::from_millis(250);

/// The connections that are not admitted yet, by their ids, which ascend with the time of arrival.
#[derive(Default)]
pub struct PendingAuth {
    all: BTreeMap<usize, PendingConnection>,
    /// The token that admits to each store.
    tokens: BTreeMap<ServiceId, String>,
    /// The service that admits PyTorch's clients.
    tcp_store: Option<ServiceId>,
}

struct PendingConnection {
    since: Instant,
    /// The challenge that followed its hello.
    nonce: Option<Nonce>,
}

/// The decision about a connection that has said something.
pub enum AuthOutcome {
    /// Until it has said more.
    Wait,
    Challenge(Nonce),
    /// It has spent so many bytes on it.
    Admit {
        service: ServiceId,
        used: usize,
    },
    /// The client speaks this protocol: it gets the reason.
    Refuse(String),
}

impl PendingAuth {
    /// Admits those who know `token` to `store` from now on, unless that token leads to another.
    pub fn open(&mut self, store: ServiceId, token: String) -> bool {
        let is_new = !self.tokens.values().any(|other| *other == token);
        if is_new {
            self.tokens.insert(store, token);
        }
        is_new
    }

    /// Admits PyTorch's clients to `tcp_store` from now on, unless they are to another.
    pub fn open_to_pytorch(&mut self, tcp_store: ServiceId) -> bool {
        let is_new = self.tcp_store.is_none();
        self.tcp_store.get_or_insert(tcp_store);
        is_new
    }

    /// Admits nobody to `service` any more.
    pub fn shut(&mut self, service: ServiceId) {
        self.tokens.remove(&service);
        self.tcp_store = self.tcp_store.filter(|tcp_store| *tcp_store != service);
    }

    /// Adds a connection that came at `now`.
    pub fn add(&mut self, id: usize, now: Instant) {
        self.all.insert(id, PendingConnection { since: now, nonce: None });
    }

    /// Forgets a connection: it is admitted, or closed.
    pub fn remove(&mut self, id: usize) {
        self.all.remove(&id);
    }

    /// Returns one that has been here for `stay` at `now`.
    fn older(&self, now: Instant, stay: Duration) -> Option<usize> {
        self.all
            .first_key_value()
            .filter(|(_, connection)| now >= connection.since + stay)
            .map(|(id, _)| *id)
    }

    /// Returns a connection that has not authenticated in time.
    pub fn overdue(&self, now: Instant) -> Option<usize> {
        self.older(now, AUTH_TIMEOUT)
    }

    /// Returns one that has had time to say something, and can make room for another connection.
    pub fn removable(&self, now: Instant) -> Option<usize> {
        self.older(now, MIN_STAY)
    }

    /// Whether one must go before another is accepted.
    pub fn is_full(&self) -> bool {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        self.all.len() as u64 >= MAX_PENDING.min(files / 4)
    }

    /// Returns when the next one's time is over.
    pub fn deadline(&self) -> Option<Instant> {
        self.all.first_key_value().map(|(_, connection)| connection.since + AUTH_TIMEOUT)
    }

    /// Returns when the next one becomes removable.
    pub fn next_removable(&self) -> Option<Instant> {
        self.all.first_key_value().map(|(_, connection)| connection.since + MIN_STAY)
    }

    /// Decides about a connection that has said `input` since the last challenge.
    ///
    /// # Errors
    /// It is none of us.
    pub fn authenticate(&mut self, id: usize, input: &[u8]) -> io::Result<AuthOutcome> {
        // No frame of ours begins so.
        if let Some(service) = self.tcp_store.filter(|_| input.starts_with(&VALIDATION[..1])) {
            return match input {
                _ if input.starts_with(&VALIDATION) => {
                    Ok(AuthOutcome::Admit { service, used: VALIDATION.len() })
                }
                _ if VALIDATION.starts_with(input) => Ok(AuthOutcome::Wait),
                _ => Err(ErrorKind::InvalidData.into()),
            };
        }
        let Some(frame) = protocol::unframe(input, MAX_HELLO)? else {
            return Ok(AuthOutcome::Wait);
        };
        let connection = self.all.get_mut(&id).ok_or(ErrorKind::InvalidData)?;
        Ok(match (Request::decode(frame).ok_or(ErrorKind::InvalidData)?, connection.nonce) {
            (Request::Hello { version: VERSION }, None) => {
                let mut nonce = Nonce::default();
                // So few bytes are never given in part.
                match getrandom(&mut nonce, GetRandomFlags::empty()) {
                    Ok(_) => {
                        connection.nonce = Some(nonce);
                        AuthOutcome::Challenge(nonce)
                    }
                    Err(error) => AuthOutcome::Refuse(format!("no random numbers: {error}")),
                }
            }
            (Request::Hello { version }, None) => AuthOutcome::Refuse(format!(
                "it speaks version {VERSION} of its protocol, this program version {version}; use \
                 one version of Flow in a job"
            )),
            (Request::Proof { proof: sent }, Some(nonce)) => {
                let mut tokens = self.tokens.iter();
                match tokens.find(|(_, token)| proof::is_right(sent, token, &nonce)) {
                    Some((store, _)) => AuthOutcome::Admit { service: *store, used: input.len() },
                    None => AuthOutcome::Refuse(
                        "wrong token; FLOW_TOKEN must be that of the job that serves the store"
                            .to_string(),
                    ),
                }
            }
            _ => return Err(ErrorKind::InvalidData.into()),
        })
    }
}
