//! Data-parallel training of `tch` models on many processes.
//!
//! | here | in PyTorch |
//! |---|---|
//! | [`ProcessGroup::from_env`] | `torch.distributed.init_process_group` |
//! | [`Ddp`] | `torch.nn.parallel.DistributedDataParallel` |
//! | [`Ddp::join`], [`join`](join()), [`Joinable`] | `DistributedDataParallel.join`, `torch.distributed.algorithms.join` |
//! | [`convert_sync_batchnorm`] | `torch.nn.SyncBatchNorm.convert_sync_batchnorm` |
//! | [`DistributedSampler`] | `torch.utils.data.distributed.DistributedSampler` |
//! | [`WeightedRandomSampler`], [`BatchSampler`], [`Sampler`] | the same in `torch.utils.data` |
//! | [`DdpBuilder::optimizer_in_backward`], [`OptimizerInBackward`] | `torch.distributed.optim._apply_optimizer_in_backward` |
//! | [`ModelAverager`] | `torch.distributed.algorithms.model_averaging` |
//! | [`DiLoCo`] | torchft's `DiLoCo` |
//! | [`ZeroRedundancyOptimizer`] | `torch.distributed.optim.ZeroRedundancyOptimizer` |
//! | [`DdpBuilder::mixed_precision`], [`MixedPrecision`] | `DistributedDataParallel`'s `mixed_precision`, `_MixedPrecision` |
//! | [`Elastic`] | Horovod's `elastic.run`, torchft's `Manager` |
//! | [`InProcessRestart`] | `inprocess.Wrapper` of nvidia-resiliency-ext |
//! | [`GradScaler`] | `torch.amp.GradScaler` |
//! | [`OptimizerState`] | `optimizer.state_dict()`, `load_state_dict` |
//! | [`Checkpoints`] | `torch.distributed.checkpoint`, `torch.save` |
//! | [`DataLoader`], [`Dataset`], [`IterableDataset`] | the same in `torch.utils.data` |
//! | [`TensorCollectives`] | `torch.distributed.all_reduce` and others, on tensors |
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use flow_ddp::{Ddp, ProcessGroup, TensorCollectives};
//! use tch::nn::{self, ModuleT, OptimizerConfig};
//!
//! let group = ProcessGroup::from_env()?; // ranks from flow-launch; alone: world size 1
//! let vs = nn::VarStore::new(group.device());
//! let net = nn::linear(vs.root(), 784, 10, Default::default());
//! let model = Ddp::new(net, &vs, &group)?;
//! let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
//! # let (images, labels) = (tch::Tensor::new(), tch::Tensor::new());
//! let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
//! optimizer.backward_step(&loss); // gradients are averaged in here
//! # Ok(()) }
//! ```

mod apart;
mod backward_state;
mod bucket;
mod buffers;
mod builder;
#[doc(hidden)]
pub mod checkpoint;
pub mod comm_hooks;
mod data;
mod ddp;
mod diloco;
mod elastic;
mod error;
mod fsdp;
mod fully_shard;
mod grad_layout;
mod grad_reducer;
mod grad_scaler;
mod in_backward;
mod join;
mod low_precision;
mod mixed_precision;
mod model_averager;
mod model_check;
mod optimizer;
mod optimizer_choice;
mod optimizer_in_backward;
mod options;
mod parameter;
mod reducer;
mod refresh;
mod settings;
mod static_graph;
mod stats;
mod steps;
mod sync_batchnorm;
mod tuning;
mod virtual_ranks;
mod wrap;
mod zero;

pub use bucket::comm_hook::{CommHook, GradBucket};
pub use bucket::pending::Pending;
pub use buffers::{BufferCommHook, BufferCommHookLocation};
pub use builder::DdpBuilder;
pub use checkpoint::{Checkpoint, CheckpointError, CheckpointModel, Checkpoints};
pub use data::batch_sampler::BatchSampler;
pub use data::batches::Batches;
pub use data::iterable::{ItemStream, IterableDataset, StreamSampler};
pub use data::length_grouped::LengthGroupedSampler;
pub use data::loader::{DataLoader, Dataset, Sampled};
pub use data::loader_error::{BatchId, LoaderError};
pub use data::max_tokens::MaxTokensBatchSampler;
pub use data::on_device::{OnDevice, ToDevice};
pub use data::order::{Order, RandomSampler, Sampler, SamplerItem};
pub use data::sampler::{DistributedSampler, Indices};
pub use data::sampler_state::{SamplerError, SamplerState, Stateful};
pub use data::shuffle::Shuffle;
pub use data::token_file::{TokenDataset, TokenError, TokenFile, TokenKind};
pub use data::weighted::WeightedRandomSampler;
pub use ddp::{Ddp, NoSync};
pub use diloco::{DiLoCo, DiLoCoOptions};
pub use elastic::{Attempt, Elastic, InProcessRestart, Training};
pub use error::{Error, Result};
pub use flow_autograd::{BoxError, OptimizerState, StateDict};
pub use flow_comm::{Error as CommError, ProcessGroup, ReduceOp};
pub use flow_tensor::{DeviceKind, TensorCollectives};
pub use fsdp::shared_parameters::{is_fully_sharded, place_on_machine};
pub use fsdp::{Fsdp, FsdpBuilder, MemoryPlan, PlanError};
pub use fully_shard::{
    FullyShard, FullyShardBuilder, FullySharded, ShardOptions, ShardedModule, Unsynchronized,
};
pub use grad_reducer::GradReducer;
pub use grad_scaler::{Found, GradScaler, ScaledOptimizer};
pub use join::{Join, JoinContext, JoinHook, JoinOptions, Joinable, join};
pub use mixed_precision::MixedPrecision;
pub use model_averager::ModelAverager;
pub use optimizer::TryBackwardStep;
pub use optimizer_in_backward::OptimizerInBackward;
pub use stats::{BucketStats, BucketTimes, Stats};
pub use sync_batchnorm::convert_sync_batchnorm;
pub use zero::ZeroRedundancyOptimizer;
