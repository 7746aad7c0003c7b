//! A bucket on a GPU: gradients are packed into flat memory, reduced there beside backward, and
//! become views of it.

use std::sync::Arc;
use std::time::Duration;

use flow_autograd::CudaTensor;
use flow_comm::nccl::{CudaGroup, Event, FlatBucket, Stream};
use flow_comm::ProcessGroup;
use tch::{Kind, Tensor};

use crate::error::{dtype, failed, job_rank, Error, Result};
use crate::layout::Layout;
use crate::parameter::Parameter;

pub(crate) struct CudaBucket {
    cuda: Arc<CudaGroup>,
    flat: FlatBucket,
    /// This backward's gradients, as they lie in memory and as themselves. They are kept until its
    /// end, when libtorch's stream has been made to wait for what reads them: only then may their
    /// memory be used again.
    gradients: Vec<Option<(CudaTensor, Tensor)>>,
    /// The places of gradients in flat memory; none if they are communicated in another type.
    views: Vec<Tensor>,
    /// The streams on which the gradients were computed, mostly one.
    streams: Vec<Stream>,
    layouts: Vec<Layout>,
    kind: Kind,
    rank: usize,
}

impl CudaBucket {
    pub fn new(
        group: &ProcessGroup,
        cuda: &Arc<CudaGroup>,
        number: u32,
        members: &[&Parameter],
        communication: Kind,
    ) -> Result<Self> {
        let kind = members[0].kind;
        let lengths: Vec<usize> = members.iter().map(|member| member.elements()).collect();
        let flat =
            cuda.bucket(number, dtype(group, kind)?, dtype(group, communication)?, &lengths)?;
        let view = |(slot, member): (usize, &&Parameter)| {
            let place =
                flat.view(slot).ok_or_else(|| failed(group)(format!("there is no slot {slot}")))?;
            let view = flow_autograd::tensor_from_device_memory(
                cuda.device(),
                place,
                &member.layout.memory_shape(),
                kind,
            );
            Ok(member.layout.in_own_order(&view.map_err(|e| failed(group)(e.to_string()))?))
        };
        let views = match kind == communication {
            true => members.iter().enumerate().map(view).collect::<Result<Vec<_>>>()?,
            false => Vec::new(),
        };
        Ok(Self {
            cuda: Arc::clone(cuda),
            flat,
            gradients: members.iter().map(|_| None).collect(),
            views,
            streams: Vec::new(),
            layouts: members.iter().map(|member| member.layout.clone()).collect(),
            kind,
            rank: job_rank(group),
        })
    }

    /// Takes in a gradient. Returns whether it is reduced where it is: where it lies in the bucket
    /// already.
    pub fn mark_ready(&mut self, slot: usize, gradient: &Tensor, owned: bool) -> Result<bool> {
        // A gradient that is reduced in another type gets the result itself: nobody else may still
        // need it.
        let source = self.layouts[slot].in_memory_order(gradient).contiguous();
        let source = if self.views.is_empty() && !owned { source.copy() } else { source };
        let in_place = self
            .views
            .get(slot)
            .is_some_and(|v| flow_autograd::data_ptr(v) == flow_autograd::data_ptr(&source));
        self.put(slot, &source)?;
        Ok(in_place)
    }

    pub fn take_zeros(&mut self, slot: usize) -> Result<()> {
        let device = flow_autograd::torch_device(self.cuda.device());
        let zeros = Tensor::zeros(self.layouts[slot].memory_shape(), (self.kind, device));
        self.put(slot, &zeros)
    }

    /// `source` is contiguous, its dimensions as they come in memory.
    fn put(&mut self, slot: usize, source: &Tensor) -> Result<()> {
        let fail = |error: flow_autograd::Error| Error::Torch {
            rank: self.rank,
            operation: "reducing a bucket",
            reason: error.to_string(),
        };
        let stream = flow_autograd::current_stream(self.cuda.device()).map_err(fail)?;
        if !self.streams.contains(&stream) {
            self.streams.push(stream);
        }
        let memory = CudaTensor::new(source).map_err(fail)?;
        let gradient = self.layouts[slot].in_own_order(memory.tensor());
        self.gradients[slot] = Some((memory, gradient));
        Ok(())
    }

    pub fn set_step(&mut self, step: u32) {
        self.flat.set_step(step);
    }

    /// Enqueues the reduction; all gradients are there.
    pub fn launch(&mut self) -> flow_comm::Result<()> {
        let mut gradients: Vec<&mut CudaTensor> =
            self.gradients.iter_mut().flatten().map(|(memory, _)| memory).collect();
        self.cuda.reduce_bucket(&mut self.flat, &mut gradients, &self.streams)
    }

    /// The reduced gradient of a slot.
    pub fn reduced_grad(&self, slot: usize) -> Option<&Tensor> {
        self.views.get(slot).or_else(|| self.gradients[slot].as_ref().map(|(_, gradient)| gradient))
    }

    pub fn bytes(&self) -> usize {
        self.flat.bytes()
    }

    /// The last reduction: its last gradient after `begin`, how long it took from there, and how
    /// much of that was before `end`; the device must have come so far.
    pub fn times(&self, begin: &Event, end: &Event) -> Option<[Duration; 3]> {
        let [ready, done] = self.flat.timing()?;
        let total = done.since(ready).ok()?;
        Some([ready.since(begin).ok()?, total, total.saturating_sub(done.since(end).ok()?)])
    }

    /// Gives the gradients back; if they may still be in use, their memory is lost instead.
    pub fn release(&mut self, stream_joined: bool) {
        for gradient in self.gradients.iter_mut().filter_map(Option::take) {
            if !stream_joined {
                std::mem::forget(gradient);
            }
        }
        self.streams.clear();
    }
}
