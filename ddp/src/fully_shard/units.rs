//! All sharded modules of a model: when they are gathered, and their gradients reduced.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_comm::{Mesh, ProcessGroup};
use flow_tensor::ArenaAllocatorGuard;

use super::events::Events;
use super::flat::{FlatParameters, Precision};
use super::options::ShardOptions;
use super::place::Place;
use super::unit::{Reduction, Unit};
use crate::error::{Error, Result};

/// Modules whose gradients are on their way at once.
const REDUCED_AT_ONCE: usize = 2;

/// The sharded modules of a model.
pub(super) struct Units {
    /// All ranks of the model.
    group: ProcessGroup,
    /// The ranks that have a replica of the model together. Gathers run beside reductions: a group for
    /// each.
    gathers: ProcessGroup,
    reductions: ProcessGroup,
    /// The ranks that have the same part of each replica, if there are several replicas.
    across: Option<ProcessGroup>,
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
    reducing: VecDeque<Reducing>,
    pub events: Events,
    /// Where the optimizer's parameters are.
    pub places: Vec<Place>,
}

/// Gradients of a module on their way.
struct Reducing {
    unit: Arc<Unit>,
    reductions: Vec<Reduction>,
    /// They are averaged over replicas, if there are several.
    is_across: bool,
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
    /// Prepares for the modules of a model, which ranks have `replicas` times. All ranks call this.
    pub fn new(group: &ProcessGroup, prefetch: usize, replicas: usize) -> Result<Self> {
        let ranks = group.world_size();
        if replicas == 0 || !ranks.is_multiple_of(replicas) {
            let reason = format!(
                "{ranks} ranks cannot have {replicas} replicas of the model: choose a divisor of their number"
            );
            return Err(Error::fully_shard(group, reason));
        }
        let on_cpu = group.cuda_device().is_none();
        let allocator = ArenaAllocatorGuard::current().filter(|_| on_cpu);
        let handle = allocator.as_ref().map(|allocator| allocator.handle());
        let group = group.duplicate_in(handle)?;
        let allocator =
            if on_cpu { ArenaAllocatorGuard::install(group.arena_handle()) } else { None };
        let mut gathers = group.clone();
        let mut across = None;
        if replicas > 1 {
            let all: Vec<usize> = (0..ranks).collect();
            let mesh = Mesh::new(&group, &all, &[replicas, ranks / replicas])?;
            gathers = mesh.group(1)?.clone();
            across = Some(mesh.group(0)?.clone());
        }
        let reductions = gathers.duplicate()?;
        Ok(Self {
            group,
            gathers,
            reductions,
            across,
            _allocator: allocator,
            prefetch,
            progress: Mutex::default(),
            unsynchronized: AtomicUsize::new(0),
            has_optimizer: AtomicBool::new(false),
        })
    }

    /// Returns the group of all ranks of the model.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the group of the ranks that part a replica of the model.
    pub fn replica(&self) -> &ProcessGroup {
        &self.gathers
    }

    /// Returns the ranks that part a replica with `rank`.
    pub fn ranks_of_replica(&self, rank: usize) -> Range<usize> {
        let ranks = self.gathers.world_size();
        let first = rank - rank % ranks;
        first..first + ranks
    }

    /// Adds a module of these parameters.
    pub fn add(
        &self,
        name: &str,
        options: ShardOptions,
        is_root: bool,
        flats: Vec<FlatParameters>,
    ) -> Arc<Unit> {
        let units = &mut self.lock().units;
        let name = name.to_owned();
        let unit = Unit::new(units.len(), name, options, is_root, flats);
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
            return Err(Error::fully_shard(&self.group, reason));
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
        unit.finish_gather(&self.gathers, Precision::OfModule)?;
        for &number in next.iter().take(self.prefetch) {
            let next = Arc::clone(&self.lock().units[number]);
            self.start_gather(&next)?;
        }
        Ok(())
    }

    fn start_gather(&self, unit: &Unit) -> Result<()> {
        if unit.start_gather(&self.gathers, Precision::OfModule)? {
            self.lock().events.gathered(unit);
        }
        Ok(())
    }

    /// Takes a module's parameters from it after its forward. `has_backward`: a backward may follow.
    pub fn end_module(&self, unit: &Unit, has_backward: bool) -> Result<()> {
        if has_backward && !unit.options.reshard_after_forward {
            return unit.withdraw(&self.gathers);
        }
        unit.reshard(&self.gathers)
    }

    /// Takes the gradients of a module whose backward is over, frees its parameters, and starts to reduce
    /// the gradients unless they are accumulated.
    pub fn end_backward(&self, unit: &Arc<Unit>) -> Result<()> {
        unit.check_gradients(&self.group, true)?;
        unit.take_gradients(&self.group, self.is_unsynchronized())?;
        unit.reshard(&self.gathers)?;
        if self.is_unsynchronized() {
            return Ok(());
        }
        self.reduce(unit)
    }

    /// Starts to reduce the gradients of a module.
    fn reduce(&self, unit: &Arc<Unit>) -> Result<()> {
        self.finish_reductions(REDUCED_AT_ONCE - 1)?;
        // Those of the module before are averaged over replicas meanwhile.
        let before = self.lock().reducing.pop_back();
        if let Some(before) = before {
            let before = self.start_across(before)?;
            self.lock().reducing.push_back(before);
        }
        let reductions = unit.start_reduce(&self.reductions)?;
        let progress = &mut *self.lock();
        progress.events.reduced(unit, &reductions);
        progress.reducing.push_back(Reducing {
            unit: Arc::clone(unit),
            reductions,
            is_across: self.across.is_none(),
        });
        Ok(())
    }

    /// Starts to average gradients over replicas, if that is to be done yet.
    fn start_across(&self, mut reducing: Reducing) -> Result<Reducing> {
        if let Some(across) = self.across.as_ref().filter(|_| !reducing.is_across) {
            for reduction in std::mem::take(&mut reducing.reductions) {
                reducing.reductions.push(reducing.unit.start_average(across, reduction)?);
            }
            reducing.is_across = true;
        }
        Ok(reducing)
    }

    /// Waits for gradients until those of only so many modules are on their way.
    fn finish_reductions(&self, left: usize) -> Result<()> {
        loop {
            let next = {
                let reducing = &mut self.lock().reducing;
                if reducing.len() > left { reducing.pop_front() } else { None }
            };
            let Some(next) = next else { return Ok(()) };
            let Reducing { unit, reductions, .. } = self.start_across(next)?;
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
            unit.check_gradients(&self.group, false)?;
        }
        for unit in units.iter().filter(|unit| unit.has_unreduced()) {
            if self.is_unsynchronized() {
                let reason = "gradients are accumulated under no_sync: drop its guard before the last \
                              backward of a step";
                return Err(Error::fully_shard(&self.group, reason));
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
            unit.start_gather(&self.gathers, Precision::Full)?;
            unit.finish_gather(&self.gathers, Precision::Full)?;
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
        let reducing = std::mem::take(&mut self.lock().reducing);
        for reducing in reducing {
            self.start_across(reducing).map_err(|error| flow_autograd::Error::Libtorch {
                operation: "zero_grad",
                reason: error.to_string(),
            })?;
        }
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
        self.group.abort(cause);
        self.gathers.abort(cause);
        self.reductions.abort(cause);
        self.across.iter().for_each(|across| across.abort(cause));
    }

    pub fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
