//! Making a pipeline.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use flow_autograd::BoxError;
use flow_comm::Mesh;
use flow_global::Placement;
use flow_plan::schedule::Schedule;
use flow_tensor::TensorCollectives;

use crate::error::{Error, Result};
use crate::pipeline::Pipeline;
use crate::stage::Stage;

/// Micro-batches for each rank, unless the schedule is given: with four the bubble is below a fifth
/// (Huang et al. 2019, section 2.3).
const MICRO_BATCHES: usize = 4;

/// Makes a [`Pipeline`]: [`Pipeline::builder`].
pub struct Builder<'a> {
    mesh: &'a Mesh,
    axis: &'a str,
    schedule: Option<Schedule>,
    recomputes: bool,
    placement: Option<Placement>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(mesh: &'a Mesh, axis: &'a str) -> Self {
        Self { mesh, axis, schedule: None, recomputes: false, placement: None }
    }

    /// What each rank does: on all ranks the same. By default 1F1B, with as many stages as the axis
    /// has ranks and four times as many micro-batches.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// Whether a rank keeps only the inputs of its stages, and computes the rest anew in backward,
    /// with the same random numbers. It does not where the backward comes right after the forward.
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
    /// fails with.
    pub fn build(
        self,
        mut stage: impl FnMut(usize) -> Result<Box<dyn Stage>, BoxError>,
    ) -> Result<Pipeline> {
        let group = self.mesh.group(self.axis)?.duplicate()?;
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
                "the schedule is for {} ranks, but the axis {:?} of the mesh has {ranks}",
                schedule.ranks(),
                self.axis
            );
            return Err(argument(reason));
        }
        let mut stages = BTreeMap::new();
        for number in schedule.stages_of(group.rank()) {
            let made = stage(number)
                .map_err(|error| argument(format!("stage {number} cannot be made: {error}")))?;
            stages.insert(number, made);
        }
        let device = self.mesh.group(self.axis)?.device();
        Ok(Pipeline {
            group,
            schedule,
            stages,
            placement: self.placement,
            device,
            recomputes: self.recomputes,
            tied: Vec::new(),
            steps: 0,
            report: None,
        })
    }
}
