//! Messages between the GPUs of a group.

use flow_kernels::DType;
use flow_kernels::cuda::{DeviceBuffer, Stream};

use super::group::CudaGroup;
use super::operations::{PeerBlock, count};
use super::progress::{Batch, CudaOp};
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::kind::Kind;
use crate::p2p::P2pOp;

impl CudaGroup {
    /// Sends `data` to rank `to`, which calls [`CudaGroup::recv`] with the same size and type.
    /// Operations of a group follow each other: two ranks that both send before they receive wait
    /// for each other.
    pub fn send(&self, data: &impl DeviceBuffer, to: usize, stream: &Stream) -> Result<()> {
        self.caller().check_peer("send", to)?;
        let operation = OpDescriptor::new(Kind::Send, data.dtype(), count(data)).peer(to, 0);
        let block = PeerBlock { buffer: data, start: 0, bytes: data.bytes(), peer: to };
        // SAFETY: as above.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.exchange(&[block], &[], own)
        })
    }

    /// Receives what rank `from` sends next.
    pub fn recv(&self, buffer: &mut impl DeviceBuffer, from: usize, stream: &Stream) -> Result<()> {
        self.caller().check_peer("recv", from)?;
        let operation = OpDescriptor::new(Kind::Recv, buffer.dtype(), count(buffer)).peer(from, 0);
        let block = PeerBlock { buffer: &*buffer, start: 0, bytes: buffer.bytes(), peer: from };
        // SAFETY: as above.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.exchange(&[], &[block], own)
        })
    }

    /// Sends and receives messages as one operation, in which none waits for another. So two ranks
    /// that both send and receive do not wait for each other, in whatever order they list it.
    /// Messages between two ranks keep the order of the list.
    pub fn batch_send_recv<B: DeviceBuffer>(
        &self,
        ops: &mut [P2pOp<&mut B>],
        stream: &Stream,
    ) -> Result<()> {
        let mut sends = Vec::new();
        let mut receives = Vec::new();
        let mut messages = Vec::new();
        for op in ops.iter() {
            let (name, verb, blocks, buffer, peer) = match op {
                P2pOp::Send { data, to } => ("send", "send to", &mut sends, &**data, *to),
                P2pOp::Recv { buffer, from } => {
                    ("recv", "recv from", &mut receives, &**buffer, *from)
                }
            };
            self.caller().check_peer(name, peer)?;
            messages.push((verb, peer));
            blocks.push(PeerBlock { buffer, start: 0, bytes: buffer.bytes(), peer });
        }
        if ops.is_empty() {
            return Ok(());
        }
        let bytes = sends.iter().chain(&receives).map(|block| block.bytes).sum();
        let descriptor = OpDescriptor::new(Kind::BatchSendRecv, DType::U8, bytes);
        let batch = Some(Batch::new(&messages, &self.failure.core.ranks).into());
        let operation = CudaOp { descriptor, batch };
        // SAFETY: as above.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.exchange(&sends, &receives, own)
        })
    }
}
