//! This rank's elements of sharded parameters, for checkpoints.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use flow_autograd::identity;
use tch::{Device, Tensor};

pub(crate) use super::flat::OwnElements;
use super::units::{Units, find};
use crate::error::Result;

/// The modules of all models of this process.
static MODELS: Mutex<Vec<Weak<Units>>> = Mutex::new(Vec::new());

/// Has the parameters of a model's modules be found.
pub(super) fn remember(units: &Arc<Units>) {
    let mut models = MODELS.lock().unwrap_or_else(PoisonError::into_inner);
    models.retain(|other| other.strong_count() > 0);
    models.push(Arc::downgrade(units));
}

/// Returns the elements of a sharded parameter that this rank has, if any; None for any other tensor.
pub(crate) fn own_elements(parameter: &Tensor) -> Option<Option<OwnElements>> {
    for units in models() {
        if let Some(place) = find(&units.all(), parameter) {
            return Some(place.own_elements());
        }
    }
    None
}

/// Frees what is gathered of all models: their parameters are about to change.
pub(crate) fn finish() -> Result<()> {
    models().iter().try_for_each(|units| units.finish())
}

/// Returns the sharded parameters among these tensors, by identity, whole: on rank 0 of their models, in
/// memory of the CPU; empty ones on the others. All ranks of these models call this.
pub(crate) fn gathered<'a>(
    tensors: impl Iterator<Item = &'a Tensor>,
) -> Result<HashMap<usize, Tensor>> {
    let tensors: Vec<&Tensor> = tensors.collect();
    let mut all = HashMap::new();
    for units in models() {
        for unit in units.all() {
            let of_unit = |tensor: &&&Tensor| find(std::slice::from_ref(&unit), tensor).is_some();
            let members: Vec<&&Tensor> = tensors.iter().filter(of_unit).collect();
            if members.is_empty() {
                continue;
            }
            units.with(std::slice::from_ref(&unit), |_| {
                for tensor in members {
                    let is_first = units.group().rank() == 0;
                    let empty = Tensor::empty([0], (tensor.kind(), Device::Cpu));
                    let whole = if is_first { tensor.to_device(Device::Cpu).copy() } else { empty };
                    all.insert(identity(tensor), whole.detach());
                }
                Ok(())
            })?;
        }
    }
    Ok(all)
}

fn models() -> Vec<Arc<Units>> {
    let models = MODELS.lock().unwrap_or_else(PoisonError::into_inner);
    models.iter().filter_map(Weak::upgrade).collect()
}
