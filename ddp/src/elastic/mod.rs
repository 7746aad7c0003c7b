//! Trainings that go on when ranks are lost, and when others come.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | [`Elastic`]: from one group of ranks to the next |
//! | `training.rs` | [`Training`]: steps that are done, or not done at all |
//! | `catch_up.rs` | weights and state of the rank that is farthest |
//! | `buffers.rs` | buffers as they were before a step that failed |
//! | `in_process_restart.rs` | [`InProcessRestart`]: from a checkpoint, for models whose parts no other rank has |
//! | `newcomers.rs` | whether somebody waits to join |
//! | `loss.rs` | the errors that other ranks cause |

mod buffers;
mod catch_up;
mod in_process_restart;
mod loss;
mod newcomers;
mod training;

use std::error::Error as StdError;

use flow_comm::ProcessGroup;
use flow_tensor::{DeviceKind, TensorCollectives};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::nn::{Optimizer, VarStore};
use tch::{Device, Tensor};

use crate::builder::DdpBuilder;
use crate::ddp::Ddp;
use crate::error::{Error, Result, job_rank};
use crate::sync_batchnorm::has_converted;
use buffers::Buffers;
pub use in_process_restart::{Attempt, InProcessRestart};
use loss::is_change_of_ranks;
use newcomers::Looks;
pub use training::Training;

/// A training whose ranks may change while it runs: when one is lost the others repeat the step, and
/// when one comes it gets the weights, the optimizer's state and the program's from another rank. For
/// jobs of `flow-launch --elastic in-place`; it works without, too, and then a lost rank is an error.
///
/// `state` says where the program goes on, such as the epoch and the sampler's position. It is right
/// after each step, and what the program knows of its progress is there only.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use flow_ddp::{
///     DataLoader, Dataset, DistributedSampler, Elastic, Error, ProcessGroup, SamplerState, TensorCollectives,
/// };
/// use serde::{Deserialize, Serialize};
/// use tch::nn::{self, ModuleT, OptimizerConfig};
///
/// #[derive(Default, Serialize, Deserialize)]
/// struct Progress {
///     epoch: u64,
///     sampler: Option<SamplerState>,
/// }
///
/// # fn train(data: Arc<dyn Dataset<Batch = (tch::Tensor, tch::Tensor)>>) -> anyhow::Result<()> {
/// let group = ProcessGroup::from_env()?; // a worker that was started again waits here
/// let vs = nn::VarStore::new(group.device());
/// let net = nn::linear(vs.root(), 784, 10, Default::default());
/// let optimizer = nn::Adam::default().build(&vs, 1e-3)?;
/// let mut elastic = Elastic::new(net, &vs, optimizer, Progress::default(), &group);
/// drop(group);
/// elastic.run(|training| {
///     // This begins anew with each change of the ranks.
///     let mut sampler = DistributedSampler::new(data.len(), training.group());
///     if let Some(position) = &training.state.sampler {
///         sampler.resume(position)?;
///     }
///     while training.state.epoch < 10 {
///         training.optimizer.set_lr(1e-3 * 0.9f64.powi(training.state.epoch as i32));
///         sampler.set_epoch(training.state.epoch);
///         for batch in DataLoader::new(&data, &sampler, 32) {
///             let (images, labels) = batch?;
///             training.step(|model, _| {
///                 let loss = model.try_forward_t(&images, true)?.cross_entropy_for_logits(&labels);
///                 loss.f_backward().map_err(Error::from_backward)
///             })?;
///             training.state.sampler = Some(sampler.state());
///         }
///         training.state.sampler = None;
///         training.state.epoch += 1;
///     }
///     anyhow::Ok(())
/// })
/// # }
/// ```
pub struct Elastic<'a, M, S> {
    /// None while it is wrapped.
    model: Option<M>,
    vs: &'a VarStore,
    optimizer: Optimizer,
    state: S,
    group: ProcessGroup,
    options: Box<dyn Fn(&ProcessGroup) -> DdpBuilder + 'a>,
    /// The steps of this job that the weights have had; None of a rank that has come with none of them.
    steps: Option<u64>,
    buffers: Buffers,
    /// The device of later groups is chosen as that of the first was.
    is_on_gpu: bool,
    /// Whether `run` has returned well.
    is_done: bool,
}

/// After so many changes in which no step is done, the cause is none of the ranks.
const MAX_CHANGES: usize = 16;
const PANICKED: &str = "its model was lost in a panic: make the training anew";

impl<'a, M, S: Serialize + DeserializeOwned> Elastic<'a, M, S> {
    /// Makes a training of a model whose variables are in `vs`, and of the one optimizer that steps them.
    /// `group` is the group of all ranks. A program has one such training.
    ///
    /// Only [`use_device`](TensorCollectives::use_device) is called on `group` before, and on a newcomer
    /// nothing else that all ranks call: the others are in [`run`](Self::run) already. So a checkpoint is
    /// loaded in its closure, if [`steps`](Training::steps) says 0 there.
    ///
    /// Groups, and tensors in them, that the program keeps from before keep memory of ranks that are lost.
    pub fn new(
        model: M,
        vs: &'a VarStore,
        optimizer: Optimizer,
        state: S,
        group: &ProcessGroup,
    ) -> Self {
        Self {
            model: Some(model),
            vs,
            optimizer,
            state,
            group: group.clone(),
            options: Box::new(Ddp::builder),
            steps: (!group.is_newcomer()).then_some(0),
            buffers: Buffers::of(vs),
            is_on_gpu: matches!(group.device(), Device::Cuda(_)),
            is_done: false,
        }
    }

    /// Sets the options of the [`Ddp`], which is made anew with each change of the ranks. With
    /// [`virtual_ranks`](DdpBuilder::virtual_ranks) the weights are the same bits whoever is lost.
    ///
    /// ```no_run
    /// # use flow_ddp::{Ddp, Elastic};
    /// # fn with_options<M>(elastic: Elastic<M, u64>) -> Elastic<M, u64> {
    /// elastic.options(|group| Ddp::builder(group).virtual_ranks(8))
    /// # }
    /// ```
    pub fn options(mut self, options: impl Fn(&ProcessGroup) -> DdpBuilder + 'a) -> Self {
        self.options = Box::new(options);
        self
    }

    /// Calls `train`, and again each time the ranks have changed: with the weights, the optimizer's state
    /// and the program's state of the rank that has done most steps. All ranks call this. It returns when
    /// `train` has returned on all of them.
    ///
    /// `train` passes errors on, of steps and of all else: as `anyhow::Error`, as a boxed error, or as
    /// [`Error`]. Those that a lost rank causes end here: also
    /// inside another error, if that has them as its source. It uses the group of the training, and no
    /// group from before. What it does between steps, such as an evaluation, may happen once more, or on
    /// other ranks.
    ///
    /// # Errors
    ///
    /// Layers that [`convert_sync_batchnorm`](crate::convert_sync_batchnorm) has converted. Other errors of `train`; an error of [`reconfigure`](ProcessGroup::reconfigure); ranks whose models
    /// or optimizers differ; ranks that change so many times without a step. When one rank gets an error,
    /// the others wait until its process has ended, and go on without it.
    pub fn run<T, E>(
        &mut self,
        mut train: impl FnMut(&mut Training<M, S>) -> Result<T, E>,
    ) -> Result<T, E>
    where
        E: From<Error> + AsRef<dyn StdError + Send + Sync>,
    {
        if self.is_done {
            let reason = "run was called before: a rank that comes begins with the first, so that one run is \
                          to have the whole training";
            return Err(self.error(reason.into()).into());
        }
        let mut changes = 0;
        loop {
            let steps = self.steps;
            let error = match self.run_in_group(&mut train) {
                Ok(value) => {
                    self.is_done = true;
                    return Ok(value);
                }
                Err(error) => error,
            };
            changes = if self.steps == steps { changes + 1 } else { 0 };
            let may_change = changes < MAX_CHANGES && self.group.can_reconfigure();
            if !may_change || !is_change_of_ranks(error.as_ref()) {
                return Err(error);
            }
            log::info!("rank {}: the ranks change: {}", self.group.rank(), error.as_ref());
            self.group = self.group.reconfigure().map_err(Error::Comm)?;
        }
    }

    fn error(&self, reason: String) -> Error {
        Error::Elastic { rank: job_rank(&self.group), reason }
    }

    fn run_in_group<T, E: From<Error>>(
        &mut self,
        train: &mut impl FnMut(&mut Training<M, S>) -> Result<T, E>,
    ) -> Result<T, E> {
        if has_converted(&self.buffers.buffers) {
            let reason = "convert_sync_batchnorm keeps the group that it was called with, and groups change here: \
                          leave its layers as they are";
            return Err(self.error(reason.into()).into());
        }
        if self.is_on_gpu && self.group.device() == Device::Cpu {
            self.group.use_device(DeviceKind::Cuda).map_err(Error::from)?;
        }
        // A step that failed has made them what they were before.
        self.buffers.keep();
        self.catch_up().inspect_err(|_| self.buffers.restore())?;
        self.buffers.keep();
        let wrapped = (self.options)(&self.group).wrap((), self.vs);
        let wrapped = wrapped.inspect_err(|_| self.buffers.restore())?;
        let model = self.model.take();
        let model = model.ok_or_else(|| self.error(PANICKED.into()))?;
        let mut training = Training {
            model: wrapped.with_model(model),
            optimizer: &mut self.optimizer,
            state: &mut self.state,
            group: self.group.clone(),
            steps: self.steps.get_or_insert_default(),
            watched: smallest_parameter(self.vs),
            buffers: &mut self.buffers,
            done: 0,
            looks: Looks::default(),
        };
        let result = train(&mut training);
        self.model = Some(training.model.into_inner());
        let value = result?;
        // A rank that has not done the last step needs the others.
        self.group.barrier().map_err(Error::Comm)?;
        Ok(value)
    }

    /// Returns the group of the ranks that there are now.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the program's state.
    pub fn state(&self) -> &S {
        &self.state
    }

    /// Returns the optimizer.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Returns the model, bare.
    ///
    /// # Errors
    ///
    /// [`run`](Self::run) has panicked.
    pub fn into_model(self) -> Result<M> {
        let error = self.error(PANICKED.into());
        self.model.ok_or(error)
    }
}

/// Returns the smallest of the parameters that are trained.
fn smallest_parameter(vs: &VarStore) -> Option<Tensor> {
    let trained = vs.trainable_variables().into_iter();
    let trained = trained.filter(|tensor| tensor.requires_grad() && tensor.numel() > 0);
    trained.min_by_key(Tensor::numel)
}
