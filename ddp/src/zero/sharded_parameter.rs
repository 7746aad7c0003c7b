//! Parameters that ranks step in parts.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use flow_autograd::{OptimizerState, StateDict, StateParts, data_ptr, identity};
use flow_tensor::{OVERLAPS, overlaps};
use tch::nn::Variables;
use tch::{COptimizer, Kind, TchError, Tensor};

use super::partition::{Shard, partition};
use crate::grad_layout::GradLayout;
use crate::optimizer_choice::{OptimizerChoice, one_line};

/// The part of a state that counts steps. All others are like the parameter.
pub(super) const COUNT: &str = "step";

/// A parameter that ranks step in parts.
pub(crate) struct ShardedParameter {
    pub name: String,
    pub tensor: Tensor,
    pub layout: GradLayout,
    /// Its group in the `VarStore`.
    pub group: usize,
    pub shards: Vec<Shard>,
    /// This rank's part, if it has one.
    pub own: Option<OwnShard>,
    /// Where its first element was.
    pub address: usize,
}

/// This rank's part of a parameter.
pub(crate) struct OwnShard {
    pub elements: Range<usize>,
    pub chunks: Vec<Chunk>,
}

/// Elements that are stepped at once: on the CPU so few that what the optimizer computes on the way stays
/// in a cache.
pub(crate) struct Chunk {
    pub length: i64,
    /// A view of the parameter, or of where this rank keeps its part: the optimizer changes that.
    tensor: Tensor,
    pub optimizer: COptimizer,
    /// [`StateDict::parameters`] of the optimizer.
    pub described: Vec<String>,
}

/// The elements of a chunk on the CPU.
const CPU_CHUNK: usize = 256 << 10;

impl ShardedParameter {
    fn new(name: String, tensor: Tensor, group: usize) -> Result<Self, String> {
        if let Some(reason) = flow_autograd::unsendable(&tensor) {
            return Err(format!("{name} {reason}"));
        }
        if overlaps(&tensor) {
            return Err(format!("{name} {OVERLAPS}"));
        }
        let layout = GradLayout::of(&tensor);
        if !layout.in_memory_order(&tensor).is_contiguous() {
            return Err(format!("{name} has gaps in its memory: make it of a contiguous() tensor"));
        }
        let address = address_of(&tensor);
        Ok(Self { name, tensor, layout, group, shards: Vec::new(), own: None, address })
    }

    /// Returns the elements that a rank has, in the order of memory.
    pub fn elements_on(&self, rank: usize) -> Range<usize> {
        let shard = self.shards.iter().find(|shard| shard.rank == rank);
        shard.map_or(0..0, |shard| shard.elements.clone())
    }

    /// Returns the kind of its elements.
    pub fn kind(&self) -> Kind {
        self.tensor.kind()
    }

    /// Returns a view of so many elements, in the order of memory.
    pub fn view(&self, start: usize, elements: usize) -> Result<Tensor, TchError> {
        let flat = self.layout.in_memory_order(&self.tensor.detach()).f_view([-1])?;
        flat.f_narrow(0, start as i64, elements as i64)
    }

    /// Returns these elements of a tensor that is like the parameter, in the order of its memory.
    pub fn elements_of(
        &self,
        tensor: &Tensor,
        elements: &Range<usize>,
    ) -> Result<Tensor, TchError> {
        let flat = self.layout.in_memory_order(tensor).f_reshape([-1])?;
        flat.f_narrow(0, elements.start as i64, elements.len() as i64)
    }

    /// Checks that the gradient can be applied, if there is one.
    pub fn check_gradient(&self) -> Result<(), String> {
        let gradient = self.tensor.grad();
        if gradient.defined() && gradient.is_sparse() {
            return Err(format!(
                "the gradient of {} is sparse: build the Ddp with sparse_as_dense(true), or use tch's \
                 optimizer",
                self.name
            ));
        }
        Ok(())
    }

    /// Returns these elements of the gradient, if there is one.
    pub fn gradient(&self, elements: &Range<usize>) -> Result<Option<Tensor>, String> {
        self.check_gradient()?;
        let gradient = self.tensor.grad();
        if !gradient.defined() {
            return Ok(None);
        }
        let gradient = flow_autograd::resolved(&gradient).unwrap_or(gradient);
        self.elements_of(&gradient, elements).map(Some).map_err(one_line)
    }

    /// Steps this rank's part, if it has one, which has this gradient.
    pub fn step(&mut self, gradient: &Tensor) -> Result<(), String> {
        self.set_gradients(Some(gradient))?;
        self.step_chunks()?;
        // The gradient's memory is not to live, or be shared, because of this rank's part.
        self.set_gradients(None)
    }

    /// Makes the elements of this gradient those of the chunks.
    pub fn set_gradients(&mut self, gradient: Option<&Tensor>) -> Result<(), String> {
        let mut start = 0;
        for Chunk { length, tensor, .. } in self.own.iter().flat_map(|own| &own.chunks) {
            let part = gradient.map(|gradient| gradient.f_narrow(0, start, *length));
            let part = part.transpose().map_err(one_line)?;
            flow_autograd::set_grad(tensor, part.as_ref()).map_err(one_line)?;
            start += *length;
        }
        Ok(())
    }

    /// Steps this rank's part, whose chunks have gradients.
    pub fn step_chunks(&mut self) -> Result<(), String> {
        for chunk in self.own.iter_mut().flat_map(|own| &mut own.chunks) {
            chunk.optimizer.step().map_err(one_line)?;
        }
        flow_autograd::bump_version(&self.tensor).map_err(one_line)
    }
}

impl OwnShard {
    /// Makes the optimizers of these elements of a parameter, which are those of `part`.
    pub fn new(
        elements: Range<usize>,
        part: &Tensor,
        choice: &OptimizerChoice,
    ) -> Result<Self, String> {
        let most = if part.device().is_cuda() { usize::MAX } else { CPU_CHUNK };
        let mut chunks = Vec::new();
        let mut start = 0;
        // One without elements has a state, too.
        while start < elements.len() || chunks.is_empty() {
            let length = most.min(elements.len() - start);
            let tensor = part.f_narrow(0, start as i64, length as i64).map_err(one_line)?;
            let optimizer = choice.build_for(&tensor).map_err(one_line)?;
            let described = optimizer.state().map_err(one_line)?.parameters;
            chunks.push(Chunk { length: length as i64, tensor, optimizer, described });
            start += length;
        }
        Ok(Self { elements, chunks })
    }

    /// Returns the state, each tensor by its name in PyTorch.
    pub fn state(&self) -> Result<Vec<(String, Tensor)>, flow_autograd::Error> {
        let mut parts: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
        for chunk in &self.chunks {
            for (name, tensor) in chunk.optimizer.state()?.tensors {
                let name = name.strip_prefix("0.").unwrap_or(&name);
                parts.entry(name.to_owned()).or_default().push(tensor);
            }
        }
        let mut whole = Vec::with_capacity(parts.len());
        for (name, mut parts) in parts {
            let is_one = parts.len() == 1 || name == COUNT;
            let tensor = if is_one { parts.swap_remove(0) } else { Tensor::cat(&parts, 0) };
            whole.push((name, tensor));
        }
        Ok(whole)
    }

    /// Returns the state without a copy: the name of each part, the first of its elements that the
    /// tensor has, counted in the parameter, and the tensor.
    pub fn parts(&self) -> Result<Vec<(String, usize, Tensor)>, flow_autograd::Error> {
        let mut parts = Vec::new();
        let mut start = self.elements.start;
        for chunk in &self.chunks {
            for part in chunk.optimizer.parts()?.parts {
                let name = part.name.strip_prefix("0.").unwrap_or(&part.name);
                if name != COUNT {
                    parts.push((name.to_owned(), start, part.tensor));
                } else if start == 0 {
                    parts.push((name.to_owned(), 0, part.tensor));
                }
            }
            start += chunk.length as usize;
        }
        Ok(parts)
    }

    /// Returns the state of each chunk, without a copy.
    pub fn chunk_states(&self) -> Result<Vec<StateDict>, flow_autograd::Error> {
        let mut states = Vec::with_capacity(self.chunks.len());
        for chunk in &self.chunks {
            let StateParts { parameters, parts, .. } = chunk.optimizer.parts()?;
            let tensors = parts.into_iter().map(|part| (part.name, part.tensor)).collect();
            states.push(StateDict { parameters, tensors });
        }
        Ok(states)
    }

    /// Gives each chunk its state back.
    pub fn restore(&mut self, states: &[StateDict]) -> Result<(), flow_autograd::Error> {
        let mut chunks = self.chunks.iter_mut().zip(states);
        chunks.try_for_each(|(chunk, state)| chunk.optimizer.load_state(state))
    }
}

/// Returns the trainable variables of a store but those of the identities `ignored`, each once if it has
/// several names, parted among `ranks`.
pub(crate) fn sharded_parameters(
    store: &Mutex<Variables>,
    ignored: &HashSet<usize>,
    ranks: usize,
) -> Result<Vec<ShardedParameter>, String> {
    let variables = store.lock().unwrap_or_else(PoisonError::into_inner);
    let names = names(&variables);
    let mut seen = ignored.clone();
    let mut parameters = Vec::new();
    let mut sizes = Vec::new();
    for variable in &variables.trainable_variables {
        let tensor = variable.tensor.shallow_clone();
        if !seen.insert(identity(&tensor)) {
            continue;
        }
        let name = names.get(&identity(&tensor)).map_or("a parameter", |name| name.as_str());
        sizes.push((tensor.numel(), tensor.kind().elt_size_in_bytes()));
        parameters.push(ShardedParameter::new(name.to_owned(), tensor, variable.group)?);
    }
    if parameters.is_empty() {
        return Err("the VarStore has no trainable variables: make the model first".to_owned());
    }
    for (parameter, shards) in parameters.iter_mut().zip(partition(&sizes, ranks)) {
        parameter.shards = shards;
    }
    Ok(parameters)
}

/// Returns the names of variables, by identity: of several the first in alphabetical order.
pub(crate) fn names(variables: &Variables) -> HashMap<usize, &String> {
    let mut names: Vec<_> = variables.named_variables.iter().collect();
    names.sort_by_key(|&(name, _)| std::cmp::Reverse(name));
    // The last one inserted stays.
    names.iter().map(|(name, tensor)| (identity(tensor), *name)).collect()
}

pub(super) fn address_of(tensor: &Tensor) -> usize {
    data_ptr(tensor).addr()
}
