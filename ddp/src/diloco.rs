//! DiLoCo: ranks train alone for many steps, and an outer optimizer joins what they have learnt.

use flow_comm::{ProcessGroup, ReduceOp};
use flow_tensor::{TensorCollectives, Work};
use tch::nn::{Optimizer, OptimizerConfig, Path, VarStore};
use tch::{TchError, Tensor};

use crate::comm_hooks::{Quantize, wide};
use crate::error::{Error, Result, job_rank};
use crate::model_averager::trained;
use crate::model_check::first_mismatch;

/// The operation's name in errors.
const OPERATION: &str = "DiLoCo";
/// Elements of a range, where bytes are sent.
const CHANNEL: usize = 512;

/// Options of [`DiLoCo`], by the names of torchft; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiLoCoOptions {
    /// The steps from one exchange of a parameter to the next (default: 100).
    pub sync_every: u64,
    /// The number of parts of the model, which are exchanged at different times (default: 1).
    pub fragments: usize,
    /// The steps that training goes on while a fragment is exchanged (default: 0), fewer than
    /// `sync_every`.
    pub fragment_sync_delay: u64,
    /// The share of each rank's own parameters in what it goes on with (default: 0). Streaming DiLoCo
    /// has 0.5, where exchanges are delayed.
    pub fragment_update_alpha: f64,
    /// Whether changes are sent in 8 bits (default: no).
    pub should_quantize: bool,
}

impl Default for DiLoCoOptions {
    fn default() -> Self {
        Self {
            sync_every: 100,
            fragments: 1,
            fragment_sync_delay: 0,
            fragment_update_alpha: 0.0,
            should_quantize: false,
        }
    }
}

/// Distributed low-communication training (A. Douillard et al., "DiLoCo: Distributed Low-Communication
/// Training of Language Models", 2023, and "Streaming DiLoCo with Overlapping Communication", 2025):
/// for slow networks between machines.
///
/// Each rank trains with an optimizer of its own. Every `sync_every` steps the ranks' changes of the
/// parameters are averaged. The outer optimizer takes the average for a gradient, and changes with it
/// the parameters that all ranks began with. From those all ranks go on.
///
/// Where ranks of a machine average gradients ([`Ddp`](crate::Ddp) over a group of them), the group
/// here is all ranks: a machine sends its mean once, unless it sends bytes.
///
/// ```no_run
/// use flow_ddp::{DiLoCo, DiLoCoOptions, ProcessGroup};
/// use tch::nn::{self, ModuleT, OptimizerConfig};
///
/// # fn main() -> anyhow::Result<()> {
/// # let group = ProcessGroup::from_env()?;
/// # let batches = Vec::<(tch::Tensor, tch::Tensor)>::new();
/// let vs = nn::VarStore::new(tch::Device::Cpu);
/// let net = nn::linear(vs.root(), 784, 10, Default::default());
/// let options = DiLoCoOptions { sync_every: 50, ..Default::default() };
/// let mut diloco = DiLoCo::new(&vs, &group, nn::sgd(0.9, 0.0, 0.0, true), 0.7, options)?;
/// let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
/// for (x, y) in &batches {
///     optimizer.backward_step(&net.forward_t(x, true).cross_entropy_for_logits(y));
///     diloco.step()?;
/// }
/// diloco.synchronize()?; // all ranks have the same parameters
/// # Ok(()) }
/// ```
///
/// Buffers, such as running statistics, stay each rank's own.
pub struct DiLoCo {
    group: ProcessGroup,
    options: DiLoCoOptions,
    fragments: Vec<Fragment>,
    /// Of the parameters that all ranks have in common.
    outer: Optimizer,
    step: u64,
}

/// A part of the model.
struct Fragment {
    /// This rank's parameters.
    parameters: Vec<Tensor>,
    /// The parameters that all ranks have in common, which the outer optimizer changes.
    shared: Vec<Tensor>,
    exchange: Option<Exchange>,
}

/// Changes that are under way.
struct Exchange {
    /// The step that takes the average.
    due: u64,
    sent: Sent,
}

enum Sent {
    Mean(Work),
    /// Bytes, and their ranges.
    Bytes(Work, Work),
}

impl DiLoCo {
    /// Gives all ranks rank 0's trainable variables of `vs`, and begins. `outer` is the outer
    /// optimizer: the paper's is SGD with Nesterov momentum of 0.9 and a rate of 0.7. All ranks of
    /// `group` call this.
    ///
    /// # Errors
    ///
    /// Options that make no sense; a model without parameters; ranks with other options, another outer
    /// learning rate or other parameters; a failure of the group.
    pub fn new(
        vs: &VarStore,
        group: &ProcessGroup,
        outer: impl OptimizerConfig,
        outer_learning_rate: f64,
        options: DiLoCoOptions,
    ) -> Result<Self> {
        let parameters = trained(vs);
        let rank = job_rank(group);
        let fit = check(&parameters, options);
        let mut lines = vec![format!("{options:?}, outer learning rate {outer_learning_rate}")];
        lines.extend(fit.clone().err());
        for (number, parameter) in parameters.iter().enumerate() {
            let size = parameter.size();
            lines.push(format!("trainable parameter {number} {size:?} {:?}", parameter.kind()));
        }
        if let Some(difference) = first_mismatch(group, &lines)? {
            let reason = format!("{OPERATION}: ranks differ: {difference}");
            return Err(Error::Model { rank, reason });
        }
        fit.map_err(|reason| Error::Model { rank, reason })?;
        let group = group.duplicate()?;
        for parameter in &parameters {
            group.broadcast_tensor(&mut parameter.detach(), 0)?;
        }
        let store = VarStore::new(parameters[0].device());
        let mut fragments = Vec::with_capacity(options.fragments);
        for (index, parameters) in parts(parameters, options.fragments).into_iter().enumerate() {
            let fragment = Fragment::new(&(store.root() / index), parameters);
            fragments.push(fragment.map_err(torch(&group))?);
        }
        let outer = outer.build(&store, outer_learning_rate).map_err(torch(&group))?;
        Ok(Self { group, options, fragments, outer, step: 0 })
    }

    /// Counts a step of this rank's optimizer, and exchanges what is due. All ranks call this after
    /// each step.
    ///
    /// # Errors
    ///
    /// A failure of the group. On a CPU also ranks that are in different steps.
    pub fn step(&mut self) -> Result<()> {
        self.step += 1;
        let DiLoCoOptions { sync_every, fragment_sync_delay, fragment_update_alpha, .. } =
            self.options;
        for index in 0..self.fragments.len() {
            let turn = (index as u64 + 1) * sync_every / self.fragments.len() as u64;
            let fragment = &mut self.fragments[index];
            if self.step % sync_every == turn % sync_every {
                let due = self.step + fragment_sync_delay;
                fragment.begin(&self.group, self.options.should_quantize, due)?;
            }
            if fragment.exchange.as_ref().is_some_and(|exchange| exchange.due == self.step) {
                fragment.finish(&self.group, &mut self.outer, fragment_update_alpha)?;
            }
        }
        Ok(())
    }

    /// Exchanges what ranks have learnt since the last exchange. All ranks go on with the same
    /// parameters. Where an exchange is under way it is that one: what ranks have learnt since it began
    /// is left out. All ranks call this: before a checkpoint, and at the end.
    ///
    /// # Errors
    ///
    /// A failure of the group.
    pub fn synchronize(&mut self) -> Result<()> {
        for fragment in &mut self.fragments {
            if fragment.exchange.is_none() {
                fragment.begin(&self.group, self.options.should_quantize, self.step)?;
            }
            fragment.finish(&self.group, &mut self.outer, 0.0)?;
        }
        Ok(())
    }

    /// Returns how many steps there have been: what a checkpoint keeps, beside the state of
    /// [`DiLoCo::outer`].
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Goes on after so many steps with the parameters of a checkpoint, which all ranks have loaded.
    ///
    /// # Errors
    ///
    /// Those of libtorch.
    pub fn resume(&mut self, steps: u64) -> Result<()> {
        for fragment in &mut self.fragments {
            fragment.exchange = None;
            tch::no_grad(|| fragment.take_over()).map_err(torch(&self.group))?;
        }
        self.step = steps;
        Ok(())
    }

    /// Returns the outer optimizer, for its learning rate and its state.
    pub fn outer(&mut self) -> &mut Optimizer {
        &mut self.outer
    }
}

impl Fragment {
    /// Makes a fragment, with variables at `path`.
    fn new(path: &Path, parameters: Vec<Tensor>) -> Result<Self, TchError> {
        let mut shared = Vec::with_capacity(parameters.len());
        for (index, parameter) in parameters.iter().enumerate() {
            let value = parameter.detach().f_to_kind(wide(parameter.kind()))?.copy();
            shared.push(path.add(&index.to_string(), value, true));
        }
        Ok(Self { parameters, shared, exchange: None })
    }

    /// Takes this rank's parameters for those that all ranks have in common.
    fn take_over(&mut self) -> Result<(), TchError> {
        for (parameter, shared) in self.parameters.iter().zip(&mut self.shared) {
            shared.f_copy_(parameter)?;
        }
        Ok(())
    }

    /// Starts to average the ranks' changes.
    fn begin(&mut self, group: &ProcessGroup, quantize: bool, due: u64) -> Result<()> {
        // Ranks in different steps must not take each other's changes.
        let group = &group.with_digest(due);
        let change = tch::no_grad(|| self.change()).map_err(torch(group))?;
        let sent = if quantize && change.numel() > 0 {
            let quantized = Quantize::per_channel(CHANNEL).quantized(&change);
            let (bytes, ranges) = quantized.map_err(torch(group))?;
            Sent::Bytes(
                group.all_gather_tensor_async(bytes)?,
                group.all_gather_tensor_async(ranges)?,
            )
        } else {
            Sent::Mean(group.all_reduce_tensor_async(change, ReduceOp::Avg)?)
        };
        self.exchange = Some(Exchange { due, sent });
        Ok(())
    }

    /// Returns by how much the parameters of this rank are below those that it has begun with, in one
    /// dimension.
    fn change(&self) -> Result<Tensor, TchError> {
        let mut changes = Vec::with_capacity(self.parameters.len());
        for (parameter, shared) in self.parameters.iter().zip(&self.shared) {
            // In the parameter's kind: what it rounds off is not learnt.
            let begun = shared.f_to_kind(parameter.kind())?.f_to_kind(shared.kind())?;
            let own = parameter.f_to_kind(shared.kind())?;
            changes.push(begun.f_sub(&own)?.f_reshape([-1])?);
        }
        Tensor::f_cat(&changes, 0)
    }

    /// Waits for the average and has the outer optimizer take it. `alpha` is the share of this rank's
    /// own parameters in what it goes on with.
    fn finish(&mut self, group: &ProcessGroup, outer: &mut Optimizer, alpha: f64) -> Result<()> {
        let Some(exchange) = self.exchange.take() else { return Ok(()) };
        let mean = match exchange.sent {
            Sent::Mean(mean) => mean.wait()?,
            Sent::Bytes(bytes, ranges) => {
                let bytes = bytes.wait()?;
                let elements = self.shared.iter().map(Tensor::numel).sum::<usize>();
                Quantize::mean(&bytes, &ranges.wait()?, elements as i64).map_err(torch(group))?
            }
        };
        self.take(&mean, outer, alpha).map_err(torch(group))
    }

    fn take(&mut self, mean: &Tensor, outer: &mut Optimizer, alpha: f64) -> Result<(), TchError> {
        let lengths: Vec<i64> = self.shared.iter().map(|shared| shared.numel() as i64).collect();
        for (shared, gradient) in self.shared.iter().zip(mean.f_split_with_sizes(lengths, 0)?) {
            let gradient = gradient.f_view_as(shared)?.f_to_kind(shared.kind())?;
            set_grad(shared, Some(&gradient))?;
        }
        // Where no rank has learnt anything, momentum would change the parameters.
        if mean.f_any()?.f_int64_value(&[])? != 0 {
            // It leaves out what has no gradient: the other fragments.
            outer.step();
        }
        self.shared.iter().try_for_each(|shared| set_grad(shared, None))?;
        tch::no_grad(|| {
            for (parameter, shared) in self.parameters.iter_mut().zip(&self.shared) {
                let own = parameter.f_to_kind(shared.kind())?;
                parameter.f_copy_(&shared.f_lerp(&own, alpha)?)?;
            }
            Ok(())
        })
    }
}

fn check(parameters: &[Tensor], options: DiLoCoOptions) -> Result<(), String> {
    let DiLoCoOptions { sync_every, fragments, fragment_sync_delay, .. } = options;
    if parameters.is_empty() {
        return Err(format!("{OPERATION}: the model has no parameter that requires a gradient"));
    }
    if fragments == 0 || fragments > parameters.len() || fragments as u64 > sync_every {
        return Err(format!(
            "{OPERATION}: {fragments} fragments: there must be 1 to {} (as many as parameters), and \
             not more than sync_every, {sync_every}",
            parameters.len()
        ));
    }
    if fragment_sync_delay >= sync_every {
        return Err(format!(
            "{OPERATION}: fragment_sync_delay {fragment_sync_delay} must be below sync_every, \
             {sync_every}"
        ));
    }
    if !(0.0..1.0).contains(&options.fragment_update_alpha) {
        return Err(format!(
            "{OPERATION}: fragment_update_alpha {} must be at least 0 and below 1",
            options.fragment_update_alpha
        ));
    }
    match parameters.iter().find(|parameter| !parameter.is_floating_point()) {
        Some(parameter) => Err(format!(
            "{OPERATION}: a parameter is {:?}: parameters must be real floating-point numbers",
            parameter.kind()
        )),
        None => Ok(()),
    }
}

/// Divides parameters into so many parts, in their order, of about as many elements. Each has one at
/// least.
fn parts(parameters: Vec<Tensor>, count: usize) -> Vec<Vec<Tensor>> {
    let total: usize = parameters.iter().map(Tensor::numel).sum();
    let mut parts: Vec<Vec<Tensor>> = vec![Vec::new()];
    let mut elements = 0;
    let mut left = parameters.len();
    for parameter in parameters {
        let missing = count - parts.len();
        let is_full = elements * count >= total * parts.len();
        let is_empty = parts.last().is_some_and(Vec::is_empty);
        if missing > 0 && !is_empty && (is_full || left <= missing) {
            parts.push(Vec::new());
        }
        elements += parameter.numel();
        left -= 1;
        if let Some(part) = parts.last_mut() {
            part.push(parameter);
        }
    }
    parts
}

fn set_grad(tensor: &Tensor, gradient: Option<&Tensor>) -> Result<(), TchError> {
    let set = flow_autograd::set_grad(tensor, gradient);
    set.map_err(|error| TchError::Torch(error.to_string()))
}

fn torch(group: &ProcessGroup) -> impl Fn(TchError) -> Error {
    let rank = job_rank(group);
    move |error| Error::Torch { rank, operation: OPERATION, reason: error.to_string() }
}
