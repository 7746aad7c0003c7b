//! How long a client waits for the server.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use super::blocking_socket::{BlockingSocket, is_timeout};

/// The interval at which a wait for the server asks whether it is to go on.
pub const PATIENCE_CHECK: Duration = Duration::from_millis(100);

/// The end of a wait: a deadline, or the program's wish.
pub struct Patience {
    is_interrupted: fn() -> bool,
    /// `is_interrupted` has said so, which it may do only once.
    was_interrupted: Cell<bool>,
    pub deadline: Instant,
}

impl Patience {
    /// Returns the patience that ends at `deadline`, or once `is_interrupted` says so.
    pub fn new(is_interrupted: fn() -> bool, deadline: Instant) -> Self {
        Self { is_interrupted, was_interrupted: Cell::new(false), deadline }
    }

    /// Asks whether the program wants to stop waiting.
    pub fn is_over(&self) -> bool {
        self.was_interrupted.set(self.was_interrupted.get() || (self.is_interrupted)());
        self.was_interrupted.get()
    }

    /// Whether the program has said that it wants to stop waiting.
    pub fn was_interrupted(&self) -> bool {
        self.was_interrupted.get()
    }
}

/// A socket whose reads and writes end with the patience.
pub struct Impatient<'a> {
    pub socket: &'a mut dyn BlockingSocket,
    pub patience: &'a Patience,
    /// The longest time of a read or a write.
    pub limit: Duration,
    /// The part of it after which to ask whether to go on.
    pub unasked: Duration,
}

impl Impatient<'_> {
    fn patiently(
        &mut self,
        mut act: impl FnMut(&mut dyn BlockingSocket) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let end = self.patience.deadline.min(Instant::now() + self.limit);
        let mut slice = self.unasked;
        loop {
            self.socket.set_timeout(left_until(end)?.min(slice))?;
            match act(self.socket) {
                Err(error) if is_timeout(&error) && !self.patience.is_over() => {
                    slice = PATIENCE_CHECK;
                }
                result => return result,
            }
        }
    }
}

impl Read for Impatient<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.patiently(|socket| socket.read(buffer))
    }
}

impl Write for Impatient<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.patiently(|socket| socket.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

/// Returns the time until a deadline.
///
/// # Errors
/// It is over.
pub fn left_until(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}
