//! What a rank works with.

use std::sync::atomic::AtomicU64;
use std::sync::Arc;

use anyhow::{bail, Result};
use flow::global::{self, ZeroRedundancyOptimizer};
use flow::pipeline::Pipeline;
use flow::prelude::{nn, Mesh, Placement, ProcessGroup, TensorCollectives};

use super::model::{Stage, DATA};
use super::options::Options;

/// A rank's part of a job.
pub struct Job<'a> {
    pub options: &'a Options,
    pub group: &'a ProcessGroup,
    /// Of this rank's stages, with the axes `dp` and `tp`.
    pub placement: Placement,
    pub pipeline: Pipeline,
    /// Of each stage: the micro-batches that went through in training.
    pub micro_batches: Vec<Arc<AtomicU64>>,
    /// One that has the last stage.
    pub last_rank: usize,
    /// The variables of all stages.
    pub vs: nn::VarStore,
    pub optimizer: ZeroRedundancyOptimizer,
}

impl<'a> Job<'a> {
    /// Makes the model of all stages. All ranks call this.
    pub fn new(options: &'a Options, group: &'a ProcessGroup) -> Result<Self> {
        let mesh = options.mesh(group)?;
        let schedule = options.schedule()?;
        let stages = schedule.stages();
        let config = options.config(stages)?;
        let placements = placements(&mesh, group)?;
        let mut vs = nn::VarStore::new(group.device());
        vs.set_kind(options.dtype.kind());
        global::manual_seed(&placements[0], config.seed)?;
        let stage = |(number, layers)| {
            let placement = &placements[schedule.rank_of(number)];
            Stage::new(&vs.root(), config, layers, placement)
        };
        let layers = config.stages(stages)?.into_iter().enumerate();
        let model: Vec<Stage> = layers.map(stage).collect::<global::Result<_>>()?;
        let adam = nn::AdamW { wd: 0.1, beta2: 0.99, ..Default::default() };
        let optimizer = ZeroRedundancyOptimizer::new(&vs, DATA, adam, options.lr)?;

        let micro_batches = model.iter().map(|stage| stage.micro_batches.clone()).collect();
        let placement = placements[mesh.coordinates().unwrap_or_default()[0]].clone();
        let last_rank = placements[schedule.rank_of(stages - 1)].ranks()[0];
        let mut model: Vec<Option<Stage>> = model.into_iter().map(Some).collect();
        let pipeline = Pipeline::builder(&mesh, "pp")
            .schedule(schedule)
            .placement(placement.clone())
            .build(|stage| {
                let own = model[stage].take().ok_or("a stage is made once")?;
                Ok(Box::new(own))
            })?;
        Ok(Self { options, group, placement, pipeline, micro_batches, last_rank, vs, optimizer })
    }
}

/// The placement of each rank of the pipeline: its ranks of the mesh, with the axes `dp` and `tp`.
fn placements(mesh: &Mesh, group: &ProcessGroup) -> Result<Vec<Placement>> {
    let &[_, dp, tp] = mesh.shape() else { bail!("the mesh has {} axes", mesh.shape().len()) };
    let of_stage = |ranks: &[usize]| {
        let rows: Vec<Vec<usize>> = ranks.chunks(tp).map(<[usize]>::to_vec).collect();
        Ok(Placement::new(group, rows)?.named(["dp", "tp"])?)
    };
    mesh.ranks().chunks(dp * tp).map(of_stage).collect()
}
