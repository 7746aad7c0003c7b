//! Messages that are sent and received together.

use std::sync::Arc;

use flow_comm::nccl::{CudaGroup, Stream};
use flow_comm::{Lane, P2pOp, ProcessGroup};
use tch::Tensor;

use crate::error::{Result, failed};
use crate::prepared::{Prepared, check};
use crate::tensors::{HostTensor, contiguous, copy_back, cuda_buffer, cuda_group};

const NAME: &str = "batch_send_recv";

/// Messages and their tensors, ready to go.
pub(crate) struct Batch {
    messages: Vec<Message>,
}

struct Message {
    op: P2pOp<Tensor>,
    /// The tensor, or a contiguous copy of it.
    contiguous: Tensor,
}

impl Batch {
    /// Checks the tensors, and makes contiguous ones where needed.
    pub fn new(group: &ProcessGroup, ops: &[P2pOp<Tensor>]) -> Result<Self> {
        let messages: Vec<Message> =
            ops.iter().map(|op| Message::new(group, op)).collect::<Result<_>>()?;
        for message in &messages {
            let first = messages[0].contiguous.device();
            let device = message.contiguous.device();
            if device != first {
                return Err(failed(group, NAME)(format!(
                    "tensors are on {first:?} and on {device:?}: put those of a batch on one device"
                )));
            }
        }
        Ok(Self { messages })
    }
}

impl Message {
    fn new(group: &ProcessGroup, op: &P2pOp<Tensor>) -> Result<Self> {
        let op = match op {
            P2pOp::Send { data, to } => {
                check(false, data, false).map_err(failed(group, NAME))?;
                P2pOp::Send { data: data.shallow_clone(), to: *to }
            }
            P2pOp::Recv { buffer, from } => {
                check(false, buffer, true).map_err(failed(group, NAME))?;
                P2pOp::Recv { buffer: buffer.shallow_clone(), from: *from }
            }
        };
        let contiguous = match &op {
            P2pOp::Send { data: tensor, .. } | P2pOp::Recv { buffer: tensor, .. } => {
                contiguous(tensor)
            }
        };
        Ok(Self { op, contiguous })
    }

    /// Starts to send or receive, beside the caller.
    fn start(self, group: &ProcessGroup) -> flow_comm::Result<flow_comm::Work<Self>> {
        match self.op {
            P2pOp::Send { to, .. } => group.start(Lane::To(to), "send", move |group| {
                group.send(&HostTensor::new(&self.contiguous), to)?;
                Ok(self)
            }),
            P2pOp::Recv { from, .. } => group.start(Lane::From(from, 0), "recv", move |group| {
                group.recv(&mut HostTensor::new(&self.contiguous), from)?;
                Ok(self)
            }),
        }
    }

    /// Returns the caller's tensor, with what was received.
    fn finish(self, group: &ProcessGroup) -> Result<Tensor> {
        match self.op {
            P2pOp::Send { data, .. } => Ok(data),
            P2pOp::Recv { mut buffer, .. } => {
                copy_back(group, NAME, &self.contiguous, &mut buffer)?;
                Ok(buffer)
            }
        }
    }
}

impl Prepared for Batch {
    /// The callers' tensors, in their order.
    type Output = Vec<Tensor>;

    fn name(&self) -> &'static str {
        NAME
    }

    fn cuda(&self, group: &ProcessGroup) -> Result<Option<Arc<CudaGroup>>> {
        match self.messages.first() {
            Some(message) => cuda_group(group, &message.contiguous),
            None => Ok(None),
        }
    }

    fn run_on_host(&self, group: &ProcessGroup) -> flow_comm::Result<()> {
        let mut buffers: Vec<HostTensor> =
            self.messages.iter().map(|message| HostTensor::new(&message.contiguous)).collect();
        group.batch_send_recv(&mut self.ops(&mut buffers))
    }

    /// Each message goes in the order of those to, or from, the same rank.
    fn start_on_host(
        self,
        group: &ProcessGroup,
    ) -> Result<impl FnOnce() -> Result<Self> + Send + 'static> {
        let works: Vec<_> = self
            .messages
            .into_iter()
            .map(|message| message.start(group))
            .collect::<flow_comm::Result<_>>()?;
        Ok(move || {
            let messages = works.into_iter().map(flow_comm::Work::wait);
            Ok(Self { messages: messages.collect::<flow_comm::Result<_>>()? })
        })
    }

    fn enqueue(&self, group: &ProcessGroup, cuda: &CudaGroup, stream: &Stream) -> Result<()> {
        let mut buffers = self
            .messages
            .iter()
            .map(|message| cuda_buffer(group, NAME, &message.contiguous))
            .collect::<Result<Vec<_>>>()?;
        cuda.batch_send_recv(&mut self.ops(&mut buffers), stream)?;
        Ok(())
    }

    fn finish(self, group: &ProcessGroup) -> Result<Vec<Tensor>> {
        self.messages.into_iter().map(|message| message.finish(group)).collect()
    }
}

impl Batch {
    /// Returns the messages on these buffers.
    fn ops<'a, B>(&self, buffers: &'a mut [B]) -> Vec<P2pOp<&'a mut B>> {
        let mut ops = Vec::with_capacity(buffers.len());
        for (message, buffer) in self.messages.iter().zip(buffers) {
            ops.push(match message.op {
                P2pOp::Send { to, .. } => P2pOp::Send { data: buffer, to },
                P2pOp::Recv { from, .. } => P2pOp::Recv { buffer, from },
            });
        }
        ops
    }
}
