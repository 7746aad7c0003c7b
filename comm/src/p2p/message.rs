//! A message on its way between nodes.

use crate::descriptor::MessageDescriptor;
use crate::error::Result;
use crate::failure::Failure;
use crate::internode::connect::{Connector, progress};
use crate::memory::BufferView;
use crate::shm::io_segment::IoSegment;
use crate::transport::Connections;

/// Bytes that a connection moves within the group's timeout.
pub const PIECE: usize = 8 << 20;

/// The connection to a rank on another node, once there has been a message.
pub type PeerConnection = Option<Box<dyn Connections>>;

/// The ends of a connection for messages.
#[derive(Clone, Copy)]
pub struct Endpoints {
    pub sender: usize,
    pub receiver: usize,
}

impl Endpoints {
    /// Returns the name of the channel between the two.
    pub fn channel(self) -> String {
        format!("messages/{}-{}", self.sender, self.receiver)
    }

    /// Returns the two ranks, by their positions in the channel.
    pub fn members(self) -> [usize; 2] {
        [self.receiver, self.sender]
    }
}

/// Returns the parts of a message that are waited for one by one.
pub fn pieces(data: BufferView) -> impl Iterator<Item = IoSegment> {
    let starts = (0..data.bytes).step_by(PIECE);
    // SAFETY: they are inside the caller's memory, which is valid for the length of the call.
    starts.map(move |start| unsafe {
        IoSegment::new(data.data.add(start), PIECE.min(data.bytes - start))
    })
}

/// Sends or receives segments over the connection between two ranks; `own` is this one. The
/// connection is made first if there is none yet. The sender's life is not watched: all that it has
/// sent comes before the end of the connection.
pub fn transfer(
    (connector, failure): (&Connector, &Failure),
    connection: &mut PeerConnection,
    (ends, own): (Endpoints, usize),
    what: &MessageDescriptor,
    segments: impl IntoIterator<Item = IoSegment>,
) -> Result<()> {
    let is_sender = ends.sender == own;
    let (peer, position) = if is_sender { (ends.receiver, 1) } else { (ends.sender, 0) };
    let mut connections = match connection.take() {
        Some(connections) => connections,
        None => connector.connect(&ends.channel(), &ends.members(), position, what)?,
    };
    for segment in segments {
        if is_sender {
            connections.send(0, segment);
        } else {
            connections.receive(1, segment);
        }
    }
    let mut departure = None;
    let moved = failure.wait_until(what, &|| vec![peer], &|| None, &mut |time| {
        progress(&mut *connections, time, &mut |peer| peer.is_idle(1 - position)).or_else(|loss| {
            departure = Some(loss.how);
            Ok(true)
        })
    });
    let moved = match departure {
        Some(how) => Err(failure.handle_disconnect(peer, how, what)),
        None => moved,
    };
    if moved.is_err() {
        failure.abort_connections(&mut *connections);
    }
    *connection = Some(connections);
    moved
}
