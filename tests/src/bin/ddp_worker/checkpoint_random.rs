//! Random models, saved by some ranks and resumed by others: each way to train goes on from what each
//! other way has saved.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use flow_autograd::{OptimizerState, StateDict};
use flow_comm::ProcessGroup;
use flow_ddp::{Checkpoints, Ddp, DistributedSampler, Fsdp, ZeroRedundancyOptimizer};
use tch::nn::{Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use crate::helpers::{Draws, own_group};
use crate::models::{device, store};
use crate::optimizers::{Config, configs, same_elements, same_state};

/// A variable.
#[derive(Debug)]
struct Variable {
    shape: Vec<i64>,
    kind: Kind,
    /// In memory, channels come last.
    is_channels_last: bool,
    is_trained: bool,
}

/// How the optimizer's state is kept.
#[derive(Clone, Copy, Debug)]
enum Way {
    Whole,
    Zero,
    Fsdp,
}

enum AnyOptimizer {
    Whole(Box<Optimizer>),
    Zero(ZeroRedundancyOptimizer),
}

enum AnyModel {
    Ddp(Ddp<()>),
    Fsdp(Fsdp<()>),
}

/// A model that is trained in some way.
struct Training<'a> {
    group: &'a ProcessGroup,
    store: VarStore,
    model: AnyModel,
    optimizer: AnyOptimizer,
}

const SHAPES: [&[i64]; 9] =
    [&[], &[0], &[1], &[0, 3], &[3, 1, 5], &[8, 4, 3, 3], &[64, 40, 3, 3], &[130, 257], &[70_001]];
const TRAINED: [Kind; 4] = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
const KEPT: [Kind; 9] = [
    Kind::Bool,
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Float8e4m3fn,
    Kind::ComplexFloat,
    Kind::Double,
];

/// Draws one of some.
fn one_of<T: Copy>(draws: &mut Draws, some: &[T]) -> T {
    some[draws.below(some.len() as u64) as usize]
}

fn draw_variables(draws: &mut Draws) -> Vec<Variable> {
    let count = 2 + draws.below(7);
    let mut variables = Vec::new();
    for number in 0..count {
        let shape = one_of(draws, &SHAPES).to_vec();
        let is_trained = number == 0 || draws.below(4) > 0;
        let kind = one_of(draws, if is_trained { &TRAINED[..] } else { &KEPT[..] });
        let is_channels_last = shape.len() == 4 && draws.below(2) == 0;
        variables.push(Variable { shape, kind, is_channels_last, is_trained });
    }
    variables
}

/// Makes the variables: all ranks the same, but for what is not trained.
fn new_store(variables: &[Variable], group: &ProcessGroup, first: i64) -> VarStore {
    let store = store();
    for (number, variable) in variables.iter().enumerate() {
        let apart = if variable.is_trained { 0 } else { group.rank() as i64 };
        let count = variable.shape.iter().product::<i64>();
        let numbers = Tensor::arange(count, (Kind::Int64, device())) * 7 + (first + apart);
        let small: Tensor = numbers.remainder(97).to_kind(Kind::Float) / 8.0;
        let mut tensor = small.to_kind(variable.kind).reshape(&variable.shape);
        if variable.is_channels_last {
            tensor = tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
        }
        let path = store.root().set_group(number % 2);
        let _ = path.add(&format!("v{number}"), tensor, variable.is_trained);
    }
    store
}

impl<'a> Training<'a> {
    fn new(group: &'a ProcessGroup, store: VarStore, way: Way, config: Config) -> Result<Self> {
        let model = match way {
            Way::Fsdp => AnyModel::Fsdp(Fsdp::new((), &store, group)?),
            _ => AnyModel::Ddp(Ddp::builder(group).broadcast_buffers(false).wrap((), &store)?),
        };
        let optimizer = match (&model, way) {
            (AnyModel::Fsdp(model), _) => AnyOptimizer::Zero(model.optimizer(config, 0.1)?),
            (_, Way::Whole) => AnyOptimizer::Whole(Box::new(config.build(&store, 0.1)?)),
            _ => AnyOptimizer::Zero(ZeroRedundancyOptimizer::new(&store, group, config, 0.1)?),
        };
        Ok(Self { group, store, model, optimizer })
    }

    fn ddp(&self) -> &Ddp<()> {
        match &self.model {
            AnyModel::Ddp(model) => model,
            AnyModel::Fsdp(model) => model,
        }
    }

    fn step(&mut self) -> Result<()> {
        let mut loss = Tensor::zeros([], (Kind::Double, device()));
        for parameter in self.store.trainable_variables() {
            let factor = 0.5 + self.group.rank() as f64;
            loss += (parameter.to_kind(Kind::Double) * factor).square().sum(Kind::Double);
        }
        match &mut self.optimizer {
            AnyOptimizer::Whole(optimizer) => optimizer.backward_step(&loss),
            AnyOptimizer::Zero(optimizer) => optimizer.backward_step(&loss)?,
        }
        Ok(())
    }

    fn optimizer(&mut self) -> &mut dyn OptimizerState {
        match &mut self.optimizer {
            AnyOptimizer::Whole(optimizer) => &mut **optimizer,
            AnyOptimizer::Zero(optimizer) => optimizer,
        }
    }

    /// The optimizer's state on rank 0.
    fn state(&mut self) -> Result<Option<StateDict>> {
        let is_first = self.group.rank() == 0;
        let optimizer = self.optimizer();
        optimizer.consolidate_state_dict(0)?;
        Ok(if is_first { Some(optimizer.state()?) } else { None })
    }
}

/// Models that `group` saves, and that it, fewer ranks and a rank alone resume.
pub fn random(group: &ProcessGroup) -> Result<()> {
    let mut pid = [i64::from(std::process::id())];
    group.broadcast(&mut pid, 0)?;
    let folder = std::env::temp_dir().join(format!("flow-checkpoints-{}", pid[0]));
    let fewer = group.new_group(&(0..group.world_size() - 1).collect::<Vec<_>>())?;
    let alone = own_group(group)?;
    let parts = [Some(group), fewer.as_ref(), Some(&alone).filter(|_| group.rank() == 0)];
    for seed in 0..18 {
        let folder = folder.join(seed.to_string());
        let resumed = saved_and_resumed(group, &parts, seed, &folder);
        resumed.with_context(|| format!("seed {seed}"))?;
    }
    group.barrier()?;
    if group.rank() == 0 {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok(())
}

fn saved_and_resumed(
    group: &ProcessGroup,
    parts: &[Option<&ProcessGroup>],
    seed: u64,
    folder: &Path,
) -> Result<()> {
    let mut draws = Draws(1000 * group.world_size() as u64 + seed);
    let variables = draw_variables(&mut draws);
    let config = configs()[seed as usize % 6];
    let ways = [Way::Whole, Way::Zero, Way::Fsdp];
    let way = ways[seed as usize / 6];
    let file_bytes = one_of(&mut draws, &[1, 5000, 200_000, 5_000_000_000]);
    let mut training = Training::new(group, new_store(&variables, group, 1), way, config)?;
    let mut saved = Training::new(group, new_store(&variables, group, 1), way, config)?;
    for _ in 0..2 {
        training.step()?;
        saved.step()?;
    }
    let mut checkpoints = Checkpoints::open(folder, group)?.file_bytes(file_bytes);
    let Training { store, optimizer, .. } = &saved;
    let state: &dyn OptimizerState = match optimizer {
        AnyOptimizer::Whole(optimizer) => &**optimizer,
        AnyOptimizer::Zero(optimizer) => optimizer,
    };
    let sampler = DistributedSampler::new(10, group);
    if draws.below(2) == 0 {
        checkpoints.save(1, saved.ddp(), store, state, &sampler, &seed)?;
    } else {
        checkpoints.async_save(1, saved.ddp(), store, state, &sampler, &seed)?;
        saved.step()?;
        if draws.below(2) == 0 {
            checkpoints.wait()?;
        }
    }
    drop(checkpoints);
    group.barrier()?;
    let state = training.state()?;
    if group.rank() == 0 {
        readable(&folder.join("step-1"), "model", &variables, &training.store)?;
    }
    for part in parts {
        let other = one_of(&mut draws, &ways);
        if let Some(part) = part {
            let what = || format!("{way:?} to {other:?}, {config:?}, {variables:?}");
            let mut resumed = Training::new(part, new_store(&variables, part, 50), other, config)?;
            let mut checkpoints = Checkpoints::open(folder, part)?;
            let checkpoint = checkpoints.latest::<u64>()?.context("it was saved")?;
            ensure!(checkpoint.state == seed);
            let mut sampler = DistributedSampler::new(10, part);
            let store = &resumed.store;
            let optimizer: &mut dyn OptimizerState = match &mut resumed.optimizer {
                AnyOptimizer::Whole(optimizer) => &mut **optimizer,
                AnyOptimizer::Zero(optimizer) => optimizer,
            };
            checkpoint.resume(store, optimizer, &mut sampler).with_context(what)?;
            same_as_on_rank_0(&training.store, &resumed.store, &variables).with_context(what)?;
            if let (Some(actual), Some(expected)) = (resumed.state()?, &state) {
                same_state(&actual, expected).with_context(what)?;
            }
            resumed.step()?;
        }
        group.barrier()?;
    }
    Ok(())
}

/// Buffers are those of rank 0, which no step changes.
fn same_as_on_rank_0(saved: &VarStore, resumed: &VarStore, variables: &[Variable]) -> Result<()> {
    let first = new_store(variables, &ProcessGroup::in_process(1)?.remove(0), 1).variables();
    let saved = saved.variables();
    for (name, tensor) in resumed.variables() {
        let number: usize = name[1..].parse()?;
        let of = if variables[number].is_trained { &saved } else { &first };
        same_elements(&name, &tensor, &of[&name])?;
    }
    Ok(())
}

/// Programs without Flow read the files: here tch, which knows fewer kinds.
fn readable(step: &Path, stem: &str, variables: &[Variable], store: &VarStore) -> Result<()> {
    let unknown = [Kind::Float8e4m3fn, Kind::ComplexFloat];
    if variables.iter().any(|variable| unknown.contains(&variable.kind)) {
        return Ok(());
    }
    let mut found = 0;
    let index = step.join(format!("{stem}.safetensors.index.json"));
    let files: Vec<PathBuf> = match std::fs::read(index) {
        Err(_) => vec![step.join(format!("{stem}.safetensors"))],
        Ok(text) => {
            let index: serde_json::Value = serde_json::from_slice(&text)?;
            let files = index["weight_map"].as_object().context("a map")?.values();
            let mut files: Vec<&str> = files.filter_map(|file| file.as_str()).collect();
            files.dedup();
            files.into_iter().map(|file| step.join(file)).collect()
        }
    };
    let saved = store.variables();
    for file in files {
        for (name, tensor) in Tensor::read_safetensors(file)? {
            same_elements(&name, &tensor, &saved[&name].to(Device::Cpu))?;
            found += 1;
        }
    }
    ensure!(found == variables.len(), "{found} of {} variables", variables.len());
    Ok(())
}
