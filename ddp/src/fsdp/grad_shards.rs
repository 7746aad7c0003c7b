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
use crate::optimizer_choice::one_line;
use crate::parameter::Parameter;
use crate::zero::kept::{KeptGradients, clip_grad_norm};
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

    fn lock(&self) -> MutexGuard<'_, Vec<GradShard>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeptGradients for GradShards {
    /// Those of the rank's machine, which have the parameters in common.
    fn sharers(&self, group: &ProcessGroup, rank: usize) -> Vec<usize> {
        group.ranks_on_machine_of(rank)
    }

    fn part(&self, parameters: &mut [ShardedParameter]) -> Result<(), String> {
        let are_these = parameters.iter().enumerate().all(|(place, parameter)| {
            self.places.get(&identity(&parameter.tensor)) == Some(&place)
        });
        if are_these && parameters.len() == self.places.len() {
            self.has_optimizer.store(true, Ordering::Relaxed);
            return Ok(());
        }
        Err("the VarStore has got variables since the model was wrapped: wrap it again".to_owned())
    }

    fn own_part(
        &self,
        parameter: &ShardedParameter,
        _: usize,
        elements: &Range<usize>,
    ) -> Result<Tensor, String> {
        parameter.view(elements.start, elements.len()).map_err(one_line)
    }

    fn memory(&self, place: usize) -> Option<Tensor> {
        Some(self.lock()[place].gradient())
    }

    fn is_there(&self, place: usize) -> bool {
        self.lock()[place].is_there
    }

    fn parts(&self) -> Result<Vec<Tensor>> {
        Ok(self.lock().iter().map(|shard| shard.part.shallow_clone()).collect())
    }

    fn check(&self) -> Result<(), String> {
        self.shared.check()
    }

    fn begin_step(&self, group: &ProcessGroup) -> Result<()> {
        // Until then other ranks read the parameters that this one steps. Of all machines, so that none
        // leaves out a step of the others.
        Ok(group.barrier()?)
    }

    fn has_stepped(&self) {
        self.shared.accept_writes();
    }

    fn end_step(&self, group: &ProcessGroup) -> Result<()> {
        Ok(group.barrier_on_machine()?)
    }

    fn clip_grad_norm(&self, group: &ProcessGroup, max: f64) -> Result<f64> {
        let gradients = {
            let shards = self.lock();
            let there = shards.iter().filter(|shard| shard.is_there);
            there.map(|shard| shard.part.grad()).collect()
        };
        // Each machine has all gradients. All take the same sum, also if they part them otherwise.
        clip_grad_norm(group, &group.ranks_on_machine_of(0), gradients, max)
    }

    fn clear(&self) -> Result<(), flow_autograd::Error> {
        for shard in &mut *self.lock() {
            flow_autograd::set_grad(&shard.part, None)?;
            shard.is_there = false;
        }
        Ok(())
    }

    fn abort(&self, cause: &str) {
        self.shared.abort(cause);
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
