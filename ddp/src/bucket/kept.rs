//! This rank's parts of a bucket's gradients, where each rank keeps others.

use std::ops::Range;
use std::sync::Arc;

use flow_comm::Segments;
use tch::{Device, Kind, Tensor};

use super::grad_bytes::GradBytes;
use crate::fsdp::grad_shards::GradShards;
use crate::parameter::Parameter;

/// The parts of a bucket that this rank keeps.
pub(super) struct KeptParts {
    shards: Arc<GradShards>,
    /// The place of each slot's parameter among the shards.
    places: Vec<usize>,
    /// The type of communication.
    kind: Kind,
    /// The parts that are not reduced where they stay in this backward.
    apart: Vec<Option<Tensor>>,
}

impl KeptParts {
    /// Returns the parts of these parameters, whose gradients are communicated as `kind`.
    pub fn new(shards: &Arc<GradShards>, members: &[&Parameter], kind: Kind) -> Self {
        let places = members.iter().map(|member| shards.place_of(member)).collect();
        let apart = members.iter().map(|_| None).collect();
        Self { shards: Arc::clone(shards), places, kind, apart }
    }

    /// Returns the numbers of each gradient that this rank keeps.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        self.places.iter().map(|&place| self.shards.numbers(place)).collect()
    }

    /// Says where the bucket that is about to be launched leaves the parts.
    pub fn place(&mut self, segments: &Segments) {
        for (slot, &place) in self.places.iter().enumerate() {
            let stays = self.shards.destination(place, self.kind);
            let destination = match &stays {
                Some(destination) => destination.shallow_clone(),
                None => {
                    let length = self.shards.numbers(place).len() as i64;
                    Tensor::empty([length], (self.kind, Device::Cpu))
                }
            };
            // Refused only while a backward that failed still reduces the bucket: then launching it
            // fails.
            segments.set_destination(slot, GradBytes(destination.shallow_clone()));
            self.apart[slot] = stays.is_none().then_some(destination);
        }
    }

    /// Returns the part of a slot, unless it was reduced where it stays.
    pub fn apart(&self, slot: usize) -> Option<&Tensor> {
        self.apart[slot].as_ref()
    }

    /// Drops what was not reduced where it stays.
    pub fn clear(&mut self) {
        self.apart.fill_with(|| None);
    }
}
