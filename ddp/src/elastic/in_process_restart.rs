//! Trainings that begin again from a checkpoint, in the same processes, when the ranks have changed.

use std::cell::Cell;
use std::error::Error as StdError;
use std::thread;
use std::time::Instant;

use flow_comm::{ProcessGroup, ReduceOp};

use super::loss::is_change_of_ranks;
use super::training::LOOK_INTERVAL;
use crate::error::{Error, Result, job_rank};

/// A training that begins again in the same processes when a rank is lost, or when one comes. For models whose parts
/// no other rank has: with [`Fsdp`](crate::Fsdp), [`FullyShard`](crate::FullyShard),
/// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer), global tensors or pipelines. It goes on from
/// [checkpoints in memory](crate::Checkpoints::in_memory), or from others. For jobs of
/// `flow-launch --elastic in-place`; it works without, too, and then a lost rank is an error.
///
/// ```no_run
/// use flow_ddp::{Checkpoints, DistributedSampler, Fsdp, InProcessRestart, ProcessGroup, TryBackwardStep};
/// use tch::nn;
///
/// # fn loss(_: &Fsdp<nn::Linear>) -> Result<tch::Tensor, flow_ddp::Error> { unimplemented!() }
/// # fn train() -> anyhow::Result<()> {
/// let group = ProcessGroup::from_env()?; // a worker that was started again waits here
/// InProcessRestart::new(group).run(|attempt| {
///     let group = attempt.group();
///     let vs = nn::VarStore::new(group.device());
///     let model = Fsdp::new(nn::linear(vs.root(), 784, 10, Default::default()), &vs, group)?;
///     let mut optimizer = model.optimizer(nn::Adam::default(), 1e-3)?;
///     let mut sampler = DistributedSampler::new(60_000, group);
///     let mut checkpoints = Checkpoints::in_memory(group)?;
///     let mut step = 0;
///     if let Some(checkpoint) = checkpoints.latest()? {
///         checkpoint.resume(&vs, &mut optimizer, &mut sampler)?;
///         step = checkpoint.state;
///     }
///     while step < 1000 {
///         attempt.check()?;
///         optimizer.try_backward_step(&loss(&model)?)?;
///         step += 1;
///         checkpoints.async_save(step, &model, &vs, &optimizer, &sampler, &step)?;
///     }
///     checkpoints.wait()?;
///     anyhow::Ok(())
/// })?;
/// # Ok(()) }
/// ```
pub struct InProcessRestart {
    group: ProcessGroup,
    multiple: usize,
}

/// A training while its ranks stay the same: see [`InProcessRestart::run`].
pub struct Attempt<'r> {
    /// The ranks that train.
    group: ProcessGroup,
    /// All ranks.
    all: &'r ProcessGroup,
    /// When it was last looked whether the ranks are to change.
    looked: Cell<Option<Instant>>,
    checks: Cell<usize>,
}

/// After so many changes in which no step is done, the cause is none of the ranks.
const MAX_CHANGES: usize = 16;

impl InProcessRestart {
    /// Makes one for the group of all ranks. Drop other handles of the group, and what was made with it: they keep
    /// memory of ranks that are lost.
    pub fn new(group: ProcessGroup) -> Self {
        Self { group, multiple: 1 }
    }

    /// Lets the ranks train in multiples of `count` (default: 1): as many as a replica of the model is divided over,
    /// or a pipeline has stages. If a rank is lost, the rest of its replica waits until there are as many again. If fewer
    /// than `count` are left, all wait, as long as the group's timeout.
    /// A count of 0 is 1.
    pub fn multiple_of(mut self, count: usize) -> Self {
        self.multiple = count.max(1);
        self
    }

    /// Calls `train`, and again each time the ranks have changed, until it has returned on all ranks that train. All
    /// ranks call this. `train` makes all that it uses from [`Attempt::group`], resumes the last checkpoint, calls
    /// [`Attempt::check`] before each step, and passes errors on: as `anyhow::Error`, as a boxed error, or as
    /// [`Error`]. Those that a lost rank causes end here.
    ///
    /// Returns what `train` has returned; None on a rank that had no part at the end.
    ///
    /// # Errors
    ///
    /// Other errors of `train`; an error of [`reconfigure`](ProcessGroup::reconfigure); too few ranks for as long as
    /// the group's timeout; ranks that change so many times without a step. When one rank gets an error, the others
    /// wait until its process has ended, and go on without it.
    pub fn run<T, E>(
        mut self,
        mut train: impl FnMut(&Attempt<'_>) -> Result<T, E>,
    ) -> Result<Option<T>, E>
    where
        E: From<Error> + AsRef<dyn StdError + Send + Sync>,
    {
        let mut result = None;
        let mut changes = 0;
        loop {
            let error = match self.attempt(&mut result, &mut train, &mut changes) {
                Ok(true) => return Ok(result),
                Ok(false) => None,
                Err(error) => Some(error),
            };
            if let Some(error) = error {
                let may_change = changes < MAX_CHANGES && self.group.can_reconfigure();
                if !may_change || !self.is_change_of_ranks(error.as_ref()) {
                    return Err(error);
                }
                log::info!("rank {}: the ranks change: {}", self.group.rank(), error.as_ref());
            }
            self.group = self.group.reconfigure().map_err(Error::Comm)?;
        }
    }

    /// Trains, or waits, until the ranks are to change. Returns whether the training is over, as all ranks know.
    fn attempt<T, E: From<Error>>(
        &self,
        result: &mut Option<T>,
        train: &mut impl FnMut(&Attempt<'_>) -> Result<T, E>,
        changes: &mut usize,
    ) -> Result<bool, E> {
        // Those that wait have not heard of the end, nor has a rank that comes.
        let mut is_over = [i64::from(result.is_some())];
        self.group.all_reduce(&mut is_over, ReduceOp::Max).map_err(Error::Comm)?;
        if is_over[0] > 0 {
            return Ok(true);
        }
        let ranks = self.group.world_size();
        let training = ranks - ranks % self.multiple;
        if self.group.rank() >= training {
            self.wait(training)?;
            return Ok(false);
        }
        let attempt = Attempt {
            group: self.training_ranks(training)?,
            all: &self.group,
            looked: Cell::new(None),
            checks: Cell::new(0),
        };
        let value = train(&attempt);
        *changes = if attempt.checks.get() > 1 { 0 } else { *changes + 1 };
        let value = value?;
        // A rank that has not done the last step needs the others.
        attempt.group.barrier().map_err(Error::Comm)?;
        *result = Some(value);
        Ok(training == ranks)
    }

    /// Whether the ranks have to change. Errors of other crates do not always have what caused them as their source.
    fn is_change_of_ranks(&self, error: &(dyn StdError + Send + Sync + 'static)) -> bool {
        is_change_of_ranks(error) || self.group.is_changing().unwrap_or(false)
    }

    /// Returns the group of the first ranks.
    fn training_ranks(&self, count: usize) -> Result<ProcessGroup> {
        if count == self.group.world_size() {
            return Ok(self.group.clone());
        }
        let ranks: Vec<usize> = (0..count).collect();
        self.group.new_group_of(&ranks, "in_process_restart").map_err(Error::Comm)
    }

    /// Waits until the ranks are to change, while `training` ones train.
    fn wait(&self, training: usize) -> Result<()> {
        let begin = Instant::now();
        while !self.group.is_changing().map_err(Error::Comm)? {
            if training == 0 {
                if self.group.rank() == 0 && self.group.newcomers().map_err(Error::Comm)? > 0 {
                    break;
                }
                if begin.elapsed() >= self.group.timeout() {
                    return Err(self.too_few());
                }
            }
            thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }

    fn too_few(&self) -> Error {
        let reason = format!(
            "{} ranks train together, the job has {}, and no other has come within {:?}: give flow-launch more \
             --max-restarts, or start with more ranks",
            self.multiple,
            self.group.world_size(),
            self.group.timeout()
        );
        Error::Elastic { rank: job_rank(&self.group), reason }
    }
}

impl Attempt<'_> {
    /// Returns the group of the ranks that train.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Fails on rank 0 when the ranks are to change: when a process waits to join, or one that waited has ended. Call
    /// this before each step. It sends nothing: the other ranks hear of it by their next operation.
    ///
    /// # Errors
    ///
    /// [`Error::Newcomers`], [`Error::RanksChange`]; the store is gone.
    pub fn check(&self) -> Result<()> {
        self.checks.set(self.checks.get() + 1);
        let is_time = self.looked.get().is_none_or(|looked| looked.elapsed() >= LOOK_INTERVAL);
        if self.group.rank() != 0 || !is_time || !self.all.can_reconfigure() {
            return Ok(());
        }
        self.looked.set(Some(Instant::now()));
        let rank = job_rank(self.all);
        match self.all.newcomers()? {
            0 if self.all.is_changing()? => Err(Error::RanksChange { rank }),
            0 => Ok(()),
            count => Err(Error::Newcomers { rank, count }),
        }
    }
}
