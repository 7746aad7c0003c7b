//! Making a pipeline.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use flow_autograd::BoxError;
use flow_comm::{Axis, Mesh, ProcessGroup};
use flow_global::Placement;
use flow_plan::schedule::Schedule;
use flow_tensor::TensorCollectives;

use crate::caught::caught;
use crate::error::{Error, Result};
use crate::links::Links;
use crate::pipeline::Pipeline;
use crate::stage::Stage;

/// Micro-batches for each rank, unless the schedule is given: with four the bubble is below a fifth
/// (Huang et al. 2019, section 2.3).
const MICRO_BATCHES: usize = 4;

/// Makes a [`Pipeline`]: [`Pipeline::builder`].
pub struct Builder<'a> {
    mesh: &'a Mesh,
    axis: Axis<'a>,
    schedule: Option<Schedule>,
    recomputes: bool,
    placement: Option<Placement>,
}

impl Pipeline {
    /// Of a list of stages, which all ranks have: stage s is on rank s of the mesh's axis `pp`, or
    /// of its only axis, and each rank keeps its own. As many stages as ranks, or, interleaved, a
    /// multiple; four times as many micro-batches as ranks.
    ///
    /// # Errors
    /// A number of stages that is no multiple of the number of ranks; else as [`Builder::build`].
    pub fn new(stages: Vec<Box<dyn Stage>>, mesh: &Mesh) -> Result<Self> {
        let is_named = mesh.names().iter().any(|name| name == "pp");
        let axis = match is_named || mesh.shape().len() != 1 {
            true => Axis::Name("pp"),
            false => Axis::Number(0),
        };
        let group = mesh.group(axis)?;
        let ranks = group.world_size();
        let (count, chunks) = (stages.len(), stages.len() / ranks);
        if count == 0 || count % ranks != 0 {
            let reason = format!("there are {count} stages; give a multiple of the {ranks} ranks");
            let error = Error::Argument { rank: group.ranks()[group.rank()], reason };
            mesh.abort(&error.to_string());
            return Err(error);
        }
        let schedule = match chunks {
            1 => Schedule::one_f_one_b(count, MICRO_BATCHES * ranks)?,
            _ => Schedule::interleaved(ranks, chunks, MICRO_BATCHES * ranks)?,
        };
        let mut stages: Vec<Option<Box<dyn Stage>>> = stages.into_iter().map(Some).collect();
        Self::builder(mesh, axis).schedule(schedule).build(|stage| {
            let own = stages.get_mut(stage).and_then(Option::take);
            own.ok_or_else(|| "it has been made before".into())
        })
    }

    /// A pipeline along this axis of a mesh, by name or number.
    pub fn builder<'a>(mesh: &'a Mesh, axis: impl Into<Axis<'a>>) -> Builder<'a> {
        Builder::new(mesh, axis.into())
    }
}

impl<'a> Builder<'a> {
    fn new(mesh: &'a Mesh, axis: Axis<'a>) -> Self {
        Self { mesh, axis, schedule: None, recomputes: false, placement: None }
    }

    /// What each rank does: on all ranks the same. By default 1F1B, with as many stages as the axis
    /// has ranks and four times as many micro-batches.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// Whether a rank keeps only the inputs of its stages, and computes the rest anew in backward,
    /// with the same random numbers. It does not in stages of which each backward comes right after
    /// its forward. Running statistics are updated each time that a stage runs, so twice in a step,
    /// and the loss may be called twice. A stage that changes its inputs in place cannot be computed
    /// anew: an error, but for global tensors, whose changes are not seen.
    pub fn recompute(mut self, recomputes: bool) -> Self {
        self.recomputes = recomputes;
        self
    }

    /// Where the global tensors of this rank's stages are, if they have any: on the ranks of the
    /// mesh with this rank's coordinate on the axis of the pipeline. What a stage gives the next
    /// one then has the same SBP there. Gradients are reduced once in a step.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// Makes the stages: `stage` is called for this rank's. All ranks of the mesh call this.
    ///
    /// # Errors
    /// The schedule is for another number of ranks; ranks have different schedules; what `stage`
    /// fails with, or its panic. The mesh's groups, and that of the placement, are of no use then:
    /// so the pipeline's other ranks fail as well, here or in their next step, and so do replicas
    /// that wait for this rank in [`Ddp::new`](flow_ddp::Ddp::new) with a group of the mesh.
    pub fn build(
        self,
        stage: impl FnMut(usize) -> Result<Box<dyn Stage>, BoxError>,
    ) -> Result<Pipeline> {
        let (mesh, placement) = (self.mesh, self.placement.clone());
        let group = mesh.group(self.axis).and_then(ProcessGroup::duplicate);
        let made = group.map_err(Error::from).and_then(|group| {
            let made = self.build_in(&group, stage);
            made.inspect_err(|error| group.abort(&error.to_string()))
        });
        made.inspect_err(|error| {
            mesh.abort(&error.to_string());
            placement.iter().for_each(|of| of.abort(&error.to_string()));
        })
    }

    /// `group` is the pipeline's own.
    fn build_in(
        self,
        group: &ProcessGroup,
        mut stage: impl FnMut(usize) -> Result<Box<dyn Stage>, BoxError>,
    ) -> Result<Pipeline> {
        let rank = group.ranks()[group.rank()];
        let argument = |reason| Error::Argument { rank, reason };
        let ranks = group.world_size();
        let schedule = match self.schedule {
            Some(schedule) => schedule,
            None => Schedule::one_f_one_b(ranks, MICRO_BATCHES * ranks)?,
        };
        let mut digest = DefaultHasher::new();
        format!("{schedule:?} {}", self.recomputes).hash(&mut digest);
        let mut digests = vec![0_i64; ranks];
        group.all_gather(&[digest.finish() as i64][..], &mut digests[..])?;
        if digests.iter().any(|&other| other != digests[0]) {
            return Err(argument("give the builders of all ranks the same schedule".into()));
        }
        if schedule.ranks() != ranks {
            let reason = format!(
                "the schedule is for {} ranks, but the axis {} of the mesh has {ranks}",
                schedule.ranks(),
                self.axis
            );
            return Err(argument(reason));
        }
        let mut stages = BTreeMap::new();
        for number in schedule.stages_of(group.rank()) {
            let made = caught(|| stage(number))
                .map_err(|error| argument(format!("stage {number} cannot be made: {error}")))?;
            stages.insert(number, made);
        }
        let device = self.mesh.group(self.axis)?.device();
        let links = Links::new(group, &schedule)?;
        Ok(Pipeline {
            group: group.clone(),
            links,
            schedule,
            stages,
            placement: self.placement,
            device,
            recomputes: self.recomputes,
            tied: Vec::new(),
            steps: 0,
            allocated: RefCell::new(HashMap::new()),
            measured: None,
        })
    }
}
