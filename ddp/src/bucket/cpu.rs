//! Buckets on the CPU: gradients are reduced in memory that all ranks of the machine reach.

use std::sync::Arc;

use flow_comm::{ProcessGroup, Segments};
use tch::{Kind, Tensor};

use super::grad_bytes::GradBytes;
use super::kept::KeptParts;
use super::pending::Pending;
use super::progress::Progress;
use super::{BackwardEvent, Bucket, ReducePath};
use crate::error::{Error, Result, dtype, failed, job_rank};
use crate::fsdp::grad_shards::GradShards;
use crate::grad_layout::GradLayout;
use crate::options::Options;
use crate::parameter::Parameter;
use crate::settings::Settings;
use crate::stats::{BucketTimes, PhaseTimes};

/// Buckets in shared memory, and who reduces them beside backward.
pub(crate) struct CpuPath {
    group: ProcessGroup,
    progress: Arc<Progress>,
    in_place: bool,
    kept: Option<Arc<GradShards>>,
    /// The number of virtual ranks, if buckets are added up in their tree.
    virtual_ranks: Option<usize>,
}

impl CpuPath {
    /// Returns the path of a group, and starts the thread that reduces, if there is to be one. `kept`:
    /// where this rank's parts of gradients go, if it gets no others.
    pub fn new(
        group: &ProcessGroup,
        settings: &Settings,
        options: &Options,
        kept: Option<Arc<GradShards>>,
    ) -> Result<Self> {
        let progress = Progress::choose(group, settings.progress_thread, options.op);
        let progress = progress.map_err(|error| Error::Model {
            rank: job_rank(group),
            reason: format!("cannot start a thread: {error}"),
        })?;
        let progress = Arc::new(progress);
        Ok(Self {
            group: group.clone(),
            progress,
            in_place: settings.in_place,
            kept,
            virtual_ranks: options.virtual_ranks,
        })
    }
}

impl ReducePath for CpuPath {
    fn bucket(&self, number: u32, members: &[&Parameter], kind: Kind) -> Result<Box<dyn Bucket>> {
        Ok(Box::new(CpuBucket::new(self, number, members, kind)?))
    }

    fn grads_are_views(&self) -> bool {
        false
    }

    fn progress(&self) -> flow_comm::Result<()> {
        self.progress.advance()
    }

    fn flush(&self) -> flow_comm::Result<()> {
        self.progress.flush()
    }

    fn join(&self) -> Result<()> {
        Ok(()) // the host has waited
    }

    fn record(&self, _: BackwardEvent) -> Result<()> {
        Ok(())
    }

    fn phase_times(&self) -> Option<PhaseTimes> {
        None
    }

    fn synchronize(&self) -> Result<()> {
        Ok(()) // backward has waited
    }

    fn abort(&self, _: &str) {}
}

struct CpuBucket {
    segments: Arc<Segments>,
    progress: Arc<Progress>,
    in_place: bool,
    /// Shared memory for each gradient that cannot be reduced where it is. libtorch put it
    /// elsewhere, or it has not the type of communication or its parameter's layout.
    places: Vec<Tensor>,
    layouts: Vec<GradLayout>,
    /// Which gradients of this backward were copied to their places.
    copied: Vec<bool>,
    kind: Kind,
    /// This rank's parts, if it gets no others.
    kept: Option<KeptParts>,
}

impl CpuBucket {
    fn new(path: &CpuPath, number: u32, members: &[&Parameter], kind: Kind) -> Result<Self> {
        let group = &path.group;
        let dtype = dtype(group, kind)?;
        let lengths: Vec<usize> = members.iter().map(|member| member.elements()).collect();
        let mut places = Vec::with_capacity(members.len());
        for member in members {
            // A place that no gradient is copied to is never touched, and takes no memory.
            let memory = group.alloc_shared::<u8>(member.elements() * dtype.size())?;
            let shape = member.layout.memory_shape();
            let place = flow_autograd::tensor_from_memory(memory, &shape, kind)
                .map_err(|error| failed(group, error.to_string()))?;
            places.push(member.layout.in_own_order(&place));
        }
        let kept = path.kept.as_ref().map(|shards| KeptParts::new(shards, members, kind));
        let segments = match (&kept, path.virtual_ranks) {
            (Some(kept), _) => group.scattered_segments(number, dtype, lengths, kept.ranges())?,
            (None, Some(count)) => group.virtual_segments(number, dtype, lengths, count)?,
            (None, None) => group.segments(number, dtype, lengths)?,
        };
        Ok(Self {
            places,
            segments: Arc::new(segments),
            progress: Arc::clone(&path.progress),
            in_place: path.in_place,
            layouts: members.iter().map(|member| member.layout.clone()).collect(),
            copied: vec![false; members.len()],
            kind,
            kept,
        })
    }

    fn use_place(&mut self, slot: usize) {
        self.copied[slot] = true;
        let place = self.layouts[slot].in_memory_order(&self.places[slot]);
        // Refused only while a backward that failed still reduces the bucket: then launching it
        // fails.
        self.segments.set_piece(slot, GradBytes(place));
    }
}

impl Bucket for CpuBucket {
    fn set_step(&mut self, step: u32) {
        self.segments.set_step(step);
    }

    fn mark_ready(&mut self, slot: usize, gradient: &Tensor, exclusive: bool) -> Result<bool> {
        // Ranks add up what lies at the same place in memory: a gradient of another layout must be
        // copied.
        let in_place = self.in_place
            && exclusive
            && gradient.kind() == self.kind
            && self
                .segments
                .set_piece(slot, GradBytes(self.layouts[slot].in_memory_order(gradient)));
        if in_place {
            self.copied[slot] = false;
        } else {
            tch::no_grad(|| self.places[slot].copy_(gradient));
            self.use_place(slot);
        }
        Ok(in_place)
    }

    fn mark_unused(&mut self, slot: usize) -> Result<()> {
        let _ = tch::no_grad(|| self.places[slot].zero_());
        self.use_place(slot);
        Ok(())
    }

    fn launch(&mut self) -> flow_comm::Result<Pending> {
        if let Some(kept) = &mut self.kept {
            kept.place(&self.segments);
        }
        self.progress.launch(&self.segments)
    }

    fn join_gradients(&self) -> Result<()> {
        Ok(())
    }

    fn gradient(&self, slot: usize) -> Option<&Tensor> {
        self.copied[slot].then(|| &self.places[slot])
    }

    fn reduced_grad(&self, slot: usize) -> Option<&Tensor> {
        match &self.kept {
            Some(kept) => kept.apart(slot),
            None => self.gradient(slot),
        }
    }

    fn bytes(&self) -> usize {
        self.segments.bytes()
    }

    fn times(&self) -> Option<BucketTimes> {
        None
    }

    fn reset(&mut self, _: bool) {
        self.segments.clear();
        if let Some(kept) = &mut self.kept {
            kept.clear();
        }
    }
}
