//! Pipeline parallelism: the stages of a model on different ranks, which work on different
//! micro-batches at the same time. PyTorch has it in `torch.distributed.pipelining`.
//!
//! ```no_run
//! use flow_pipeline::{Pipeline, Schedule, Stage};
//! use flow_tensor::{ProcessGroup, TensorCollectives};
//! use tch::nn::{self, OptimizerConfig};
//! use tch::Tensor;
//!
//! # fn main() -> anyhow::Result<()> {
//! let group = ProcessGroup::from_env()?; // two ranks
//! let mesh = flow_comm::Mesh::new(&group, &[0, 1], &[2])?.with_names(&["pp"])?;
//! let vs = nn::VarStore::new(group.device());
//! let mut pipeline = Pipeline::builder(&mesh, "pp")
//!     .schedule(Schedule::one_f_one_b(2, 8)?)
//!     .build(|stage| {
//!         // Called for this rank's stages only.
//!         let (path, sizes) = (vs.root() / stage, [(784, 128), (128, 10)][stage]);
//!         Ok(Box::new(nn::seq().add(nn::linear(path, sizes.0, sizes.1, Default::default()))))
//!     })?;
//! let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
//! # let (images, labels) = (Tensor::new(), Tensor::new());
//! optimizer.zero_grad();
//! let loss = pipeline.step(&[images], |outputs, micro_batch| {
//!     outputs[0].cross_entropy_for_logits(&micro_batch.of(&labels))
//! })?;
//! optimizer.step();
//! if let Some(loss) = loss {
//!     println!("{}", loss.double_value(&[])); // the last stage has it
//! }
//! # Ok(()) }
//! ```
//!
//! | here | in `torch.distributed.pipelining` |
//! |---|---|
//! | [`Stage`] | the submodule of a `PipelineStage` |
//! | [`Pipeline::builder`], [`Builder::build`] | `PipelineStage`, and the schedule's constructor |
//! | [`Schedule`] | `ScheduleGPipe`, `Schedule1F1B` and others |
//! | [`Pipeline::step`] | `schedule.step(x, target=y, losses=losses)` |
//! | [`Pipeline::forward`] | `schedule.eval(x)` |
//! | [`MicroBatch`] | what `n_microbatches` divides a batch into |
//! | [`split_by_parameters`], [`split_by_time`], [`Layers::into_stages`] | `SplitPoint`, by hand |

mod builder;
mod caught;
mod error;
mod executor;
mod links;
mod message;
mod messages;
mod micro_batch;
mod pipeline;
mod random;
mod report;
mod split;
mod stage;
mod tied;

pub use builder::Builder;
pub use error::{Error, Result};
pub use flow_plan::schedule::{Action, Schedule};
pub use flow_plan::split;
pub use micro_batch::MicroBatch;
pub use pipeline::Pipeline;
pub use report::{Report, StageReport};
pub use split::{split_by_parameters, split_by_time};
pub use stage::{DdpStage, FsdpStage, Layers, Stage, stage_fn, stage_fn_t};
