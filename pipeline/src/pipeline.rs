//! The pipeline, as programs use it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use flow_autograd::BoxError;
use flow_comm::ProcessGroup;
use flow_global::{Placement, no_sync};
use flow_plan::schedule::{Action, Schedule};
use tch::{Device, Tensor};

use crate::error::{Error, Outcome, Result, job_rank};
use crate::executor::{Allocated, Executor, Last, Results, Step};
use crate::links::Links;
use crate::messages::Messages;
use crate::micro_batch::{MicroBatch, join, local_rows};
use crate::report::{Measured, Report};
use crate::stage::Stage;
use crate::tied::Tied;

/// A model whose stages are on different ranks. See the crate for an example.
///
/// After a step, loss and gradients equal those of one process that has the whole batch, to rounding.
/// So do the weights once the optimizer has run. The loss is the mean over the batch.
///
/// A step that fails on one rank fails on all, and on the replicas of its stages. The pipeline is then
/// unusable, as are its `Ddp`s and its placement's group: make them anew, or end the job.
pub struct Pipeline {
    /// The ranks along the axis, in a group of the pipeline's own.
    pub(crate) group: ProcessGroup,
    pub(crate) schedule: Schedule,
    pub(crate) stages: BTreeMap<usize, Box<dyn Stage>>,
    pub(crate) placement: Option<Placement>,
    pub(crate) device: Device,
    pub(crate) recomputes: bool,
    /// The links of tensors, if ranks compute on GPUs.
    pub(crate) links: Option<Links>,
    pub(crate) tied: Vec<Tied>,
    pub(crate) steps: u64,
    pub(crate) allocated: RefCell<Allocated>,
    /// The measurements of the last training step, with the time that it took.
    pub(crate) measured: Option<(Measured, Duration)>,
}

impl Pipeline {
    /// Returns the schedule.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the numbers of this rank's stages.
    pub fn stages(&self) -> Vec<usize> {
        self.stages.keys().copied().collect()
    }

    /// Returns whether this rank has the first stage, and so needs the inputs of the batch.
    pub fn needs_inputs(&self) -> bool {
        self.stages.contains_key(&0)
    }

    /// Returns whether this rank has the last stage, and so needs the targets of the loss.
    pub fn needs_targets(&self) -> bool {
        self.stages.contains_key(&(self.schedule.stages() - 1))
    }

    /// Ties a weight that these stages share, such as the embedding of the first and the last one. All
    /// copies become that of the first of these stages. After each step they have the sum of all
    /// copies' gradients. `weight` is this rank's copy, if it has one of the stages; a rank with
    /// several of them has one copy for all. All ranks of the pipeline call this.
    ///
    /// # Errors
    /// A copy is missing, copies differ in shape, or a collective fails.
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

    /// Runs forward and backward of a batch. Gradients are added to `.grad`, as always: the program
    /// zeroes them before, and calls its optimizer after.
    ///
    /// The rank of the first stage gives the tensors of the batch, whose first dimension is the
    /// batch; others may give none. A batch has at least as many rows as there are micro-batches. On
    /// the rank of the last stage, `loss` is called for each micro-batch, and returns its mean loss.
    /// With recomputation it may be called twice. That rank gets the mean loss of the batch, the others
    /// None. All ranks of the pipeline call this.
    ///
    /// # Errors
    /// A stage, the loss or a message failed on this rank, or on another. Or a batch has fewer rows than
    /// there are micro-batches, which fails on all ranks: drop such a last batch, or pad it.
    pub fn step(
        &mut self,
        inputs: &[Tensor],
        mut loss: impl FnMut(&[Tensor], MicroBatch) -> Tensor,
    ) -> Result<Option<Tensor>> {
        let actions = self.schedule.actions(self.group.rank()).to_vec();
        let results = self.run(&actions, inputs, Last::Loss(&mut loss))?;
        Ok(results.loss)
    }

    /// Runs forwards only, without gradients. Returns the outputs of the whole batch on the rank of the
    /// last stage, None on the others. All ranks of the pipeline call this.
    ///
    /// # Errors
    /// Those of [`Pipeline::step`].
    pub fn forward(&mut self, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
        let mut actions = self.schedule.actions(self.group.rank()).to_vec();
        actions.retain(|action| {
            matches!(
                action,
                Action::Forward { .. }
                    | Action::SendActivation { .. }
                    | Action::RecvActivation { .. }
            )
        });
        let results = self.run(&actions, inputs, Last::Outputs)?;
        // By output: the part of each micro-batch. All micro-batches have as many outputs.
        let mut parts: Vec<Vec<(MicroBatch, Tensor)>> = Vec::new();
        for (micro_batch, outputs) in results.outputs.into_values() {
            parts.resize_with(outputs.len(), Vec::new);
            for (parts, output) in parts.iter_mut().zip(outputs) {
                parts.push((micro_batch, output));
            }
        }
        if !self.needs_targets() {
            return Ok(None);
        }
        let outputs = parts.iter().map(|parts| join(parts)).collect::<Outcome<_>>();
        Ok(Some(outputs.map_err(|error| self.failed("joining the outputs", error))?))
    }

    /// Reports time and memory of the last training step on this rank.
    ///
    /// # Errors
    /// There has been no step.
    pub fn report(&self) -> Result<Report> {
        let Some((measured, took)) = &self.measured else {
            return Err(self.argument("call report() after a step".into()));
        };
        measured.report(&self.schedule, &self.group, *took)
    }

    /// Gathers the reports of all ranks of the pipeline, in the order of its axis. All of them call this.
    ///
    /// # Errors
    /// There has been no step, or a collective fails.
    pub fn reports(&self) -> Result<Vec<Report>> {
        let text = serde_json::to_vec(&self.report()?)
            .map_err(|error| self.failed("gathering the reports", error.into()))?;
        let mut lengths = vec![0_i64; self.group.world_size()];
        self.group.all_gather(&[text.len() as i64][..], &mut lengths[..])?;
        let lengths: Vec<usize> = lengths.iter().map(|&length| length as usize).collect();
        let mut all = vec![0_u8; lengths.iter().sum()];
        self.group.all_gather_v(&text[..], &mut all[..], &lengths)?;
        let mut rest = &all[..];
        let mut reports = Vec::new();
        for length in lengths {
            let (text, others) = rest.split_at(length);
            let report = serde_json::from_slice(text)
                .map_err(|error| self.failed("gathering the reports", error.into()))?;
            reports.push(report);
            rest = others;
        }
        Ok(reports)
    }

    fn run(&mut self, actions: &[Action], batch: &[Tensor], last: Last) -> Result<Results> {
        let began = Instant::now();
        self.steps += 1;
        let is_training = matches!(last, Last::Loss(_));
        let (results, measured) = self
            .check_rows(batch)
            .and_then(|()| self.carry_out(actions, batch, last))
            .inspect_err(|error| self.abort(&error.to_string()))?;
        if is_training {
            self.measured = Some((measured, began.elapsed()));
        }
        Ok(results)
    }

    fn check_rows(&self, batch: &[Tensor]) -> Result<()> {
        let Some(first) = batch.first().filter(|_| self.needs_inputs()) else { return Ok(()) };
        let rows = local_rows(first).map_err(|error| self.failed("step", error))?.unwrap_or(0);
        let count = self.schedule.micro_batches();
        if rows < count as i64 {
            return Err(self.argument(format!(
                "a batch of {rows} rows has too few for {count} micro-batches: drop such a last batch, \
                 or pad it"
            )));
        }
        Ok(())
    }

    /// Makes all ranks fail that wait for this one, now or later: those of the pipeline, and the replicas
    /// of its stages.
    fn abort(&self, cause: &str) {
        self.group.abort(cause);
        self.links.iter().for_each(|links| links.abort(cause));
        self.tied.iter().for_each(|tied| tied.abort(cause));
        self.stages.values().for_each(|stage| stage.abort(cause));
        if let Some(placement) = &self.placement {
            placement.abort(cause);
        }
    }

    fn carry_out(
        &self,
        actions: &[Action],
        batch: &[Tensor],
        last: Last,
    ) -> Result<(Results, Measured)> {
        let is_training = matches!(last, Last::Loss(_));
        let executor = Executor {
            schedule: &self.schedule,
            stages: &self.stages,
            placement: self.placement.as_ref(),
            device: self.device,
            recomputes: self.recomputes,
            allocated: &self.allocated,
            number: self.steps,
        };
        // Gradients of global tensors are reduced once, after the last backward.
        let no_sync = self.placement.as_ref().filter(|_| is_training).map(no_sync).transpose();
        let no_sync = no_sync.map_err(|error| self.failed("step", error.into()))?;
        let messages =
            Messages::new(&self.group, self.links.as_ref(), self.device, &self.schedule, actions)
                .map_err(|error| self.failed("step", error))?;
        let tied = self.tied.iter().filter(|_| is_training);
        let tied = tied
            .map(|tied| Ok((tied, tied.begin()?)))
            .collect::<Outcome<Vec<_>>>()
            .map_err(|error| self.failed("step", error))?;
        let mut step = Step::new(&executor, messages, batch, last)
            .map_err(|error| self.failed("the beginning of a step", error))?;
        step.run(actions).map_err(|(action, cause)| {
            let rank = job_rank(&self.group);
            Error::Action { rank, action, cause }
        })?;
        let done = step.finish().map_err(|error| self.failed("sending", error))?;
        if let Some(no_sync) = no_sync {
            no_sync.finish().map_err(|error| self.failed("reducing gradients", error.into()))?;
        }
        for (tied, before) in tied {
            tied.reduce(before).map_err(|error| self.failed("adding up a tied gradient", error))?;
        }
        Ok(done)
    }

    fn argument(&self, reason: String) -> Error {
        Error::Argument { rank: job_rank(&self.group), reason }
    }

    fn failed(&self, operation: &'static str, cause: BoxError) -> Error {
        Error::Step { rank: job_rank(&self.group), operation, cause }
    }
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipeline")
            .field("stages", &self.stages)
            .field("group", &self.group)
            .field("over_nccl", &self.links.is_some())
            .finish_non_exhaustive()
    }
}
