//! Random models, trained with random options in random ways: a training ends as it does in one process,
//! or all ranks get an error that names the options which cannot be combined.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | the training by `Ddp`, and what is compared |
//! | `training.rs` | what is drawn |
//! | `common.rs` | inputs and losses |
//! | `model.rs` | the model |
//! | `reference.rs` | the same training without `Ddp`, of all ranks in one process |
//! | `refusals.rs` | the options that exclude each other, and the words of the errors |

mod common;
pub mod model;
mod reference;
mod refusals;
mod training;

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use flow_autograd::{OptimizerState, set_grad};
use flow_comm::{ProcessGroup, ReduceOp};
use flow_ddp::comm_hooks::{Bf16Compress, Fp16Compress, PostLocalSgd, PowerSgd, Quantize, TopK};
use flow_ddp::{
    BoxError, BufferCommHook, BufferCommHookLocation, Checkpoints, Ddp, DdpBuilder, DiLoCo,
    DiLoCoOptions, DistributedSampler, Error, Joinable, ModelAverager, OptimizerInBackward,
    TensorCollectives, ZeroRedundancyOptimizer, convert_sync_batchnorm, join,
};
use tch::nn::{Optimizer, OptimizerConfig, Sgd, VarStore};
use tch::{Kind, Tensor};

use self::common::{AVERAGED_EVERY, LEARNING_RATE, MAX_NORM, batch, loss, sgd, subgroup};
use self::model::{Net, WIDTH, weight_of};
use self::reference::Reference;
use self::training::{Averages, Before, Hook, Steps, Training};
use crate::helpers::{OwnMean, own_group};
use crate::models::{device, store};

/// The seeds of a run; by hand more, or one of them: `FLOW_TEST_SEEDS=0..1000`.
const SEEDS: &str = "FLOW_TEST_SEEDS";

pub fn trained(group: &ProcessGroup) -> Result<()> {
    let seeds = std::env::var(SEEDS).unwrap_or_else(|_| "0..100".to_owned());
    let range = seeds.split_once("..").context("FLOW_TEST_SEEDS is FIRST..END")?;
    let alone = own_group(group)?;
    let mut counts = [0, 0];
    for seed in range.0.parse::<u64>()?..range.1.parse()? {
        // Some are also trained by each rank alone.
        for group in [group, &alone].into_iter().take(if seed % 4 == 0 { 2 } else { 1 }) {
            let training = Training::drawn(seed, group.world_size());
            let what = || format!("seed {seed} of {} ranks: {training:?}", group.world_size());
            let is_refused = trained_or_refused(group, &training, seed).with_context(what)?;
            counts[usize::from(is_refused)] += 1;
        }
    }
    if group.rank() == 0 && std::env::var_os(SEEDS).is_some() {
        eprintln!("{} trained, {} refused", counts[0], counts[1]);
    }
    Ok(())
}

/// Returns whether the training was refused.
fn trained_or_refused(group: &ProcessGroup, training: &Training, seed: u64) -> Result<bool> {
    let refusals = training.refusals(group.world_size());
    let mut reference = Reference::new(training, group.world_size())?;
    let result = catch_unwind(AssertUnwindSafe(|| run(group, training, &mut reference, seed)));
    let result = result.unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked")));
    // The group still works, whatever has become of the model.
    let mut failed = [i64::from(result.is_err())];
    let reduced = group.all_reduce(&mut failed, ReduceOp::Sum);
    reduced.with_context(|| format!("the group does not work after {result:?}"))?;
    let Err(error) = result else {
        ensure!(failed[0] == 0, "{} ranks had an error, this one had none", failed[0]);
        ensure!(!refusals.iter().any(|r| r.is_certain), "none of {refusals:?} came");
        return Ok(false);
    };
    let text = error.to_string();
    let is_expected =
        |words: &[&str]| !text.contains('\n') && words.iter().all(|word| text.contains(word));
    if !refusals.iter().any(|refusal| is_expected(refusal.words)) {
        return Err(error.context(format!("{refusals:?} were expected")));
    }
    ensure!(failed[0] == group.world_size() as i64, "{} ranks had an error: {text}", failed[0]);
    Ok(true)
}

/// Averages the buffers.
struct OwnBuffers(BufferCommHookLocation);

impl BufferCommHook for OwnBuffers {
    fn run(&mut self, group: &ProcessGroup, all: &mut [(String, Tensor)]) -> Result<(), BoxError> {
        for (_, buffer) in all.iter_mut().filter(|(_, buffer)| buffer.is_floating_point()) {
            group.all_reduce_tensor(buffer, ReduceOp::Avg)?;
        }
        Ok(())
    }

    fn location(&self) -> BufferCommHookLocation {
        self.0
    }
}

fn builder(group: &ProcessGroup, training: &Training) -> Result<DdpBuilder> {
    let sparse: Vec<String> = training.named_sparse().into_iter().map(weight_of).collect();
    let sparse: Vec<&str> = sparse.iter().map(String::as_str).collect();
    let mut builder = Ddp::builder(group)
        .bucket_cap_mb_list(&training.caps)
        .tune(training.tune)
        .broadcast_buffers(training.broadcast_buffers)
        .forward_sync_buffers(training.forward_sync_buffers)
        .find_unused_parameters(training.find_unused)
        .static_graph(training.static_graph)
        .gradient_as_bucket_view(training.bucket_view)
        .sparse_gradients(&sparse)
        .sparse_as_dense(training.sparse_as_dense)
        .mixed_precision(training.mixed);
    if let Some((one, until)) = training.delayed {
        builder = builder.delay_all_reduce_named_params(&[&weight_of(one)], &weight_of(until));
    }
    if let Some(location) = training.buffer_hook {
        builder = builder.buffer_comm_hook(OwnBuffers(location));
    }
    let power = |rank| PowerSgd::new(rank).start_iter(1).min_compression_rate(0.0);
    Ok(match training.hook {
        Hook::None => builder,
        Hook::OwnMean => builder.comm_hook(OwnMean),
        Hook::Fp16 => builder.comm_hook(Fp16Compress),
        Hook::Bf16 => builder.comm_hook(Bf16Compress),
        // The mean is exact, and no rank keeps what its own gradient has beside it.
        Hook::PowerSgd => builder.comm_hook(power(WIDTH as u32).error_feedback(false)),
        Hook::LowPowerSgd => builder.comm_hook(power(1)),
        Hook::BatchedPowerSgd => builder.comm_hook(power(1000).error_feedback(false).batched(true)),
        Hook::TopK => builder.comm_hook(TopK::new(1.0)),
        Hook::HalfTopK => builder.comm_hook(TopK::new(0.5)),
        Hook::Quantize => builder.comm_hook(Quantize::per_tensor()),
        Hook::QuantizeChannels => builder.comm_hook(Quantize::per_channel(10)),
        Hook::PostLocalSgd { start_iter, gradient_all_reduce } => {
            let mut own = None;
            for first in (0..group.world_size()).step_by(2) {
                own = group.new_group(&subgroup(first, group.world_size()))?.or(own);
            }
            let hook = PostLocalSgd::new(&own.context("each rank has a subgroup")?)?;
            builder.comm_hook(hook.start_iter(start_iter).gradient_all_reduce(gradient_all_reduce))
        }
    })
}

enum Stepper {
    After(RefCell<Optimizer>),
    InBackward(OptimizerInBackward),
    Zero(Box<ZeroRedundancyOptimizer>),
    ZeroInBackward(Box<ZeroRedundancyOptimizer>),
}

impl Stepper {
    /// Wraps the model, and makes its optimizer.
    fn wrap(
        training: &Training,
        group: &ProcessGroup,
        net: Net,
        store: &VarStore,
    ) -> Result<(Ddp<Net>, Self)> {
        let builder = builder(group, training)?;
        let config = sgd(training);
        let zero =
            || ZeroRedundancyOptimizer::new(store, group, config, LEARNING_RATE).map(Box::new);
        Ok(match training.steps {
            Steps::After => {
                let model = builder.wrap(net, store)?;
                (model, Self::After(config.build(store, LEARNING_RATE)?.into()))
            }
            Steps::InBackward => {
                let model =
                    builder.optimizer_in_backward(config, LEARNING_RATE).wrap(net, store)?;
                let optimizer = model.optimizer_in_backward()?;
                (model, Self::InBackward(optimizer))
            }
            Steps::Zero => (builder.wrap(net, store)?, Self::Zero(zero()?)),
            Steps::ZeroInBackward => {
                let zero = zero()?;
                (builder.hook_with_zero_step(&zero).wrap(net, store)?, Self::ZeroInBackward(zero))
            }
        })
    }

    fn state(&mut self) -> &mut dyn OptimizerState {
        match self {
            Self::After(optimizer) => optimizer.get_mut(),
            Self::InBackward(optimizer) => optimizer,
            Self::Zero(optimizer) | Self::ZeroInBackward(optimizer) => &mut **optimizer,
        }
    }

    fn step(&self, clips: bool) -> Result<()> {
        match self {
            Self::After(optimizer) => {
                let mut optimizer = optimizer.borrow_mut();
                if clips {
                    optimizer.clip_grad_norm(MAX_NORM);
                }
                optimizer.step();
            }
            Self::InBackward(_) | Self::ZeroInBackward(_) => {}
            Self::Zero(optimizer) => {
                if clips {
                    optimizer.clip_grad_norm(MAX_NORM)?;
                }
                optimizer.step()?;
            }
        }
        Ok(())
    }
}

enum Averager {
    None,
    ModelAverager(ModelAverager),
    DiLoCo(DiLoCo),
}

impl Averager {
    fn new(averages: Averages, store: &VarStore, group: &ProcessGroup) -> Result<Self> {
        Ok(match averages {
            Averages::None => Self::None,
            Averages::ModelAverager => {
                Self::ModelAverager(ModelAverager::periodic(group, AVERAGED_EVERY, 0)?)
            }
            Averages::DiLoCo => {
                let options = DiLoCoOptions { sync_every: AVERAGED_EVERY, ..Default::default() };
                Self::DiLoCo(DiLoCo::new(store, group, Sgd::default(), 1.0, options)?)
            }
        })
    }

    fn step(&mut self, store: &VarStore) -> Result<()> {
        match self {
            Self::None => {}
            Self::ModelAverager(averager) => _ = averager.average_parameters(store)?,
            Self::DiLoCo(diloco) => diloco.step()?,
        }
        Ok(())
    }
}

/// A rank's training by `Ddp`.
struct Trained<'a> {
    group: &'a ProcessGroup,
    training: &'a Training,
    store: VarStore,
    model: Ddp<Net>,
    stepper: Stepper,
    averager: RefCell<Averager>,
}

fn run(
    group: &ProcessGroup,
    training: &Training,
    reference: &mut Reference<'_>,
    seed: u64,
) -> Result<()> {
    let store = store();
    let net = Net::new(&store, &training.layers, training.wide, group.rank());
    if training.sync_batch_norm {
        convert_sync_batchnorm(&store, group)?;
    }
    let (model, stepper) = Stepper::wrap(training, group, net, &store)?;
    let averager = RefCell::new(Averager::new(training.averages, &store, group)?);
    let mut trained = Trained { group, training, store, model, stepper, averager };
    for (number, phase) in training.phases.iter().enumerate() {
        trained.prepare(phase.before, seed)?;
        reference.prepare(phase.before)?;
        let mut result = trained.phase(number);
        // A rank that had all gradients before another failed has the error in its next backward.
        let mut failed = [i64::from(result.is_err())];
        group.all_reduce(&mut failed, ReduceOp::Sum)?;
        if failed[0] > 0 && result.is_ok() {
            result = trained.step(number, 0);
        }
        result?;
        ensure!(failed[0] == 0, "another rank had an error, this one has none");
        reference.run(number)?;
        let steps = phase.steps.iter().max().copied().unwrap_or_default();
        let gathered = trained.gathered()?;
        reference.compare(&gathered, steps).with_context(|| format!("phase {number}"))?;
    }
    Ok(())
}

impl Trained<'_> {
    fn prepare(&mut self, before: Before, seed: u64) -> Result<()> {
        match before {
            Before::Nothing => {}
            Before::SyncBuffers => self.model.sync_buffers()?,
            Before::CastParameters => self.model.cast_parameters()?,
            Before::Refresh { layer, trains } => {
                for parameter in self.model.parameters_of(layer) {
                    set_grad(parameter, None)?;
                    let _ = parameter.set_requires_grad(trains);
                }
                self.model.refresh()?;
            }
            Before::Resume => self.resume(seed)?,
        }
        Ok(())
    }

    /// Saves the model, changes it, and goes on from what was saved.
    fn resume(&mut self, seed: u64) -> Result<()> {
        let mut own = [i64::from(std::process::id())];
        self.group.broadcast(&mut own, 0)?;
        // Ranks that train alone may be threads of one process.
        let name = format!("flow-random-options-{}-{}-{seed}", own[0], self.group.ranks()[0]);
        let folder = std::env::temp_dir().join(name);
        let result = self.resume_in(&folder);
        self.group.barrier()?;
        if self.group.rank() == 0 {
            std::fs::remove_dir_all(&folder)?;
        }
        result
    }

    fn resume_in(&mut self, folder: &Path) -> Result<()> {
        let mut checkpoints = Checkpoints::open(folder, self.group)?;
        let mut sampler = DistributedSampler::new(10, self.group);
        let optimizer = self.stepper.state();
        checkpoints.save(1, &self.model, &self.store, optimizer, &sampler, &())?;
        tch::no_grad(|| {
            for parameter in self.model.parameters() {
                let _ = parameter.shallow_clone().g_add_scalar_(1);
            }
        });
        let checkpoint = checkpoints.latest::<()>()?.context("it was saved")?;
        checkpoint.resume(&self.store, optimizer, &mut sampler)?;
        if let Averager::DiLoCo(diloco) = self.averager.get_mut() {
            diloco.resume(diloco.steps())?;
        }
        Ok(())
    }

    fn phase(&self, number: usize) -> Result<()> {
        let phase = &self.training.phases[number];
        let steps =
            || (0..phase.steps[self.group.rank()]).try_for_each(|step| self.step(number, step));
        let Some(options) = phase.join else { return steps() };
        let mut joinables: Vec<&dyn Joinable> = vec![&self.model];
        if let Stepper::Zero(optimizer) = &self.stepper {
            joinables.push(&**optimizer);
        }
        join(&joinables, options, steps)
    }

    fn step(&self, number: usize, step: usize) -> Result<()> {
        let phase = &self.training.phases[number];
        for backward in 0..phase.backwards {
            let reduces = backward + 1 == phase.backwards;
            self.model.step.set(phase.number(step, backward));
            let drops = usize::from(phase.drops && reduces);
            let _guard = (!reduces).then(|| self.model.no_sync());
            let mut sum = Tensor::zeros([], (Kind::Double, device()));
            for forward in 0..drops + phase.forwards {
                let input =
                    batch(self.training, self.group.rank(), [number, step, backward, forward]);
                let input = input.set_requires_grad(self.training.penalty);
                let output = self.model.try_forward_t(&input, true)?;
                if forward >= drops {
                    sum += loss(&[output], &[input], self.training.penalty)?;
                }
            }
            sum.f_backward().map_err(Error::from_backward)?;
        }
        self.stepper.step(self.training.clips)?;
        for parameter in self.model.parameters() {
            let mut gradient = parameter.grad();
            if gradient.defined() && self.training.zeroes {
                let _ = gradient.zero_();
            } else {
                set_grad(&parameter, None)?;
            }
        }
        self.averager.borrow_mut().step(&self.store)?;
        if phase.evaluates == self.group.rank() {
            let input = batch(self.training, 0, [number, step, 0, 0]);
            let _ = tch::no_grad(|| self.model.try_forward_t(&input, false))?;
        }
        Ok(())
    }

    /// All ranks' parameters and buffers.
    fn gathered(&self) -> Result<Vec<Vec<Tensor>>> {
        let mut own = self.model.parameters();
        own.extend(self.model.buffers());
        let mut flat = Vec::with_capacity(own.len());
        for tensor in &own {
            let tensor = tensor.detach();
            let real = if tensor.is_complex() { tensor.view_as_real() } else { tensor };
            flat.push(real.reshape([-1]).to_kind(Kind::Double));
        }
        let all = self.group.all_gather_tensor(&Tensor::cat(&flat, 0))?;
        let mut of_ranks = Vec::new();
        for rank in 0..self.group.world_size() as i64 {
            let mut rest = all.get(rank);
            let mut tensors = Vec::with_capacity(own.len());
            for (tensor, flat) in own.iter().zip(&flat) {
                let length = flat.numel() as i64;
                let part = rest.narrow(0, 0, length);
                rest = rest.narrow(0, length, rest.numel() as i64 - length);
                let size = tensor.size();
                tensors.push(if tensor.is_complex() {
                    part.copy()
                        .view([-1, 2])
                        .view_as_complex()
                        .view(&size[..])
                        .to_kind(tensor.kind())
                } else {
                    part.view(&size[..]).to_kind(tensor.kind())
                });
            }
            of_ranks.push(tensors);
        }
        if !self.training.differs_between_ranks() {
            for tensors in &of_ranks[1..] {
                let count = self.model.parameters().len();
                let mut pairs = tensors.iter().zip(&of_ranks[0]).take(count);
                ensure!(pairs.all(|(one, first)| one == first), "ranks have other parameters");
            }
        }
        Ok(of_ranks)
    }
}
