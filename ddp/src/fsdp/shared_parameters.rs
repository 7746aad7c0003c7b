//! Parameters that the ranks of a machine have in common.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use flow_comm::{MachineBuffer, ProcessGroup};
use tch::Tensor;

use crate::error::{Error, Result};
use crate::model_check::agree;
use crate::zero::sharded_parameter::ShardedParameter;

/// The alignment of each parameter: a cache line.
const ALIGNMENT: usize = 64;

/// All shared parameters of this process.
static SHARED: Mutex<Vec<Weak<SharedParameters>>> = Mutex::new(Vec::new());

/// The parameters of a model that lie in memory of all ranks of the machine, and how often each has been
/// changed, as far as all ranks know.
pub(crate) struct SharedParameters(Mutex<Vec<SharedParameter>>);

struct SharedParameter {
    name: String,
    tensor: Tensor,
    version: i64,
}

impl SharedParameters {
    /// Puts the parameters into memory that the ranks of the machine have in common, with the values of
    /// its first rank. All ranks call this.
    pub fn new(group: &ProcessGroup, parameters: &[ShardedParameter]) -> Result<Arc<Self>> {
        let mut starts = Vec::with_capacity(parameters.len());
        let mut end = 0;
        for parameter in parameters {
            starts.push(end);
            end += bytes_of(&parameter.tensor).next_multiple_of(ALIGNMENT);
        }
        let memory = group.alloc_on_machine(end)?;
        let mut places = Vec::with_capacity(parameters.len());
        for (parameter, start) in parameters.iter().zip(starts) {
            places.push(place(&memory, parameter, start));
        }
        let places: Result<Vec<Tensor>, flow_autograd::Error> = places.into_iter().collect();
        let mut places = agree(group, places.map_err(|error| Error::torch(group, "Fsdp", error)))?;
        if group.local_index() == 0 {
            for (place, parameter) in places.iter_mut().zip(parameters) {
                tch::no_grad(|| place.copy_(&parameter.tensor));
            }
        }
        group.barrier()?;
        let mut shared = Vec::with_capacity(parameters.len());
        for (place, parameter) in places.iter().zip(parameters) {
            let mut tensor = parameter.tensor.shallow_clone();
            tensor.set_data(place);
            let version = tensor.internal_version();
            shared.push(SharedParameter { name: parameter.name.clone(), tensor, version });
        }
        let shared = Arc::new(Self(Mutex::new(shared)));
        let mut all = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&shared));
        Ok(shared)
    }

    /// Takes what was written into the parameters as written by all ranks.
    pub fn accept_writes(&self) {
        for parameter in &mut *self.lock() {
            parameter.version = parameter.tensor.internal_version();
        }
    }

    /// Checks that nothing was written into the parameters that not all ranks know of. The error says
    /// into which, and what would be right.
    pub fn check(&self) -> Result<(), String> {
        for SharedParameter { name, tensor, version } in &*self.lock() {
            if tensor.internal_version() != *version {
                return Err(format!(
                    "{name} was changed in place: the ranks of a machine have it in common, and each of \
                     them would change it; change parameters in Fsdp::write"
                ));
            }
        }
        Ok(())
    }

    /// Gives this process copies of the parameters in memory of its own.
    pub fn part(&self) {
        for SharedParameter { tensor, .. } in &mut *self.lock() {
            let own = tch::no_grad(|| tensor.detach().copy());
            tensor.set_data(&own);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<SharedParameter>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes what was written into any shared parameters as written by all ranks, which load the same.
pub(crate) fn all_ranks_have_loaded() {
    let all = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().filter_map(Weak::upgrade).for_each(|shared| shared.accept_writes());
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// Returns a parameter's place in the memory.
fn place(
    memory: &MachineBuffer,
    parameter: &ShardedParameter,
    start: usize,
) -> Result<Tensor, flow_autograd::Error> {
    let part = memory.part(start..start + bytes_of(&parameter.tensor));
    let shape = parameter.layout.memory_shape();
    let place = flow_autograd::tensor_from_memory(part, &shape, parameter.kind())?;
    Ok(parameter.layout.in_own_order(&place))
}
