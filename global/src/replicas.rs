//! Gradients of leaves that are B: partial sums are added up in a Ddp's buckets, while backward still
//! runs.
//!
//! The first backward of a leaf shows on which axes of the placement its gradient is partial. At
//! the end of that the leaves get buckets, one set for each set of axes. From then on the hook of a
//! leaf gives its partial sum to its bucket. The end of backward makes the sum the leaf's `.grad`.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_autograd::BoxError;
use flow_comm::digest;
use flow_ddp::GradReducer;
use rustc_hash::FxHashMap;
use tch::Tensor;

use crate::boxing::plan::groups;
use crate::error::Result;
use crate::handle::{boxed, local_of, spec_of, wrap};
use crate::placement::Placement;
use crate::runtime::Runtime;
use crate::sbp::{B, NdSbp, P};
use crate::sequence::{self, AgreedOperation};
use crate::spec::Spec;

/// Leaves of a model that were distributed together, on one placement. (The placement itself, which
/// keeps the runtime and thereby this, comes with each call.)
struct Replicas {
    leaves: Vec<Mutex<Leaf>>,
    state: Mutex<ReplicaState>,
}

/// All that a job has.
#[derive(Default)]
struct Registry {
    all: Mutex<Vec<Arc<Replicas>>>,
    /// Leaves by where their locals are in memory, which the replicas keep.
    leaves: Mutex<FxHashMap<usize, (Arc<Replicas>, usize)>>,
    /// Some leaf has a bucket, or had one.
    has_buckets: AtomicBool,
}

struct Leaf {
    name: String,
    /// Of the leaf's own handle.
    identity: usize,
    /// What this rank has of the leaf, by the leaf's own handle.
    local: Tensor,
    /// A plain leaf with the same memory, whose `.grad` the buckets reduce.
    shadow: Tensor,
}

#[derive(Default)]
struct ReplicaState {
    /// Axes on which gradients were partial, of leaves without a bucket, in the running backward.
    noted: BTreeMap<usize, Vec<usize>>,
    is_noting: bool,
    reducers: Vec<Arc<Reducer>>,
    /// By leaf: the reducer, and the number in it.
    places: HashMap<usize, (usize, usize)>,
}

/// Buckets of the leaves whose gradients are partial on the same axes.
struct Reducer {
    axes: Vec<usize>,
    /// By leaf's number.
    members: Vec<usize>,
    buckets: GradReducer,
    /// Of the running backward: leaves whose gradients have come, by member.
    taken: Mutex<Option<BTreeMap<usize, Tensor>>>,
}

impl Replicas {
    /// For leaves of one placement.
    fn new(leaves: &[(String, Tensor)]) -> Arc<Self> {
        let mut own = Vec::new();
        for (name, tensor) in leaves {
            let local = local_of(tensor).filter(|local| local.numel() > 0);
            let Some(local) = local else { continue };
            let shadow = local.detach().set_requires_grad(true);
            let identity = flow_autograd::identity(tensor);
            own.push(Mutex::new(Leaf { name: name.clone(), identity, local, shadow }));
        }
        Arc::new(Self { leaves: own, state: Mutex::default() })
    }

    /// Returns where the leaves' locals are in memory: no two are at one place.
    fn addresses(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        (0..self.leaves.len()).map(|index| (self.leaf(index).local.data_ptr() as usize, index))
    }

    /// Returns whether nobody has the leaves any more.
    fn are_gone(&self) -> bool {
        (0..self.leaves.len()).all(|at| flow_autograd::use_count(&self.leaf(at).local) == 1)
    }

    fn leaf(&self, index: usize) -> MutexGuard<'_, Leaf> {
        self.leaves[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shadow(&self, index: usize) -> Tensor {
        self.leaf(index).shadow.shallow_clone()
    }

    fn state(&self) -> MutexGuard<'_, ReplicaState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a gradient, if the leaf has a bucket.
    fn take(
        self: &Arc<Self>,
        index: usize,
        leaf: &Tensor,
        gradient: &Tensor,
        exclusive: bool,
    ) -> std::result::Result<bool, BoxError> {
        let own = spec_of(leaf)?;
        let now = spec_of(gradient)?;
        if own.placement() != now.placement() {
            return Ok(false);
        }
        let mut state = self.state();
        let Some(&(reducer, member)) = state.places.get(&index) else {
            let pairs = own.sbp().iter().zip(now.sbp()).enumerate();
            let axes = pairs.filter(|&(_, (&own, &now))| own == B && now == P);
            let axes: Vec<usize> = axes.map(|(axis, _)| axis).collect();
            if !axes.is_empty() {
                state.noted.insert(index, axes);
                if !std::mem::replace(&mut state.is_noting, true) {
                    let noting = Noting(Arc::clone(self));
                    drop(state);
                    flow_autograd::at_end_of_backward(move || {
                        Ok(noting.0.make_buckets(own.placement())?)
                    })?;
                }
            }
            return Ok(false);
        };
        let reducer = Arc::clone(&state.reducers[reducer]);
        drop(state);
        let mut terms: NdSbp = own.sbp().to_vec();
        reducer.axes.iter().for_each(|&axis| terms[axis] = P);
        let is_term = terms == now.sbp();
        let spec = Spec::of(own.placement(), &terms)?;
        let term = tch::no_grad(|| boxed(gradient, &spec))?;
        let Some(term) = local_of(&term) else { return Ok(false) };
        // Memory that others use is copied by the bucket, and stays as it is.
        let is_own = exclusive || !is_term;
        flow_autograd::set_grad(&self.shadow(index), is_own.then_some(&term))?;
        let is_first = reducer.note_taken(member, leaf);
        if is_first {
            let replicas = Arc::clone(self);
            let own = Arc::clone(&reducer);
            flow_autograd::at_end_of_backward(move || replicas.add_missing(&own))?;
        }
        if let Err(error) = reducer.buckets.mark_ready(member, &term, is_own) {
            *reducer.taken() = None;
            return Err(error);
        }
        if is_first {
            let end = EndOfBackward { replicas: Arc::clone(self), reducer };
            flow_autograd::at_end_of_backward(move || Ok(end.give()?))?;
        }
        Ok(true)
    }

    /// Leaves of a reducer that got no gradient in this backward take part with zeros.
    fn add_missing(&self, reducer: &Reducer) -> std::result::Result<(), BoxError> {
        let taken: Vec<usize> = match &*reducer.taken() {
            Some(taken) => taken.keys().copied().collect(),
            None => return Ok(()),
        };
        for (member, &leaf) in reducer.members.iter().enumerate() {
            if !taken.contains(&member) {
                let shadow = self.shadow(leaf);
                let zeros = tch::no_grad(|| shadow.zeros_like());
                flow_autograd::set_grad(&shadow, Some(&zeros))?;
                reducer.buckets.mark_ready(member, &zeros, true)?;
            }
        }
        Ok(())
    }

    /// Makes buckets for the leaves whose gradients were partial.
    fn make_buckets(&self, placement: &Placement) -> Result<()> {
        let noted = std::mem::take(&mut self.state().noted);
        let mut by_axes = BTreeMap::<Vec<usize>, Vec<usize>>::new();
        for (leaf, axes) in noted {
            by_axes.entry(axes).or_default().push(leaf);
        }
        let runtime = placement.runtime()?;
        let Some(position) = placement.position(runtime.rank()) else { return Ok(()) };
        for (axes, members) in by_axes {
            let all = groups(placement, &axes);
            let Some(group) = all.iter().find(|group| group.contains(&position)) else { continue };
            if group.len() < 2 {
                continue;
            }
            let ranks: Vec<usize> = group.iter().map(|&at| placement.ranks()[at]).collect();
            let group = runtime.groups.group(&ranks)?;
            let names: Vec<_> = members.iter().map(|&leaf| self.leaf(leaf).name.clone()).collect();
            let text = format!("buckets for the gradients of {}", names.join(", "));
            let operation = AgreedOperation::new(placement, ("buckets", &axes, names), text, false);
            sequence::note(&runtime.groups, &operation);
            let mut parameters = Vec::new();
            for &leaf in &members {
                let leaf = self.leaf(leaf);
                parameters.push((leaf.name.clone(), leaf.shadow.shallow_clone()));
            }
            let buckets = GradReducer::new(&group, parameters).map_err(|error| {
                let of = digest(placement);
                let group = Some((&group, &ranks[..]));
                sequence::explained(error.into(), &runtime.groups, group, of)
            })?;
            let mut state = self.state();
            let number = state.reducers.len();
            for (member, &leaf) in members.iter().enumerate() {
                state.places.insert(leaf, (number, member));
            }
            let taken = Mutex::default();
            state.reducers.push(Arc::new(Reducer { axes, members, buckets, taken }));
            runtime.part::<Registry>().has_buckets.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Reducer {
    fn taken(&self) -> MutexGuard<'_, Option<BTreeMap<usize, Tensor>>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether this is the first gradient of the backward.
    fn note_taken(&self, member: usize, leaf: &Tensor) -> bool {
        let mut taken = self.taken();
        let is_first = taken.is_none();
        taken.get_or_insert_default().insert(member, leaf.shallow_clone());
        is_first
    }
}

/// Runs at the end of the backward that shows which gradients are partial, however it ends.
struct Noting(Arc<Replicas>);

impl Drop for Noting {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_noting = false;
        state.noted.clear();
    }
}

/// Runs at the end of a backward, however it ends.
struct EndOfBackward {
    replicas: Arc<Replicas>,
    reducer: Arc<Reducer>,
}

impl EndOfBackward {
    /// Gives the leaves the sums.
    fn give(self) -> Result<()> {
        let taken = self.reducer.taken().take();
        for (member, leaf) in taken.into_iter().flatten() {
            let shadow = self.replicas.shadow(self.reducer.members[member]);
            let sum = shadow.grad();
            flow_autograd::set_grad(&shadow, None)?;
            // The next backward uses the buckets' memory again.
            let sum = if self.reducer.buckets.grads_are_views() { sum.copy() } else { sum };
            let gradient = wrap(Some(&sum), &sum, spec_of(&leaf)?, &leaf.size())?;
            let before = leaf.grad();
            let gradient =
                if before.defined() { tch::no_grad(|| before.f_add(&gradient))? } else { gradient };
            flow_autograd::set_grad(&leaf, Some(&gradient))?;
        }
        Ok(())
    }
}

impl Drop for EndOfBackward {
    fn drop(&mut self) {
        *self.reducer.taken() = None;
    }
}

/// Reduces the gradients of these leaves in buckets from now on.
pub(crate) fn add(runtime: &Runtime, leaves: &[(String, Tensor)]) {
    let replicas = Replicas::new(leaves);
    let registry = runtime.part::<Registry>();
    let mut all = registry.all.lock().unwrap_or_else(PoisonError::into_inner);
    let new: Vec<usize> = replicas.addresses().map(|(address, _)| address).collect();
    // Models that are gone, or are distributed anew.
    all.retain(|old| !old.are_gone() && old.addresses().any(|(at, _)| !new.contains(&at)));
    all.push(replicas);
    let mut leaves = registry.leaves.lock().unwrap_or_else(PoisonError::into_inner);
    leaves.clear();
    for replicas in &*all {
        let addresses = replicas.addresses();
        leaves.extend(addresses.map(|(at, index)| (at, (Arc::clone(replicas), index))));
    }
}

/// Forgets models whose leaves are gone, or have other memory.
pub(crate) fn drop_gone(runtime: &Runtime) {
    let registry = runtime.part::<Registry>();
    let mut all = registry.all.lock().unwrap_or_else(PoisonError::into_inner);
    let mut leaves = registry.leaves.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|replicas| !replicas.are_gone());
    leaves.retain(|_, (replicas, _)| !replicas.are_gone());
}

/// Returns whether a leaf may have a bucket.
pub(crate) fn has_buckets(runtime: &Runtime) -> bool {
    runtime.part::<Registry>().has_buckets.load(Ordering::Relaxed)
}

/// Returns the leaf whose local is here.
fn find(runtime: &Runtime, address: usize) -> Option<(Arc<Replicas>, usize)> {
    let leaves = &runtime.part::<Registry>().leaves;
    leaves.lock().unwrap_or_else(PoisonError::into_inner).get(&address).cloned()
}

/// Returns the leaf, if it is one of a model that was distributed.
fn known(leaf: &Tensor) -> Result<Option<(Arc<Replicas>, usize)>> {
    let spec = spec_of(leaf)?;
    let Some(local) = local_of(leaf).filter(|local| local.numel() > 0) else { return Ok(None) };
    let found = find(spec.placement().runtime()?, local.data_ptr() as usize);
    Ok(found.filter(|(replicas, index)| {
        replicas.leaf(*index).identity == flow_autograd::identity(leaf)
    }))
}

/// Returns whether the leaf is one of a model that was distributed.
pub(crate) fn is_known(leaf: &Tensor) -> Result<bool> {
    Ok(known(leaf)?.is_some())
}

/// Takes the gradient of a leaf, if that has a bucket.
pub(crate) fn take(
    leaf: &Tensor,
    gradient: &Tensor,
    exclusive: bool,
) -> std::result::Result<bool, BoxError> {
    match known(leaf)? {
        Some((replicas, index)) => replicas.take(index, leaf, gradient, exclusive),
        None => Ok(false),
    }
}
