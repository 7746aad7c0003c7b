//! Parameters in one piece of memory, of which each rank keeps a chunk.

use std::ops::Range;

use flow_autograd::{TransientMemory, bump_version, data_ptr, identity, set_grad};
use flow_comm::ProcessGroup;
use flow_tensor::{TensorCollectives, Work};
use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// Elements of which none but a parameter's last ones are parted: see `zero/partition.rs`.
const ALIGNMENT: usize = 64;

/// Parameters of one kind, all of which require gradients or none does: PyTorch's `FlatParameter`. Between
/// [`free`](Self::free) and [`start_gather`](Self::start_gather) they have shapes, but no memory.
pub(super) struct FlatParameters {
    pub slots: Vec<Slot>,
    /// Whether the parameters required gradients.
    pub is_trained: bool,
    /// All parameters, one after the other.
    memory: TransientMemory,
    /// Elements that each rank keeps.
    chunk: usize,
    rank: usize,
    /// This rank's chunk of the parameters.
    shard: Tensor,
    /// This rank's chunk of the reduced gradients; empty where none are.
    gradient: Tensor,
    /// Gradients of all elements that are not reduced yet.
    unreduced: Option<Tensor>,
}

/// A parameter, and where it lies.
pub(super) struct Slot {
    pub tensor: Tensor,
    start: usize,
    elements: usize,
    /// Backward on this rank has left a gradient in the unreduced ones.
    has_come: bool,
    /// A reduced gradient is there.
    is_there: bool,
}

/// A parameter's elements on this rank.
pub(crate) struct OwnElements {
    /// The first of them.
    pub start: usize,
    /// The elements, in one dimension.
    pub elements: Tensor,
}

impl FlatParameters {
    /// Takes over parameters of one kind and device, with rank 0's values. All ranks call this.
    pub fn new(
        group: &ProcessGroup,
        module: &str,
        parameters: Vec<(String, Tensor)>,
        is_trained: bool,
    ) -> Result<Self> {
        let kind = parameters[0].1.kind();
        let device = parameters[0].1.device();
        let mut slots = Vec::with_capacity(parameters.len());
        let mut end = 0;
        for (_, tensor) in parameters {
            let elements = tensor.numel();
            slots.push(Slot { tensor, start: end, elements, has_come: false, is_there: false });
            // One without elements has a place, too.
            end += elements.max(1).next_multiple_of(ALIGNMENT);
        }
        let ranks = group.world_size();
        let chunk = end.div_ceil(ranks).next_multiple_of(ALIGNMENT);
        let text = format!(
            "a parameter of the module of {module}, which is sharded, has no memory outside of its \
             forward and backward: use it there, or in with_full_parameters"
        );
        let made = TransientMemory::new(kind, device, chunk * ranks, &text);
        let memory = made.map_err(|error| torch(group, error))?;
        let numbers = if is_trained { chunk as i64 } else { 0 };
        let mut flat = Self {
            slots,
            is_trained,
            memory,
            chunk,
            rank: group.rank(),
            shard: Tensor::empty([chunk as i64], (kind, device)),
            gradient: Tensor::zeros([numbers], (kind, device)),
            unreduced: None,
        };
        flat.take_values(group)?;
        Ok(flat)
    }

    /// Fills the memory with the parameters' values, takes over rank 0's, and frees it.
    fn take_values(&mut self, group: &ProcessGroup) -> Result<()> {
        self.memory.allocate().map_err(|error| torch(group, error))?;
        tch::no_grad(|| {
            let _ = self.whole().zero_();
            for Slot { tensor, start, elements, .. } in &self.slots {
                let mut place = self.whole().narrow(0, *start as i64, *elements as i64);
                place.copy_(&tensor.reshape([-1]));
            }
        });
        self.take_over(group)?;
        self.free().map_err(|error| torch(group, error))
    }

    /// Gives all ranks what rank 0 has in the memory, which is there, and keeps this rank's chunk. All
    /// ranks call this.
    pub fn take_over(&mut self, group: &ProcessGroup) -> Result<()> {
        group.broadcast_tensor(&mut self.whole(), 0)?;
        let own = self.whole().narrow(0, (self.rank * self.chunk) as i64, self.chunk as i64);
        tch::no_grad(|| self.shard.copy_(&own));
        // Graphs of the values before are of no use.
        let bumped = self.slots.iter().try_for_each(|slot| bump_version(&slot.tensor));
        bumped.map_err(|error| torch(group, error))
    }

    /// Allocates the memory, and starts to gather all chunks in it.
    pub fn start_gather(&self, group: &ProcessGroup) -> Result<Work> {
        self.memory.allocate().map_err(|error| torch(group, error))?;
        Ok(group.all_gather_into_tensor_async(self.whole(), &self.shard)?)
    }

    /// Has the parameters lie in the memory, which is there.
    pub fn place(&self) -> Result<(), flow_autograd::Error> {
        self.slots.iter().try_for_each(|slot| self.memory.place(&slot.tensor, slot.start))
    }

    /// Takes the memory from the parameters, and frees it.
    pub fn free(&self) -> Result<(), flow_autograd::Error> {
        for slot in &self.slots {
            self.memory.withdraw(&slot.tensor, slot.start)?;
        }
        self.memory.free();
        Ok(())
    }

    /// Returns whether a tensor lies in the memory, which is there.
    pub fn has_memory_of(&self, tensor: &Tensor) -> bool {
        let start = data_ptr(self.memory.tensor()).addr();
        let bytes = self.memory.tensor().numel() * self.kind().elt_size_in_bytes();
        tensor.numel() > 0 && (start..start + bytes).contains(&data_ptr(tensor).addr())
    }

    /// Moves the parameters' gradients to the unreduced ones.
    pub fn take_gradients(&mut self) -> Result<(), flow_autograd::Error> {
        let mut gradients = Vec::with_capacity(2 * self.slots.len() + 1);
        let mut end = 0;
        for slot in &mut self.slots {
            let gradient = slot.tensor.grad();
            if !gradient.defined() {
                continue;
            }
            slot.has_come = true;
            set_grad(&slot.tensor, None)?;
            let gradient =
                if gradient.is_sparse() { gradient.to_dense(None, false) } else { gradient };
            gradients.extend(zeros(&self.shard, slot.start - end));
            gradients.push(gradient.reshape([-1]));
            end = slot.start + slot.elements;
        }
        gradients.extend(zeros(&self.shard, self.memory.tensor().numel() - end));
        tch::no_grad(|| {
            let all = Tensor::cat(&gradients, 0);
            match &mut self.unreduced {
                Some(before) => drop(before.g_add_(&all)),
                None => self.unreduced = Some(all),
            }
        });
        Ok(())
    }

    /// Returns which parameters have unreduced gradients: ranks must agree on it.
    pub fn have_come(&self) -> Vec<bool> {
        self.slots.iter().map(|slot| slot.has_come).collect()
    }

    /// Takes the unreduced gradients, each rank's chunk in a row.
    pub fn take_unreduced(&mut self) -> Option<Tensor> {
        Some(self.unreduced.take()?.view([-1, self.chunk as i64]))
    }

    /// Adds this rank's chunk of gradients that are reduced. `have_come`: of which parameters.
    pub fn add(&mut self, reduced: &Tensor, have_come: &[bool]) {
        tch::no_grad(|| {
            if self.has_gradients() {
                drop(self.gradient.g_add_(reduced));
            } else {
                self.gradient.copy_(reduced);
            }
        });
        for (slot, &has_come) in self.slots.iter_mut().zip(have_come) {
            slot.is_there |= has_come;
        }
    }

    /// Forgets that the unreduced gradients have come.
    pub fn clear_come(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.has_come = false);
    }

    /// Drops all gradients.
    pub fn clear_gradients(&mut self) {
        self.unreduced = None;
        for slot in &mut self.slots {
            slot.has_come = false;
            slot.is_there = false;
        }
    }

    /// Returns the place of a parameter among the slots.
    pub fn slot_of(&self, parameter: &Tensor) -> Option<usize> {
        self.slots.iter().position(|slot| identity(&slot.tensor) == identity(parameter))
    }

    /// Returns the elements of a parameter that a rank keeps; None if that has none. A parameter without
    /// elements is with one rank, too.
    pub fn elements_on(&self, slot: usize, rank: usize) -> Option<Range<usize>> {
        let Slot { start, elements, .. } = self.slots[slot];
        let chunk = rank * self.chunk..(rank + 1) * self.chunk;
        let from = start.max(chunk.start);
        let to = (start + elements).min(chunk.end);
        let is_here = from < to || (elements == 0 && chunk.contains(&start));
        is_here.then(|| from - start..to - start)
    }

    /// Returns this rank's elements of a parameter, and of its gradient if it has one.
    pub fn own(&self, slot: usize) -> Option<(Tensor, Option<Tensor>)> {
        let elements = self.elements_on(slot, self.rank)?;
        let start = (self.slots[slot].start + elements.start - self.rank * self.chunk) as i64;
        let length = elements.len() as i64;
        let gradient = self.is_trained.then(|| self.gradient.narrow(0, start, length));
        Some((self.shard.narrow(0, start, length), gradient))
    }

    /// Returns this rank's elements of a parameter, with their place.
    pub fn own_elements(&self, slot: usize) -> Option<OwnElements> {
        let start = self.elements_on(slot, self.rank)?.start;
        let (elements, _) = self.own(slot)?;
        Some(OwnElements { start, elements })
    }

    /// Returns whether reduced gradients are there.
    pub fn has_gradients(&self) -> bool {
        self.slots.iter().any(|slot| slot.is_there)
    }

    /// Returns whether a reduced gradient of a parameter is there.
    pub fn is_there(&self, slot: usize) -> bool {
        self.slots[slot].is_there
    }

    fn whole(&self) -> Tensor {
        self.memory.tensor().shallow_clone()
    }

    fn kind(&self) -> Kind {
        self.shard.kind()
    }
}

/// Returns so many zeros like a tensor's elements, if any.
fn zeros(like: &Tensor, elements: usize) -> Option<Tensor> {
    (elements > 0).then(|| Tensor::zeros([elements as i64], (like.kind(), like.device())))
}

/// Makes an error of libtorch.
pub(super) fn torch(group: &ProcessGroup, error: flow_autograd::Error) -> Error {
    Error::torch(group, "FullyShard", error)
}
