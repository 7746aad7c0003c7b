//! A rank's part of the job: model, pipeline and optimizer.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyhow::{Result, bail};
use flow::global::{self, ShardedOptimizer};
use flow::pipeline::Pipeline;
use flow::prelude::{Mesh, Placement, ProcessGroup, TensorCollectives, nn};

use super::model::{DATA, Stage};
use super::options::Options;

/// A rank's part of a job.
pub struct Job<'a> {
    pub options: &'a Options,
    pub group: &'a ProcessGroup,
    /// The placement of this rank's stages, with the axes `dp` and `tp`.
    pub placement: Placement,
    /// The data parallel ranks of this rank's machine that have its part of the model.
    pub replicas_on_machine: usize,
    pub pipeline: Pipeline,
    /// The number of micro-batches that went through each stage in training.
    pub micro_batches: Vec<Arc<AtomicU64>>,
    /// A rank that has the last stage.
    pub last_rank: usize,
    /// The variables of all stages.
    pub vs: nn::VarStore,
    pub optimizer: ShardedOptimizer,
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
        let mut model = Vec::with_capacity(stages);
        for (number, layers) in config.stages(stages)?.into_iter().enumerate() {
            let placement = &placements[schedule.rank_of(number)];
            model.push(Stage::new(&vs.root(), config, layers, placement)?);
        }
        let adam = nn::AdamW { wd: 0.1, beta2: 0.99, ..Default::default() };
        let optimizer = if options.fsdp {
            ShardedOptimizer::fully_sharded(&vs, DATA, adam, options.lr)?
        } else {
            ShardedOptimizer::new(&vs, DATA, adam, options.lr)?
        };

        let micro_batches = model.iter().map(|stage| stage.micro_batches.clone()).collect();
        let placement = placements[mesh.coordinates().unwrap_or_default()[0]].clone();
        let last_rank = placements[schedule.rank_of(stages - 1)].ranks()[0];
        let mut model: Vec<Option<Stage>> = model.into_iter().map(Some).collect();
        let pipeline = Pipeline::builder(&mesh, "pp")
            .schedule(schedule)
            .placement(placement.clone())
            .build(|stage| {
                let stage = model[stage].take().ok_or("a stage is made once")?;
                Ok(Box::new(stage))
            })?;
        let replicas_on_machine = mesh.group("dp")?.local_world_size();
        Ok(Self {
            options,
            group,
            placement,
            replicas_on_machine,
            pipeline,
            micro_batches,
            last_rank,
            vs,
            optimizer,
        })
    }
}

/// Returns the placement of each rank of the pipeline: its ranks of the mesh, with the axes `dp`
/// and `tp`.
fn placements(mesh: &Mesh, group: &ProcessGroup) -> Result<Vec<Placement>> {
    let &[_, dp, tp] = mesh.shape() else { bail!("the mesh has {} axes", mesh.shape().len()) };
    let mut placements = Vec::new();
    for ranks in mesh.ranks().chunks(dp * tp) {
        let rows: Vec<Vec<usize>> = ranks.chunks(tp).map(<[usize]>::to_vec).collect();
        placements.push(Placement::new(group, rows)?.named(["dp", "tp"])?);
    }
    Ok(placements)
}
