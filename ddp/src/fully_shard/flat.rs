//! Parameters in one piece of memory, of which each rank keeps a chunk.

use std::ops::Range;

use flow_autograd::{Error, TransientMemory, bump_version, data_ptr, identity, set_grad};
use flow_comm::ProcessGroup;
use flow_tensor::{TensorCollectives, Work};
use tch::{Kind, TchError, Tensor};

use crate::mixed_precision::MixedPrecision;

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
    /// The same in half precision, if their module computes so.
    low: Option<TransientMemory>,
    /// The kind in which gradients are sent.
    sent_as: Kind,
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
    /// What the module takes in its place, if it computes in half precision.
    pub low: Option<Tensor>,
    start: usize,
    elements: usize,
    /// Backward on this rank has left a gradient in the unreduced ones.
    has_come: bool,
    /// A reduced gradient is there.
    is_there: bool,
}

/// Which values are gathered.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Precision {
    /// Those that the module computes with.
    OfModule,
    /// Those that the optimizer changes.
    Full,
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
        mixed_precision: MixedPrecision,
    ) -> Result<Self, Error> {
        let kind = parameters[0].1.kind();
        let device = parameters[0].1.device();
        let sent_as = mixed_precision.communication().unwrap_or(kind);
        let mut slots = Vec::with_capacity(parameters.len());
        let mut end = 0;
        for (name, tensor) in parameters {
            let elements = tensor.numel();
            let start = end;
            slots.push(Slot {
                name,
                tensor,
                low: None,
                start,
                elements,
                has_come: false,
                is_there: false,
            });
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
        let mut flat = Self {
            slots,
            is_trained,
            memory: TransientMemory::new(kind, device, chunk * ranks, &text)?,
            low: None,
            sent_as,
            chunk,
            rank: group.rank(),
            shard: Tensor::f_empty([chunk as i64], (kind, device)).map_err(libtorch)?,
            gradient: Tensor::f_zeros([gradients], (kind, device)).map_err(libtorch)?,
            unreduced: None,
        };
        if let Some(low) = mixed_precision.param {
            flat.lower(TransientMemory::new(low, device, chunk * ranks, &text)?)?;
        }
        flat.memory.allocate()?;
        tch::no_grad(|| flat.fill()).map_err(libtorch)?;
        Ok(flat)
    }

    /// Has the module compute with parameters in this memory, which are of its kind.
    fn lower(&mut self, memory: TransientMemory) -> Result<(), Error> {
        let kind = memory.tensor().kind();
        for Slot { tensor, low, start, .. } in &mut self.slots {
            let other =
                Tensor::f_empty(tensor.size(), (kind, tensor.device())).map_err(libtorch)?;
            memory.withdraw(&other, *start)?;
            *low = Some(other);
        }
        self.low = Some(memory);
        Ok(())
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
        self.slots.iter().try_for_each(Slot::bump_version)
    }

    /// Allocates the memory of this precision, and starts to gather all chunks in it.
    pub fn start_gather(
        &self,
        group: &ProcessGroup,
        precision: Precision,
    ) -> crate::error::Result<Work> {
        let failed = |error| crate::error::Error::fully_shard(group, error);
        let memory = self.memory_of(precision);
        memory.allocate().map_err(failed)?;
        let whole = memory.tensor().shallow_clone();
        let own = tch::no_grad(|| self.shard.f_to_kind(whole.kind()));
        let own = own.map_err(|error| failed(libtorch(error)))?;
        Ok(group.all_gather_into_tensor_async(whole, &own)?)
    }

    /// Has the parameters lie in the memory of this precision, which is there.
    pub fn place(&self, precision: Precision) -> Result<(), Error> {
        let memory = self.memory_of(precision);
        for slot in &self.slots {
            match &slot.low {
                Some(low) if precision == Precision::OfModule => {
                    memory.place(low, slot.start)?;
                    // Parameters may be frozen at any time.
                    let requires_grad = slot.tensor.requires_grad();
                    let _ = low.f_set_requires_grad(requires_grad).map_err(libtorch)?;
                }
                _ => memory.place(&slot.tensor, slot.start)?,
            }
        }
        Ok(())
    }

    /// Takes the memory from the parameters, which stays.
    pub fn withdraw(&self) -> Result<(), Error> {
        for slot in &self.slots {
            self.memory.withdraw(&slot.tensor, slot.start)?;
            if let (Some(memory), Some(tensor)) = (&self.low, &slot.low) {
                memory.withdraw(tensor, slot.start)?;
            }
        }
        Ok(())
    }

    /// Takes the memory from the parameters, and frees it.
    pub fn free(&self) -> Result<(), Error> {
        self.withdraw()?;
        self.memory.free();
        self.low.iter().for_each(TransientMemory::free);
        Ok(())
    }

    /// Returns whether a tensor is a parameter, or lies in the memory that the module computes with, which is
    /// there.
    pub fn has_memory_of(&self, tensor: &Tensor) -> bool {
        let memory = self.memory_of(Precision::OfModule).tensor();
        let start = data_ptr(memory).addr();
        let bytes = memory.numel() * memory.kind().elt_size_in_bytes();
        if self.slot_of(tensor).is_some() {
            return true;
        }
        tensor.numel() > 0 && (start..start + bytes).contains(&data_ptr(tensor).addr())
    }

    /// Checks that no parameter has a gradient of its own. `taken` says whether the backward of the
    /// module is over. The error says whence such a gradient comes.
    pub fn check_gradients(&self, taken: bool) -> Result<(), String> {
        for slot in self.slots.iter().filter(|slot| slot.has_gradient()) {
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

    /// Moves the parameters' gradients to the unreduced ones. `others_follow`: more will be added to them.
    pub fn take_gradients(&mut self, others_follow: bool) -> Result<(), Error> {
        let memory = self.memory_of(Precision::OfModule).tensor().shallow_clone();
        let mut gradients = Vec::with_capacity(2 * self.slots.len() + 1);
        let mut end = 0;
        for slot in &mut self.slots {
            let gradient = slot.of_module().grad();
            if !gradient.defined() {
                continue;
            }
            slot.has_come = true;
            set_grad(slot.of_module(), None)?;
            gradients.push(zeros(&memory, slot.start - end)?);
            gradients.push(flattened(&gradient).map_err(libtorch)?);
            end = slot.start + slot.elements;
        }
        if gradients.is_empty() && self.unreduced.is_some() {
            return Ok(());
        }
        gradients.push(zeros(&memory, memory.numel() - end)?);
        // Sums in half precision would lose small gradients.
        let kind = if others_follow { self.shard.kind() } else { memory.kind() };
        let all = tch::no_grad(|| Tensor::f_cat(&gradients, 0)?.f_to_kind(kind));
        let all = all.map_err(libtorch)?;
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
        let gradients =
            tch::no_grad(|| gradients.f_to_kind(self.sent_as)?.f_view([-1, self.chunk as i64]));
        let gradients = gradients.map_err(libtorch)?;
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
            set_grad(slot.of_module(), None)?;
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

    fn memory_of(&self, precision: Precision) -> &TransientMemory {
        match (precision, &self.low) {
            (Precision::OfModule, Some(low)) => low,
            _ => &self.memory,
        }
    }
}

impl Slot {
    /// Has backwards of graphs with another value of the parameter fail.
    pub fn bump_version(&self) -> Result<(), Error> {
        bump_version(&self.tensor)?;
        self.low.as_ref().map_or(Ok(()), bump_version)
    }

    /// Returns whether the parameter has a gradient of its own.
    fn has_gradient(&self) -> bool {
        self.tensor.grad().defined() || self.of_module().grad().defined()
    }

    /// Returns what the module computes with.
    fn of_module(&self) -> &Tensor {
        self.low.as_ref().unwrap_or(&self.tensor)
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
