//! Buckets on a GPU: gradients are packed into flat memory, reduced there beside backward, and
//! become views of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_autograd::CudaTensor;
use flow_comm::nccl::{CudaGroup, Event, FlatBucket, Stream};
use flow_comm::{ProcessGroup, ReduceOp};
use tch::{Kind, Tensor};

use super::pending::Pending;
use super::{BackwardEvent, Bucket, ReducePath};
use crate::error::{Error, Result, dtype, failed};
use crate::grad_layout::GradLayout;
use crate::parameter::Parameter;
use crate::stats::{BucketTimes, PhaseTimes};

/// Buckets that are reduced over NCCL: the host waits for none of them, libtorch's stream does.
pub(crate) struct CudaPath {
    device: Arc<CudaDevice>,
}

/// A GPU, shared by its buckets.
struct CudaDevice {
    group: ProcessGroup,
    cuda: Arc<CudaGroup>,
    op: ReduceOp,
    /// When the last backward passed its moments.
    phases: Mutex<Option<Phases>>,
}

/// An event in libtorch's stream for each [`BackwardEvent`].
struct Phases {
    first_gradient: Event,
    end_of_backward: Event,
    end_of_reduction: Event,
}

impl CudaPath {
    /// Returns the path of a group whose ranks have GPUs.
    pub fn new(group: &ProcessGroup, cuda: Arc<CudaGroup>, op: ReduceOp) -> Self {
        let device = CudaDevice { group: group.clone(), cuda, op, phases: Mutex::default() };
        Self { device: Arc::new(device) }
    }
}

impl CudaDevice {
    /// libtorch's stream on this thread.
    fn current_stream(&self) -> Result<Stream> {
        flow_autograd::current_stream(self.cuda.device()).map_err(|error| self.error(error))
    }

    fn new_phases(&self) -> Result<Phases> {
        Ok(Phases {
            first_gradient: self.timed_event()?,
            end_of_backward: self.timed_event()?,
            end_of_reduction: self.timed_event()?,
        })
    }

    /// Returns the places of gradients in flat memory.
    fn views(&self, flat: &FlatBucket, members: &[&Parameter]) -> Result<Vec<Tensor>> {
        let mut views = Vec::with_capacity(members.len());
        for (slot, member) in members.iter().enumerate() {
            let place =
                flat.view(slot).ok_or_else(|| self.error(format!("there is no slot {slot}")))?;
            let shape = member.layout.memory_shape();
            let device = self.cuda.device();
            let view = flow_autograd::tensor_from_device_memory(device, place, &shape, member.kind)
                .map_err(|error| self.error(error))?;
            views.push(member.layout.in_own_order(&view));
        }
        Ok(views)
    }

    fn timed_event(&self) -> Result<Event> {
        Event::timed(self.cuda.device()).map_err(|error| self.error(error))
    }

    fn phases(&self) -> MutexGuard<'_, Option<Phases>> {
        self.phases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, error: impl ToString) -> Error {
        failed(&self.group, error.to_string())
    }
}

impl ReducePath for CudaPath {
    fn bucket(&self, number: u32, members: &[&Parameter], kind: Kind) -> Result<Box<dyn Bucket>> {
        Ok(Box::new(CudaBucket::new(&self.device, number, members, kind)?))
    }

    fn grads_are_views(&self) -> bool {
        true
    }

    fn progress(&self) -> flow_comm::Result<()> {
        self.device.cuda.check()
    }

    fn flush(&self) -> flow_comm::Result<()> {
        Ok(()) // what is launched is enqueued
    }

    fn join(&self) -> Result<()> {
        Ok(self.device.cuda.join(&self.device.current_stream()?)?)
    }

    fn record(&self, event: BackwardEvent) -> Result<()> {
        let device = &self.device;
        let stream = device.current_stream()?;
        let mut phases = device.phases();
        if phases.is_none() {
            *phases = Some(device.new_phases()?);
        }
        let Some(phases) = phases.as_mut() else { return Ok(()) };
        let moment = match event {
            BackwardEvent::FirstGradient => &mut phases.first_gradient,
            BackwardEvent::EndOfBackward => &mut phases.end_of_backward,
            BackwardEvent::EndOfReduction => &mut phases.end_of_reduction,
        };
        moment.record(&stream).map_err(|error| device.error(error))
    }

    fn phase_times(&self) -> Option<PhaseTimes> {
        let phases = self.device.phases();
        let phases = phases.as_ref()?;
        phases.end_of_reduction.synchronize().ok()?;
        let backward = phases.end_of_backward.since(&phases.first_gradient);
        let exposed = phases.end_of_reduction.since(&phases.end_of_backward);
        Some(PhaseTimes {
            backward: backward.unwrap_or_default(),
            exposed: exposed.unwrap_or_default(),
        })
    }

    fn synchronize(&self) -> Result<()> {
        Ok(self.device.cuda.synchronize()?)
    }

    fn abort(&self, cause: &str) {
        self.device.cuda.abort(cause);
    }
}

struct CudaBucket {
    device: Arc<CudaDevice>,
    flat: FlatBucket,
    /// This backward's gradients, as they lie in memory and as themselves. They are kept until its
    /// end, when libtorch's stream waits for everything that reads them: only then may libtorch
    /// use their memory again.
    gradients: Vec<Option<(CudaTensor, Tensor)>>,
    /// The places of gradients in flat memory; none if they are communicated in another type.
    views: Vec<Tensor>,
    /// The streams on which the gradients were computed, mostly one.
    streams: Vec<Stream>,
    layouts: Vec<GradLayout>,
    kind: Kind,
}

impl CudaBucket {
    fn new(
        device: &Arc<CudaDevice>,
        number: u32,
        members: &[&Parameter],
        communication: Kind,
    ) -> Result<Self> {
        let kind = members[0].kind;
        let lengths: Vec<usize> = members.iter().map(|member| member.elements()).collect();
        let mut flat = device.cuda.bucket(
            number,
            dtype(&device.group, kind)?,
            dtype(&device.group, communication)?,
            &lengths,
        )?;
        flat.set_op(device.op);
        let views = if kind == communication { device.views(&flat, members)? } else { Vec::new() };
        Ok(Self {
            device: Arc::clone(device),
            flat,
            gradients: members.iter().map(|_| None).collect(),
            views,
            streams: Vec::new(),
            layouts: members.iter().map(|member| member.layout.clone()).collect(),
            kind,
        })
    }

    /// Makes the streams on which gradients were computed, other than libtorch's current one, wait
    /// for the reductions.
    fn join_streams(&self) -> Result<()> {
        let current = self.device.current_stream()?;
        for stream in self.streams.iter().filter(|&stream| *stream != current) {
            self.device.cuda.join(stream)?;
        }
        Ok(())
    }

    /// `source` is contiguous, its dimensions in the order of memory.
    fn put(&mut self, slot: usize, source: &Tensor) -> Result<()> {
        let stream = self.device.current_stream()?;
        if !self.streams.contains(&stream) {
            self.streams.push(stream);
        }
        let memory = CudaTensor::new(source).map_err(|error| self.device.error(error))?;
        let gradient = self.layouts[slot].in_own_order(memory.tensor());
        self.gradients[slot] = Some((memory, gradient));
        Ok(())
    }
}

impl Bucket for CudaBucket {
    fn set_step(&mut self, step: u32) {
        self.flat.set_step(step);
    }

    /// A gradient is reduced where it is if it lies in the bucket already.
    fn mark_ready(&mut self, slot: usize, gradient: &Tensor, exclusive: bool) -> Result<bool> {
        let mut source = self.layouts[slot].in_memory_order(gradient).contiguous();
        // A gradient that is sent in another type is where the result goes: it needs memory of its
        // own.
        if self.views.is_empty() && !exclusive {
            source = source.copy();
        }
        let in_place = self
            .views
            .get(slot)
            .is_some_and(|view| flow_autograd::data_ptr(view) == flow_autograd::data_ptr(&source));
        self.put(slot, &source)?;
        Ok(in_place)
    }

    fn mark_unused(&mut self, slot: usize) -> Result<()> {
        let device = flow_autograd::torch_device(self.device.cuda.device());
        let zeros = Tensor::zeros(self.layouts[slot].memory_shape(), (self.kind, device));
        self.put(slot, &zeros)
    }

    /// Enqueues the reduction. libtorch's stream is made to wait for it by [`ReducePath::join`].
    fn launch(&mut self) -> flow_comm::Result<Pending> {
        let mut gradients: Vec<&mut CudaTensor> =
            self.gradients.iter_mut().flatten().map(|(memory, _)| memory).collect();
        self.device.cuda.reduce_bucket(&mut self.flat, &mut gradients, &self.streams)?;
        Ok(Pending::on_device())
    }

    fn join_gradients(&self) -> Result<()> {
        let current = self.device.current_stream()?;
        for stream in self.streams.iter().filter(|&stream| *stream != current) {
            let event =
                Event::new(self.device.cuda.device()).map_err(|error| self.device.error(error))?;
            event.record(stream).map_err(|error| self.device.error(error))?;
            current.wait(&event).map_err(|error| self.device.error(error))?;
        }
        Ok(())
    }

    fn gradient(&self, slot: usize) -> Option<&Tensor> {
        self.gradients[slot].as_ref().map(|(_, gradient)| gradient)
    }

    fn reduced_grad(&self, slot: usize) -> Option<&Tensor> {
        self.views.get(slot).or_else(|| self.gradient(slot))
    }

    fn bytes(&self) -> usize {
        self.flat.bytes()
    }

    fn times(&self) -> Option<BucketTimes> {
        let phases = self.device.phases();
        let phases = phases.as_ref()?;
        let [ready, done] = self.flat.timing()?;
        let ready_to_done = done.since(ready).ok()?;
        let after_backward = done.since(&phases.end_of_backward).ok()?;
        Some(BucketTimes {
            ready_at: ready.since(&phases.first_gradient).ok()?,
            ready_to_done,
            behind_backward: ready_to_done.saturating_sub(after_backward),
        })
    }

    /// libtorch uses a gradient's memory again in the order of the stream that computed it, which
    /// may be another than its current one. The memory of gradients that may still be read is lost.
    fn reset(&mut self, stream_joined: bool) {
        let may_reuse = stream_joined && self.join_streams().is_ok();
        for gradient in self.gradients.iter_mut().filter_map(Option::take) {
            if !may_reuse {
                std::mem::forget(gradient);
            }
        }
        self.streams.clear();
    }
}
