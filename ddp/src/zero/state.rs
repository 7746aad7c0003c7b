//! The state as a whole: gathered on a rank, and loaded.

use std::collections::BTreeMap;

use flow_autograd::{OptimizerState, SavedState, StateDict, StatePart, StateParts};
use tch::{Device, Kind, TchError, Tensor};

use super::ZeroRedundancyOptimizer;
use super::error::{agree, failed};
use super::loaded::ParameterState;
use super::sharded_parameter::{COUNT, OwnShard, ShardedParameter};
use super::shards::Shards;
use crate::error::{Result, job_rank};
use crate::model_check::gather_texts;

/// A part of the state of one parameter.
type Part<'a> = (usize, &'a str);

impl OptimizerState for ZeroRedundancyOptimizer {
    /// Returns the whole state, as tch's optimizer has it.
    fn state(&self) -> Result<StateDict, flow_autograd::Error> {
        if self.parts.group.world_size() == 1 {
            self.consolidate_state_dict(0)?;
        }
        let consolidated = self.parts.consolidated();
        let Some(state) = &*consolidated else {
            return Err(in_state(
                "the state is on all ranks: let all call consolidate_state_dict(to) after the last \
                 step, and only rank `to` this"
                    .to_owned(),
            ));
        };
        let tensors = state.tensors.iter();
        Ok(StateDict {
            parameters: state.parameters.clone(),
            tensors: tensors.map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect(),
        })
    }

    /// Replaces this rank's part of the state. All ranks call this, with the same state: they all take
    /// it, or none does.
    fn load_state(&mut self, saved: &StateDict) -> Result<(), flow_autograd::Error> {
        self.load_from(saved)
    }

    /// Replaces this rank's part of the state, as [`load_state`](Self::load_state) does.
    fn load_from(&mut self, saved: &dyn SavedState) -> Result<(), flow_autograd::Error> {
        let shards = &mut *self.parts.shards();
        let before = shards.own_state()?;
        let loaded = shards.load_own(saved);
        let loaded = loaded.map_err(|error| failed(job_rank(&self.parts.group), error));
        let agreed = agree(&self.parts.group, loaded);
        if agreed.is_err() {
            shards.restore(&before)?;
        }
        self.parts.consolidated().take();
        agreed.map_err(|error| in_state(error.to_string()))
    }

    /// Returns this rank's parts, and on rank 0 what ranks do not have row-major.
    fn parts(&self) -> Result<StateParts, flow_autograd::Error> {
        let is_other = |parameter: &ShardedParameter| !parameter.layout.is_row_major();
        let mut gathered = None;
        // All ranks have parameters of the same layouts.
        if self.parts.shards().parameters.iter().any(is_other) {
            let state = self.gather_state(0, is_other);
            gathered = state.map_err(|error| in_state(error.to_string()))?;
        }
        let shards = self.parts.shards();
        let mut parts = Vec::new();
        for (name, tensor) in gathered.into_iter().flat_map(|state| state.tensors) {
            parts.push(StatePart { name, shape: tensor.size(), start: 0, tensor });
        }
        // Each machine of an Fsdp has all: those of rank 0 give theirs.
        let sharers = shards.sharers(&self.parts.group, 0);
        let is_sharer = sharers.contains(&self.parts.group.rank());
        for (place, number) in shards.in_groups().into_iter().enumerate() {
            let parameter = &shards.parameters[number];
            let is_given = is_sharer && parameter.layout.is_row_major();
            let Some(own) = parameter.own.as_ref().filter(|_| is_given) else { continue };
            for (name, start, tensor) in own.parts()? {
                let is_count = name == COUNT;
                let shape = if is_count { Vec::new() } else { parameter.tensor.size() };
                parts.push(StatePart { name: format!("{place}.{name}"), shape, start, tensor });
            }
        }
        let parameters = shards.described.clone();
        Ok(StateParts { parameters, parts, are_whole: false })
    }

    fn consolidate_state_dict(&self, to: usize) -> Result<(), flow_autograd::Error> {
        let state = self.gather_state(to, |_| true).map_err(|error| in_state(error.to_string()))?;
        *self.parts.consolidated() = state;
        Ok(())
    }
}

impl ZeroRedundancyOptimizer {
    /// Returns the whole state of some parameters on rank `to`; None on the others.
    fn gather_state(
        &self,
        to: usize,
        of: impl Fn(&ShardedParameter) -> bool,
    ) -> Result<Option<StateDict>> {
        let ranks = self.parts.group.world_size();
        if to >= ranks {
            return Err(self
                .parts
                .failed(format!("there is no rank {to}, but {ranks} ranks from 0 on")));
        }
        let shards = self.parts.shards();
        let own = own_bytes(&shards, of).map_err(|error| self.parts.failed(error));
        let (names, bytes) = agree(&self.parts.group, own)?;
        let names = gather_texts(&self.parts.group, &names)?;
        let sharers = shards.sharers(&self.parts.group, to);
        let rank = self.parts.group.rank();
        if rank != to {
            if sharers.contains(&rank) && !bytes.is_empty() {
                self.parts.group.send(&bytes[..], to)?;
            }
            return Ok(None);
        }
        let mut parts: BTreeMap<Part, Tensor> = BTreeMap::new();
        for (place, &rank) in sharers.iter().enumerate() {
            let names: Vec<Part> = names[rank].lines().filter_map(parse).collect();
            let lengths: Vec<usize> =
                names.iter().map(|&part| length(&shards, place, part)).collect();
            let mut received = vec![0; lengths.iter().sum()];
            if rank == to {
                received.copy_from_slice(&bytes);
            } else if !received.is_empty() {
                self.parts.group.recv(&mut received[..], rank)?;
            }
            let mut rest = &received[..];
            for (part, length) in names.into_iter().zip(lengths) {
                let (bytes, others) = rest.split_at(length);
                rest = others;
                add(&shards, &mut parts, place, part, bytes)
                    .map_err(|error| self.parts.failed(error))?;
            }
        }
        Ok(Some(whole(&shards, parts)))
    }
}

/// Returns the names of this rank's parts of the state of some parameters, each in a line, and their
/// bytes.
fn own_bytes(
    shards: &Shards,
    of: impl Fn(&ShardedParameter) -> bool,
) -> Result<(String, Vec<u8>), flow_autograd::Error> {
    let mut names = String::new();
    let mut all = Vec::new();
    for (number, parameter) in shards.parameters.iter().enumerate() {
        let Some(own) = parameter.own.as_ref().filter(|_| of(parameter)) else { continue };
        for (name, tensor) in own.state()? {
            names += &format!("{number} {name}\n");
            let tensor = tensor.to_device(Device::Cpu).contiguous();
            all.extend_from_slice(flow_autograd::bytes(&tensor)?);
        }
    }
    Ok((names, all))
}

fn parse(line: &str) -> Option<Part<'_>> {
    let (number, name) = line.split_once(' ')?;
    Some((number.parse().ok()?, name))
}

/// Returns the bytes that the sharer at a place has of a part.
fn length(shards: &Shards, place: usize, (number, name): Part) -> usize {
    if name == COUNT {
        return Kind::Int64.elt_size_in_bytes();
    }
    let parameter = &shards.parameters[number];
    parameter.elements_on(place).len() * parameter.kind().elt_size_in_bytes()
}

/// Adds what the sharer at a place has of a part.
fn add<'a>(
    shards: &Shards,
    parts: &mut BTreeMap<Part<'a>, Tensor>,
    place: usize,
    part: Part<'a>,
    bytes: &[u8],
) -> Result<(), TchError> {
    let (number, name) = part;
    if name == COUNT {
        parts.insert(part, Tensor::f_from_data_size(bytes, &[], Kind::Int64)?);
        return Ok(());
    }
    let parameter = &shards.parameters[number];
    let elements = parameter.elements_on(place);
    let shape = [elements.len() as i64];
    let given = Tensor::f_from_data_size(bytes, &shape, parameter.kind())?;
    let whole = parts.entry(part).or_insert_with(|| {
        let like = (parameter.kind(), Device::Cpu);
        parameter.layout.in_own_order(&Tensor::empty(parameter.layout.memory_shape(), like))
    });
    parameter.elements_of(whole, &elements)?.f_copy_(&given)
}

/// Names parts as an optimizer that has all parameters does, which has them group by group.
fn whole(shards: &Shards, mut parts: BTreeMap<Part, Tensor>) -> StateDict {
    let mut tensors = Vec::with_capacity(parts.len());
    for (place, number) in shards.in_groups().into_iter().enumerate() {
        while let Some((&part, _)) = parts.range((number, "")..(number + 1, "")).next() {
            let tensor = parts.remove(&part).unwrap_or_default();
            tensors.push((format!("{place}.{}", part.1), tensor));
        }
    }
    StateDict { parameters: shards.described.clone(), tensors }
}

/// The state of each chunk of each parameter.
type OwnState = Vec<Vec<StateDict>>;

/// Returns the names in PyTorch and in the state of what a state has of each parameter.
fn names(
    shards: &Shards,
    saved: &dyn SavedState,
) -> Result<Vec<Vec<(String, String)>>, flow_autograd::Error> {
    let order = shards.in_groups();
    let mut names: Vec<Vec<(String, String)>> = order.iter().map(|_| Vec::new()).collect();
    for (name, shape) in saved.shapes() {
        let place = name.split_once('.').and_then(|(place, part)| {
            let place: usize = place.parse().ok()?;
            Some((*order.get(place)?, part))
        });
        let Some((number, part)) = place else {
            return Err(in_state(format!(
                "the state has {name}, which the optimizer has no place for"
            )));
        };
        let parameter = &shards.parameters[number];
        let wanted = if part == COUNT { Vec::new() } else { parameter.tensor.size() };
        if shape != wanted {
            return Err(in_state(format!(
                "{name} has the shape {shape:?} in the state, and {} has {wanted:?}",
                parameter.name
            )));
        }
        names[number].push((part.to_owned(), name));
    }
    Ok(names)
}

impl Shards {
    /// Returns the places of parameters as a tch optimizer has them: group by group.
    fn in_groups(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.parameters.len()).collect();
        order.sort_by_key(|&number| self.parameters[number].group);
        order
    }

    /// Returns the state of this rank's parts, without a copy.
    fn own_state(&self) -> Result<OwnState, flow_autograd::Error> {
        let own = self.parameters.iter().map(|parameter| &parameter.own);
        own.map(|own| own.as_ref().map_or(Ok(Vec::new()), OwnShard::chunk_states)).collect()
    }

    /// Replaces the state of this rank's parts by what a whole state has of them; of some only, if there
    /// is an error.
    fn load_own(&mut self, saved: &dyn SavedState) -> Result<(), flow_autograd::Error> {
        saved.check_parameters(&self.described)?;
        let names = names(self, saved)?;
        for (parameter, names) in self.parameters.iter_mut().zip(names) {
            let Some(mut own) = parameter.own.take() else { continue };
            let state = ParameterState::new(parameter, names, saved);
            let loaded = state.and_then(|state| state.load_into(&mut own));
            parameter.own = Some(own);
            loaded?;
        }
        Ok(())
    }

    /// Gives this rank's parts their state back.
    fn restore(&mut self, state: &OwnState) -> Result<(), flow_autograd::Error> {
        for (parameter, state) in self.parameters.iter_mut().zip(state) {
            if let Some(own) = &mut parameter.own {
                own.restore(state)?;
            }
        }
        Ok(())
    }
}

fn in_state(reason: String) -> flow_autograd::Error {
    flow_autograd::Error::Libtorch { operation: "OptimizerState", reason }
}
