//! This rank's elements of sharded parameters, for checkpoints.

use std::collections::HashMap;
use std::slice;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use flow_autograd::identity;
use tch::{Device, Tensor};

pub(crate) use super::flat::OwnElements;
use super::place::Place;
use super::unit::Unit;
use super::units::Units;
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
    find(parameter).map(|(_, place)| place.own_elements())
}

/// Returns the elements of a sharded parameter that this rank saves, if any; None for any other tensor.
/// The first replica of a model saves all.
pub(crate) fn saved_elements(parameter: &Tensor) -> Option<Option<OwnElements>> {
    let (units, place) = find(parameter)?;
    let is_first = units.ranks_of_replica(units.group().rank()).start == 0;
    Some(place.own_elements().filter(|_| is_first))
}

/// Notes that a sharded parameter has been given other elements.
pub(crate) fn changed(parameter: &Tensor) -> std::result::Result<(), flow_autograd::Error> {
    find(parameter).map_or(Ok(()), |(_, place)| place.bump_version())
}

/// Finds a sharded parameter.
fn find(parameter: &Tensor) -> Option<(Arc<Units>, Place)> {
    models().into_iter().find_map(|units| {
        let place = Place::find(&units.all(), parameter)?;
        Some((units, place))
    })
}

/// Frees what is gathered of the models that have these parameters, which are about to change. All ranks
/// of them call this.
pub(crate) fn free<'a>(parameters: impl Iterator<Item = &'a Tensor>) -> Result<()> {
    let parameters: Vec<&Tensor> = parameters.collect();
    for units in models() {
        let all = units.all();
        if parameters.iter().any(|parameter| Place::find(&all, parameter).is_some()) {
            units.free()?;
        }
    }
    Ok(())
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
            let members = members(&unit, &tensors);
            if members.is_empty() {
                continue;
            }
            let is_first = units.group().rank() == 0;
            units.with(slice::from_ref(&unit), |_| {
                for tensor in members {
                    let whole = if is_first {
                        tensor.detach().to_device(Device::Cpu).copy()
                    } else {
                        Tensor::empty([0], (tensor.kind(), Device::Cpu))
                    };
                    all.insert(identity(tensor), whole);
                }
                Ok(())
            })?;
        }
    }
    Ok(all)
}

/// Returns the tensors that are parameters of a module.
fn members<'a>(unit: &Arc<Unit>, tensors: &[&'a Tensor]) -> Vec<&'a Tensor> {
    let mut members = Vec::new();
    for tensor in tensors {
        if Place::find(slice::from_ref(unit), tensor).is_some() {
            members.push(*tensor);
        }
    }
    members
}

fn models() -> Vec<Arc<Units>> {
    let models = MODELS.lock().unwrap_or_else(PoisonError::into_inner);
    models.iter().filter_map(Weak::upgrade).collect()
}
