//! Messages that are sent and received together.

/// One message of a batch: torch's `P2POp`. `B` is the buffer, on the host or on a GPU.
///
/// See [`ProcessGroup::batch_send_recv`](crate::ProcessGroup::batch_send_recv) and
/// [`CudaGroup::batch_send_recv`](crate::nccl::CudaGroup::batch_send_recv).
#[derive(Debug)]
pub enum P2pOp<B> {
    /// Sends `data` to rank `to` of the group.
    Send {
        /// The data that is sent.
        data: B,
        /// The receiver.
        to: usize,
    },
    /// Receives the next message of rank `from` of the group.
    Recv {
        /// The memory for it, as long as the message.
        buffer: B,
        /// The sender.
        from: usize,
    },
}

impl<B> P2pOp<B> {
    /// Whether this rank sends the message.
    pub(crate) fn is_send(&self) -> bool {
        matches!(self, P2pOp::Send { .. })
    }

    /// Returns the rank at the other end.
    pub fn peer(&self) -> usize {
        match self {
            P2pOp::Send { to, .. } => *to,
            P2pOp::Recv { from, .. } => *from,
        }
    }
}
