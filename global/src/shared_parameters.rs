//! Parameters that the ranks of a machine have in common, along an axis of their placement.

use std::collections::HashMap;

use flow_autograd::{bump_version, data_ptr, identity};
use flow_comm::{ProcessGroup, ReduceOp};
use flow_ddp::place_on_machine;
use tch::{Device, Tensor};

use crate::boxing::plan::groups;
use crate::error::{Error, Result};
use crate::handle::{local_of, spec_of, wrap};
use crate::placement::Placement;
use crate::region::{regions, shape};
use crate::replicas;
use crate::sbp::{B, NdSbp};
use crate::tensor::GlobalTensor;

/// The parameters of a model that lie in memory of all ranks of the machine. Each rank writes its own
/// part of them.
#[derive(Default)]
pub(crate) struct SharedParameters {
    /// One for each placement.
    groups: Vec<Group>,
    /// By identity.
    parameters: HashMap<usize, SharedParameter>,
}

/// The ranks of a placement along the axis.
struct Group {
    /// Those of this rank.
    ranks: ProcessGroup,
    /// Some of the placement are on other machines than those with the same other coordinates. All
    /// ranks of a placement box alike.
    is_over_machines: bool,
}

struct SharedParameter {
    handle: Tensor,
    /// Of [`SharedParameters::groups`].
    group: usize,
    /// The part of the memory that this rank writes: that of its shard.
    part: Tensor,
    /// How often the parameter and its memory have been changed, as far as all ranks know.
    changes: [i64; 2],
}

impl SharedParameters {
    /// Puts parameters into memory of all ranks of the machine: those that are B on this axis, and
    /// whose shards, of these SBPs, are split there. All ranks call this.
    pub fn new(parameters: &[Tensor], shards: &[NdSbp], axis: usize) -> Result<Self> {
        let mut by_placement: Vec<(Placement, Vec<(&Tensor, &NdSbp)>)> = Vec::new();
        for (parameter, sbp) in parameters.iter().zip(shards) {
            let spec = spec_of(parameter)?;
            if spec.sbp()[axis] != B || sbp[axis] == B {
                continue;
            }
            if parameter.device() != Device::Cpu {
                return Err(fail(format!(
                    "a parameter is on {:?}, and ranks can have those on the CPU in common: use \
                     ShardedOptimizer::new",
                    parameter.device()
                )));
            }
            match by_placement.iter_mut().find(|(placement, _)| placement == spec.placement()) {
                Some((_, members)) => members.push((parameter, sbp)),
                None => by_placement.push((spec.placement().clone(), vec![(parameter, sbp)])),
            }
        }
        let mut shared = Self::default();
        for (placement, members) in by_placement {
            shared.add(&placement, axis, &members)?;
        }
        Ok(shared)
    }

    /// Puts the parameters of a placement there.
    fn add(
        &mut self,
        placement: &Placement,
        axis: usize,
        members: &[(&Tensor, &NdSbp)],
    ) -> Result<()> {
        let runtime = placement.runtime()?;
        let Some(position) = placement.position(runtime.rank()) else { return Ok(()) };
        let mut own = Vec::new();
        let mut is_over_machines = false;
        for positions in groups(placement, &[axis]) {
            let ranks: Vec<usize> = positions.iter().map(|&at| placement.ranks()[at]).collect();
            let on_machine = runtime.world().ranks_on_machine_of(ranks[0]);
            is_over_machines |= ranks.iter().any(|rank| !on_machine.contains(rank));
            if positions.contains(&position) {
                own = ranks;
            }
        }
        if own.len() < 2 {
            return Ok(());
        }
        let group = runtime.groups.group(&own)?;
        let locals: Vec<Tensor> =
            members.iter().filter_map(|(parameter, _)| local_of(parameter)).collect();
        let (_, places) = place_on_machine(&group, &locals)?;
        drop(locals);
        for ((parameter, sbp), place) in members.iter().zip(places) {
            let sizes = parameter.size();
            let mut handle = parameter.shallow_clone();
            handle.set_data(&wrap(Some(&place), parameter, spec_of(parameter)?, &sizes)?);
            let region = regions(placement, sbp, &shape(&sizes)).swap_remove(position);
            let mut part = place;
            if let Some(dim) = sbp[axis].dim() {
                let range = &region.0[dim];
                part = part.f_narrow(dim as i64, range.start as i64, range.len() as i64)?;
            }
            let group = self.groups.len();
            let mut shared = SharedParameter { handle, group, part, changes: [0; 2] };
            shared.changes = shared.count_changes();
            self.parameters.insert(identity(parameter), shared);
        }
        self.groups.push(Group { ranks: group, is_over_machines });
        // Of a model that was distributed, they keep the memory that the parameters had.
        replicas::drop_gone(runtime);
        Ok(())
    }

    /// Returns this rank's part of the memory of a parameter, if ranks have that in common.
    pub fn part(&self, parameter: &Tensor) -> Option<&Tensor> {
        self.parameters.get(&identity(parameter)).map(|shared| &shared.part)
    }

    /// Returns whether a shard is this rank's part of a parameter, and not a copy.
    pub fn is_own_part(&self, parameter: &Tensor, shard: &Tensor) -> bool {
        let (Some(part), Some(own)) = (self.part(parameter), local_of(shard)) else { return false };
        data_ptr(part) == data_ptr(&own)
    }

    /// Waits until no rank reads the parameters: each of them comes here after its last backward. All
    /// ranks call this.
    ///
    /// # Errors
    /// A parameter was changed by other means, on one rank or on all.
    pub fn begin_writes(&self) -> Result<()> {
        for (number, group) in self.groups.iter().enumerate() {
            let mut of_group = self.parameters.values().filter(|shared| shared.group == number);
            let is_changed = of_group.any(SharedParameter::is_changed);
            let mut changed = [u8::from(is_changed)];
            group.ranks.all_reduce(&mut changed, ReduceOp::Max)?;
            if changed[0] != 0 {
                return Err(fail(
                    "a parameter was changed in place: the ranks of a machine have it in common, and \
                     each of them would change it. Change parameters before the optimizer is made, or \
                     load a checkpoint by ShardedOptimizer::resume"
                        .to_owned(),
                ));
            }
        }
        Ok(())
    }

    /// Writes what a shard has into a parameter, if ranks have that in common. Returns whether they do.
    pub fn write(&self, parameter: &Tensor, shard: &Tensor) -> Result<bool> {
        let Some(shared) = self.parameters.get(&identity(parameter)) else { return Ok(false) };
        let group = &self.groups[shared.group];
        if group.is_over_machines {
            let whole = shard.f_to_kind(parameter.kind())?.to_sbp(parameter.sbp()?)?;
            if group.ranks.local_index() == 0
                && let (Some(mut own), Some(whole)) = (local_of(parameter), local_of(&whole))
            {
                own.f_copy_(&whole)?;
            }
        } else if !self.is_own_part(parameter, shard)
            && let Some(own) = local_of(shard)
        {
            shared.part.shallow_clone().f_copy_(&own)?;
        }
        // A backward through an older graph is an error, as after any change in place.
        bump_version(parameter)?;
        Ok(true)
    }

    /// Waits until all ranks of the machine have written. All ranks call this.
    pub fn end_writes(&mut self) -> Result<()> {
        for group in &self.groups {
            group.ranks.barrier_on_machine()?;
        }
        for shared in self.parameters.values_mut() {
            shared.changes = shared.count_changes();
        }
        Ok(())
    }
}

impl SharedParameter {
    fn is_changed(&self) -> bool {
        self.changes != self.count_changes()
    }

    fn count_changes(&self) -> [i64; 2] {
        // The memory is written past the handle by way of to_local().
        [&self.handle, &self.part].map(Tensor::internal_version)
    }
}

pub(crate) fn fail(reason: String) -> Error {
    Error::Unsupported { operation: "ShardedOptimizer".to_owned(), reason }
}
