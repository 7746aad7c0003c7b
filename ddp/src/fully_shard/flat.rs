//! Parameters in one piece of memory, of which each rank keeps a chunk.

use std::ops::Range;

use flow_autograd::{Error, TransientMemory, bump_version, data_ptr, identity, set_grad};
use flow_comm::ProcessGroup;
use flow_tensor::{TensorCollectives, Work};
use tch::{TchError, Tensor};

/// Elements of which none but a parameter's last ones are parted: see `zero/partition.rs`.
const ALIGNMENT: usize = 64;

/// Parameters of one kind, all of which require gradients or none does: PyTorch's `FlatParameter`. Between
/// [`free`](Self::free) and [`start_gather`](Self::start_gather) they have shapes, but no memory.
pub(super) struct FlatParameters {
    pub slots: Vec<Slot>,
    /// Whether the parameters required gradients when they were sharded.
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
    pub name: String,
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
    /// Lays out parameters of one kind and device for the ranks of `group`, and copies them into the
    /// memory. [`take_over`](Self::take_over) then makes them rank 0's. `module` is how errors name their
    /// module.
    pub fn new(
        group: &ProcessGroup,
        module: &str,
        parameters: Vec<(String, Tensor)>,
        is_trained: bool,
    ) -> Result<Self, Error> {
        let kind = parameters[0].1.kind();
        let device = parameters[0].1.device();
        let mut slots = Vec::with_capacity(parameters.len());
        let mut end = 0;
        for (name, tensor) in parameters {
            let elements = tensor.numel();
            let start = end;
            slots.push(Slot { name, tensor, start, elements, has_come: false, is_there: false });
            // One without elements has a place, too.
            end += elements.max(1).next_multiple_of(ALIGNMENT);
        }
        let ranks = group.world_size();
        let chunk = end.div_ceil(ranks).next_multiple_of(ALIGNMENT);
        let text = format!(
            "a parameter of the module of {module}, which is sharded, has no memory outside of its \
             forward and backward: call forward_t of what FullyShard has made, or use it in \
             with_full_parameters"
        );
        let gradients = if is_trained { chunk as i64 } else { 0 };
        let flat = Self {
            slots,
            is_trained,
            memory: TransientMemory::new(kind, device, chunk * ranks, &text)?,
            chunk,
            rank: group.rank(),
            shard: Tensor::f_empty([chunk as i64], (kind, device)).map_err(libtorch)?,
            gradient: Tensor::f_zeros([gradients], (kind, device)).map_err(libtorch)?,
            unreduced: None,
        };
        flat.memory.allocate()?;
        tch::no_grad(|| flat.fill()).map_err(libtorch)?;
        Ok(flat)
    }

    /// Copies the parameters into the memory, which is there.
    fn fill(&self) -> Result<(), TchError> {
        let _ = self.whole().f_zero_()?;
        for Slot { tensor, start, elements, .. } in &self.slots {
            let mut place = self.whole().f_narrow(0, *start as i64, *elements as i64)?;
            place.f_copy_(&tensor.f_reshape([-1])?)?;
        }
        Ok(())
    }

    /// Gives all ranks what rank 0 has in the memory, which is there, and keeps this rank's chunk. All
    /// ranks call this.
    pub fn take_over(&mut self, group: &ProcessGroup) -> crate::error::Result<()> {
        group.broadcast_tensor(&mut self.whole(), 0)?;
        let kept = self.keep_chunk();
        kept.map_err(|error| crate::error::Error::fully_shard(group, error))
    }

    fn keep_chunk(&mut self) -> Result<(), Error> {
        let start = (self.rank * self.chunk) as i64;
        let own = self.whole().f_narrow(0, start, self.chunk as i64).map_err(libtorch)?;
        tch::no_grad(|| self.shard.f_copy_(&own)).map_err(libtorch)?;
        self.bump_versions()
    }

    /// Has backwards of graphs with other values of the parameters fail.
    fn bump_versions(&self) -> Result<(), Error> {
        self.slots.iter().try_for_each(|slot| bump_version(&slot.tensor))
    }

    /// Allocates the memory, and starts to gather all chunks in it.
    pub fn start_gather(&self, group: &ProcessGroup) -> crate::error::Result<Work> {
        let allocated = self.memory.allocate();
        allocated.map_err(|error| crate::error::Error::fully_shard(group, error))?;
        Ok(group.all_gather_into_tensor_async(self.whole(), &self.shard)?)
    }

    /// Has the parameters lie in the memory, which is there.
    pub fn place(&self) -> Result<(), Error> {
        self.slots.iter().try_for_each(|slot| self.memory.place(&slot.tensor, slot.start))
    }

    /// Takes the memory from the parameters, which stays.
    pub fn withdraw(&self) -> Result<(), Error> {
        self.slots.iter().try_for_each(|slot| self.memory.withdraw(&slot.tensor, slot.start))
    }

    /// Takes the memory from the parameters, and frees it.
    pub fn free(&self) -> Result<(), Error> {
        self.withdraw()?;
        self.memory.free();
        Ok(())
    }

    /// Returns whether a tensor lies in the memory, which is there.
    pub fn has_memory_of(&self, tensor: &Tensor) -> bool {
        let memory = self.memory.tensor();
        let start = data_ptr(memory).addr();
        let bytes = memory.numel() * memory.kind().elt_size_in_bytes();
        tensor.numel() > 0 && (start..start + bytes).contains(&data_ptr(tensor).addr())
    }

    /// Checks that no parameter has a gradient of its own. `taken` says whether the backward of the
    /// module is over. The error says whence such a gradient comes.
    pub fn check_gradients(&self, taken: bool) -> Result<(), String> {
        for slot in self.slots.iter().filter(|slot| slot.tensor.grad().defined()) {
            let name = &slot.name;
            if !taken {
                return Err(format!(
                    "{name} has got a gradient outside of its module's backward: a loss may depend on the \
                     module by its output only"
                ));
            }
            if !self.is_trained {
                return Err(format!(
                    "{name} was frozen when its module was made, and requires gradients now: freeze it \
                     after FullyShard::module, if it is to be trained later"
                ));
            }
        }
        Ok(())
    }

    /// Moves the parameters' gradients to the unreduced ones.
    pub fn take_gradients(&mut self) -> Result<(), Error> {
        let mut gradients = Vec::with_capacity(2 * self.slots.len() + 1);
        let mut end = 0;
        for slot in &mut self.slots {
            let gradient = slot.tensor.grad();
            if !gradient.defined() {
                continue;
            }
            slot.has_come = true;
            set_grad(&slot.tensor, None)?;
            gradients.push(zeros(&self.shard, slot.start - end)?);
            gradients.push(flattened(&gradient).map_err(libtorch)?);
            end = slot.start + slot.elements;
        }
        if gradients.is_empty() && self.unreduced.is_some() {
            return Ok(());
        }
        gradients.push(zeros(&self.shard, self.memory.tensor().numel() - end)?);
        let all = tch::no_grad(|| Tensor::f_cat(&gradients, 0)).map_err(libtorch)?;
        match &mut self.unreduced {
            Some(before) => tch::no_grad(|| before.f_add_(&all).map(drop)).map_err(libtorch)?,
            None => self.unreduced = Some(all),
        }
        Ok(())
    }

    /// Returns whether gradients wait to be reduced.
    pub fn has_unreduced(&self) -> bool {
        self.unreduced.is_some()
    }

    /// Takes the unreduced gradients, each rank's chunk in a row, and which parameters have some: ranks
    /// must agree on that.
    pub fn take_unreduced(&mut self) -> Result<Option<(Tensor, Vec<bool>)>, Error> {
        let Some(gradients) = self.unreduced.take() else { return Ok(None) };
        let mut have_come = Vec::with_capacity(self.slots.len());
        for slot in &mut self.slots {
            have_come.push(std::mem::take(&mut slot.has_come));
        }
        let gradients = gradients.f_view([-1, self.chunk as i64]).map_err(libtorch)?;
        Ok(Some((gradients, have_come)))
    }

    /// Adds this rank's chunk of gradients that are reduced. `have_come`: of which parameters.
    pub fn add(&mut self, reduced: &Tensor, have_come: &[bool]) -> Result<(), Error> {
        tch::no_grad(|| {
            if self.has_gradients() {
                self.gradient.f_add_(reduced).map(drop)
            } else {
                self.gradient.f_copy_(reduced)
            }
        })
        .map_err(libtorch)?;
        for (slot, &has_come) in self.slots.iter_mut().zip(have_come) {
            slot.is_there |= has_come;
        }
        Ok(())
    }

    /// Drops all gradients.
    pub fn clear_gradients(&mut self) -> Result<(), Error> {
        self.unreduced = None;
        for slot in &mut self.slots {
            slot.has_come = false;
            slot.is_there = false;
            set_grad(&slot.tensor, None)?;
        }
        Ok(())
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
}

/// Returns so many zeros like a tensor's elements.
fn zeros(like: &Tensor, elements: usize) -> Result<Tensor, Error> {
    Tensor::f_zeros([elements as i64], (like.kind(), like.device())).map_err(libtorch)
}

/// Returns a gradient in one dimension, dense.
fn flattened(gradient: &Tensor) -> Result<Tensor, TchError> {
    if gradient.is_sparse() {
        return gradient.f_to_dense(None, false)?.f_reshape([-1]);
    }
    gradient.f_reshape([-1])
}

/// Makes an error of tch's.
fn libtorch(error: TchError) -> Error {
    Error::Libtorch { operation: "FullyShard", reason: error.to_string() }
}
