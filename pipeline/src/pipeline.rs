//! The pipeline as a program has it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use flow_autograd::BoxError;
use flow_comm::{Mesh, ProcessGroup};
use flow_global::{no_sync, Placement};
use flow_plan::schedule::{Action, Schedule};
use tch::{Device, Tensor};

use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::executor::{Executor, Last, Results, Step};
use crate::messages::Messages;
use crate::micro_batch::MicroBatch;
use crate::report::Report;
use crate::stage::Stage;
use crate::tied::Tied;

/// A model whose stages are on different ranks. See the crate for an example.
///
/// After a step, loss, gradients and, once the optimizer has run, weights are those of one process
/// that has the whole batch, to rounding: the loss is the mean over the batch.
///
/// A step that fails on one rank fails on all, and the pipeline is then unusable: make it anew, or
/// end the job.
pub struct Pipeline {
    /// The ranks along the axis.
    pub(crate) group: ProcessGroup,
    pub(crate) schedule: Schedule,
    pub(crate) stages: BTreeMap<usize, Box<dyn Stage>>,
    pub(crate) placement: Option<Placement>,
    pub(crate) device: Device,
    pub(crate) recomputes: bool,
    pub(crate) tied: Vec<Tied>,
    pub(crate) steps: u64,
    pub(crate) report: Option<Report>,
}

impl Pipeline {
    /// Of a list of stages, which all ranks have: stage s is on rank s of the mesh's axis `pp`, or
    /// of its only axis, and each rank keeps its own. As many stages as ranks, or, interleaved, a
    /// multiple; four times as many micro-batches as ranks.
    ///
    /// # Errors
    /// As [`Builder::build`].
    pub fn new(stages: Vec<Box<dyn Stage>>, mesh: &Mesh) -> Result<Self> {
        let ranks = match mesh.names().iter().position(|name| name == "pp") {
            Some(axis) => mesh.shape()[axis],
            None => mesh.shape()[0],
        };
        let chunks = stages.len() / ranks;
        let schedule = match chunks {
            0 | 1 => Schedule::one_f_one_b(stages.len(), 4 * ranks)?,
            _ => Schedule::interleaved(ranks, chunks, 4 * ranks)?,
        };
        let count = stages.len();
        let mut stages: Vec<Option<Box<dyn Stage>>> = stages.into_iter().map(Some).collect();
        let named;
        let mesh = match mesh.names() {
            [] if mesh.shape().len() == 1 => {
                named = mesh.clone().with_names(&["pp"])?;
                &named
            }
            _ => mesh,
        };
        Self::builder(mesh, "pp").schedule(schedule).build(|stage| {
            let own = stages.get_mut(stage).and_then(Option::take);
            own.ok_or_else(|| {
                format!("there are {count} stages; give a multiple of the ranks").into()
            })
        })
    }

    /// A pipeline along this axis of a mesh.
    pub fn builder<'a>(mesh: &'a Mesh, axis: &'a str) -> Builder<'a> {
        Builder::new(mesh, axis)
    }

    /// The schedule.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// This rank's stages.
    pub fn stages(&self) -> Vec<usize> {
        self.stages.keys().copied().collect()
    }

    /// Whether this rank has the first stage, and so needs the inputs of the batch.
    pub fn needs_inputs(&self) -> bool {
        self.stages.contains_key(&0)
    }

    /// Whether this rank has the last stage, and so needs what the loss compares outputs with.
    pub fn needs_targets(&self) -> bool {
        self.stages.contains_key(&(self.schedule.stages() - 1))
    }

    /// A weight that these stages share, such as the embedding of the first and the last one: its
    /// copies become that of the first of these stages, and after each step have the sum of all
    /// copies' gradients. `weight` is this rank's copy, if it has one of the stages; a rank with
    /// several of them has one copy for all. All ranks of the pipeline call this.
    ///
    /// # Errors
    /// No copy where there must be one, copies that differ in shape, or a collective that fails.
    pub fn tie(&mut self, stages: &[usize], weight: Option<&Tensor>) -> Result<()> {
        if let Some(stage) = stages.iter().find(|&&stage| stage >= self.schedule.stages()) {
            let count = self.schedule.stages();
            return Err(self.argument(format!("there is no stage {stage}, only {count}")));
        }
        let mut ranks: Vec<usize> = Vec::new();
        for &stage in stages {
            let rank = self.schedule.rank_of(stage);
            if !ranks.contains(&rank) {
                ranks.push(rank);
            }
        }
        let group = self.group.new_group(&ranks)?;
        match (group, weight) {
            (None, _) => {}
            (Some(group), Some(weight)) => {
                let tied = Tied::new(group, weight);
                self.tied.push(tied.map_err(|error| self.failed("tie", error))?);
            }
            (Some(group), None) => {
                let error = self.argument(format!(
                    "this rank has one of the stages {stages:?}: give tie() its copy of the weight"
                ));
                group.abort(&error.to_string());
                return Err(error);
            }
        }
        Ok(())
    }

    /// Forward and backward of a batch. Gradients are added to `.grad`, as always: the program zeroes
    /// them before, and has its optimizer step after.
    ///
    /// The rank of the first stage gives the tensors of the batch, whose first dimension is the
    /// batch; others may give none. `loss` is called for each micro-batch where the last stage is,
    /// and gives its mean; with recomputation it may be called twice. Returns the mean loss of the
    /// batch there, None on the other ranks. All ranks of the pipeline call this.
    ///
    /// # Errors
    /// A stage, the loss or a message failed on this rank, or on another.
    pub fn step(
        &mut self,
        inputs: &[Tensor],
        mut loss: impl FnMut(&[Tensor], MicroBatch) -> Tensor,
    ) -> Result<Option<Tensor>> {
        let actions = self.schedule.actions(self.group.rank()).to_vec();
        let results = self.run(&actions, inputs, Last::Loss(&mut loss))?;
        Ok(results.loss)
    }

    /// Forward only, without gradients. Returns the outputs of the whole batch on the rank of the
    /// last stage, None on the others. All ranks of the pipeline call this.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn forward(&mut self, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
        let is_forward = |action: &&Action| {
            matches!(
                action,
                Action::Forward { .. }
                    | Action::SendActivation { .. }
                    | Action::RecvActivation { .. }
            )
        };
        let actions = self.schedule.actions(self.group.rank()).iter().filter(is_forward);
        let actions: Vec<Action> = actions.copied().collect();
        let results = self.run(&actions, inputs, Last::Outputs)?;
        let parts: Vec<Vec<Tensor>> = results.outputs.into_values().collect();
        let Some(first) = parts.first() else { return Ok(None) };
        let whole = |output: usize| {
            let parts: Vec<&Tensor> = parts.iter().filter_map(|part| part.get(output)).collect();
            Tensor::f_cat(&parts, 0)
        };
        let whole: Result<Vec<Tensor>, tch::TchError> = (0..first.len()).map(whole).collect();
        Ok(Some(whole.map_err(|error| self.failed("joining the outputs", error.into()))?))
    }

    /// What the last step took on this rank; None before the first.
    pub fn report(&self) -> Option<&Report> {
        self.report.as_ref()
    }

    fn run(&mut self, actions: &[Action], batch: &[Tensor], last: Last) -> Result<Results> {
        let began = Instant::now();
        self.steps += 1;
        let is_training = matches!(last, Last::Loss(_));
        let outcome = self.carry_out(actions, batch, last);
        let (results, measured) = outcome.inspect_err(|error| {
            // The other ranks wait for this one.
            self.group.abort(&error.to_string());
        })?;
        if is_training {
            self.report =
                Some(measured.report(&self.schedule, self.group.rank(), began.elapsed())?);
        }
        Ok(results)
    }

    fn carry_out(
        &self,
        actions: &[Action],
        batch: &[Tensor],
        last: Last,
    ) -> Result<(Results, crate::report::Measured)> {
        let is_training = matches!(last, Last::Loss(_));
        let executor = Executor {
            schedule: &self.schedule,
            stages: &self.stages,
            placement: self.placement.as_ref(),
            device: self.device,
            recomputes: self.recomputes,
            number: self.steps,
        };
        // Gradients of global tensors are reduced once, after the last backward.
        let no_sync = self.placement.as_ref().filter(|_| is_training).map(no_sync).transpose();
        let no_sync = no_sync.map_err(|error| self.failed("step", error.into()))?;
        let messages = Messages::new(&self.group, &self.schedule, actions)
            .map_err(|error| self.failed("step", error))?;
        let mut step = Step::new(&executor, messages, batch, last);
        step.run(actions).map_err(|(action, source)| {
            let rank = self.job_rank();
            Error::Action { rank, action, source }
        })?;
        let done = step.finish().map_err(|error| self.failed("sending", error))?;
        if let Some(no_sync) = no_sync {
            let reduced = no_sync.finish();
            reduced.map_err(|error| self.failed("reducing gradients", error.into()))?;
        }
        if is_training {
            for tied in &self.tied {
                tied.reduce().map_err(|error| self.failed("adding up a tied gradient", error))?;
            }
        }
        Ok(done)
    }

    fn job_rank(&self) -> usize {
        self.group.ranks()[self.group.rank()]
    }

    fn argument(&self, reason: String) -> Error {
        Error::Argument { rank: self.job_rank(), reason }
    }

    fn failed(&self, operation: &'static str, source: BoxError) -> Error {
        Error::Step { rank: self.job_rank(), operation, source }
    }
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipeline")
            .field("stages", &self.stages)
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}
