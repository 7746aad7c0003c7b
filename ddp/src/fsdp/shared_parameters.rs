//! Parameters that the ranks of a machine have in common.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use flow_autograd::{data_ptr, identity};
use flow_comm::{MachineBuffer, ProcessGroup, WeakMachineBuffer};
use tch::Tensor;

use crate::error::{Error, Result};
use crate::grad_layout::GradLayout;
use crate::model_check::agree;
use crate::zero::sharded_parameter::ShardedParameter;

/// The alignment of each parameter: a cache line.
const ALIGNMENT: usize = 64;

/// The bytes that machines send each other at once.
const PIECE: usize = 1 << 20;

/// The memory of all parameters of this process that are in common, also of models that were dropped.
static MEMORY: Mutex<Vec<WeakMachineBuffer>> = Mutex::new(Vec::new());

/// All shared parameters of this process.
static SHARED: Mutex<Vec<Weak<SharedParameters>>> = Mutex::new(Vec::new());

/// The parameters of a model that lie in memory of all ranks of the machine.
pub(crate) struct SharedParameters {
    group: ProcessGroup,
    memory: MachineBuffer,
    parameters: Mutex<Vec<SharedParameter>>,
}

struct SharedParameter {
    name: String,
    tensor: Tensor,
    /// How often it has been changed, as far as all ranks know.
    version: i64,
    /// Where it lies.
    address: usize,
}

impl SharedParameters {
    /// Puts the parameters into memory that the ranks of the machine have in common, with the values of
    /// its first rank. All ranks call this.
    pub fn new(group: &ProcessGroup, parameters: &[ShardedParameter]) -> Result<Arc<Self>> {
        let mut tensors = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            tensors.push(parameter.tensor.shallow_clone());
        }
        let (memory, places) = place_on_machine(group, &tensors)?;
        let mut shared = Vec::with_capacity(parameters.len());
        for (place, parameter) in places.iter().zip(parameters) {
            let mut tensor = parameter.tensor.shallow_clone();
            tensor.set_data(place);
            let version = tensor.internal_version();
            let address = data_ptr(&tensor).addr();
            shared.push(SharedParameter { name: parameter.name.clone(), tensor, version, address });
        }
        let parameters = Mutex::new(shared);
        let shared = Arc::new(Self { group: group.clone(), memory, parameters });
        let mut all = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&shared));
        Ok(shared)
    }

    /// Gives all machines what rank 0 has in the parameters. All ranks call this, none of which reads them.
    pub fn spread(&self) -> Result<()> {
        let group = &self.group;
        if group.local_world_size() < group.world_size() {
            let bytes = self.memory.bytes();
            let buffer = group.alloc_shared::<u8>(PIECE.min(bytes)).map_err(Error::from);
            let mut buffer = agree(group, buffer)?;
            for start in (0..bytes).step_by(PIECE) {
                let end = bytes.min(start + PIECE);
                let mut part = self.memory.part(start..end);
                let piece = &mut buffer[..end - start];
                if group.rank() == 0 {
                    piece.copy_from_slice(part.as_mut());
                }
                group.broadcast(&mut *piece, 0)?;
                if group.local_index() == 0 && group.rank() != 0 {
                    part.as_mut().copy_from_slice(piece);
                }
            }
            group.barrier_on_machine()?;
        }
        self.accept_writes();
        Ok(())
    }

    /// Makes the next backward fail, on all ranks.
    pub fn abort(&self, cause: &str) {
        self.group.abort(cause);
    }

    /// Takes what was written into the parameters as written for all ranks.
    pub fn accept_writes(&self) {
        for parameter in &mut *self.lock() {
            parameter.version = parameter.tensor.internal_version();
        }
    }

    /// Checks that nothing was written into the parameters that not all ranks know of, and that they are
    /// where they were. The error says which is not so, and what would be right.
    pub fn check(&self) -> Result<(), String> {
        self.check_memory()?;
        for SharedParameter { name, tensor, version, .. } in &*self.lock() {
            if tensor.internal_version() != *version {
                return Err(format!(
                    "{name} was changed in place: the ranks of a machine have it in common, and each of \
                     them would change it; change parameters in Fsdp::write"
                ));
            }
        }
        Ok(())
    }

    /// Checks that the parameters are where they were.
    pub fn check_memory(&self) -> Result<(), String> {
        for SharedParameter { name, tensor, address, .. } in &*self.lock() {
            if data_ptr(tensor).addr() != *address {
                return Err(format!(
                    "{name} has other memory since (set_data, another type or device): write into it, or \
                     wrap the model again"
                ));
            }
        }
        Ok(())
    }

    /// Returns whether one of these tensors, given by identity, is among the parameters.
    pub fn has_any(&self, identities: &HashSet<usize>) -> bool {
        self.lock().iter().any(|parameter| identities.contains(&identity(&parameter.tensor)))
    }

    /// Gives this process copies of the parameters in memory of its own.
    pub fn unshare(&self) {
        for SharedParameter { tensor, .. } in &mut *self.lock() {
            let own = tch::no_grad(|| tensor.detach().copy());
            tensor.set_data(&own);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<SharedParameter>> {
        self.parameters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies tensors into memory that the group's ranks of a machine have in common, with the values of the
/// machine's first rank. Each copy has the strides of its tensor, which has no gaps. All ranks call this,
/// with tensors on the CPU of the same sizes, strides and kinds.
///
/// # Errors
///
/// On all ranks: the shared memory of one is full, or libtorch fails.
pub fn place_on_machine(
    group: &ProcessGroup,
    tensors: &[Tensor],
) -> Result<(MachineBuffer, Vec<Tensor>)> {
    let mut starts = Vec::with_capacity(tensors.len());
    let mut end = 0;
    for tensor in tensors {
        starts.push(end);
        end += bytes_of(tensor).next_multiple_of(ALIGNMENT);
    }
    let memory = group.alloc_on_machine(end)?;
    remember(&memory);
    let mut places = Vec::with_capacity(tensors.len());
    for (tensor, start) in tensors.iter().zip(starts) {
        places.push(place(&memory, tensor, start));
    }
    let places: Result<Vec<Tensor>, flow_autograd::Error> = places.into_iter().collect();
    let mut places = agree(group, places.map_err(|error| Error::torch(group, "Fsdp", error)))?;
    if group.local_index() == 0 {
        for (place, tensor) in places.iter_mut().zip(tensors) {
            tch::no_grad(|| place.copy_(tensor));
        }
    }
    group.barrier()?;
    Ok((memory, places))
}

fn remember(memory: &MachineBuffer) {
    let mut all = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(WeakMachineBuffer::is_used);
    all.push(memory.downgrade());
}

/// Returns whether the ranks of a machine have a tensor in common: a parameter of an [`Fsdp`](crate::Fsdp) of
/// several ranks, until [`into_inner`](crate::Fsdp::into_inner).
pub fn is_fully_sharded(tensor: &Tensor) -> bool {
    let address = data_ptr(tensor).addr();
    let all = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().any(|memory| memory.contains(address))
}

/// Writes into these tensors what all ranks load alike. Before that, ranks that have some of them in common
/// wait until none reads them. `write` is told which part of a tensor this rank is to write, and of how many:
/// of one that ranks have in common each writes its own. All have written once ranks agree on the result.
pub(crate) fn load<'a, E: From<flow_comm::Error>>(
    tensors: impl Iterator<Item = &'a Tensor>,
    write: impl FnOnce(&dyn Fn(&Tensor) -> (usize, usize)) -> Result<(), E>,
) -> Result<(), E> {
    let identities: HashSet<usize> = tensors.map(identity).collect();
    let all: Vec<Arc<SharedParameters>> = {
        let all = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    };
    let loaded: Vec<_> = all.into_iter().filter(|shared| shared.has_any(&identities)).collect();
    for shared in &loaded {
        shared.group.barrier()?;
    }
    let written = write(&|tensor| {
        let shared = loaded.iter().find(|shared| shared.has_any(&[identity(tensor)].into()));
        shared
            .map_or((0, 1), |shared| (shared.group.local_index(), shared.group.local_world_size()))
    });
    loaded.iter().for_each(|shared| shared.accept_writes());
    written
}

/// Returns the bytes of a tensor's elements.
pub fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// Returns a tensor like this one, at a place in the memory.
fn place(
    memory: &MachineBuffer,
    tensor: &Tensor,
    start: usize,
) -> Result<Tensor, flow_autograd::Error> {
    let part = memory.part(start..start + bytes_of(tensor));
    let layout = GradLayout::of(tensor);
    let place = flow_autograd::tensor_from_memory(part, &layout.memory_shape(), tensor.kind())?;
    Ok(layout.in_own_order(&place))
}
