//! One bucket's life in a backward: gradients come in, are reduced, and are where the optimizer reads them.

use std::sync::Arc;
use std::time::Instant;

use flow_comm::{DType, ProcessGroup, Segments};
use tch::{Kind, Tensor};

use crate::error::{job_rank, Error, Result};
use crate::reducer::Parameter;

/// A bucket and the shared memory it may need.
pub(crate) struct Bucket {
    /// Parameters by index, in the order of their places.
    pub members: Vec<usize>,
    pub segments: Arc<Segments>,
    /// For gradients that were not born in shared memory, or not in the type of communication: a place for each.
    places: Vec<Tensor>,
    /// Which gradients of this backward were copied to their places.
    copied: Vec<bool>,
    /// Gradients still to come in this backward.
    pub pending: usize,
    /// When the last one came.
    pub ready: Option<Instant>,
    kind: Kind,
}

impl Bucket {
    pub fn new(
        group: &ProcessGroup,
        number: usize,
        members: Vec<usize>,
        parameters: &[Parameter],
        communication: Option<Kind>,
    ) -> Result<Self> {
        let rank = job_rank(group);
        let fail = |reason: String| Error::Torch { rank, operation: "making a bucket", reason };
        let kind = communication.unwrap_or(parameters[members[0]].kind);
        let dtype: DType = flow_autograd::dtype(kind).ok_or_else(|| fail(format!("{kind:?} cannot be reduced")))?;
        let lengths: Vec<usize> = members.iter().map(|&m| parameters[m].elements()).collect();
        // Memory that no gradient is ever copied to is never touched, and costs none.
        let place = |(&member, &length): (&usize, &usize)| {
            let memory = group.alloc_shared::<u8>(length * dtype.size())?;
            flow_autograd::tensor_in(memory, &parameters[member].shape, kind).map_err(|e| fail(e.to_string()))
        };
        let places = members.iter().zip(&lengths).map(place).collect::<Result<Vec<_>>>()?;
        let segments = Arc::new(group.segments(number as u32, dtype, lengths)?);
        let (copied, pending) = (vec![false; members.len()], members.len());
        Ok(Self { members, segments, places, copied, pending, ready: None, kind })
    }

    /// Takes in a member's gradient. With `in_place` it is reduced where it is, if all ranks can reach it there.
    /// Returns whether it is.
    pub fn take(&mut self, slot: usize, gradient: &Tensor, in_place: bool) -> bool {
        let reachable =
            in_place && gradient.kind() == self.kind && self.segments.place(slot, Memory(gradient.shallow_clone()));
        if reachable {
            self.copied[slot] = false;
        } else {
            tch::no_grad(|| self.places[slot].copy_(gradient));
            self.use_place(slot);
        }
        self.arrived();
        reachable
    }

    /// Takes part with zeros for a member that got no gradient.
    pub fn take_zeros(&mut self, slot: usize) {
        let _ = tch::no_grad(|| self.places[slot].zero_());
        self.use_place(slot);
        self.arrived();
    }

    fn use_place(&mut self, slot: usize) {
        self.copied[slot] = true;
        // Refused only if a backward that failed was reducing the bucket: then posting it again fails.
        self.segments.place(slot, Memory(self.places[slot].shallow_clone()));
    }

    fn arrived(&mut self) {
        self.pending -= 1;
        if self.pending == 0 {
            self.ready = Some(Instant::now());
        }
    }

    /// The reduced gradient of a member that was copied; None if it was reduced where it is.
    pub fn result(&self, slot: usize) -> Option<&Tensor> {
        self.copied[slot].then(|| &self.places[slot])
    }

    /// Ready for the next backward.
    pub fn reset(&mut self) {
        self.pending = self.members.len();
        self.ready = None;
        self.segments.clear();
    }
}

/// A contiguous CPU tensor; of others, nothing.
struct Memory(Tensor);

impl AsMut<[u8]> for Memory {
    fn as_mut(&mut self) -> &mut [u8] {
        flow_autograd::bytes_mut(&mut self.0).unwrap_or_default()
    }
}
