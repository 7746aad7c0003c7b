//! A module whose parameters are gathered for its forward and its backward.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use flow_autograd::{BoxError, Forward, Graph, custom_function, grad_enabled};
use tch::nn::{Module, ModuleT};
use tch::{Device, Kind, TchError, Tensor};

use super::unit::Unit;
use super::units::{FailOnPanic, Units};
use crate::error::{Error, Result};

/// A module whose parameters each rank keeps a part of: what [`FullyShard::module`](super::FullyShard::module)
/// makes. It derefs to the module.
pub struct ShardedModule<M> {
    pub(super) module: M,
    pub(super) unit: Arc<Unit>,
    pub(super) units: Arc<Units>,
}

impl<M: ModuleT> ShardedModule<M> {
    /// Runs the module's `forward_t`, with its parameters gathered. All ranks call this, and run the
    /// backwards that follow.
    ///
    /// # Errors
    ///
    /// A failure of this rank or another; an output that is a view of a parameter.
    pub fn try_forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let output = self.run(input, train);
        output.inspect_err(|error| self.units.fail(&error.to_string()))
    }

    fn run(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let input = &self.unit.input(input);
        let replacements = self.unit.replacements();
        let replacements =
            replacements.map_err(|error| Error::fully_shard(self.units.group(), error))?;
        let place = self.units.gather_for_forward(&self.unit)?;
        let of_graph = grad_enabled();
        // Backward runs the module's graph by itself: the parameters are gathered before, and the
        // gradients reduced after.
        let leaf = if of_graph {
            input.detach().set_requires_grad(input.requires_grad())
        } else {
            input.shallow_clone()
        };
        let output = {
            let _fails = FailOnPanic(&self.units);
            match replacements {
                Some(replacements) => replacements.during(|| self.module.forward_t(&leaf, train)),
                None => self.module.forward_t(&leaf, train),
            }
        };
        if self.unit.has_memory_of(&output) {
            return Err(
                self.failed("its output is a part of a parameter: return a copy of it".into())
            );
        }
        let has_graph = of_graph && output.requires_grad();
        self.units.end_module(&self.unit, has_graph)?;
        if !has_graph {
            return Ok(output);
        }
        let graph = Graph::of(&[output.shallow_clone()]);
        let graph = graph.map_err(|error| Error::fully_shard(self.units.group(), error))?;
        let backward = Backward {
            units: Arc::clone(&self.units),
            unit: Arc::clone(&self.unit),
            place,
            run: Mutex::new(Some((leaf, graph))),
        };
        // Of no use but to require a gradient: the parameters do so where the input does not.
        let any = Tensor::zeros([0], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let outputs = custom_function(
            &[input, &any],
            |_| Ok(Forward { outputs: vec![output.detach()], saved: Vec::new() }),
            move |_, gradients| backward.run(gradients),
        );
        let mut outputs = outputs.map_err(|error| Error::fully_shard(self.units.group(), error))?;
        Ok(outputs.swap_remove(0))
    }

    fn failed(&self, reason: String) -> Error {
        Error::fully_shard(
            self.units.group(),
            format!("the module of {}: {reason}", self.unit.name),
        )
    }
}

/// The backward of a forward of a module.
struct Backward {
    units: Arc<Units>,
    unit: Arc<Unit>,
    /// The module's place in the model's forward, if it is a part of that.
    place: Option<usize>,
    /// The module's input, and the graph of its output. Gone once it has run.
    run: Mutex<Option<(Tensor, Graph)>>,
}

impl Backward {
    /// Returns the gradients of the input and of the tensor that is of no use.
    fn run(&self, gradients: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, BoxError> {
        let _fails = FailOnPanic(&self.units);
        let input = self.try_run(gradients).map_err(|error| {
            self.units.fail(&error.to_string());
            error.end_backward()
        })?;
        Ok(vec![input, None])
    }

    fn try_run(&self, gradients: &[Option<Tensor>]) -> Result<Option<Tensor>> {
        let group = self.units.group();
        if grad_enabled() {
            let reason =
                "gradients of gradients (create_graph) cannot be computed of a sharded module";
            return Err(Error::fully_shard(group, reason));
        }
        let run = self.run.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some((leaf, graph)) = run else {
            let reason = "backward runs twice through a sharded module: add the losses up, and run one \
                          backward";
            return Err(Error::fully_shard(group, reason));
        };
        self.unit.check_gradients(group, false)?;
        self.units.gather_for_backward(&self.unit, self.place)?;
        graph.backward(gradients).map_err(|error| {
            let reason = match error {
                flow_autograd::Error::Libtorch { reason, .. } => reason,
                other => other.to_string(),
            };
            Error::from_backward(TchError::Torch(reason))
        })?;
        self.units.end_backward(&self.unit)?;
        Ok(Some(leaf.grad()).filter(Tensor::defined))
    }
}

impl<M: Module> ShardedModule<M> {
    /// Runs the module's `forward`, as [`ModuleT::forward_t`] does in training.
    pub fn forward(&self, input: &Tensor) -> Tensor {
        self.forward_t(input, true)
    }
}

impl<M: ModuleT> ModuleT for ShardedModule<M> {
    /// Runs [`ShardedModule::try_forward_t`]. Panics with its error, as tch's modules do.
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        self.try_forward_t(input, train).unwrap_or_else(|error| panic!("{error}"))
    }
}

impl<M> Deref for ShardedModule<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.module
    }
}

impl<M: fmt::Debug> fmt::Debug for ShardedModule<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedModule").field("module", &self.module).finish_non_exhaustive()
    }
}
