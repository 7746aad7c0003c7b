//! All sharded modules of a model: when they are gathered, and where an optimizer finds their gradients.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_comm::{ProcessGroup, digest};
use flow_tensor::ArenaAllocatorGuard;
use tch::Tensor;

use super::flat::{FlatParameters, OwnElements, torch};
use super::unit::{Reduction, Unit};
use crate::error::{Error, Result};
use crate::model_check::first_mismatch;
use crate::zero::kept::{KeptGradients, clip_grad_norm};
use crate::zero::partition::Shard;
use crate::zero::sharded_parameter::ShardedParameter;

/// Modules whose gradients are on their way at once.
const REDUCED_AT_ONCE: usize = 2;

/// The sharded modules of a model.
pub(super) struct Units {
    /// Gathers run beside reductions: a group for each.
    gathers: ProcessGroup,
    reductions: ProcessGroup,
    /// Keeps large tensors of the CPU where ranks reach them.
    _allocator: Option<Arc<ArenaAllocatorGuard>>,
    /// Modules whose parameters are gathered before they are needed.
    prefetch: usize,
    progress: Mutex<Progress>,
    /// Guards of `no_sync`.
    unsynchronized: AtomicUsize,
    has_optimizer: AtomicBool,
}

#[derive(Default)]
struct Progress {
    units: Vec<Arc<Unit>>,
    /// Modules in the order of the last forward, by number.
    order: Vec<usize>,
    /// Those of the forward under way.
    running: Vec<usize>,
    /// Gradients on their way.
    reducing: VecDeque<(Arc<Unit>, Vec<Reduction>)>,
    /// What ranks have done together since the last step: it must be the same on all.
    events: Vec<Event>,
    /// The module and the flat parameters that have each parameter of the optimizer.
    places: Vec<Place>,
}

/// Where a parameter is.
#[derive(Clone)]
pub(super) struct Place {
    unit: Arc<Unit>,
    flat: usize,
    slot: usize,
}

#[derive(Clone, Copy, Hash)]
enum Event {
    Gather(usize),
    Reduce(usize),
    /// Many, of which only a digest is left.
    Earlier(u64),
}

/// Events that are remembered one by one.
const EVENTS: usize = 4096;

impl Progress {
    fn note(&mut self, event: Event) {
        if self.events.len() == EVENTS {
            let earlier = Event::Earlier(digest(&self.events));
            self.events = vec![earlier];
        }
        self.events.push(event);
    }
}

impl Units {
    /// Prepares for the modules of a model. All ranks call this.
    pub fn new(group: &ProcessGroup, prefetch: usize) -> Result<Self> {
        let on_cpu = group.cuda_device().is_none();
        let allocator = ArenaAllocatorGuard::current().filter(|_| on_cpu);
        let handle = allocator.as_ref().map(|allocator| allocator.handle());
        let gathers = group.duplicate_in(handle)?;
        let reductions = group.duplicate_in(handle)?;
        let allocator =
            if on_cpu { ArenaAllocatorGuard::install(gathers.arena_handle()) } else { None };
        Ok(Self {
            gathers,
            reductions,
            _allocator: allocator,
            prefetch,
            progress: Mutex::default(),
            unsynchronized: AtomicUsize::new(0),
            has_optimizer: AtomicBool::new(false),
        })
    }

    /// Returns the group in which parameters are gathered.
    pub fn group(&self) -> &ProcessGroup {
        &self.gathers
    }

    /// Adds a module of these parameters.
    pub fn add(
        &self,
        name: &str,
        reshard_after_forward: bool,
        is_root: bool,
        flats: Vec<FlatParameters>,
    ) -> Arc<Unit> {
        let units = &mut self.lock().units;
        let name = name.to_owned();
        let unit = Unit::new(units.len(), name, reshard_after_forward, is_root, flats);
        let unit = Arc::new(unit);
        units.push(Arc::clone(&unit));
        unit
    }

    /// Returns all modules.
    pub fn all(&self) -> Vec<Arc<Unit>> {
        self.lock().units.clone()
    }

    /// Begins the forward of the model.
    pub fn begin_forward(&self) {
        self.lock().running.clear();
    }

    /// Ends the forward of the model, in whose order the next one gathers.
    pub fn end_forward(&self) {
        let progress = &mut *self.lock();
        progress.order = std::mem::take(&mut progress.running);
    }

    /// Gathers a module's parameters for its forward, and begins to gather those of the next ones. Returns
    /// its place in the forward.
    pub fn gather_for_forward(&self, unit: &Unit) -> Result<usize> {
        let (place, next) = {
            let progress = &mut *self.lock();
            let place = progress.running.len();
            progress.running.push(unit.number);
            let is_known = progress.order.get(place) == Some(&unit.number);
            let next: Vec<usize> = progress.order.iter().skip(place + 1).copied().collect();
            (place, if is_known { next } else { Vec::new() })
        };
        self.gather(unit, &next)?;
        Ok(place)
    }

    /// Gathers a module's parameters for its backward, and begins to gather those of the modules before.
    /// `place`: its place in the forward.
    pub fn gather_for_backward(&self, unit: &Unit, place: usize) -> Result<()> {
        let order = self.lock().order.clone();
        let is_known = order.get(place) == Some(&unit.number);
        let before = if is_known { &order[..place] } else { &[] };
        // The backward of the whole model comes to the last module next.
        let next = if is_known && unit.is_root { &order[1..] } else { before };
        let next: Vec<usize> = next.iter().rev().copied().collect();
        self.gather(unit, &next)
    }

    /// Gathers a module's parameters, and begins to gather those of the first of `next`.
    fn gather(&self, unit: &Unit, next: &[usize]) -> Result<()> {
        self.start_gather(unit)?;
        unit.finish_gather(&self.gathers)?;
        for &number in next.iter().take(self.prefetch) {
            let next = Arc::clone(&self.lock().units[number]);
            self.start_gather(&next)?;
        }
        Ok(())
    }

    fn start_gather(&self, unit: &Unit) -> Result<()> {
        if unit.start_gather(&self.gathers)? {
            self.lock().note(Event::Gather(unit.number));
        }
        Ok(())
    }

    /// Frees a module's parameters after its forward.
    pub fn end_module(&self, unit: &Unit, keeps: bool) -> Result<()> {
        if keeps && !unit.reshard_after_forward { Ok(()) } else { unit.reshard(&self.gathers) }
    }

    /// Takes the gradients of a module whose backward is over, frees its parameters, and starts to reduce
    /// the gradients unless they are accumulated.
    pub fn end_backward(&self, unit: &Arc<Unit>) -> Result<()> {
        if unit.has_gradients() && !self.has_optimizer.load(Ordering::Relaxed) {
            let reason = "the gradients of the last backward were not used: make the optimizer by \
                          FullySharded::optimizer, as one of the VarStore finds none; without an \
                          optimizer call FullySharded::zero_grad";
            return Err(Error::fsdp(&self.reductions, reason.to_owned()));
        }
        unit.take_gradients().map_err(|error| torch(&self.reductions, error))?;
        unit.reshard(&self.gathers)?;
        if self.unsynchronized.load(Ordering::Relaxed) > 0 {
            return Ok(());
        }
        self.finish_reductions(REDUCED_AT_ONCE - 1)?;
        let reductions = unit.start_reduce(&self.reductions)?;
        let progress = &mut *self.lock();
        progress.note(Event::Reduce(unit.number));
        progress.reducing.push_back((Arc::clone(unit), reductions));
        Ok(())
    }

    /// Waits for gradients until those of only so many modules are on their way.
    fn finish_reductions(&self, left: usize) -> Result<()> {
        loop {
            let next = {
                let reducing = &mut self.lock().reducing;
                if reducing.len() > left { reducing.pop_front() } else { None }
            };
            let Some((unit, reductions)) = next else { return Ok(()) };
            for reduction in reductions {
                unit.finish_reduce(reduction)?;
            }
        }
    }

    /// Waits for all that is on its way, and frees all parameters.
    pub fn finish(&self) -> Result<()> {
        self.finish_reductions(0)?;
        self.all().iter().try_for_each(|unit| unit.reshard(&self.gathers))
    }

    /// Gathers the parameters of some modules while `run` runs. All ranks call this.
    pub fn with<T>(
        &self,
        units: &[Arc<Unit>],
        run: impl FnOnce(&[Arc<Unit>]) -> Result<T>,
    ) -> Result<T> {
        self.finish()?;
        for unit in units {
            unit.start_gather(&self.gathers)?;
            unit.finish_gather(&self.gathers)?;
        }
        let result = run(units);
        self.finish()?;
        result
    }

    /// Accumulates gradients without reducing them, until [`end_unsynchronized`](Self::end_unsynchronized)
    /// is called as often.
    pub fn begin_unsynchronized(&self) {
        self.unsynchronized.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends what [`begin_unsynchronized`](Self::begin_unsynchronized) began.
    pub fn end_unsynchronized(&self) {
        self.unsynchronized.fetch_sub(1, Ordering::Relaxed);
    }

    /// Has a failure of this rank reach the others.
    pub fn fail(&self, cause: &str) {
        self.gathers.abort(cause);
        self.reductions.abort(cause);
    }

    fn place(&self, place: usize) -> Place {
        self.lock().places[place].clone()
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Returns the ranks that have elements of the parameter.
    fn shards(&self, ranks: usize) -> Vec<Shard> {
        let mut shards = Vec::new();
        let state = self.unit.lock();
        for rank in 0..ranks {
            if let Some(elements) = state.flats[self.flat].elements_on(self.slot, rank) {
                shards.push(Shard { rank, elements });
            }
        }
        shards
    }

    /// Returns this rank's elements of the parameter, and of its gradient if it has one.
    fn own(&self) -> Option<(Tensor, Option<Tensor>)> {
        self.unit.lock().flats[self.flat].own(self.slot)
    }

    /// Returns this rank's elements of the parameter.
    pub fn own_elements(&self) -> Option<OwnElements> {
        let state = self.unit.lock();
        state.flats[self.flat].own_elements(self.slot)
    }

    fn is_there(&self) -> bool {
        self.unit.lock().flats[self.flat].is_there(self.slot)
    }
}

/// Finds a parameter.
pub(super) fn find(units: &[Arc<Unit>], parameter: &Tensor) -> Option<Place> {
    for unit in units {
        for (flat, parameters) in unit.lock().flats.iter().enumerate() {
            if let Some(slot) = parameters.slot_of(parameter) {
                return Some(Place { unit: Arc::clone(unit), flat, slot });
            }
        }
    }
    None
}

impl KeptGradients for Units {
    /// All: each has a chunk of each module.
    fn sharers(&self, group: &ProcessGroup, _: usize) -> Vec<usize> {
        (0..group.world_size()).collect()
    }

    fn part(&self, parameters: &mut [ShardedParameter]) -> Result<(), String> {
        let units = self.all();
        let mut places = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            let Some(place) = find(&units, &parameter.tensor) else {
                return Err(format!(
                    "{} has come to the VarStore since the model was wrapped: make it before",
                    parameter.name
                ));
            };
            parameter.shards = place.shards(self.gathers.world_size());
            places.push(place);
        }
        self.lock().places = places;
        self.has_optimizer.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn own_part(
        &self,
        parameter: &ShardedParameter,
        place: usize,
        _: &Range<usize>,
    ) -> Result<Tensor, String> {
        let own = self.place(place).own();
        own.map(|(part, _)| part).ok_or_else(|| format!("{} has no part here", parameter.name))
    }

    fn memory(&self, place: usize) -> Option<Tensor> {
        self.place(place).own().and_then(|(_, gradient)| gradient)
    }

    fn is_there(&self, place: usize) -> bool {
        self.place(place).is_there()
    }

    fn parts(&self) -> Result<Vec<Tensor>> {
        self.finish()?;
        let mut parts = Vec::new();
        let places = self.lock().places.clone();
        for place in places.iter().filter(|place| place.is_there()) {
            let Some((part, gradient)) = place.own() else { continue };
            let part = part.detach();
            let set = flow_autograd::set_grad(&part, gradient.as_ref());
            set.map_err(|error| torch(&self.reductions, error))?;
            parts.push(part);
        }
        Ok(parts)
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn begin_step(&self, group: &ProcessGroup) -> Result<()> {
        self.finish()?;
        let events = std::mem::take(&mut self.lock().events);
        let events: Vec<String> = events.iter().map(|event| self.describe(*event)).collect();
        match first_mismatch(group, &events)? {
            Some(difference) => Err(Error::fsdp(
                group,
                format!(
                    "ranks have gone through different modules since the last step: {difference}; let \
                     all ranks run the same forwards and backwards"
                ),
            )),
            None => Ok(()),
        }
    }

    fn has_stepped(&self) {}

    fn end_step(&self, _: &ProcessGroup) -> Result<()> {
        Ok(())
    }

    fn clip_grad_norm(&self, group: &ProcessGroup, max: f64) -> Result<f64> {
        let gradients = self.parts()?.iter().map(Tensor::grad).collect();
        let all: Vec<usize> = (0..group.world_size()).collect();
        clip_grad_norm(group, &all, gradients, max)
    }

    fn clear(&self) -> Result<(), flow_autograd::Error> {
        // Ranks still need what this one sends.
        self.lock().reducing.clear();
        for unit in self.all() {
            unit.lock().flats.iter_mut().for_each(FlatParameters::clear_gradients);
        }
        Ok(())
    }

    fn abort(&self, cause: &str) {
        self.fail(cause);
    }
}

impl Units {
    fn describe(&self, event: Event) -> String {
        let progress = self.lock();
        match event {
            Event::Earlier(digest) => format!("gone through many modules, digest {digest:x}"),
            Event::Gather(unit) => format!("gathered the module of {}", progress.units[unit].name),
            Event::Reduce(unit) => {
                format!("reduced the gradients of the module of {}", progress.units[unit].name)
            }
        }
    }
}
