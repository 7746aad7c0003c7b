//! Distributed training of `tch` models: one crate to depend on.
//!
//! | module | what |
//! |---|---|
//! | [`prelude`] | what a training program uses, for `use flow::prelude::*;` |
//! | [`ddp`] | `Ddp`, samplers, loaders, checkpoints: `torch.nn.parallel`, `torch.utils.data` |
//! | [`global`] | global tensors: placements, SBPs, views; in PyTorch `torch.distributed.tensor` |
//! | [`pipeline`] | stages of a model on different ranks: `torch.distributed.pipelining` |
//! | [`plan`] | pipeline schedules and their simulator |
//! | [`tensor`] | collectives on tensors, differentiable ones too: `torch.distributed.nn` |
//! | [`autograd`] | recomputation of activations: `torch.utils.checkpoint` |
//! | [`comm`] | process groups and collectives on slices and buffers: `torch.distributed` |
//! | [`tch`] | tensors, autograd and models: libtorch |
//!
//! The features `global`, `pipeline` and `plan`, on by default, are the modules of these names.
//!
//! ```no_run
//! use flow::prelude::*;
//!
//! # fn main() -> anyhow::Result<()> {
//! let group = ProcessGroup::from_env()?; // ranks from flow-launch; alone: world size 1
//! let vs = nn::VarStore::new(group.device());
//! let net = nn::linear(vs.root(), 784, 10, Default::default());
//! let model = Ddp::new(net, &vs, &group)?;
//! let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
//! # let (images, labels) = (Tensor::new(), Tensor::new());
//! let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
//! optimizer.backward_step(&loss); // gradients are averaged in here
//! # Ok(()) }
//! ```

pub use flow_autograd as autograd;
pub use flow_comm as comm;
pub use flow_ddp as ddp;
#[cfg(feature = "global")]
pub use flow_global as global;
#[cfg(feature = "pipeline")]
pub use flow_pipeline as pipeline;
#[cfg(feature = "plan")]
pub use flow_plan as plan;
pub use flow_tensor as tensor;
pub use tch;

/// The names that a training program uses. [`Checkpoints`](prelude::Checkpoints) is `Ddp`'s: for a model
/// of global tensors there is [`global::checkpoint::ShardedCheckpoints`].
pub mod prelude {
    pub use flow_comm::Mesh;
    pub use flow_ddp::{
        Checkpoints, DataLoader, Dataset, Ddp, DeviceKind, DistributedSampler, Elastic, Fsdp,
        FullyShard, GradScaler, InProcessRestart, OptimizerState, ProcessGroup, ReduceOp,
        TensorCollectives, TryBackwardStep, convert_sync_batchnorm,
    };
    #[cfg(feature = "global")]
    pub use flow_global::{self as global, B, GlobalTensor, P, Placement, S, Sbp};
    #[cfg(feature = "pipeline")]
    pub use flow_pipeline::{Pipeline, Schedule, Stage, stage_fn};
    pub use tch::nn::{self, Module, ModuleT, OptimizerConfig};
    pub use tch::{Device, Kind, Tensor};
}

/// The programs of docs/ compile.
#[cfg(doctest)]
#[doc = include_str!("../../docs/data.md")]
#[doc = include_str!("../../docs/ddp.md")]
#[doc = include_str!("../../docs/elastic.md")]
#[doc = include_str!("../../docs/from-others.md")]
#[doc = include_str!("../../docs/global.md")]
#[doc = include_str!("../../docs/pipelines.md")]
#[doc = include_str!("../../docs/sharded.md")]
struct Docs;

/// The programs in the READMEs compile.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../../tensor/README.md")]
struct Readme;
