//! `FullyShard` where it cannot work: errors that say what would be right, and no rank goes on with
//! something wrong.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{Checkpoints, DistributedSampler, Error, FullyShard, FullySharded};
use tch::nn::{self, ModuleT, OptimizerConfig, Path, SequentialT, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{error, own_group, says};
use crate::models::{device, store};

/// Errors say what would be right, and no rank goes on with something wrong.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let vs = store();
    let shard = FullyShard::new(&vs, group)?;
    let width = if rank == 1 { 11 } else { 10 };
    let unlike = vs.root() / "unlike";
    let text = error(shard.module(|| nn::linear(&unlike, 4, width, Default::default())))?;
    if group.world_size() > 1 {
        says(&text, &["a module differs", "[10", "[11"])?;
    }
    let vs = store();
    let shard = FullyShard::new(&vs, group)?;
    says(&error(shard.module(|| ()))?, &["no trainable variable", "inside of FullyShard::module"])?;
    says(&error(shard.wrap(()))?, &["nothing to train"])?;

    let (vs, model) = wrapped(group)?;
    let input = Tensor::ones([2, 4], (Kind::Float, device()));
    let weight = vs.variables()["0.weight"].shallow_clone();
    ensure!(weight.size() == [4, 4] && weight.requires_grad());
    let words = ["is sharded", "with_full_parameters"];
    says(&error(weight.f_sum(Kind::Float))?, &["of the module of 0."])?;
    says(&error(weight.f_sum(Kind::Float))?, &words)?;
    says(&error(vs.save(std::env::temp_dir().join("flow-not-written")))?, &words)?;

    // Without its optimizer.
    let mut plain = Sgd::default().build(&vs, 0.1)?;
    backward(&model.forward_t(&input, true))?;
    plain.step();
    let words = ["were not used", "FullySharded::optimizer"];
    says(&error(model.try_forward_t(&input, true))?, &words)?;
    let _ = tch::no_grad(|| model.try_forward_t(&input, false))?;
    model.zero_grad()?;
    backward(&model.try_forward_t(&input, true)?)?;
    Ok(())
}

fn backward(output: &Tensor) -> flow_ddp::Result<()> {
    output.sum(Kind::Float).f_backward().map_err(Error::from_backward)
}

/// Two modules of the same size, and one layer of no module.
fn wrapped(group: &ProcessGroup) -> Result<(VarStore, FullySharded<SequentialT>)> {
    let vs = store();
    let shard = FullyShard::new(&vs, group)?;
    let mut net = nn::seq_t();
    for layer in 0..2 {
        let path = vs.root() / layer;
        net = net.add(shard.module(|| nn::linear(&path, 4, 4, Default::default()))?);
    }
    let net = net.add(nn::linear(vs.root() / "head", 4, 4, Default::default()));
    let model = shard.wrap(net)?;
    Ok((vs, model))
}

/// Checks what the model gives now.
fn gives(model: &impl ModuleT, input: &Tensor, expected: f64) -> Result<()> {
    let actual = tch::no_grad(|| model.forward_t(input, false)).double_value(&[0, 9]);
    ensure!((actual - expected).abs() < 1e-4, "{actual}, not {expected}");
    Ok(())
}

/// Rank 0 changes parameters and buffers for all, and each rank keeps its elements of them.
pub fn written(group: &ProcessGroup) -> Result<()> {
    let vs = store();
    let shard = FullyShard::new(&vs, group)?;
    let weight = vs.root();
    let module = shard.module(|| {
        let weight = weight.ones("weight", &[10, 10]);
        nn::func(move |x| x.matmul(&weight))
    })?;
    let mut buffer = vs.root().zeros_no_train("buffer", &[1]);
    let model = shard.wrap(module)?;
    let input = Tensor::ones([1, 10], (Kind::Float, device()));
    gives(&model, &input, 10.0)?;
    let mut weight = vs.variables()["weight"].shallow_clone();
    let stale = model.forward_t(&input.shallow_clone().set_requires_grad(true), true);
    model.write(|| {
        let _ = buffer.f_fill_(3.0)?;
        weight.f_fill_(2.0).map(drop)
    })?;
    gives(&model, &input, 20.0)?;
    ensure!(buffer.double_value(&[0]) == 3.0, "{buffer}");
    says(&error(model.write(|| Err("no such file")))?, &["parameters: no such file"])?;
    gives(&model, &input, 20.0)?;
    // What is not written by `write` is lost.
    model.with_full_parameters(|| weight.f_fill_(7.0).map(drop))??;
    gives(&model, &input, 20.0)?;
    let optimizer = model.optimizer(Sgd::default(), 0.5)?;
    optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float))?;
    gives(&model, &input, 15.0)?;
    if group.world_size() > 1 {
        let alone = own_group(group)?;
        let folder = std::env::temp_dir().join(format!(
            "flow-alone-{}-{}",
            std::process::id(),
            group.rank()
        ));
        let mut checkpoints = Checkpoints::open(&folder, &alone)?;
        let sampler = DistributedSampler::new(10, &alone);
        let text = error(checkpoints.save(1, &model, &vs, &optimizer, &sampler, &()))?;
        drop(checkpoints);
        std::fs::remove_dir_all(&folder)?;
        says(&text, &["weight", "open the checkpoints with the model's group"])?;
    }
    says(&error(backward(&stale))?, &["modified by an inplace operation"])
}

/// Runs a backward that keeps the graph.
fn run_backward(output: &Tensor, input: &Tensor, create_graph: bool) -> flow_ddp::Result<()> {
    let run = Tensor::f_run_backward(&[output], &[input], true, create_graph);
    run.map(drop).map_err(Error::from_backward)
}

/// Graphs that cannot be gone through.
pub fn misused_graphs(group: &ProcessGroup) -> Result<()> {
    let input = Tensor::ones([2, 4], (Kind::Float, device())).set_requires_grad(true);
    let (_vs, model) = wrapped(group)?;
    let output = model.forward_t(&input, true).sum(Kind::Float);
    run_backward(&output, &input, false)?;
    // A failure of one rank ends what the others have not begun.
    group.barrier()?;
    says(
        &error(run_backward(&output, &input, false))?,
        &["backward runs twice", "add the losses up"],
    )?;

    let (_vs, model) = wrapped(group)?;
    let output = model.forward_t(&input, true).sum(Kind::Float);
    group.barrier()?;
    says(&error(run_backward(&output, &input, true))?, &["create_graph"])?;

    // Of parameters that are others by now.
    let (_vs, model) = wrapped(group)?;
    let optimizer = model.optimizer(Sgd::default(), 0.1)?;
    let output = model.forward_t(&input, true);
    optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float))?;
    group.barrier()?;
    says(&error(backward(&output))?, &["modified by an inplace operation"])?;

    // A module that gives its parameter away.
    let vs = store();
    let shard = FullyShard::new(&vs, group)?;
    let module = shard.module(|| {
        let weight = vs.root().ones("weight", &[4, 4]);
        nn::func_t(move |_, _| weight.tr())
    })?;
    says(&error(module.try_forward_t(&input, true))?, &["weight", "return a copy"])?;
    // It is of no more use, and says so each time.
    group.barrier()?;
    for _ in 0..2 {
        says(&error(module.try_forward_t(&input, true))?, &["return a copy"])?;
    }

    // The layer of no module is there in the model's forward and backward only, too.
    let (vs, model) = wrapped(group)?;
    let output = model.forward_t(&input, true);
    let head = vs.variables()["head.weight"].shallow_clone();
    says(&error(head.f_sum(Kind::Float))?, &["is sharded"])?;
    Ok(backward(&output)?)
}

/// One rank goes through other modules than the rest: all get an error before a step is taken.
pub fn out_of_step(group: &ProcessGroup) -> Result<()> {
    let vs = store();
    let shard = FullyShard::builder(group).prefetch(0).begin(&vs)?;
    let mut layers = Vec::new();
    for layer in 0..2 {
        let path = vs.root() / layer;
        layers.push(shard.module(|| nn::linear(&path, 4, 4, Default::default()))?);
    }
    let first = usize::from(group.rank() == 1);
    let net = nn::func_t(move |x, train| layers[first].forward_t(x, train));
    let model = shard.wrap(net)?;
    let optimizer = model.optimizer(Sgd::default(), 0.1)?;
    let input = Tensor::ones([2, 4], (Kind::Float, device()));
    let trained = catch_unwind(AssertUnwindSafe(|| {
        backward(&model.forward_t(&input, true))?;
        optimizer.step()
    }));
    let text = match trained {
        // A module's error in forward, which is that of an operation on the CPU.
        Err(panic) => panic.downcast::<String>().map(|text| *text).unwrap_or_default(),
        Ok(trained) => error(trained)?,
    };
    if group.world_size() > 1 {
        let is_told = text.contains("different modules") || text.contains("ranks disagree");
        ensure!(is_told, "{text}");
    }
    Ok(())
}

/// A module of a weight, and of a bias that some forwards leave out.
#[derive(Debug)]
struct Biased {
    weight: Tensor,
    bias: Tensor,
    /// A loss beside the output, if there is room for one.
    beside: Option<Mutex<Option<Tensor>>>,
}

impl Biased {
    fn new(path: &Path) -> Self {
        let weight = path.ones("weight", &[4, 4]);
        let bias = path.ones("bias", &[4]);
        Self { weight, bias, beside: None }
    }
}

impl ModuleT for Biased {
    /// Leaves the bias out if `train` is false.
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        if let Some(beside) = &self.beside {
            *beside.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(self.weight.sum(Kind::Float));
        }
        let y = x.matmul(&self.weight);
        if train { y + &self.bias } else { y }
    }
}

/// Ranks that leave out different parameters of a module get an error before a step is taken.
pub fn left_out(group: &ProcessGroup) -> Result<()> {
    let vs = store();
    let shard = FullyShard::new(&vs, group)?;
    let module = shard.module(|| Biased::new(&vs.root()))?;
    let model = shard.wrap(module)?;
    let optimizer = model.optimizer(Sgd::default(), 0.1)?;
    let input = Tensor::ones([2, 4], (Kind::Float, device()));
    for uses in [true, false] {
        optimizer.backward_step(&model.forward_t(&input, uses).sum(Kind::Float))?;
    }
    if group.world_size() == 1 {
        return Ok(());
    }
    let output = model.forward_t(&input, group.rank() != 1);
    optimizer.zero_grad()?;
    let text = error(backward(&output).and_then(|()| optimizer.step()))?;
    let is_told = text.contains("different modules") || text.contains("ranks disagree");
    ensure!(is_told, "{text}");
    Ok(())
}

/// Gradients that come when the parameters have no memory, or of parameters that were frozen.
pub fn gradients_elsewhere(group: &ProcessGroup) -> Result<()> {
    let input = Tensor::ones([2, 4], (Kind::Float, device()));
    for first in [true, false] {
        let vs = store();
        let shard = FullyShard::new(&vs, group)?;
        let module = shard
            .module(|| Biased { beside: Some(Mutex::default()), ..Biased::new(&vs.root()) })?;
        let model = shard.wrap(module)?;
        let optimizer = model.optimizer(Sgd::default(), 0.1)?;
        let output = model.forward_t(&input, true);
        let beside = model
            .beside
            .as_ref()
            .and_then(|beside| beside.lock().unwrap_or_else(PoisonError::into_inner).take());
        let beside = beside.context("forward leaves it there")?;
        group.barrier()?;
        let trained = if first {
            backward(&beside).and_then(|()| backward(&output))
        } else {
            backward(&output).and_then(|()| backward(&beside))
        };
        let text = error(trained.and_then(|()| optimizer.step()))?;
        says(&text, &["weight", "outside of its module's backward", "by its output only"])?;
        group.barrier()?;
    }
    let vs = store();
    let shard = FullyShard::new(&vs, group)?;
    let module = shard.module(|| {
        let module = Biased::new(&vs.root());
        let _ = module.bias.set_requires_grad(false);
        module
    })?;
    let model = shard.wrap(module)?;
    let optimizer = model.optimizer(Sgd::default(), 0.1)?;
    optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float))?;
    let _ = vs.variables()["bias"].set_requires_grad(true);
    optimizer.zero_grad()?;
    let output = model.forward_t(&input, true);
    group.barrier()?;
    says(&error(backward(&output))?, &["bias was frozen when its module was made"])
}
