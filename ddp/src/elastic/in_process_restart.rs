//! Trainings that begin again from a checkpoint, in the same processes, when the ranks have changed.

use std::cell::Cell;
use std::error::Error as StdError;
use std::thread;
use std::time::{Duration, Instant};

use flow_comm::ProcessGroup;

use super::loss::{are_parts_missing, is_change_of_ranks};
use super::newcomers::{LOOK_INTERVAL, Looks, look_for_newcomers};
use crate::error::{Error, Result, job_rank};

/// A training that begins again in the same processes when a rank is lost, or when one comes. For models whose parts
/// no other rank has: with [`Fsdp`](crate::Fsdp), [`FullyShard`](crate::FullyShard),
/// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer), global tensors or pipelines. It goes on from
/// [checkpoints in memory](crate::Checkpoints::in_memory), or from others. For jobs of
/// `flow-launch --elastic in-place`; it works without, too, and then a lost rank is an error.
///
/// ```no_run
/// use flow_ddp::{
///     Checkpoints, DistributedSampler, Fsdp, InProcessRestart, ProcessGroup, TensorCollectives, TryBackwardStep,
/// };
/// use tch::nn;
///
/// # fn train(images: tch::Tensor, labels: tch::Tensor) -> anyhow::Result<()> {
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
///         let loss = model.try_forward_t(&images, true)?.cross_entropy_for_logits(&labels);
///         optimizer.try_backward_step(&loss)?;
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
    /// The changes since [`Attempt::check`] was last called twice.
    changes: usize,
    /// Since when no rank trains, as too few are there.
    short_since: Option<Instant>,
}

/// A training while its ranks stay the same: see [`InProcessRestart::run`].
pub struct Attempt<'r> {
    /// The ranks that train.
    group: ProcessGroup,
    /// All ranks.
    all: &'r ProcessGroup,
    looks: Looks,
    checks: Cell<usize>,
}

/// If the ranks change more often without a step, no lost rank is the cause.
const MAX_CHANGES: usize = 16;
/// The time that a worker has to come back with its parts of a checkpoint.
const PARTS_TIMEOUT: Duration = Duration::from_secs(60);

impl InProcessRestart {
    /// Makes one for the group of all ranks. Drop other handles of the group, and what was made with it: they keep
    /// memory of ranks that are lost.
    pub fn new(group: ProcessGroup) -> Self {
        Self { group, multiple: 1, changes: 0, short_since: None }
    }

    /// Lets the ranks train in multiples of `count` (default: 1; 0 is 1): as many as a replica of the model is
    /// divided over, or a pipeline has stages. If one of 8 ranks is lost, and `count` is 4, then 4 train, and 3 wait
    /// until a fourth comes. If fewer than `count` are left, all wait, as long as the group's timeout.
    pub fn multiple_of(mut self, count: usize) -> Self {
        self.multiple = count.max(1);
        self
    }

    /// Calls `train`, and again each time the ranks have changed, until it has returned on all ranks that train. All
    /// ranks call this. `train` makes all that it uses from [`Attempt::group`], resumes the last checkpoint, calls
    /// [`Attempt::check`] before each step, and passes errors on: as `anyhow::Error`, as a boxed error, or as
    /// [`Error`]. `run` takes those that a lost rank causes.
    ///
    /// Returns what `train` has returned; None on a rank that waited at the end.
    ///
    /// # Errors
    ///
    /// Other errors of `train`; an error of [`reconfigure`](ProcessGroup::reconfigure); too few ranks for as long as
    /// the group's timeout; a checkpoint whose parts do not come back; ranks that change too often without a step. When
    /// one rank gets an error, the others wait until its process has ended, and go on without it.
    pub fn run<T, E>(
        mut self,
        mut train: impl FnMut(&Attempt<'_>) -> Result<T, E>,
    ) -> Result<Option<T>, E>
    where
        E: From<Error> + AsRef<dyn StdError + Send + Sync>,
    {
        let mut result = None;
        loop {
            match self.attempt(&mut result, &mut train) {
                Ok(true) => return Ok(result),
                Ok(false) => {}
                Err(error) => self.check_change(error)?,
            }
            self.group = self.group.reconfigure().map_err(Error::Comm)?;
        }
    }

    /// Trains, or waits, until the ranks are to change. Returns whether the training is over, as all ranks know.
    fn attempt<T, E: From<Error> + AsRef<dyn StdError + Send + Sync>>(
        &mut self,
        result: &mut Option<T>,
        train: &mut impl FnMut(&Attempt<'_>) -> Result<T, E>,
    ) -> Result<bool, E> {
        let ranks = self.group.world_size();
        // Those that wait have not heard of the end, nor has a rank that comes.
        let own = [i64::from(result.is_some()), i64::from(self.group.is_newcomer())];
        let mut all = vec![0_i64; 2 * ranks];
        self.group.all_gather(&own, &mut all).map_err(Error::Comm)?;
        let (is_over, is_newcomer): (Vec<bool>, Vec<bool>) =
            all.chunks(2).map(|of_rank| (of_rank[0] > 0, of_rank[1] > 0)).unzip();
        if is_over.contains(&true) {
            return Ok(true);
        }
        let machines: Vec<usize> =
            (0..ranks).map(|rank| self.group.ranks_on_machine_of(rank)[0]).collect();
        let training = training_ranks(&machines, &is_newcomer, self.multiple);
        if training.is_empty() {
            let has_changed = self.wait(Some(self.group.timeout()))?;
            return if has_changed { Ok(false) } else { Err(self.too_few().into()) };
        }
        if !training.contains(&self.group.rank()) {
            self.wait(None)?;
            return Ok(false);
        }
        let all_train = training.len() == ranks;
        let attempt = Attempt {
            group: self.group_of(&training)?,
            all: &self.group,
            looks: Looks::default(),
            checks: Cell::new(0),
        };
        let value = train(&attempt);
        let Attempt { group, checks, .. } = attempt;
        self.changes = if checks.get() > 1 { 0 } else { self.changes + 1 };
        if checks.get() > 0 {
            self.short_since = None;
        }
        let value = match value {
            Err(error) if are_parts_missing(error.as_ref()) && self.group.can_reconfigure() => {
                let has_changed = self.wait(Some(PARTS_TIMEOUT.min(self.group.timeout())))?;
                return if has_changed { Ok(false) } else { Err(error) };
            }
            value => value?,
        };
        // A rank that has not done the last step needs the others.
        group.barrier().map_err(Error::Comm)?;
        *result = Some(value);
        Ok(all_train)
    }

    /// Returns the error if no change of the ranks has caused it, or there were too many changes.
    fn check_change<E>(&self, error: E) -> Result<(), E>
    where
        E: From<Error> + AsRef<dyn StdError + Send + Sync>,
    {
        // Errors of other crates do not always have what caused them as their source.
        let is_known = is_change_of_ranks(error.as_ref());
        if !self.group.can_reconfigure() || !(is_known || self.group.is_changing().unwrap_or(false))
        {
            return Err(error);
        }
        let rank = job_rank(&self.group);
        if self.changes >= MAX_CHANGES {
            let reason = format!(
                "the ranks have changed {MAX_CHANGES} times, and Attempt::check was not called twice in between; the \
                 last cause: {}",
                error.as_ref()
            );
            return Err(Error::Elastic { rank, reason }.into());
        }
        if is_known {
            log::info!("rank {rank}: the ranks change: {}", error.as_ref());
        } else {
            log::warn!("rank {rank}: the ranks change, and this failed: {}", error.as_ref());
        }
        Ok(())
    }

    /// Returns the group of these ranks.
    fn group_of(&self, ranks: &[usize]) -> Result<ProcessGroup> {
        if ranks.len() == self.group.world_size() {
            return Ok(self.group.clone());
        }
        self.group.new_group_of(ranks, "in_process_restart").map_err(Error::Comm)
    }

    /// Waits until the ranks are to change. With a limit no rank trains, and this is how long that may last, from its
    /// begin. Returns whether the ranks are to change.
    fn wait(&mut self, limit: Option<Duration>) -> Result<bool> {
        let begin = Instant::now();
        let since = limit.map(|_| *self.short_since.get_or_insert(begin));
        loop {
            if let Some((since, limit)) = since.zip(limit)
                && since.elapsed() >= limit
            {
                return Ok(false);
            }
            let looks = limit.is_some() && self.group.rank() == 0;
            if self.group.is_changing()? || looks && self.group.newcomers()? > 0 {
                return Ok(true);
            }
            thread::sleep(LOOK_INTERVAL);
        }
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
    /// this before each step: by these calls `run` knows that the training goes on. It sends nothing. The other ranks
    /// hear of the change by their next operation.
    ///
    /// # Errors
    ///
    /// [`Error::Newcomers`], [`Error::RanksChange`]; the store is gone.
    pub fn check(&self) -> Result<()> {
        self.checks.set(self.checks.get() + 1);
        if self.group.rank() == 0 && self.looks.take_due(self.all) {
            look_for_newcomers(self.all)?;
            if self.all.is_changing()? {
                return Err(Error::RanksChange { rank: job_rank(self.all) });
            }
        }
        Ok(())
    }
}

/// Returns the ranks that train: as many as are a multiple of `multiple`. Those that were there before come first, as
/// they are near to what was saved; and of these the first of each machine, as it reads what the machine's memory has.
fn training_ranks(machines: &[usize], is_newcomer: &[bool], multiple: usize) -> Vec<usize> {
    let mut ranks: Vec<usize> = (0..machines.len()).collect();
    ranks.sort_by_key(|&rank| {
        let is_first =
            !(0..rank).any(|before| machines[before] == machines[rank] && !is_newcomer[before]);
        (is_newcomer[rank], !is_first)
    });
    ranks.truncate(machines.len() - machines.len() % multiple);
    ranks.sort_unstable();
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_from_before_train_and_one_of_each_machine() {
        let chosen = |machines: &[usize], newcomers: &[usize], multiple| {
            let is_newcomer: Vec<bool> =
                (0..machines.len()).map(|rank| newcomers.contains(&rank)).collect();
            training_ranks(machines, &is_newcomer, multiple)
        };
        // The second of two machines has lost a rank.
        assert_eq!(chosen(&[0, 0, 2], &[], 2), [0, 2]);
        assert_eq!(chosen(&[0, 0, 0, 0, 4, 4, 4], &[], 4), [0, 1, 2, 4]);
        // A newcomer is the first of its machine.
        assert_eq!(chosen(&[0, 0, 2, 2, 2], &[2], 2), [0, 1, 3, 4]);
        assert_eq!(chosen(&[0, 0, 2, 2, 2], &[2, 3], 3), [0, 1, 4]);
        // More machines than ranks that train.
        assert_eq!(chosen(&[0, 1, 2], &[0], 2), [1, 2]);
        assert_eq!(chosen(&[0], &[], 2), [0; 0]);
        assert_eq!(chosen(&[0, 0], &[1], 1), [0, 1]);
    }
}
