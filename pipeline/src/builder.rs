//! The builder of a pipeline.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use flow_autograd::BoxError;
use flow_comm::{Axis, Mesh, ProcessGroup, digest};
use flow_global::Placement;
use flow_plan::schedule::Schedule;
use flow_tensor::TensorCollectives;

use crate::caught::caught;
use crate::error::{Error, Outcome, Result, job_rank};
use crate::links::Links;
use crate::pipeline::Pipeline;
use crate::stage::Stage;

/// Micro-batches for each rank, unless the schedule is given. With four the bubble is below a fifth of
/// the step (Huang et al. 2019, section 2.3).
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
    /// Makes a pipeline of a list of stages, along the mesh's axis `pp` or its only axis. All ranks give
    /// all stages. Stage s is on rank s, or with several stages a rank on rank s mod p, and each rank
    /// keeps its own. The schedule is 1F1B, or interleaved 1F1B with several stages a rank. There are
    /// four times as many micro-batches as ranks.
    ///
    /// # Errors
    /// The number of stages is no multiple of the number of ranks, or [`Builder::build`] fails.
    pub fn new(stages: Vec<Box<dyn Stage>>, mesh: &Mesh) -> Result<Self> {
        let is_named = mesh.names().iter().any(|name| name == "pp");
        let has_other_axes = mesh.shape().len() != 1;
        let axis = if is_named || has_other_axes { Axis::Name("pp") } else { Axis::Number(0) };
        let group = mesh.group(axis)?;
        let ranks = group.world_size();
        let count = stages.len();
        if count == 0 || !count.is_multiple_of(ranks) {
            let reason = format!("there are {count} stages; give a multiple of the {ranks} ranks");
            let error = Error::Argument { rank: job_rank(group), reason };
            mesh.abort(&error.to_string());
            return Err(error);
        }
        let chunks = count / ranks;
        let schedule = match chunks {
            1 => Schedule::one_f_one_b(count, MICRO_BATCHES * ranks)?,
            _ => Schedule::interleaved(ranks, chunks, MICRO_BATCHES * ranks)?,
        };
        let mut stages: Vec<Option<Box<dyn Stage>>> = stages.into_iter().map(Some).collect();
        Self::builder(mesh, axis).schedule(schedule).build(|stage| {
            let made = stages.get_mut(stage).and_then(Option::take);
            made.ok_or_else(|| "it has been made before".into())
        })
    }

    /// Begins a pipeline along this axis of a mesh, by name or number.
    pub fn builder<'a>(mesh: &'a Mesh, axis: impl Into<Axis<'a>>) -> Builder<'a> {
        Builder::new(mesh, axis.into())
    }
}

impl<'a> Builder<'a> {
    fn new(mesh: &'a Mesh, axis: Axis<'a>) -> Self {
        Self { mesh, axis, schedule: None, recomputes: false, placement: None }
    }

    /// Sets the schedule, which is the same on all ranks. The default is 1F1B, with as many stages as the
    /// axis has ranks and four times as many micro-batches.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// Sets whether a rank keeps only the inputs of its stages, and computes the rest anew in backward,
    /// with the same random numbers. A stage whose backward always follows its forward at once is not
    /// recomputed.
    ///
    /// Running statistics are updated each time that a stage runs, so twice in a step. The loss may be
    /// called twice. A stage that changes its inputs in place cannot be computed anew, which is an
    /// error; with global tensors such changes are not seen.
    pub fn recompute(mut self, recomputes: bool) -> Self {
        self.recomputes = recomputes;
        self
    }

    /// Sets the placement of the global tensors of this rank's stages. It has the ranks of the mesh
    /// with this rank's coordinate on the axis of the pipeline. An output that a stage gives the
    /// next one keeps its SBP. Gradients are reduced once in a step.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// Makes the pipeline. `stage` is called for each of this rank's stages. All ranks of the mesh call
    /// this.
    ///
    /// # Errors
    /// The schedule is for another number of ranks; ranks have different schedules; `stage` fails
    /// or panics. The mesh's groups and that of the placement are unusable then. So the pipeline's
    /// other ranks fail as well, here or in their next step. So do replicas that wait for this rank
    /// in [`Ddp::new`](flow_ddp::Ddp::new) with a group of the mesh.
    pub fn build(
        self,
        stage: impl FnMut(usize) -> Result<Box<dyn Stage>, BoxError>,
    ) -> Result<Pipeline> {
        let mesh = self.mesh;
        let placement = self.placement.clone();
        self.build_in_group(stage).inspect_err(|error| {
            let cause = error.to_string();
            mesh.abort(&cause);
            if let Some(placement) = placement {
                placement.abort(&cause);
            }
        })
    }

    /// Makes the pipeline's own group, and the stages in it.
    fn build_in_group(
        self,
        stage: impl FnMut(usize) -> Result<Box<dyn Stage>, BoxError>,
    ) -> Result<Pipeline> {
        let group = self.mesh.group(self.axis)?.duplicate()?;
        self.build_stages(&group, stage).inspect_err(|error| group.abort(&error.to_string()))
    }

    fn build_stages(
        self,
        group: &ProcessGroup,
        mut stage: impl FnMut(usize) -> Result<Box<dyn Stage>, BoxError>,
    ) -> Result<Pipeline> {
        let rank = job_rank(group);
        let ranks = group.world_size();
        let schedule = match self.schedule {
            Some(schedule) => schedule,
            None => Schedule::one_f_one_b(ranks, MICRO_BATCHES * ranks)?,
        };
        let own = digest_of(&schedule, self.recomputes).map_err(|cause| {
            let operation = "comparing the schedules";
            Error::Step { rank, operation, cause }
        })?;
        let mut digests = vec![0_i64; ranks];
        group.all_gather(&[own][..], &mut digests[..])?;
        if digests.iter().any(|&other| other != own) {
            let reason = "give the builders of all ranks the same schedule".into();
            return Err(Error::Argument { rank, reason });
        }
        if schedule.ranks() != ranks {
            let reason = format!(
                "the schedule is for {} ranks, but the axis {} of the mesh has {ranks}",
                schedule.ranks(),
                self.axis
            );
            return Err(Error::Argument { rank, reason });
        }
        let mut stages = BTreeMap::new();
        for number in schedule.stages_of(group.rank()) {
            let made = caught(|| stage(number)).map_err(|error| {
                let reason = format!("stage {number} cannot be made: {error}");
                Error::Argument { rank, reason }
            })?;
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

/// Computes a digest of what all ranks must have in common.
fn digest_of(schedule: &Schedule, recomputes: bool) -> Outcome<i64> {
    let text = serde_json::to_string(&(schedule, recomputes))?;
    Ok(digest(&text) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks may have been compiled by different versions of Rust: the digest is FNV-1a of the text and
    /// a byte 255.
    #[test]
    fn the_digest_is_that_of_the_schedule_as_json() {
        let schedule = Schedule::one_f_one_b(1, 1).unwrap();
        // Computed without Rust.
        assert_eq!(digest_of(&schedule, false).unwrap(), -4_797_884_457_321_873_343);
        assert_ne!(digest_of(&schedule, true).unwrap(), digest_of(&schedule, false).unwrap());
        let other = Schedule::one_f_one_b(1, 2).unwrap();
        assert_ne!(digest_of(&other, false).unwrap(), digest_of(&schedule, false).unwrap());
    }
}
