//! Parameters in half precision, for the operations of a forward and its backward. The model keeps
//! them in single precision: whatever runs between forwards finds these.
//!
//! On the CPU a machine has one copy. Each of its ranks casts a part of each parameter, in a forward
//! that all ranks run together. No rank is in another forward or backward then, and none reads the
//! copy before all have cast. Where ranks do not meet, a rank takes the copy if its parameters are
//! still what was cast, and casts them for itself otherwise.

use std::sync::{Mutex, PoisonError};

use flow_autograd::{Forward, Replacements, custom_function, grad_enabled};
use flow_comm::{ForkSafe, MachineBuffer, ProcessGroup, ReduceOp};
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::grad_layout::GradLayout;

/// Each parameter is compared with other ranks' casts in one of so many forwards.
const CHECKED_EVERY: usize = 16;

/// The parameters of a model in half precision.
pub(crate) struct LowPrecision {
    group: ProcessGroup,
    kind: Kind,
    /// All parameters of the model, in single precision.
    parameters: Vec<(String, Tensor)>,
    /// None on GPUs, whose ranks share no memory, and where ranks have parameters of their own.
    copy: Option<ForkSafe<Mutex<MachineCopy>>>,
}

/// The copy that the ranks of a machine have in common.
struct MachineCopy {
    casts: Vec<Cast>,
    /// How often all ranks have come to cast.
    count: usize,
}

/// A parameter's place in the copy.
struct Cast {
    tensor: Tensor,
    /// The same memory in one dimension.
    flat: Tensor,
    layout: GradLayout,
    /// How often the tensor has been changed, as far as ranks know.
    version: i64,
}

impl LowPrecision {
    /// Makes the copy of these parameters, without their values. `are_equal`: those of all ranks. All
    /// ranks call this.
    pub fn new(
        group: &ProcessGroup,
        kind: Kind,
        parameters: Vec<(String, Tensor)>,
        are_equal: bool,
    ) -> Result<Self> {
        let element = kind.elt_size_in_bytes();
        let mut copy = None;
        if are_equal && group.cuda_device().is_none() {
            let bytes = parameters.iter().map(|(_, tensor)| tensor.numel() * element).sum();
            let memory = group.alloc_on_machine(bytes)?;
            let casts = places(&memory, kind, &parameters);
            let casts = casts.map_err(|error| torch(group, error))?;
            copy = Some(ForkSafe::new(Mutex::new(MachineCopy { casts, count: 0 })));
        }
        Ok(Self { group: group.clone(), kind, parameters, copy })
    }

    /// Returns the input of a forward: a floating-point one in half precision.
    pub fn input(&self, input: &Tensor) -> Tensor {
        if input.is_floating_point() { input.to_kind(self.kind) } else { input.shallow_clone() }
    }

    /// Casts the parameters that have changed, for all ranks of the machine. All ranks call this, none of
    /// them in a forward or backward.
    pub fn cast_together(&self) -> Result<()> {
        let Some(copy) = &self.copy else { return Ok(()) };
        let mut copy = copy.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = copy.casts.iter().position(Cast::is_written) {
            return Err(self.error(format!(
                "the copy of {} in half precision was changed in place, which all ranks of the machine \
                 read: change the parameter itself, between forwards",
                self.parameters[index].0
            )));
        }
        let rank = self.group.local_index();
        let ranks = self.group.local_world_size();
        let mut pairs = self.parameters.iter().zip(&copy.casts);
        let is_changed = pairs.any(|((_, tensor), cast)| !cast.is_of(tensor, rank, ranks));
        let mut changed = [u8::from(is_changed)];
        // From here on no rank reads the copy.
        self.group.all_reduce(&mut changed, ReduceOp::Max)?;
        if changed[0] != 0 {
            for ((_, tensor), cast) in self.parameters.iter().zip(&mut copy.casts) {
                cast.write(tensor, rank, ranks);
            }
            self.group.barrier_on_machine()?;
        }
        copy.count += 1;
        self.check_equal(&copy)
    }

    /// Compares some of the parameters, others each time, with what other ranks have cast.
    fn check_equal(&self, copy: &MachineCopy) -> Result<()> {
        for (index, ((name, tensor), cast)) in self.parameters.iter().zip(&copy.casts).enumerate() {
            if (index + copy.count).is_multiple_of(CHECKED_EVERY) && !cast.is_of(tensor, 0, 1) {
                return Err(self.error(format!(
                    "{name} is not the same on all ranks of this machine: take the same steps on all \
                     ranks, and load the same checkpoint"
                )));
            }
        }
        Ok(())
    }

    /// Returns what operations of a forward take in place of the parameters. `is_cast`: all ranks have just
    /// cast them.
    pub fn replacements(&self, is_cast: bool) -> Result<Replacements> {
        let replaced = self.copies(is_cast).and_then(|copies| {
            let pairs: Vec<(&Tensor, &Tensor)> =
                self.parameters.iter().map(|(_, tensor)| tensor).zip(&copies).collect();
            Replacements::new(&pairs)
        });
        replaced.map_err(|error| torch(&self.group, error))
    }

    /// Returns the parameters in half precision, connected with them: their gradients become gradients in
    /// single precision.
    fn copies(&self, is_cast: bool) -> Result<Vec<Tensor>, flow_autograd::Error> {
        let copy = self.copy.as_ref().filter(|copy| copy.is_ours());
        let copy = copy.map(|copy| copy.lock().unwrap_or_else(PoisonError::into_inner));
        let copy = copy.filter(|copy| {
            let mut pairs = self.parameters.iter().zip(&copy.casts);
            is_cast || pairs.all(|((_, tensor), cast)| cast.is_of(tensor, 0, 1))
        });
        let mut copies = Vec::with_capacity(self.parameters.len());
        for (index, (_, tensor)) in self.parameters.iter().enumerate() {
            let low = match &copy {
                Some(copy) => copy.casts[index].tensor.detach(),
                None => tensor.detach().to_kind(self.kind),
            };
            copies.push(if grad_enabled() && tensor.requires_grad() {
                connected(tensor, low)?
            } else {
                low
            });
        }
        Ok(copies)
    }

    fn error(&self, reason: String) -> Error {
        Error::model(&self.group, reason)
    }
}

fn torch(group: &ProcessGroup, error: flow_autograd::Error) -> Error {
    Error::torch(group, "mixed_precision", error)
}

/// Returns `low` as what a cast of the parameter has computed.
fn connected(parameter: &Tensor, low: Tensor) -> Result<Tensor, flow_autograd::Error> {
    let kind = parameter.kind();
    let outputs = custom_function(
        &[parameter],
        |_| Ok(Forward { outputs: vec![low], saved: Vec::new() }),
        move |_, gradients| Ok(vec![gradients[0].as_ref().map(|gradient| gradient.to_kind(kind))]),
    );
    Ok(outputs?.swap_remove(0))
}

/// Returns the place of each parameter in the memory.
fn places(
    memory: &MachineBuffer,
    kind: Kind,
    parameters: &[(String, Tensor)],
) -> Result<Vec<Cast>, flow_autograd::Error> {
    let mut start = 0;
    let mut casts = Vec::with_capacity(parameters.len());
    for (_, tensor) in parameters {
        let layout = GradLayout::of(tensor);
        let end = start + tensor.numel() * kind.elt_size_in_bytes();
        let part = memory.part(start..end);
        let place = flow_autograd::tensor_from_memory(part, &layout.memory_shape(), kind)?;
        let tensor = layout.in_own_order(&place);
        let flat = place.view([-1]);
        casts.push(Cast { version: flat.internal_version(), tensor, flat, layout });
        start = end;
    }
    Ok(casts)
}

impl Cast {
    /// Returns the part of a tensor in one dimension that one of so many ranks casts.
    fn part(flat: &Tensor, rank: usize, ranks: usize) -> Tensor {
        let length = flat.numel();
        let start = length * rank / ranks;
        let end = length * (rank + 1) / ranks;
        flat.narrow(0, start as i64, (end - start) as i64)
    }

    fn part_of(&self, parameter: &Tensor, rank: usize, ranks: usize) -> Tensor {
        let flat = self.layout.in_memory_order(&parameter.detach()).reshape([-1]);
        Self::part(&flat, rank, ranks)
    }

    /// Returns whether a rank's part is a cast of what the parameter is now, bit for bit.
    fn is_of(&self, parameter: &Tensor, rank: usize, ranks: usize) -> bool {
        let bits = |tensor: &Tensor| tensor.view_dtype(Kind::Int16);
        let cast = self.part_of(parameter, rank, ranks).to_kind(self.flat.kind());
        bits(&Self::part(&self.flat, rank, ranks)).equal(&bits(&cast))
    }

    /// Casts a rank's part. Graphs that need what was there before find out in backward.
    fn write(&mut self, parameter: &Tensor, rank: usize, ranks: usize) {
        let part = self.part_of(parameter, rank, ranks);
        tch::no_grad(|| Self::part(&self.flat, rank, ranks).copy_(&part));
        self.version = self.flat.internal_version();
    }

    /// Returns whether something else has written into the copy.
    fn is_written(&self) -> bool {
        self.flat.internal_version() != self.version
    }
}
