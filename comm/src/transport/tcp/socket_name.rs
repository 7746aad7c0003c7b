//! The name that the handshake of a socket has: which of a connection's two sockets it is.

use serde::{Deserialize, Serialize};

/// One of the two sockets of a connection.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub enum SocketKind {
    /// The socket with the frames.
    Data,
    /// The socket with the notices.
    Control,
}

/// The name of a socket.
#[derive(Serialize, Deserialize)]
pub struct SocketName {
    pub kind: SocketKind,
    /// The rank that connects.
    pub rank: usize,
    /// The number of that rank's attempt.
    pub attempt: u64,
}

impl SocketName {
    /// Returns the name as the handshake has it.
    pub fn encode(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads the name of a handshake; None if it is none.
    pub fn decode(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}
