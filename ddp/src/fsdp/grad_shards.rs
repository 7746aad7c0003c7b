//! The gradients that a rank keeps: those of its parts of the parameters.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_autograd::identity;
use flow_comm::ProcessGroup;
use tch::{Device, Kind, TchError, Tensor};

use super::shared_parameters::SharedParameters;
use crate::error::Result;
use crate::parameter::Parameter;
use crate::zero::sharded_parameter::ShardedParameter;

/// Where backward leaves the reduced gradients of this rank's parts, and the optimizer finds them.
pub(crate) struct GradShards {
    pub shared: Arc<SharedParameters>,
    /// The place of each parameter, by identity.
    places: HashMap<usize, usize>,
    shards: Mutex<Vec<GradShard>>,
    /// An optimizer takes the gradients.
    has_optimizer: AtomicBool,
}

/// A parameter's gradient, as far as this rank keeps it.
struct GradShard {
    /// Elements, in the order of memory. Complex ones are two numbers each.
    numbers: Range<usize>,
    /// A view of this rank's part of the parameter, whose `.grad` is what backward has left.
    part: Tensor,
    /// The memory of that, of the parameter's real kind.
    memory: Tensor,
    /// Backward has left a gradient on the rank that keeps it.
    is_there: bool,
}

impl GradShards {
    /// Makes room for the gradients of the parts of the rank at a place on its machine.
    pub fn new(
        shared: Arc<SharedParameters>,
        parameters: &[ShardedParameter],
        rank_on_machine: usize,
    ) -> Result<Self, TchError> {
        let mut shards = Vec::with_capacity(parameters.len());
        let mut places = HashMap::new();
        for (place, parameter) in parameters.iter().enumerate() {
            let elements = parameter.elements_on(rank_on_machine);
            let part = parameter.view(elements.start, elements.len())?;
            let (real, width) = real_kind(parameter.kind());
            let numbers = elements.start * width..elements.end * width;
            let memory = Tensor::f_empty([numbers.len() as i64], (real, Device::Cpu))?;
            places.insert(identity(&parameter.tensor), place);
            shards.push(GradShard { numbers, part, memory, is_there: false });
        }
        Ok(Self {
            shared,
            places,
            shards: Mutex::new(shards),
            has_optimizer: AtomicBool::new(false),
        })
    }

    /// Returns the place of a parameter.
    pub fn place_of(&self, parameter: &Parameter) -> usize {
        self.places[&identity(&parameter.tensor)]
    }

    /// Returns the numbers of a gradient that this rank keeps, by the parameter's place.
    pub fn numbers(&self, place: usize) -> Range<usize> {
        self.lock()[place].numbers.clone()
    }

    /// Returns where the next gradient of a parameter goes if it is of that kind, unless one is there
    /// to which it is added.
    pub fn destination(&self, place: usize, kind: Kind) -> Option<Tensor> {
        let shard = &self.lock()[place];
        (!shard.is_there && shard.memory.kind() == kind).then(|| shard.memory.shallow_clone())
    }

    /// Keeps this rank's part of a parameter's reduced gradient, and frees the whole one. `reduced`: that
    /// part, unless it is in its destination.
    pub fn keep(
        &self,
        parameter: &Parameter,
        reduced: Option<&Tensor>,
    ) -> Result<(), flow_autograd::Error> {
        let shard = &mut self.lock()[self.place_of(parameter)];
        if let Some(reduced) = reduced {
            tch::no_grad(|| {
                if shard.is_there {
                    let _ = shard.memory.g_add_(&reduced.to_kind(shard.memory.kind()));
                } else {
                    shard.memory.copy_(reduced);
                }
            });
        }
        if !shard.is_there {
            flow_autograd::set_grad(&shard.part, Some(&shard.gradient()))?;
            shard.is_there = true;
        }
        flow_autograd::set_grad(&parameter.tensor, None)
    }

    /// Returns the memory of this rank's part of the gradient of the parameter at a place.
    pub fn memory(&self, place: usize) -> Tensor {
        self.lock()[place].gradient()
    }

    /// Returns whether the gradient of the parameter at a place is there.
    pub fn is_there(&self, place: usize) -> bool {
        self.lock()[place].is_there
    }

    /// Checks that a backward may begin.
    pub fn check_use(&self) -> Result<(), String> {
        self.shared.check()?;
        let is_unused = self.lock().iter().any(|shard| shard.is_there);
        if is_unused && !self.has_optimizer.load(Ordering::Relaxed) {
            return Err("the gradients of the last backward were not used: make the optimizer by \
                        Fsdp::optimizer, as one of the VarStore finds none; without an optimizer call \
                        Fsdp::zero_grad"
                .to_owned());
        }
        Ok(())
    }

    /// Returns this rank's parts of parameters, whose `.grad` is this rank's part of the gradients.
    pub fn parts(&self) -> Vec<Tensor> {
        self.lock().iter().map(|shard| shard.part.shallow_clone()).collect()
    }

    /// Clips the norm of all ranks' gradients together to `max`, and returns what it was. All ranks call
    /// this.
    pub fn clip_grad_norm(&self, group: &ProcessGroup, max: f64) -> Result<f64> {
        let shards = self.lock();
        let gradients: Vec<Tensor> =
            shards.iter().filter(|shard| shard.is_there).map(|shard| shard.part.grad()).collect();
        let mut square = 0.0;
        for gradient in &gradients {
            square +=
                gradient.abs().norm_scalaropt_dtype(2.0, Kind::Double).double_value(&[]).powi(2);
        }
        let mut squares = vec![0.0; group.world_size()];
        group.all_gather(&[square], &mut squares)?;
        // Each machine has all gradients. All take the same sum, also if they part them otherwise.
        let first_machine = group.ranks_on_machine_of(0);
        let norm = first_machine.iter().map(|&rank| squares[rank]).sum::<f64>().sqrt();
        let factor = max / (norm + 1e-6);
        if factor < 1.0 {
            for mut gradient in gradients {
                let _ = tch::no_grad(|| gradient.g_mul_scalar_(factor));
            }
        }
        Ok(norm)
    }

    /// Checks that an optimizer of these parameters can take the gradients, and lets it.
    pub fn take(&self, parameters: &[ShardedParameter]) -> Result<(), String> {
        let are_these = parameters.iter().enumerate().all(|(place, parameter)| {
            self.places.get(&identity(&parameter.tensor)) == Some(&place)
        });
        if are_these && parameters.len() == self.places.len() {
            self.has_optimizer.store(true, Ordering::Relaxed);
            return Ok(());
        }
        Err("the VarStore has got variables since the model was wrapped: wrap it again".to_owned())
    }

    /// Drops the gradients.
    pub fn clear(&self) -> Result<(), flow_autograd::Error> {
        for shard in &mut *self.lock() {
            flow_autograd::set_grad(&shard.part, None)?;
            shard.is_there = false;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<GradShard>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GradShard {
    fn gradient(&self) -> Tensor {
        if self.part.kind() == self.memory.kind() {
            return self.memory.shallow_clone();
        }
        self.memory.view([-1, 2]).view_as_complex()
    }
}

/// Returns the kind of a number's parts, and how many it has.
fn real_kind(kind: Kind) -> (Kind, usize) {
    match kind {
        Kind::ComplexFloat => (Kind::Float, 2),
        Kind::ComplexDouble => (Kind::Double, 2),
        real => (real, 1),
    }
}
