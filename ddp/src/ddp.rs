//! The wrapper that makes a model train on many processes.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use flow_autograd::GradHook;
use flow_comm::ProcessGroup;
use tch::nn::{Module, ModuleT, VarStore, Variables};
use tch::{Kind, Tensor};

use crate::birthplace::Birthplace;
use crate::bucket::Caps;
use crate::coalesced::CoalescedBroadcast;
use crate::error::{job_rank, Error, Result};
use crate::layout::{overlaps, Layout, OVERLAPS};
use crate::reducer::{Options, Reducer};
use crate::state::Parameter;
use crate::stats::Stats;
use crate::tensors::cuda_group;
use crate::verify::difference;

const MIB: f64 = 1024.0 * 1024.0;

/// A model whose gradients are averaged over all ranks of a process group, inside `backward`.
///
/// Made once, it needs no further call: train the model as if it were alone. At construction all
/// ranks compare their models and take over rank 0's parameters and buffers (these not with
/// [`DdpBuilder::broadcast_buffers`]`(false)`). Each `backward` leaves in every parameter's `.grad`
/// the mean of all ranks' gradients; reductions run while backward still does. In training mode,
/// `forward_t` first gives all ranks rank 0's buffers (running statistics).
///
/// `Ddp` implements [`ModuleT`] for models that do, and thereby for every [`Module`]; it derefs to
/// the model for its other methods. (It cannot implement `Module` too: tch implements `ModuleT` for
/// all `Module`s, so that Rust would see two implementations.)
///
/// The model is on the CPU or, on each rank, on that rank's GPU. There, reductions run over NCCL on
/// a stream of their own and the host waits for none of them: each `.grad` is a view of its bucket,
/// to be used in the order of libtorch's stream, and an error of another rank comes from the next
/// backward at the latest.
///
/// All ranks run the same number of backwards. A *step* is a backward that reduces gradients, or a
/// [`Ddp::forward_t`] in training mode that none follows: its loss was thrown away, or did not
/// depend on it, or its backward failed. If only some ranks have such a step, the next backward
/// fails on all and says which rank is in which step (with buffers, who is in forward and who in
/// backward): gradients of different steps would else be averaged. While something still holds the
/// forward's graph (a loss that is kept for later: keep `loss.detach()`), it is the backward after
/// that which fails. So evaluate with `forward_t(.., false)`, or under `no_grad`. Not found out is
/// a rank that leaves out the forward as well, or calls other methods of the model, until it has a
/// backward less at the end, for which the others wait in vain. Nor are ranks on GPUs, whose hosts
/// do not wait for each other; their time-outs name the steps.
///
/// A backward that fails on one rank, once gradients have come, fails on all. The `Ddp` is then of
/// no more use: each later backward says why (after the failure of a backward in which another one
/// ran: once its graph is freed). If all ranks still live, they may drop theirs and wrap the model
/// anew. [`Error::from_backward`] gives the error that ended a backward. A backward may run inside
/// another one, as in checkpointing, if each parameter gets its gradient in one of them.
///
/// Gradients are reduced, and buffers broadcast, in a group of `Ddp`'s own, so that they do not mix
/// with what the program does in `group`; the price: a rank that is in backward while another, out
/// of step, is in a collective of `group` hears of it when the time is over, not at once.
///
/// Parameters are those that require gradients when the model is wrapped; freeze and unfreeze
/// before. One that the `VarStore` gets later is an error of the next backward. One tensor under
/// several names (tied weights) is one parameter, of the first name. Buffers are the tensors that
/// they are when the model is wrapped: write into them. One that the model has replaced
/// (`model.norm.running_mean = ...`) is an error of the next forward that would broadcast it,
/// unless something else still holds the old tensor. Where one backward goes through several
/// wrapped models, all ranks must go through them in the same order. With one rank nothing is
/// installed and nothing costs.
///
/// A process that is forked from a rank can use the model to infer (`forward_t` with `train`
/// false); forward in training mode and backward are errors there.
pub struct Ddp<M> {
    model: M,
    group: ProcessGroup,
    reducer: Option<Arc<Reducer>>,
    /// Dropped with the wrapper, so that the bare model is left as it was.
    _hooks: Vec<GradHook>,
    _birthplace: Option<Arc<Birthplace>>,
    /// Those that are broadcast.
    buffers: Mutex<CoalescedBroadcast>,
    held: Mutex<Vec<Held>>,
}

/// A buffer that, besides those who have all buffers, somebody had when the model was wrapped: the
/// model itself.
struct Held {
    name: String,
    tensor: Tensor,
    /// The handles that would be left if the model replaced it.
    others: usize,
}

impl Ddp<()> {
    /// Options to choose before wrapping a model, of whatever type.
    pub fn builder(group: &ProcessGroup) -> DdpBuilder {
        DdpBuilder::new(group)
    }
}

impl<M> Ddp<M> {
    /// Wraps `model`, whose variables are in `vs`, with the default options of [`DdpBuilder`].
    ///
    /// Errors: models that differ between ranks (on every rank, naming the parameter and both
    /// ranks), no parameter to train, parameters that cannot be reduced or that another `Ddp` has,
    /// failing communication.
    pub fn new(model: M, vs: &VarStore, group: &ProcessGroup) -> Result<Self> {
        DdpBuilder::new(group).wrap(model, vs)
    }

    /// As [`Ddp::new`] for a model that keeps no `VarStore`: its parameters by name, in the order
    /// of their use in forward, and its buffers (running statistics). Parameters that do not
    /// require gradients are frozen.
    pub fn from_tensors(
        model: M,
        parameters: Vec<(String, Tensor)>,
        buffers: Vec<(String, Tensor)>,
        group: &ProcessGroup,
    ) -> Result<Self> {
        DdpBuilder::new(group).wrap_tensors(model, parameters, buffers)
    }

    /// The group that gradients are averaged over.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Until the guard is dropped, and every other one, backward only accumulates this rank's
    /// gradients; the first backward after that reduces what has been accumulated.
    #[must_use = "gradients are reduced again as soon as the guard is dropped"]
    pub fn no_sync(&self) -> NoSync {
        let reducer = self.reducer.clone();
        reducer.iter().for_each(|reducer| reducer.keep_local());
        NoSync { reducer }
    }

    /// Runs `accumulate` under [`Ddp::no_sync`].
    pub fn without_sync<T>(&self, accumulate: impl FnOnce(&Self) -> T) -> T {
        let _guard = self.no_sync();
        accumulate(self)
    }

    /// Waits until the last backward's gradients are averaged, which on a GPU may be after
    /// `backward` has returned. To be called before what was trained is kept, as in a checkpoint:
    /// gradients, and what the optimizer made of them, are of no use after a failure.
    ///
    /// Errors: a failure of this rank or another, a rank that does not come in time.
    pub fn synchronize(&self) -> Result<()> {
        self.reducer.as_ref().map_or(Ok(()), |reducer| reducer.synchronize())
    }

    /// What the last backward's communication took.
    pub fn stats(&self) -> Stats {
        self.reducer.as_ref().map(|r| r.stats()).unwrap_or_default()
    }

    /// The model, without its hooks.
    pub fn into_inner(self) -> M {
        self.model
    }

    fn sync_buffers(&self) -> Result<()> {
        let Some(reducer) = &self.reducer else { return Ok(()) };
        reducer.check_process("forward")?;
        if !reducer.synchronizes() {
            return Ok(());
        }
        // What is wrong with this rank's buffers the others are to hear: they wait for it.
        self.broadcast_buffers(reducer).inspect_err(|error| {
            if !matches!(error, Error::Comm(_)) {
                reducer.abort(&error.to_string());
            }
        })
    }

    fn broadcast_buffers(&self, reducer: &Reducer) -> Result<()> {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if !buffers.is_empty() {
            let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
            let replaced =
                |buffer: &&Held| flow_autograd::use_count(&buffer.tensor) <= buffer.others;
            if let Some(Held { name, .. }) = held.iter().find(replaced) {
                let reason = format!(
                    "the model has another tensor in place of the buffer {name} since it was wrapped, which ranks would \
                     not share (or whoever else held the buffer then has dropped it): copy into the buffer (copy_), or wrap \
                     the model again"
                );
                return Err(Error::Model { rank: job_rank(&self.group), reason });
            }
            reducer.broadcast(&mut buffers)?;
        }
        Ok(())
    }
}

impl<M: ModuleT> Ddp<M> {
    /// As `forward_t`, with the error if rank 0's buffers cannot be had.
    pub fn try_forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        if train {
            self.sync_buffers()?;
        }
        let output = self.model.forward_t(input, train);
        if let Some(reducer) = self.reducer.as_ref().filter(|_| train) {
            reducer.follow(&output)?;
        }
        Ok(output)
    }
}

impl<M: Module> Ddp<M> {
    /// The model's `forward`, as in training: all ranks call it. To evaluate on some ranks only,
    /// use `forward_t`.
    pub fn forward(&self, input: &Tensor) -> Tensor {
        self.forward_t(input, true)
    }
}

impl<M: ModuleT> ModuleT for Ddp<M> {
    /// A failure to broadcast the buffers is returned by the backward that follows, on all ranks;
    /// use [`Ddp::try_forward_t`] to have it here.
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        self.try_forward_t(input, train).unwrap_or_else(|error| {
            log::error!("{error}");
            if let Some(reducer) = &self.reducer {
                reducer.abort(&error.to_string());
            }
            self.model.forward_t(input, train)
        })
    }
}

impl<M> Deref for Ddp<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.model
    }
}

impl<M> DerefMut for Ddp<M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.model
    }
}

impl<M: fmt::Debug> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ddp")
            .field("model", &self.model)
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

/// Keeps gradients local while it lives: see [`Ddp::no_sync`].
pub struct NoSync {
    reducer: Option<Arc<Reducer>>,
}

impl Drop for NoSync {
    fn drop(&mut self) {
        if let Some(reducer) = &self.reducer {
            reducer.end_local();
        }
    }
}

/// Options of a [`Ddp`]; all ranks choose the same.
///
/// ```no_run
/// # fn main() -> anyhow::Result<()> {
/// use flow_ddp::{Ddp, ProcessGroup, TensorCollectives};
/// use tch::{nn, Kind};
///
/// let group = ProcessGroup::from_env()?;
/// let vs = nn::VarStore::new(group.device());
/// let net = nn::linear(vs.root(), 784, 10, Default::default());
/// let model = Ddp::builder(&group)
///     .bucket_cap_mb(4.0)
///     .find_unused_parameters(true)
///     .communication_kind(Kind::BFloat16)
///     .wrap(net, &vs)?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct DdpBuilder {
    group: ProcessGroup,
    options: Options,
    broadcast_buffers: bool,
}

impl DdpBuilder {
    /// PyTorch's defaults: buckets of 1 MiB first and 25 MiB then, buffers broadcast, every
    /// parameter used.
    fn new(group: &ProcessGroup) -> Self {
        let caps = Caps { first: MIB as usize, rest: 25 * MIB as usize };
        let options = Options { caps, find_unused: false, bucket_view: false, communication: None };
        Self { group: group.clone(), options, broadcast_buffers: true }
    }

    /// Cap of all buckets, in MiB.
    pub fn bucket_cap_mb(mut self, cap: f64) -> Self {
        let cap = (cap * MIB) as usize;
        self.options.caps = Caps { first: cap, rest: cap };
        self
    }

    /// Cap of the first bucket, in MiB: small, so that communication begins early.
    pub fn first_bucket_cap_mb(mut self, cap: f64) -> Self {
        self.options.caps.first = (cap * MIB) as usize;
        self
    }

    /// Whether ranks take over rank 0's buffers, when the model is wrapped and with each forward in
    /// training mode (default: yes). If not, each rank's buffers are its own from the beginning, as
    /// in PyTorch.
    pub fn broadcast_buffers(mut self, broadcast: bool) -> Self {
        self.broadcast_buffers = broadcast;
        self
    }

    /// Whether a backward may leave parameters out (default: no, that is an error). They take part
    /// with zeros; one that no rank used keeps its `.grad`.
    pub fn find_unused_parameters(mut self, find: bool) -> Self {
        self.options.find_unused = find;
        self
    }

    /// Whether the `.grad` of small parameters becomes a view of the bucket, which saves a copy
    /// (default: no). A gradient kept beyond its step then changes with the next. On GPUs every
    /// `.grad` does, unless gradients are sent in another type.
    pub fn gradient_as_bucket_view(mut self, view: bool) -> Self {
        self.options.bucket_view = view;
        self
    }

    /// Type in which gradients are sent, such as `Kind::BFloat16` for half the bytes (default:
    /// their own). They are averaged in single precision and rounded to this type once before and
    /// once after; on GPUs they are scaled before they are rounded, and NCCL adds in this type.
    pub fn communication_kind(mut self, kind: Kind) -> Self {
        self.options.communication = Some(kind);
        self
    }

    /// Wraps a model whose variables are in `vs`: see [`Ddp::new`].
    pub fn wrap<M>(self, model: M, vs: &VarStore) -> Result<Ddp<M>> {
        let variables = vs.variables_.lock().unwrap_or_else(PoisonError::into_inner);
        // Parameters in the order of their creation, which is that of their use in forward as a
        // rule; the map of names has no order of its own.
        let mut named: Vec<(String, Tensor)> = variables
            .named_variables
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()))
            .collect();
        let created: Vec<usize> = variables
            .trainable_variables
            .iter()
            .map(|v| flow_autograd::identity(&v.tensor))
            .collect();
        drop(variables);
        let place = |tensor: &Tensor| {
            let identity = flow_autograd::identity(tensor);
            created.iter().position(|&c| c == identity).unwrap_or(usize::MAX)
        };
        named.sort_by_cached_key(|(name, tensor)| (place(tensor), name.clone()));
        // A parameter stays one when it is frozen; only what was made as not trainable is a buffer.
        let (parameters, buffers) =
            named.into_iter().partition(|(_, tensor)| place(tensor) != usize::MAX);
        let mut ddp = self.wrap_tensors(model, parameters, buffers)?;
        // The store has them all.
        let held = ddp.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        held.iter_mut().for_each(|buffer| buffer.others += 1);
        held.retain(|buffer| flow_autograd::use_count(&buffer.tensor) > buffer.others);
        if let Some(reducer) = &ddp.reducer {
            let (store, known) = (Arc::clone(&vs.variables_), created.len());
            reducer.watch_for(Box::new(move || {
                let store = store.try_lock().ok()?;
                added(&store, known)
            }));
        }
        Ok(ddp)
    }

    /// Wraps a model by its named tensors: see [`Ddp::from_tensors`].
    pub fn wrap_tensors<M>(
        self,
        model: M,
        mut parameters: Vec<(String, Tensor)>,
        mut buffers: Vec<(String, Tensor)>,
    ) -> Result<Ddp<M>> {
        let Self { group, options, broadcast_buffers } = self;
        let rank = job_rank(&group);
        let mut fit = check(&parameters, &buffers, &options, broadcast_buffers);
        if group.world_size() > 1 {
            fit = fit.and_then(|()| check_hooks(&parameters));
            let mut lines =
                vec![format!("options {options:?}, broadcast_buffers: {broadcast_buffers}")];
            match &fit {
                Ok(()) => lines.extend(describe(&parameters, &buffers)),
                Err(reason) => lines
                    .push(format!("a model that cannot be wrapped: {}", reason.replace('\n', " "))),
            }
            if let Some(difference) = difference(&group, &lines)? {
                return Err(Error::Mismatch { rank, difference });
            }
        }
        fit.map_err(|reason| Error::Model { rank, reason })?;
        let mut seen = HashSet::new();
        let mut is_first =
            |(_, tensor): &(String, Tensor)| seen.insert(flow_autograd::identity(tensor));
        parameters.retain(&mut is_first);
        buffers.retain(&mut is_first);
        if group.world_size() == 1 {
            let buffers = Mutex::new(CoalescedBroadcast::new(&group, Vec::new())?);
            return Ok(Ddp {
                model,
                group,
                reducer: None,
                _hooks: Vec::new(),
                _birthplace: None,
                buffers,
                held: Mutex::default(),
            });
        }
        if !broadcast_buffers {
            buffers.clear();
        }
        let all = parameters
            .iter()
            .chain(&buffers)
            .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        CoalescedBroadcast::new(&group, all.collect())?.run(&group, 0)?;
        // Before the first backward: gradients are to be born in shared memory from then on.
        let birthplace = Birthplace::current().filter(|_| group.cuda_device().is_none());
        let own = group.duplicate_in(birthplace.as_ref().map(|birthplace| birthplace.home()))?;
        // A rank whose first backward fails would else fail the group while nodes are still being
        // linked.
        own.barrier()?;
        let to_broadcast =
            buffers.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
        // There are two handles here, one in the broadcast.
        let held = buffers.into_iter().map(|(name, tensor)| Held { name, tensor, others: 2 });
        let buffers = Mutex::new(CoalescedBroadcast::new(&own, to_broadcast)?);
        let held = held.filter(|buffer| flow_autograd::use_count(&buffer.tensor) > buffer.others);
        let held = Mutex::new(held.collect());
        let parameters = parameters.into_iter().map(|(name, tensor)| Parameter::new(name, tensor));
        let (trained, frozen): (Vec<_>, Vec<_>) =
            parameters.partition(|parameter| parameter.tensor.requires_grad());
        let cuda = trained
            .first()
            .map(|parameter: &Parameter| cuda_group(&own, &parameter.tensor))
            .transpose()?
            .flatten();
        let birthplace = cuda.is_none().then(|| Birthplace::install(own.home())).flatten();
        let reducer = Reducer::new(own, cuda, trained, frozen, options)?;
        let hooks = reducer.install_hooks()?;
        Ok(Ddp {
            model,
            group,
            reducer: Some(reducer),
            _hooks: hooks,
            _birthplace: birthplace,
            buffers,
            held,
        })
    }
}

/// The name of a parameter in a store that has come to the first `known`.
fn added(store: &Variables, known: usize) -> Option<String> {
    let new = store
        .trainable_variables
        .iter()
        .skip(known)
        .find(|variable| variable.tensor.requires_grad())?;
    let is_new =
        |tensor: &Tensor| flow_autograd::identity(tensor) == flow_autograd::identity(&new.tensor);
    let named = store.named_variables.iter().find(|(_, tensor)| is_new(tensor));
    Some(named.map_or_else(|| "a parameter".into(), |(name, _)| name.clone()))
}

/// What must be equal on all ranks of the model's tensors, each in a line.
fn describe(parameters: &[(String, Tensor)], buffers: &[(String, Tensor)]) -> Vec<String> {
    let mut first_names = HashMap::new();
    let parameters = parameters.iter().map(|named| ("parameter", named));
    let line = |(what, (name, tensor)): (&str, &(String, Tensor))| {
        let name = name.replace('\n', " ");
        let form = format!(
            "{:?} {:?} requires_grad={}",
            tensor.size(),
            tensor.kind(),
            tensor.requires_grad()
        );
        // What lies at the same place in memory is added up.
        let layout =
            if what == "parameter" { Layout::of(tensor).to_string() } else { String::new() };
        let line = format!("{what} {name} {form}{layout}");
        match first_names.entry(flow_autograd::identity(tensor)) {
            Entry::Occupied(first) => format!("{line}, the same tensor as {}", first.get()),
            Entry::Vacant(none) => {
                none.insert(name);
                line
            }
        }
    };
    parameters.chain(buffers.iter().map(|named| ("buffer", named))).map(line).collect()
}

/// Nobody else may be told of the parameters' gradients.
fn check_hooks(parameters: &[(String, Tensor)]) -> Result<(), String> {
    for (name, tensor) in parameters.iter().filter(|(_, tensor)| tensor.requires_grad()) {
        match GradHook::is_installed(tensor) {
            Ok(false) => {}
            Ok(true) => {
                return Err(format!("parameter {name} is wrapped in a Ddp already: drop the first"))
            }
            Err(error) => return Err(format!("parameter {name}: {error}")),
        }
    }
    Ok(())
}

/// What can be said of a model without other ranks.
fn check(
    parameters: &[(String, Tensor)],
    buffers: &[(String, Tensor)],
    options: &Options,
    broadcast_buffers: bool,
) -> Result<(), String> {
    for (name, tensor) in parameters.iter().chain(buffers) {
        if let Some(reason) = flow_autograd::unsendable(tensor) {
            return Err(format!("{name} {reason}"));
        }
    }
    if !parameters.iter().any(|(_, t)| t.requires_grad()) {
        return Err(
            "the model has no parameter that requires a gradient: there is nothing to wrap".into(),
        );
    }
    if options.caps.first == 0 || options.caps.rest == 0 {
        return Err("bucket caps must be positive".into());
    }
    let (first, device) = (&parameters[0].0, parameters[0].1.device());
    for (name, tensor) in parameters.iter().chain(buffers) {
        if tensor.device() != device {
            let other = tensor.device();
            return Err(format!(
                "{first} is on {device:?} and {name} on {other:?}: a model must be on one device"
            ));
        }
        let floating =
            matches!(tensor.kind(), Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
        if tensor.requires_grad() && !floating {
            return Err(format!(
                "{name} is {:?}: parameters must be Float, Double, Half or BFloat16",
                tensor.kind()
            ));
        }
    }
    let written = parameters.iter().chain(buffers.iter().filter(|_| broadcast_buffers));
    if let Some((name, _)) = written.into_iter().find(|(_, tensor)| overlaps(tensor)) {
        return Err(format!("{name} {OVERLAPS}"));
    }
    match options.communication {
        Some(kind) if !matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) => {
            Err(format!(
                "gradients cannot be sent as {kind:?}: use Float, Double, Half or BFloat16"
            ))
        }
        _ => Ok(()),
    }
}
