//! Stages of a model.

use std::fmt;
use std::ops::Range;

use flow_autograd::BoxError;
use flow_ddp::{Ddp, Fsdp, NoSync};
use tch::Tensor;
use tch::nn::{ModuleT, Path, VarStore};

use crate::error::Error;

/// A part of a model. Any `tch` module is a stage with one input and one output. [`stage_fn`] makes a
/// stage of a closure, with several.
pub trait Stage: Send {
    /// Computes the outputs of a micro-batch: the inputs of the next stage, or of the loss. The inputs of
    /// the first stage are those of the batch. `train` is false in
    /// [`Pipeline::forward`](crate::Pipeline::forward).
    ///
    /// # Errors
    /// An error ends the step on all ranks. So does a panic.
    fn forward_micro_batch(&self, inputs: &[Tensor], train: bool) -> Result<Vec<Tensor>, BoxError>;

    /// Begins a training step. Makes equal what the stage's replicas have in common, such as buffers.
    /// While the returned guard lives, backwards do not average gradients over the replicas. It lives
    /// until the last backward of the step, so that gradients are averaged once.
    ///
    /// # Errors
    /// An error ends the step on all ranks.
    fn begin_step(&self) -> Result<Option<NoSync>, BoxError> {
        Ok(None)
    }

    /// Makes the stage's replicas fail, because this rank's step has failed and they may wait for it.
    fn abort(&self, _cause: &str) {}
}

impl<M: ModuleT> Stage for M {
    fn forward_micro_batch(&self, inputs: &[Tensor], train: bool) -> Result<Vec<Tensor>, BoxError> {
        Ok(vec![self.forward_t(one(inputs)?, train)])
    }
}

/// A stage whose gradients are averaged over the group of its [`Ddp`], once in a step. Each step begins
/// with the buffers of the first rank of that group. The `Ddp` wraps a module, or a stage of
/// [`stage_fn`] with several inputs and outputs.
pub struct DdpStage<S>(pub Ddp<S>);

impl<S: Stage> Stage for DdpStage<S> {
    /// Calls the module without [`Ddp::forward_t`]: a step has the buffers already, and its backwards
    /// belong to its forwards.
    fn forward_micro_batch(&self, inputs: &[Tensor], train: bool) -> Result<Vec<Tensor>, BoxError> {
        S::forward_micro_batch(&self.0, inputs, train)
    }

    fn begin_step(&self) -> Result<Option<NoSync>, BoxError> {
        begin_step(&self.0)
    }

    fn abort(&self, cause: &str) {
        self.0.abort(cause);
    }
}

/// A stage that trains as a [`DdpStage`] does, of a model whose parameters are there once for all replicas on
/// a machine. [`Fsdp::optimizer`] makes its optimizer.
pub struct FsdpStage<S>(pub Fsdp<S>);

impl<S: Stage> Stage for FsdpStage<S> {
    fn forward_micro_batch(&self, inputs: &[Tensor], train: bool) -> Result<Vec<Tensor>, BoxError> {
        S::forward_micro_batch(&self.0, inputs, train)
    }

    fn begin_step(&self) -> Result<Option<NoSync>, BoxError> {
        begin_step(&self.0)
    }

    fn abort(&self, cause: &str) {
        self.0.abort(cause);
    }
}

fn begin_step<S>(replica: &Ddp<S>) -> Result<Option<NoSync>, BoxError> {
    if replica.has_mixed_precision() {
        return Err(
            "the model's mixed_precision has no effect in a stage: build it without, and let the \
                    stage compute in half precision itself"
                .into(),
        );
    }
    replica.sync_buffers()?;
    Ok(Some(replica.no_sync()))
}

impl Stage for Box<dyn Stage> {
    fn forward_micro_batch(&self, inputs: &[Tensor], train: bool) -> Result<Vec<Tensor>, BoxError> {
        (**self).forward_micro_batch(inputs, train)
    }

    fn begin_step(&self) -> Result<Option<NoSync>, BoxError> {
        (**self).begin_step()
    }

    fn abort(&self, cause: &str) {
        (**self).abort(cause);
    }
}

/// A sequence of layers of a model.
///
/// ```
/// use flow_pipeline::{split_by_parameters, Layers};
/// use tch::{nn, Device};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let layers = Layers::default()
///     .add(&vs, |path| nn::linear(path, 784, 128, Default::default()))
///     .add(&vs, |_| nn::func(|x| x.relu()))
///     .add(&vs, |path| nn::linear(path, 128, 10, Default::default()));
/// let ranges = split_by_parameters(&layers, 2);
/// let stages = layers.into_stages(&ranges)?;
/// assert_eq!(stages.len(), 2);
/// # Ok::<(), flow_pipeline::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Layers(pub(crate) Vec<Layer>);

#[derive(Debug)]
pub(crate) struct Layer {
    pub module: Box<dyn ModuleT>,
    /// The number of elements of its trainable variables.
    pub parameters: usize,
}

impl Layers {
    /// Adds a layer at the end. Its parameters are the variables that `make` makes in `vs`, below the
    /// layer's number (`0.weight`, as in `torch.nn.Sequential`).
    #[must_use]
    pub fn add<M: ModuleT + 'static>(
        mut self,
        vs: &VarStore,
        make: impl FnOnce(Path) -> M,
    ) -> Self {
        let before = parameters(vs);
        let module = Box::new(make(vs.root() / self.0.len()));
        self.0.push(Layer { module, parameters: parameters(vs) - before });
        self
    }

    /// Makes a stage of the layers of each range, for [`Pipeline::new`](crate::Pipeline::new).
    ///
    /// # Errors
    /// The ranges do not divide all layers in their order.
    pub fn into_stages(self, ranges: &[Range<usize>]) -> crate::Result<Vec<Box<dyn Stage>>> {
        let layers = self.0.len();
        if !divide(ranges, layers) {
            return Err(Error::Ranges { ranges: ranges.to_vec(), layers });
        }
        let mut rest = self.0.into_iter();
        let mut stages: Vec<Box<dyn Stage>> = Vec::new();
        for range in ranges {
            stages.push(Box::new(Self(rest.by_ref().take(range.len()).collect())));
        }
        Ok(stages)
    }
}

/// Returns whether the ranges follow each other from 0 to `layers`.
fn divide(ranges: &[Range<usize>], layers: usize) -> bool {
    let mut end = 0;
    for range in ranges {
        if range.start != end || range.end < end {
            return false;
        }
        end = range.end;
    }
    end == layers
}

/// Counts the elements of all trainable variables.
fn parameters(vs: &VarStore) -> usize {
    vs.trainable_variables().iter().map(Tensor::numel).sum()
}

impl ModuleT for Layers {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        let first = input.shallow_clone();
        self.0.iter().fold(first, |input, layer| layer.module.forward_t(&input, train))
    }
}

/// Makes a stage of a closure, with any number of inputs and outputs. The stage is the same in training
/// and in evaluation, like `tch::nn::func`.
pub fn stage_fn<F>(forward: F) -> Box<dyn Stage>
where
    F: Fn(&[Tensor]) -> Result<Vec<Tensor>, BoxError> + Send + 'static,
{
    stage_fn_t(move |inputs, _| forward(inputs))
}

/// Makes a stage of a closure that is told whether it trains, like `tch::nn::func_t`.
pub fn stage_fn_t<F>(forward: F) -> Box<dyn Stage>
where
    F: Fn(&[Tensor], bool) -> Result<Vec<Tensor>, BoxError> + Send + 'static,
{
    Box::new(Function(forward))
}

struct Function<F>(F);

impl<F> Stage for Function<F>
where
    F: Fn(&[Tensor], bool) -> Result<Vec<Tensor>, BoxError> + Send,
{
    fn forward_micro_batch(&self, inputs: &[Tensor], train: bool) -> Result<Vec<Tensor>, BoxError> {
        self.0(inputs, train)
    }
}

impl fmt::Debug for dyn Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stage")
    }
}

fn one(inputs: &[Tensor]) -> Result<&Tensor, BoxError> {
    match inputs {
        [input] => Ok(input),
        _ => {
            Err(format!("a module has one input, not {}: make the stage by stage_fn", inputs.len())
                .into())
        }
    }
}
