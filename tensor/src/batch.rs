//! Messages that are sent and received together.

use std::sync::Arc;

use flow_comm::nccl::{CudaGroup, Stream};
use flow_comm::{Lane, P2pOp, ProcessGroup};
use tch::Tensor;

use crate::error::{failed, Result};
use crate::operation::{check, Prepared};
use crate::tensors::{contiguous, copy_back, cuda_group, cuda_tensor, HostTensor};

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
        let message = |op: &P2pOp<Tensor>| {
            let (tensor, written) = tensor_of(op);
            check(false, tensor, written).map_err(failed(group, NAME))?;
            let tensor = tensor.shallow_clone();
            let op = match *op {
                P2pOp::Send { to, .. } => P2pOp::Send { data: tensor, to },
                P2pOp::Recv { from, .. } => P2pOp::Recv { buffer: tensor, from },
            };
            Ok(Message { contiguous: contiguous(tensor_of(&op).0), op })
        };
        let messages: Vec<Message> = ops.iter().map(message).collect::<Result<_>>()?;
        let device = |message: &Message| message.contiguous.device();
        if let [first, others @ ..] = &messages[..] {
            if let Some(other) = others.iter().find(|other| device(other) != device(first)) {
                return Err(failed(group, NAME)(format!(
                    "tensors are on {:?} and on {:?}: put those of a batch on one device",
                    device(first),
                    device(other)
                )));
            }
        }
        Ok(Self { messages })
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
        let start = |message: Message| match message.op {
            P2pOp::Send { to, .. } => group.start(Lane::To(to), "send", move |group| {
                group.send(&HostTensor::new(&message.contiguous), to).map(|()| message)
            }),
            P2pOp::Recv { from, .. } => group.start(Lane::From(from, 0), "recv", move |group| {
                group.recv(&mut HostTensor::new(&message.contiguous), from).map(|()| message)
            }),
        };
        let works: Vec<_> =
            self.messages.into_iter().map(start).collect::<flow_comm::Result<_>>()?;
        Ok(move || {
            let messages = works.into_iter().map(flow_comm::Work::wait);
            Ok(Self { messages: messages.collect::<flow_comm::Result<_>>()? })
        })
    }

    fn enqueue(&self, group: &ProcessGroup, cuda: &CudaGroup, stream: &Stream) -> Result<()> {
        let failed = failed(group, NAME);
        let memory = |message: &Message| {
            cuda_tensor(&message.contiguous).map_err(|error| failed(error.to_string()))
        };
        let mut buffers = self.messages.iter().map(memory).collect::<Result<Vec<_>>>()?;
        cuda.batch_send_recv(&mut self.ops(&mut buffers), stream)?;
        Ok(())
    }

    fn finish(self, group: &ProcessGroup) -> Result<Vec<Tensor>> {
        let finish = |message: Message| match message.op {
            P2pOp::Send { data, .. } => Ok(data),
            P2pOp::Recv { mut buffer, .. } => {
                copy_back(group, NAME, &message.contiguous, &mut buffer)?;
                Ok(buffer)
            }
        };
        self.messages.into_iter().map(finish).collect()
    }
}

impl Batch {
    /// The messages on these buffers.
    fn ops<'a, B>(&self, buffers: &'a mut [B]) -> Vec<P2pOp<&'a mut B>> {
        let op = |(message, buffer): (&Message, &'a mut B)| match message.op {
            P2pOp::Send { to, .. } => P2pOp::Send { data: buffer, to },
            P2pOp::Recv { from, .. } => P2pOp::Recv { buffer, from },
        };
        self.messages.iter().zip(buffers).map(op).collect()
    }
}

/// A message's tensor, and whether it is written to.
fn tensor_of(op: &P2pOp<Tensor>) -> (&Tensor, bool) {
    match op {
        P2pOp::Send { data, .. } => (data, false),
        P2pOp::Recv { buffer, .. } => (buffer, true),
    }
}
