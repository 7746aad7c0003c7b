//! All sharded modules of a model: when they are gathered, and their gradients reduced.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_comm::ProcessGroup;
use flow_tensor::ArenaAllocatorGuard;

use super::events::Events;
use super::flat::FlatParameters;
use super::place::Place;
use super::unit::{Reduction, Unit};
use crate::error::{Error, Result};

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
pub(super) struct Progress {
    units: Vec<Arc<Unit>>,
    /// Modules in the order of the last forward, by number.
    order: Vec<usize>,
    /// Those of the model's forward under way, if one is.
    running: Option<Vec<usize>>,
    /// Gradients on their way.
    reducing: VecDeque<(Arc<Unit>, Vec<Reduction>)>,
    pub events: Events,
    /// Where the optimizer's parameters are.
    pub places: Vec<Place>,
}

/// Has the other ranks know that this one has panicked.
pub(super) struct FailOnPanic<'a>(pub &'a Units);

impl Drop for FailOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("it has panicked in a sharded module");
        }
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

    /// Begins the forward of the model. `is_trained`: a backward may follow.
    pub fn begin_forward(&self, is_trained: bool) -> Result<()> {
        let has_gradients =
            !self.lock().reducing.is_empty() || self.all().iter().any(|unit| unit.has_gradients());
        if is_trained && has_gradients && !self.has_optimizer.load(Ordering::Relaxed) {
            let reason = "the gradients of the last backward were not used: make the optimizer by \
                          FullySharded::optimizer, as one of the VarStore finds none; without an \
                          optimizer call FullySharded::zero_grad";
            return Err(Error::fully_shard(&self.gathers, reason));
        }
        self.lock().running = Some(Vec::new());
        Ok(())
    }

    /// Ends the forward of the model, in whose order the next one gathers.
    pub fn end_forward(&self) {
        let progress = &mut *self.lock();
        if let Some(running) = progress.running.take() {
            progress.order = running;
        }
    }

    /// Gathers a module's parameters for its forward, and begins to gather those of the next ones. Returns
    /// its place in the model's forward, if it is a part of that.
    pub fn gather_for_forward(&self, unit: &Unit) -> Result<Option<usize>> {
        let mut place = None;
        let mut next = Vec::new();
        {
            let progress = &mut *self.lock();
            if let Some(running) = &mut progress.running {
                let at = running.len();
                running.push(unit.number);
                place = Some(at);
                if progress.order.get(at) == Some(&unit.number) {
                    next = progress.order[at + 1..].to_vec();
                }
            }
        }
        self.gather(unit, &next)?;
        Ok(place)
    }

    /// Gathers a module's parameters for its backward, and begins to gather those of the modules before.
    /// `place`: its place in the model's forward.
    pub fn gather_for_backward(&self, unit: &Unit, place: Option<usize>) -> Result<()> {
        let mut next = Vec::new();
        if let Some(place) = place {
            let order = &self.lock().order;
            if order.get(place) == Some(&unit.number) {
                // The backward of the whole model comes to the last module next.
                let before = if unit.is_root { &order[1..] } else { &order[..place] };
                next = before.iter().rev().copied().collect();
            }
        }
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
            self.lock().events.gathered(unit);
        }
        Ok(())
    }

    /// Takes a module's parameters from it after its forward. `has_backward`: a backward may follow.
    pub fn end_module(&self, unit: &Unit, has_backward: bool) -> Result<()> {
        if has_backward && !unit.reshard_after_forward {
            return unit.withdraw(&self.gathers);
        }
        unit.reshard(&self.gathers)
    }

    /// Takes the gradients of a module whose backward is over, frees its parameters, and starts to reduce
    /// the gradients unless they are accumulated.
    pub fn end_backward(&self, unit: &Arc<Unit>) -> Result<()> {
        unit.check_gradients(&self.gathers, true)?;
        unit.take_gradients(&self.gathers)?;
        unit.reshard(&self.gathers)?;
        if self.is_unsynchronized() {
            return Ok(());
        }
        self.reduce(unit)
    }

    /// Starts to reduce the gradients of a module.
    fn reduce(&self, unit: &Arc<Unit>) -> Result<()> {
        self.finish_reductions(REDUCED_AT_ONCE - 1)?;
        let reductions = unit.start_reduce(&self.reductions)?;
        let progress = &mut *self.lock();
        progress.events.reduced(unit, &reductions);
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
                unit.finish_reduce(&self.reductions, reduction)?;
            }
        }
    }

    /// Waits for all gradients that are on their way.
    pub fn synchronize(&self) -> Result<()> {
        self.finish_reductions(0)
    }

    /// Reduces what is left of gradients that were accumulated, of modules that the last backward has left
    /// out, and waits for all gradients. All ranks call this.
    pub fn finish_gradients(&self) -> Result<()> {
        let units = self.all();
        for unit in &units {
            unit.check_gradients(&self.gathers, false)?;
        }
        for unit in units.iter().filter(|unit| unit.has_unreduced()) {
            if self.is_unsynchronized() {
                let reason = "gradients are accumulated under no_sync: drop its guard before the last \
                              backward of a step";
                return Err(Error::fully_shard(&self.gathers, reason));
            }
            self.reduce(unit)?;
        }
        self.finish_reductions(0)
    }

    /// Frees all parameters. All ranks call this.
    pub fn free(&self) -> Result<()> {
        self.all().iter().try_for_each(|unit| unit.reshard(&self.gathers))
    }

    /// Gathers the parameters of some modules while `run` runs. All ranks call this.
    pub fn with<T>(
        &self,
        units: &[Arc<Unit>],
        run: impl FnOnce(&[Arc<Unit>]) -> Result<T>,
    ) -> Result<T> {
        self.free()?;
        for unit in units {
            unit.start_gather(&self.gathers)?;
            unit.finish_gather(&self.gathers)?;
        }
        let result = {
            let _fails = FailOnPanic(self);
            run(units)
        };
        self.free()?;
        result
    }

    /// Drops all gradients.
    pub fn clear_gradients(&self) -> Result<(), flow_autograd::Error> {
        // Ranks still need what this one sends.
        self.lock().reducing.clear();
        for unit in self.all() {
            unit.lock().flats.iter_mut().try_for_each(FlatParameters::clear_gradients)?;
        }
        Ok(())
    }

    /// Notes that an optimizer takes the gradients.
    pub fn set_has_optimizer(&self) {
        self.has_optimizer.store(true, Ordering::Relaxed);
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

    fn is_unsynchronized(&self) -> bool {
        self.unsynchronized.load(Ordering::Relaxed) > 0
    }

    /// Has a failure of this rank reach the others.
    pub fn fail(&self, cause: &str) {
        self.gathers.abort(cause);
        self.reductions.abort(cause);
    }

    pub fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
