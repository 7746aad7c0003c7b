//! Two pipelines of two ranks each, with replicas of the same stages. First and last stage share a
//! weight.

use std::collections::BTreeMap;

use anyhow::Result;
use flow_comm::Mesh;
use flow_ddp::{Ddp, DistributedSampler};
use flow_global::{GlobalTensor, Placement, Sbp};
use flow_pipeline::{DdpStage, Pipeline, Schedule, Stage};
use tch::nn::{self, Module, VarStore};
use tch::{Kind, Tensor};

use super::{device, numbers};

/// Each of two replicas has 7, and its three micro-batches 3, 2 and 2.
pub const ROWS: i64 = 14;
const STEPS: usize = 3;

/// A stage with a weight, which in every other stage is transposed.
#[derive(Debug)]
pub struct Half(pub Tensor, usize);

impl Half {
    pub fn new(vs: &mut VarStore, stage: usize) -> Self {
        let mut weight = vs.root().var("weight", &[4, 4], nn::Init::Const(0.0));
        vs.double();
        tch::no_grad(|| weight.copy_(&Self::weight(stage)));
        Self(weight, stage)
    }

    fn weight(stage: usize) -> Tensor {
        numbers(&[4, 4], 0.3 + stage as f64 / 7.0)
    }
}

impl Module for Half {
    fn forward(&self, x: &Tensor) -> Tensor {
        match self.1 % 2 {
            0 => x.matmul(&self.0).tanh(),
            _ => x.matmul(&self.0.tr()),
        }
    }
}

pub fn loss(output: &Tensor, y: &Tensor) -> Tensor {
    (output - y).square().mean(Kind::Double)
}

/// Inputs and targets.
pub fn batch(rows: i64, step: usize) -> [Tensor; 2] {
    [0.7, 0.9].map(|factor| numbers(&[rows, 4], factor + step as f64))
}

/// All stages, in one process.
pub fn alone(stages: usize) -> Vec<Half> {
    let weights: Vec<Tensor> =
        (1..stages).map(|stage| Half::weight(stage - 1).set_requires_grad(true)).collect();
    let weights = weights.iter().chain(weights.first());
    weights.enumerate().map(|(stage, weight)| Half(weight.shallow_clone(), stage)).collect()
}

/// The gradients of all stages, in one process.
pub fn gradients_alone(stages: usize) -> Vec<Tensor> {
    let stages = alone(stages);
    for step in 0..STEPS {
        let [x, y] = batch(ROWS, step);
        loss(&stages.iter().fold(x, |x, stage| stage.forward(&x)), &y).backward();
    }
    stages.iter().map(|stage| stage.0.grad()).collect()
}

/// What a rank has of one of the pipelines.
pub struct Replica {
    pub pipeline: Pipeline,
    /// Of the two.
    number: usize,
    sampler: DistributedSampler,
    /// Of global tensors.
    placement: Option<Placement>,
    weights: BTreeMap<usize, Tensor>,
}

impl Replica {
    /// On a mesh with the axes `pp` and `dp`. The stages are those of `Ddp`, or of global tensors.
    pub fn new(
        mesh: &Mesh,
        schedule: &Schedule,
        recomputes: bool,
        is_global: bool,
    ) -> Result<Self> {
        let replicas = mesh.group("dp")?;
        let placement = is_global.then(|| Placement::all(replicas)).transpose()?;
        let last = schedule.stages() - 1;
        let mut weights = BTreeMap::<usize, Tensor>::new();
        let mut builder =
            Pipeline::builder(mesh, "pp").schedule(schedule.clone()).recompute(recomputes);
        if let Some(placement) = &placement {
            builder = builder.placement(placement.clone());
        }
        let mut pipeline = builder.build(|stage| -> Result<Box<dyn Stage>, _> {
            let mut vs = VarStore::new(device());
            let shared = weights.get(&0).filter(|_| stage == last).map(Tensor::shallow_clone);
            let is_plain = is_global || shared.is_some();
            let half = match shared {
                Some(weight) => Half(weight, stage),
                None => Half::new(&mut vs, stage),
            };
            if let Some(placement) = &placement {
                flow_global::distribute(&vs, placement, |_, _| [Sbp::Broadcast])?;
            }
            weights.insert(stage, half.0.shallow_clone());
            Ok(if is_plain {
                Box::new(half)
            } else {
                Box::new(DdpStage(Ddp::new(half, &vs, replicas)?))
            })
        })?;
        pipeline.tie(&[0, last], weights.get(&0).or(weights.get(&last)))?;
        let sampler = DistributedSampler::new(ROWS as usize, replicas).shuffle(true);
        Ok(Self { pipeline, number: replicas.rank(), sampler, placement, weights })
    }

    /// The rows that this replica has of a batch: those of the sampler, or in global tensors so many
    /// for each replica.
    pub fn part(&self, all: &Tensor, rows: [i64; 2]) -> Result<Tensor> {
        let Some(placement) = &self.placement else {
            let own: Vec<i64> = self.sampler.iter().map(|row| row as i64).collect();
            return Ok(all.index_select(0, &Tensor::from_slice(&own).to_device(device())));
        };
        let local = all.narrow(0, [0, rows[0]][self.number], rows[self.number]);
        let sizes = [rows.iter().sum(), 4];
        Ok(flow_global::from_local(&local, sizes, placement, [Sbp::Split(0)])?)
    }

    /// Some steps, whose gradients add up: those of this rank's stages.
    pub fn gradients(&mut self) -> Result<Vec<(usize, Tensor)>> {
        for step in 0..STEPS {
            let [x, y] = batch(ROWS, step);
            let (x, y) = (self.part(&x, [ROWS / 2; 2])?, self.part(&y, [ROWS / 2; 2])?);
            self.pipeline.step(&[x], |outputs, part| loss(&outputs[0], &part.of(&y)))?;
        }
        let local = |(&stage, weight): (&usize, &Tensor)| {
            let gradient = weight.grad();
            Ok((stage, if gradient.is_global() { gradient.to_local()? } else { gradient }))
        };
        self.weights.iter().map(local).collect()
    }
}
