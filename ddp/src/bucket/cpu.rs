//! A bucket on the CPU: gradients are reduced in memory that all ranks of the machine reach.

use std::sync::Arc;

use flow_comm::{ProcessGroup, Segments};
use tch::{Kind, Tensor};

use crate::error::{dtype, failed, Result};
use crate::layout::Layout;
use crate::parameter::Parameter;

use super::progress::Progress;

pub(crate) struct CpuBucket {
    pub segments: Arc<Segments>,
    progress: Arc<Progress>,
    /// For gradients that were not born in shared memory, or not in the type of communication or
    /// their parameter's layout: a place for each.
    places: Vec<Tensor>,
    layouts: Vec<Layout>,
    /// Which gradients of this backward were copied to their places.
    copied: Vec<bool>,
    kind: Kind,
}

impl CpuBucket {
    pub fn new(
        group: &ProcessGroup,
        progress: &Arc<Progress>,
        number: u32,
        members: &[&Parameter],
        kind: Kind,
    ) -> Result<Self> {
        let dtype = dtype(group, kind)?;
        let lengths: Vec<usize> = members.iter().map(|member| member.elements()).collect();
        // Memory that no gradient is ever copied to is never touched, and costs none.
        let place = |member: &&Parameter| {
            let memory = group.alloc_shared::<u8>(member.elements() * dtype.size())?;
            let place =
                flow_autograd::tensor_from_memory(memory, &member.layout.memory_shape(), kind);
            Ok(member.layout.in_own_order(&place.map_err(|e| failed(group)(e.to_string()))?))
        };
        let places = members.iter().map(place).collect::<Result<Vec<_>>>()?;
        let segments = Arc::new(group.segments(number, dtype, lengths)?);
        let progress = Arc::clone(progress);
        let layouts = members.iter().map(|member| member.layout.clone()).collect();
        Ok(Self { segments, progress, places, layouts, copied: vec![false; members.len()], kind })
    }

    /// Takes in a gradient. With `in_place` it is reduced where it is, if all ranks can reach it
    /// there. Returns whether it is.
    pub fn mark_ready(&mut self, slot: usize, gradient: &Tensor, in_place: bool) -> bool {
        // Ranks add up what lies at the same place in memory: a gradient of another layout must not
        // be taken as it is.
        let memory = || Memory(self.layouts[slot].in_memory_order(gradient));
        let reachable =
            in_place && gradient.kind() == self.kind && self.segments.set_piece(slot, memory());
        if reachable {
            self.copied[slot] = false;
        } else {
            tch::no_grad(|| self.places[slot].copy_(gradient));
            self.use_place(slot);
        }
        reachable
    }

    pub fn take_zeros(&mut self, slot: usize) {
        let _ = tch::no_grad(|| self.places[slot].zero_());
        self.use_place(slot);
    }

    fn use_place(&mut self, slot: usize) {
        self.copied[slot] = true;
        // Refused only if a backward that failed was reducing the bucket: then posting it again
        // fails.
        self.segments
            .set_piece(slot, Memory(self.layouts[slot].in_memory_order(&self.places[slot])));
    }

    /// Hands the bucket over to be reduced; false if that must be tried again later.
    pub fn launch(&self) -> flow_comm::Result<bool> {
        self.progress.post(&self.segments)
    }

    /// The reduced gradient of a slot that was copied; None if it was reduced where it is.
    pub fn reduced_grad(&self, slot: usize) -> Option<&Tensor> {
        self.copied[slot].then(|| &self.places[slot])
    }
}

/// A contiguous CPU tensor; of others, nothing.
struct Memory(Tensor);

impl AsMut<[u8]> for Memory {
    fn as_mut(&mut self) -> &mut [u8] {
        flow_autograd::bytes_mut(&mut self.0).unwrap_or_default()
    }
}
