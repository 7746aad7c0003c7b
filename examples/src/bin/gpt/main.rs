//! A GPT that learns a text, by any combination of data, tensor and pipeline parallelism.
//!
//!     scripts/setup --data
//!     flow-launch --nproc_per_node 8 gpt --dp 2 --tp 2 --pp 2 --micro-batches 4
//!
//! | file | what |
//! |---|---|
//! | here | a rank's part of a job |
//! | `options.rs` | options, and the mesh of ranks |
//! | `data.rs` | the text |
//! | `model.rs` | the model of a stage |
//! | `train.rs` | the training |
//! | `sample.rs` | text that a trained model makes |
//!
//! The losses of a training are those of one rank on each layout, but for rounding: first weights,
//! samples and dropout do not depend on the layout.

mod data;
mod model;
mod options;
mod sample;
mod train;

use std::process::ExitCode;
use std::sync::atomic::AtomicU64;
use std::sync::Arc;

use anyhow::{bail, ensure, Result};
use flow::global::checkpoint::Checkpoints;
use flow::global::{self, ZeroRedundancyOptimizer};
use flow::pipeline::Pipeline;
use flow::prelude::{nn, Mesh, Placement, ProcessGroup, TensorCollectives};

use model::{Stage, DATA};
pub use options::Options;

/// What a rank works with.
struct Job<'a> {
    options: &'a Options,
    group: &'a ProcessGroup,
    /// Of this rank's stages, with the axes `dp` and `tp`.
    placement: Placement,
    pipeline: Pipeline,
    /// Of each stage: the micro-batches that went through in training.
    micro_batches: Vec<Arc<AtomicU64>>,
    /// One that has the last stage.
    last_rank: usize,
    /// The variables of all stages.
    vs: nn::VarStore,
    optimizer: ZeroRedundancyOptimizer,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let options = flow_examples::arguments::parse();
    let outcome =
        ProcessGroup::from_env().map_err(Into::into).and_then(|group| run(&options, &group));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpt: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Trains or samples, as a rank of this group.
pub fn run(options: &Options, group: &ProcessGroup) -> Result<()> {
    group.use_device(options.device)?;
    let mut job = Job::new(options, group)?;
    let folder = options.checkpoint.as_ref();
    if let (Some(_), Some(folder)) = (&options.sample, folder) {
        ensure!(folder.is_dir(), "there is no folder {} of checkpoints", folder.display());
    }
    let mut checkpoints = folder.map(|folder| Checkpoints::open(folder, group)).transpose()?;
    let latest = checkpoints.as_mut().map(Checkpoints::latest).transpose()?.flatten();
    match &options.sample {
        Some(prompt) => sample::print(&mut job, latest.as_ref(), prompt),
        None => train::train(&mut job, checkpoints, latest),
    }
}

impl<'a> Job<'a> {
    fn new(options: &'a Options, group: &'a ProcessGroup) -> Result<Self> {
        let mesh = options.mesh(group)?;
        let schedule = options.schedule()?;
        let stages = schedule.stages();
        let config = options.config(stages)?;
        let placements = placements(&mesh, group)?;
        let mut vs = nn::VarStore::new(group.device());
        vs.set_kind(options.dtype.kind());
        global::manual_seed(&placements[0], config.seed)?;
        let stage = |number: usize| {
            let placement = &placements[schedule.rank_of(number)];
            Stage::new(&vs.root(), config, (number as i64, stages as i64), placement)
        };
        let model: Vec<Stage> = (0..stages).map(stage).collect::<global::Result<_>>()?;
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
