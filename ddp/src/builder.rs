//! Options of a [`Ddp`].

use std::fmt;
use std::sync::{Arc, Mutex};

use flow_comm::{ProcessGroup, ReduceOp};
use tch::nn::{OptimizerConfig, Variables};

use crate::bucket::assignment::Caps;
use crate::bucket::comm_hook::CommHook;
use crate::buffers::BufferCommHook;
use crate::comm_hooks::AllReduce;
use crate::ddp::Ddp;
use crate::fsdp::ignored::Ignored;
use crate::mixed_precision::MixedPrecision;
use crate::optimizer_choice::OptimizerChoice;
use crate::options::{Delayed, Options};
use crate::zero::{Parts, ZeroRedundancyOptimizer};

impl Ddp<()> {
    /// Options to choose before wrapping a model, of whatever type.
    pub fn builder(group: &ProcessGroup) -> DdpBuilder {
        DdpBuilder::new(group)
    }
}

/// Options of a [`Ddp`]; all ranks choose the same.
///
/// ```no_run
/// # fn main() -> anyhow::Result<()> {
/// use flow_ddp::comm_hooks::Bf16Compress;
/// use flow_ddp::{Ddp, ProcessGroup, TensorCollectives};
/// use tch::nn;
///
/// let group = ProcessGroup::from_env()?;
/// let vs = nn::VarStore::new(group.device());
/// let net = nn::linear(vs.root(), 784, 10, Default::default());
/// let model = Ddp::builder(&group)
///     .bucket_cap_mb(4.0)
///     .find_unused_parameters(true)
///     .comm_hook(Bf16Compress)
///     .wrap(net, &vs)?;
/// # Ok(()) }
/// ```
pub struct DdpBuilder {
    pub(crate) group: ProcessGroup,
    pub(crate) options: Options,
    pub(crate) broadcast_buffers: bool,
    pub(crate) forward_sync_buffers: bool,
    pub(crate) comm_hook: Box<dyn CommHook>,
    pub(crate) buffer_comm_hook: Option<Box<dyn BufferCommHook>>,
    pub(crate) optimizer: Option<OptimizerChoice>,
    pub(crate) zero: Option<Arc<Parts>>,
    /// The store of the parameters that ranks are to have in common, in an `Fsdp`.
    pub(crate) sharded: Option<Arc<Mutex<Variables>>>,
    /// The parameters that it leaves to each rank.
    pub(crate) ignored: Ignored,
    pub(crate) mixed_precision: MixedPrecision,
}

impl fmt::Debug for DdpBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DdpBuilder")
            .field("group", &self.group)
            .field("options", &self.options)
            .field("broadcast_buffers", &self.broadcast_buffers)
            .field("forward_sync_buffers", &self.forward_sync_buffers)
            .field("comm_hook", &self.comm_hook.name())
            .field("buffer_comm_hook", &self.buffer_comm_hook.as_ref().map(|hook| hook.name()))
            .field("optimizer_in_backward", &self.optimizer.is_some())
            .field("hook_with_zero_step", &self.zero.is_some())
            .field("mixed_precision", &self.mixed_precision)
            .finish()
    }
}

impl DdpBuilder {
    /// PyTorch's defaults: buckets of 1 MiB first and 25 MiB then, buffers broadcast, every
    /// parameter used.
    fn new(group: &ProcessGroup) -> Self {
        let options = Options {
            caps: Caps::default(),
            tune: 0,
            find_unused: false,
            static_graph: false,
            bucket_view: false,
            communication: None,
            op: ReduceOp::Avg,
            delayed: Delayed::default(),
            sparse: Vec::new(),
            sparse_as_dense: false,
            virtual_ranks: None,
        };
        Self {
            group: group.clone(),
            options,
            broadcast_buffers: true,
            forward_sync_buffers: true,
            comm_hook: Box::new(AllReduce),
            buffer_comm_hook: None,
            optimizer: None,
            zero: None,
            sharded: None,
            ignored: Ignored::default(),
            mixed_precision: MixedPrecision::default(),
        }
    }

    /// Has the gradients of a step computed in `count` parts, its virtual ranks, and averaged in a fixed order:
    /// the weights are then the same bits on 1 to `count` processes, evenly or unevenly dealt out, on any
    /// machines. Each rank runs its [virtual ranks](Ddp::virtual_ranks) in a step, each in
    /// [`Ddp::in_virtual_rank`]:
    ///
    /// ```no_run
    /// use flow_ddp::{Ddp, Error, ProcessGroup, TensorCollectives};
    /// use tch::nn::{self, OptimizerConfig};
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// # let group = ProcessGroup::from_env()?;
    /// # let vs = nn::VarStore::new(group.device());
    /// # let net = nn::linear(vs.root(), 784, 10, Default::default());
    /// # let batch = |_: u64, _: usize| (tch::Tensor::new(), tch::Tensor::new());
    /// let model = Ddp::builder(&group).virtual_ranks(8).wrap(net, &vs)?;
    /// let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
    /// for step in 0..100 {
    ///     for part in model.virtual_ranks() {
    ///         let (x, y) = batch(step, part);
    ///         model.in_virtual_rank(part, step, || {
    ///             let loss = model.try_forward_t(&x, true)?.cross_entropy_for_logits(&y);
    ///             loss.f_backward().map_err(Error::from_backward)
    ///         })?;
    ///     }
    ///     optimizer.step();
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// - Forwards in training mode and backwards are errors outside of `in_virtual_rank`.
    /// - Buffers, such as running statistics, are those of virtual rank 0: all ranks have them after each
    ///   step. What other virtual ranks made of them in the step is dropped.
    /// - A rank keeps gradients that wait for their sum, besides those of its backward: at most one set for
    ///   each halving of its virtual ranks.
    /// - The model is on CPUs, and its parameters are in single or double precision. Most other options are
    ///   an error, which names the option.
    pub fn virtual_ranks(mut self, count: usize) -> Self {
        self.options.virtual_ranks = Some(count);
        self
    }

    /// Sets the cap of all buckets, in MiB.
    pub fn bucket_cap_mb(self, cap: f64) -> Self {
        self.bucket_cap_mb_list(&[cap])
    }

    /// Sets the caps of buckets one by one, in MiB, in the order in which gradients come. The last
    /// one is that of all further buckets.
    pub fn bucket_cap_mb_list(mut self, caps: &[f64]) -> Self {
        self.options.caps = Caps::mib(caps);
        self
    }

    /// Tries several sizes of buckets in the first steps, `steps` of each in turns, and keeps the
    /// fastest (default: 0, none is tried). All ranks choose the same: another size than the
    /// [cap](Self::bucket_cap_mb) that was set, or PyTorch's, if its median step is 2 % shorter.
    /// [`Stats::bucket_cap_mb`](crate::Stats::bucket_cap_mb) says which. What the size is does not
    /// change the gradients, but for the last bits on GPUs, and for what a hook makes of whole buckets:
    /// [`Quantize`](crate::comm_hooks::Quantize) has their ranges. [`Ddp::refresh`] begins anew.
    pub fn tune(mut self, steps: u32) -> Self {
        self.options.tune = steps;
        self
    }

    /// Sets whether ranks take over rank 0's buffers, when the model is wrapped and with each
    /// forward in training mode (default: yes). If not, each rank's buffers are its own from the
    /// beginning, as in PyTorch.
    pub fn broadcast_buffers(mut self, broadcast: bool) -> Self {
        self.broadcast_buffers = broadcast;
        self
    }

    /// Sets whether each forward in training mode gives all ranks rank 0's buffers (default: yes). If
    /// not, they take them over when the model is wrapped, and in [`Ddp::sync_buffers`].
    pub fn forward_sync_buffers(mut self, sync: bool) -> Self {
        self.forward_sync_buffers = sync;
        self
    }

    /// Sets whether a backward may leave parameters out (default: no, that is an error). They take
    /// part with zeros; one that no rank used keeps its `.grad`.
    pub fn find_unused_parameters(mut self, find: bool) -> Self {
        self.options.find_unused = find;
        self
    }

    /// Sets whether each backward has the same graph (default: no). The first backward that reduces
    /// gradients shows it, and reduces all of them at its end. From then on a gradient may come
    /// several times in a backward, as where checkpointed blocks share parameters: it is reduced when
    /// it has come as often as in the first. Parameters that no rank has used are left out, which is
    /// cheaper than [`DdpBuilder::find_unused_parameters`]. A later backward that uses other
    /// parameters, or uses some of them more or less often, fails. Other ranks that have all
    /// gradients by then fail in their next backward.
    pub fn static_graph(mut self, is_static: bool) -> Self {
        self.options.static_graph = is_static;
        self
    }

    /// Has the gradients of these parameters reduced once that of `param_to_hook` has come, in buckets
    /// of their own. Until then they may come several times in a backward, as where checkpointed
    /// blocks share a parameter. If that of `param_to_hook` does not come, they are reduced at the end
    /// of backward.
    pub fn delay_all_reduce_named_params(mut self, names: &[&str], param_to_hook: &str) -> Self {
        let names = names.iter().map(|&name| name.into()).collect();
        self.options.delayed = Delayed { names, until: param_to_hook.into() };
        self
    }

    /// Names the parameters whose gradients are sparse, as those of an embedding with `sparse: true`.
    /// Each is reduced on its own at the end of backward: the entries of all ranks are gathered, so
    /// that what is sent and kept grows with the entries rather than with the parameter. After
    /// backward `.grad` is sparse and coalesced. Communication hooks do not get these gradients.
    pub fn sparse_gradients(mut self, names: &[&str]) -> Self {
        self.options.sparse = names.iter().map(|&name| name.into()).collect();
        self
    }

    /// Sets whether the sparse gradients of parameters that [`DdpBuilder::sparse_gradients`] does not
    /// name become dense, and are reduced with all others (default: no, they are an error). That is
    /// faster where most rows of a table have gradients.
    pub fn sparse_as_dense(mut self, as_dense: bool) -> Self {
        self.options.sparse_as_dense = as_dense;
        self
    }

    /// Sets whether the `.grad` of small parameters becomes a view of the bucket, which saves a
    /// copy (default: no). A gradient kept beyond its step then changes with the next. On GPUs
    /// every `.grad` does, unless gradients are sent in another type.
    pub fn gradient_as_bucket_view(mut self, view: bool) -> Self {
        self.options.bucket_view = view;
        self
    }

    /// Sets the hook that reduces each bucket of gradients: one of
    /// [`comm_hooks`](crate::comm_hooks), or one of your own (default:
    /// [`AllReduce`](crate::comm_hooks::AllReduce)).
    pub fn comm_hook(mut self, hook: impl CommHook) -> Self {
        self.comm_hook = Box::new(hook);
        self
    }

    /// Sets a hook that communicates the buffers, instead of the broadcast from rank 0 in each forward
    /// in training mode: PyTorch's `_register_buffer_comm_hook`. The model begins with rank 0's all the
    /// same, and a [`join`](crate::join()) ends with those of a rank that ended last. In a join, ranks
    /// that have ended call the hook with the buffers that they have; one
    /// [after the forward](crate::BufferCommHookLocation::PostForward), too.
    pub fn buffer_comm_hook(mut self, hook: impl BufferCommHook) -> Self {
        self.buffer_comm_hook = Some(Box::new(hook));
        self
    }

    /// Has the optimizer of `config` step in backward: each bucket of gradients is applied as soon as it
    /// is reduced, and freed. Gradients of a whole model then never exist at a time: on a CPU, those
    /// of two buckets do. `loss.backward()` is the whole step, and leaves no `.grad`. The weights have
    /// the same bits as with an optimizer that steps after it.
    ///
    /// ```no_run
    /// use flow_ddp::{Ddp, ProcessGroup, TensorCollectives};
    /// use tch::nn::{self, ModuleT};
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// # let group = ProcessGroup::from_env()?;
    /// # let vs = nn::VarStore::new(group.device());
    /// # let net = nn::linear(vs.root(), 784, 10, Default::default());
    /// # let images = tch::Tensor::new();
    /// # let labels = tch::Tensor::new();
    /// let builder = Ddp::builder(&group).optimizer_in_backward(nn::Adam::default(), 1e-3);
    /// let model = builder.wrap(net, &vs)?;
    /// let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
    /// loss.f_backward().map_err(flow_ddp::Error::from_backward)?;
    /// model.optimizer_in_backward()?.set_lr(1e-4)?; // from the next step on
    /// # Ok(()) }
    /// ```
    ///
    /// - A parameter changes once its gradient is there. A backward that uses its value later, through
    ///   `detach()` or in a graph that is kept, fails.
    /// - After an error in backward some parameters have changed and others have not: go on from a
    ///   checkpoint.
    /// - With [`find_unused_parameters`](Self::find_unused_parameters), ranks do not wait for each
    ///   other in the middle of backward. How many gradients are there then depends on how far they
    ///   are apart. Under [`Ddp::no_sync`] gradients add up, and stay until the backward that reduces
    ///   them.
    /// - A communication hook that returns a tensor of its own is waited for at the end of backward.
    ///   On GPUs all buckets are: they keep their memory anyway.
    /// - Gradients cannot be clipped by the norm of all of them, nor unscaled before the step. A
    ///   [`GradScaler`](crate::GradScaler) that is stepped or updated beside it returns an error. The
    ///   model cannot be joined.
    pub fn optimizer_in_backward(
        mut self,
        config: impl OptimizerConfig + Send + 'static,
        learning_rate: f64,
    ) -> Self {
        self.optimizer = Some(OptimizerChoice::new(config, learning_rate));
        self
    }

    /// Has this optimizer step in backward: PyTorch's `hook_with_zero_step`, and its
    /// `overlap_with_ddp=True`. As soon as a bucket is reduced, each rank applies its part of the gradients, and
    /// all of them are freed. Ranks gather all parts at the end of backward, which is then the whole step.
    ///
    /// ```no_run
    /// use flow_ddp::{Ddp, ProcessGroup, TensorCollectives, ZeroRedundancyOptimizer};
    /// use tch::nn::{self, ModuleT};
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// # let group = ProcessGroup::from_env()?;
    /// # let vs = nn::VarStore::new(group.device());
    /// # let net = nn::linear(vs.root(), 784, 10, Default::default());
    /// # let images = tch::Tensor::new();
    /// # let labels = tch::Tensor::new();
    /// let optimizer = ZeroRedundancyOptimizer::new(&vs, &group, nn::Adam::default(), 1e-3)?;
    /// let model = Ddp::builder(&group).hook_with_zero_step(&optimizer).wrap(net, &vs)?;
    /// let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
    /// loss.f_backward()?;
    /// # Ok(()) }
    /// ```
    ///
    /// The optimizer is of the `VarStore` that is wrapped, and its ranks are those of the `Ddp`. What is
    /// said of [`optimizer_in_backward`](Self::optimizer_in_backward) holds here, too. As long as the
    /// `Ddp` lives, [`step`](crate::ZeroRedundancyOptimizer::step) is an error. After an error of the `Ddp`
    /// the optimizer is of no more use: make it anew.
    pub fn hook_with_zero_step(mut self, optimizer: &ZeroRedundancyOptimizer) -> Self {
        self.zero = Some(Arc::clone(optimizer.parts()));
        self
    }

    /// Has forward and backward compute in half precision, with parameters that stay in single precision.
    /// Gradients are sent in half precision, too, and come to `.grad` as `Float`. The optimizer,
    /// checkpoints and all else outside of forward find the parameters as they are without this.
    ///
    /// ```no_run
    /// use flow_ddp::{Ddp, MixedPrecision, ProcessGroup, TensorCollectives};
    /// use tch::Kind;
    /// use tch::nn::{self, ModuleT, OptimizerConfig};
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// # let group = ProcessGroup::from_env()?;
    /// # let vs = nn::VarStore::new(group.device());
    /// # let net = nn::linear(vs.root(), 784, 10, Default::default());
    /// # let images = tch::Tensor::new();
    /// # let labels = tch::Tensor::new();
    /// let mixed = MixedPrecision { param: Some(Kind::BFloat16), ..Default::default() };
    /// let model = Ddp::builder(&group).mixed_precision(mixed).wrap(net, &vs)?;
    /// let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
    /// let output = model.forward_t(&images, true).to_kind(Kind::Float); // it is BFloat16
    /// optimizer.backward_step(&output.cross_entropy_for_logits(&labels));
    /// # Ok(()) }
    /// ```
    ///
    /// - `forward_t` casts its input, and has operations take the cast parameters. Other methods of the
    ///   model compute with the parameters themselves.
    /// - On a CPU, the cast parameters are in memory that the ranks of a machine have in common. They are
    ///   cast in forwards in training mode after a step, which all ranks run as often: see
    ///   [`Ddp::cast_parameters`]. A backward through a graph from before that fails.
    /// - An operation of forward that changes a parameter is an error.
    /// - With `Half`, gradients of small losses underflow: scale the loss.
    pub fn mixed_precision(mut self, mixed_precision: MixedPrecision) -> Self {
        self.mixed_precision = mixed_precision;
        self
    }
}
