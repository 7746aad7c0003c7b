//! A GPT that learns a text, by any combination of data, tensor and pipeline parallelism.
//!
//!     scripts/setup --data
//!     flow-launch --nproc_per_node 8 gpt --dp 2 --tp 2 --pp 2 --micro-batches 4
//!
//! | file | what |
//! |---|---|
//! | here | the training |
//! | `options.rs` | options, and the mesh of ranks |
//! | `data.rs` | the text |
//! | `model.rs` | the model of a stage |
//! | `sample.rs` | text that a trained model makes |
//!
//! The losses of a training are those of one rank on each layout, but for rounding: first weights,
//! samples and dropout do not depend on the layout.

mod data;
mod model;
mod options;
mod sample;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{bail, ensure, Result};
use flow::global::checkpoint::Checkpoints;
use flow::global::schedule::Schedule as LearningRate;
use flow::global::{self, GlobalTensor, ZeroRedundancyOptimizer};
use flow::pipeline::{Pipeline, Schedule};
use flow::prelude::{nn, Mesh, Placement, ProcessGroup, ReduceOp, Tensor, TensorCollectives, B};
use flow_examples::options::{write_losses, Options as Training};
use serde::{Deserialize, Serialize};

use data::Text;
use model::{Stage, DATA};
use options::{Options, SIZES};

/// What a checkpoint has beside the model and the optimizer.
#[derive(Clone, Default, Serialize, Deserialize)]
struct State {
    hyperparameters: Vec<(String, String)>,
    /// The loss of each step, as text: JSON has no NaN.
    losses: Vec<String>,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    match run(&flow_examples::arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpt: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    group.use_device(options.device)?;
    let is_first = group.rank() == 0;
    let config = options.config()?;
    let mesh = options.mesh(&group)?;
    let [stages, data_ranks, _] = [0, 1, 2].map(|axis| mesh.shape()[axis]);
    let placements = placements(&mesh, &group)?;
    let mut vs = nn::VarStore::new(group.device());
    vs.set_kind(options.dtype.kind());
    global::manual_seed(&placements[0], config.seed)?;
    let stage = |(stage, placement)| {
        Stage::new(&vs.root(), config, (stage as i64, stages as i64), placement)
    };
    let model: Vec<Stage> =
        placements.iter().enumerate().map(stage).collect::<global::Result<_>>()?;
    let adam = nn::AdamW { wd: 0.1, beta2: 0.99, ..Default::default() };
    let mut optimizer = ZeroRedundancyOptimizer::new(&vs, DATA, adam, options.lr)?;

    let folder = options.checkpoint.as_ref();
    if let (Some(_), Some(folder)) = (&options.sample, folder) {
        ensure!(folder.is_dir(), "there is no folder {} of checkpoints", folder.display());
    }
    let mut checkpoints = folder.map(|folder| Checkpoints::open(folder, &group)).transpose()?;
    let latest = checkpoints.as_mut().map(|checkpoints| checkpoints.latest::<State>());
    let latest = latest.transpose()?.flatten();
    if let Some(prompt) = &options.sample {
        ensure!(stages == 1, "--sample needs --pp 1, which reads checkpoints of any layout");
        let Some(checkpoint) = &latest else {
            bail!("there is no checkpoint to take the model from; train one first")
        };
        let of_model =
            |all: &[(String, String)]| all.iter().take(SIZES).cloned().collect::<Vec<_>>();
        let saved = of_model(&checkpoint.state.hyperparameters);
        Training::check_hyperparameters(&saved, &of_model(&options.hyperparameters(0)))?;
        optimizer.resume(checkpoint)?;
        return sample::print((&model[0], &placements[0]), prompt, options, &group);
    }

    let text = Text::load(options.text.as_deref())?;
    let mut state =
        State { hyperparameters: options.hyperparameters(text.checksum()), ..Default::default() };
    if let Some(saved) = latest {
        Training::check_hyperparameters(&saved.state.hyperparameters, &state.hyperparameters)?;
        optimizer.resume(&saved)?;
        state = saved.state;
        if is_first {
            println!("going on after step {}", state.losses.len());
        }
    }
    let parts = options.micro_batches;
    let samples = options.batch_size / parts;
    ensure!(
        samples % data_ranks as i64 == 0,
        "--dp {data_ranks} does not divide the {samples} samples of a micro-batch"
    );

    let first_step = state.losses.len() as u64;
    let last_step = options.stop_after.unwrap_or(u64::MAX).min(options.steps);
    model.iter().for_each(|stage| stage.micro_batches.set(first_step * parts as u64));
    let placement = &placements[mesh.coordinates().unwrap_or_default()[0]];
    let mut model: Vec<Option<Stage>> = model.into_iter().map(Some).collect();
    let mut pipeline = Pipeline::builder(&mesh, "pp")
        .schedule(Schedule::one_f_one_b(stages, parts as usize)?)
        .placement(placement.clone())
        .build(|stage| {
            let own = model[stage].take().ok_or("a stage is made once")?;
            Ok(Box::new(own))
        })?;
    let rates = rates(options);
    let data_seed = config.seed.wrapping_add(1);
    let start = Instant::now();
    for step in first_step..last_step {
        optimizer.set_lr(rates.at(step));
        let shape = (options.batch_size, parts, config.context);
        let batch = match pipeline.needs_inputs() || pipeline.needs_targets() {
            true => Vec::from(text.batch(placement, shape, (data_seed, step), group.device())?),
            false => Vec::new(),
        };
        let loss = pipeline.step(batch.get(..1).unwrap_or_default(), |logits, micro_batch| {
            let targets = micro_batch.of(&batch[1]);
            model::loss(&logits[0], &targets).unwrap_or_else(|error| panic!("{error}"))
        })?;
        let loss = on_all_ranks(loss, &mesh, &group)?;
        optimizer.clip_grad_norm(options.clip)?;
        optimizer.step()?;
        state.losses.push(loss.to_string());

        let done = step + 1;
        if is_first && (done.is_multiple_of(50) || done == last_step) {
            let per_step = start.elapsed().as_secs_f64() / (done - first_step) as f64;
            println!(
                "step {done}/{}: loss {loss:.4}, {:.0} ms a step",
                options.steps,
                1e3 * per_step
            );
        }
        let due = done.is_multiple_of(options.checkpoint_every.get() as u64) || done == last_step;
        if let Some(checkpoints) = checkpoints.as_mut().filter(|_| due) {
            optimizer.save(checkpoints, done as usize, &state)?;
        }
    }
    if is_first {
        write_losses(options.losses.as_deref(), &state.losses)?;
    }
    Ok(())
}

/// The placement of each stage: its ranks of the mesh, with the axes `dp` and `tp`.
fn placements(mesh: &Mesh, group: &ProcessGroup) -> Result<Vec<Placement>> {
    let &[_, dp, tp] = mesh.shape() else { bail!("the mesh has {} axes", mesh.shape().len()) };
    let of_stage = |ranks: &[usize]| {
        let rows: Vec<Vec<usize>> = ranks.chunks(tp).map(<[usize]>::to_vec).collect();
        Ok(Placement::new(group, rows)?.named(["dp", "tp"])?)
    };
    mesh.ranks().chunks(dp * tp).map(of_stage).collect()
}

/// The loss, which the ranks of the last stage have.
fn on_all_ranks(loss: Option<Tensor>, mesh: &Mesh, group: &ProcessGroup) -> Result<f64> {
    let is_first = mesh.coordinates().is_some_and(|at| at[1..].iter().all(|&at| at == 0));
    let mut sum = [0.0];
    if let Some(loss) = loss {
        let loss = loss.to_sbp([B, B])?.to_local()?.f_double_value(&[])?;
        // One rank answers for all that have it.
        sum[0] = if is_first { loss } else { 0.0 };
    }
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok(sum[0])
}

/// The learning rate of each step: up in a straight line, then down along half a cosine.
fn rates(options: &Options) -> LearningRate {
    let cosine = LearningRate::Cosine { base: options.lr, steps: options.steps, alpha: 0.1 };
    LearningRate::LinearWarmUp { steps: options.steps / 10, start: 0.05, then: Box::new(cosine) }
}
