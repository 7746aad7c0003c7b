//! Where a parameter is among the modules.

use std::sync::Arc;

use tch::Tensor;

use super::flat::OwnElements;
use super::unit::Unit;
use crate::zero::partition::Shard;

/// Where a parameter is: the module, the flat parameters of it, and the place among these.
#[derive(Clone)]
pub(super) struct Place {
    unit: Arc<Unit>,
    flat: usize,
    slot: usize,
}

impl Place {
    /// Finds a parameter.
    pub fn find(units: &[Arc<Unit>], parameter: &Tensor) -> Option<Self> {
        for unit in units {
            for (flat, parameters) in unit.lock().flats.iter().enumerate() {
                if let Some(slot) = parameters.slot_of(parameter) {
                    return Some(Self { unit: Arc::clone(unit), flat, slot });
                }
            }
        }
        None
    }

    /// Returns the ranks that have elements of the parameter.
    pub fn shards(&self, ranks: usize) -> Vec<Shard> {
        let mut shards = Vec::new();
        let state = self.unit.lock();
        for rank in 0..ranks {
            if let Some(elements) = state.flats[self.flat].elements_on(self.slot, rank) {
                shards.push(Shard { rank, elements });
            }
        }
        shards
    }

    /// Returns this rank's elements of the parameter, and of its gradient if it has one.
    pub fn own(&self) -> Option<(Tensor, Option<Tensor>)> {
        self.unit.lock().flats[self.flat].own(self.slot)
    }

    /// Returns this rank's elements of the parameter.
    pub fn own_elements(&self) -> Option<OwnElements> {
        self.unit.lock().flats[self.flat].own_elements(self.slot)
    }

    /// Has backwards of graphs with another value of the parameter fail.
    pub fn bump_version(&self) -> Result<(), flow_autograd::Error> {
        self.unit.lock().flats[self.flat].slots[self.slot].bump_version()
    }

    /// Returns whether a reduced gradient of the parameter is there.
    pub fn is_there(&self) -> bool {
        self.unit.lock().flats[self.flat].is_there(self.slot)
    }
}
