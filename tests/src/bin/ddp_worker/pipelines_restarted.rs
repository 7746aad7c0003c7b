//! Pipelines with replicas of their stages that begin again in the same processes when ranks are killed.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use flow_comm::{Mesh, ProcessGroup};
use flow_ddp::{Ddp, InProcessRestart};
use flow_pipeline::{DdpStage, Pipeline, Schedule};
use flow_tests::registry::{Scenario, launched, machines, process};
use tch::nn::{Module, OptimizerConfig, Sgd};
use tch::{Kind, Tensor};

use crate::checkpoints::folder;
use crate::in_process_restart::{Fate, IN_PLACE, Layer, STARTED, newcomers_come, note, number};
use crate::models::{device, store};
use crate::optimizers::same_elements;

const STAGES: usize = 2;
const MICRO_BATCHES: usize = 3;
const LEARNING_RATE: f64 = 0.01;

pub const SCENARIOS: &[Scenario] = &[process(
    "pipelines_go_on_when_ranks_are_killed",
    with_pipelines,
    &[launched(2).flags(IN_PLACE), launched(4).flags(IN_PLACE), machines(&[2, 2]).flags(IN_PLACE)],
)
.checked_by(newcomers_come)];

/// The same on all replicas, so that the mean of gradients is exact.
fn batch() -> Tensor {
    Tensor::arange(6 * 151, (Kind::Float, device())).reshape([6, 151]) / 906.0
}

fn loss(output: &Tensor) -> Tensor {
    (output - 0.3).square().mean(Kind::Float)
}

/// Where the weights of a stage are after a step.
fn saved(stage: usize, step: i64) -> Result<PathBuf> {
    Ok(folder()?.join(format!("stage{stage}-{step}.safetensors")))
}

/// Returns the last step after which all stages were saved. All ranks call this.
fn last_saved(group: &ProcessGroup, stage: usize) -> Result<i64> {
    let mut step = 0;
    while saved(stage, step + 1)?.exists() {
        step += 1;
    }
    let mut steps = vec![0; group.world_size()];
    group.all_gather(&[step], &mut steps)?;
    let first = steps.iter().copied().min().unwrap_or(step);
    ensure!(steps.iter().all(|&step| step <= first + 1), "the steps of the stages are {steps:?}");
    Ok(first)
}

fn with_pipelines() -> Result<()> {
    note(STARTED)?;
    let ranks = number("WORLD_SIZE", 1)?;
    let restart = InProcessRestart::new(ProcessGroup::from_env()?).multiple_of(STAGES);
    let trained = restart.run(|attempt| {
        let group = attempt.group();
        let all: Vec<usize> = (0..group.world_size()).collect();
        let mesh = Mesh::new(group, &all, &[STAGES, all.len() / STAGES])?;
        let mesh = mesh.with_names(&["pp", "dp"])?;
        let replicas = mesh.group("dp")?;
        let mut vs = store();
        let mut pipeline = Pipeline::builder(&mesh, "pp")
            .schedule(Schedule::one_f_one_b(STAGES, MICRO_BATCHES)?)
            .build(|stage| {
                let layer = Layer::new(vs.root() / stage, stage as i64);
                Ok(Box::new(DdpStage(Ddp::new(layer, &vs, replicas)?)))
            })?;
        let stage = pipeline.stages()[0];
        let mut optimizer = Sgd::default().build(&vs, LEARNING_RATE)?;
        let mut step = last_saved(group, stage)?;
        if step > 0 {
            vs.load(saved(stage, step)?)?;
        }
        let fate = Fate::new(group, step, ranks)?;
        while !fate.is_over(group, step)? {
            attempt.check()?;
            optimizer.zero_grad();
            pipeline.step(&[batch()], |outputs, _| loss(&outputs[0]))?;
            optimizer.step();
            step += 1;
            if replicas.rank() == 0 {
                // Whole or not there, whenever this rank is killed.
                let new = folder()?.join(format!("new{stage}.safetensors"));
                vs.save(&new)?;
                fs::rename(new, saved(stage, step)?)?;
            }
        }
        let name = format!("{stage}.weight");
        same_elements(&name, &vs.variables()[&name], &trained_alone(step)?[stage])
    })?;
    ensure!(trained.is_some());
    println!("all is well");
    Ok(())
}

/// Returns the weights of both stages after so many steps of one process.
fn trained_alone(steps: i64) -> Result<[Tensor; STAGES]> {
    let vs = store();
    let layers = [0, 1].map(|stage| Layer::new(vs.root() / stage, stage));
    let mut optimizer = Sgd::default().build(&vs, LEARNING_RATE)?;
    for _ in 0..steps {
        optimizer.zero_grad();
        for part in batch().tensor_split(MICRO_BATCHES as i64, 0) {
            let output = layers[1].forward(&layers[0].forward(&part));
            (loss(&output) / MICRO_BATCHES as f64).backward();
        }
        optimizer.step();
    }
    Ok(layers.map(|layer| layer.weight()))
}
