//! Services of connections: the event loop moves bytes, a service knows what they mean.

use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Identifies a service behind an address; never used twice.
pub type ServiceId = usize;

/// Serves the connections that it was given, by their ids.
pub trait Service {
    /// Takes a connection that was admitted.
    ///
    /// # Errors
    /// There is no room for it.
    fn join(&mut self, id: usize, now: Instant, outbox: &mut Outbox) -> io::Result<()>;

    /// Takes what it can use off the beginning of `input`, at most one request. Returns how many
    /// bytes that is: 0 if it needs more. The connection has not taken `unsent` bytes of what was
    /// sent before.
    ///
    /// # Errors
    /// The connection is of no more use.
    fn receive(
        &mut self,
        id: usize,
        input: &[u8],
        unsent: usize,
        now: Instant,
        outbox: &mut Outbox,
    ) -> io::Result<usize>;

    /// Returns when something must be done about a connection if it says nothing.
    fn due(&self, id: usize) -> Option<Instant>;

    /// Answers a wait that has timed out.
    fn expire(&mut self, id: usize, now: Instant, outbox: &mut Outbox);

    /// Notes that the connection has ended.
    fn leave(&mut self, id: usize);
}

/// The bytes that are to be sent to connections.
#[derive(Default)]
pub struct Outbox(pub Vec<(usize, Arc<Vec<u8>>)>);

impl Outbox {
    /// Adds a reply to the connection `id`.
    pub fn send(&mut self, id: usize, reply: Arc<Vec<u8>>) {
        self.0.push((id, reply));
    }
}
