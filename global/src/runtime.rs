//! What all global tensors of a process group share.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use flow_autograd::global::Globals;
use flow_tensor::{ArenaAllocatorGuard, ProcessGroup};
use rustc_hash::FxHashMap;

use crate::boxing::execute::Boxing;
use crate::boxing::plan::Layout;
use crate::dispatch::{Operations, Plan};
use crate::error::Result;
use crate::groups::Groups;
use crate::placement::Placement;
use crate::random::Generator;
use crate::replicas::Replicas;
use crate::sbp::{NdSbp, Sbp};
use crate::spec::Spec;

/// More plans than this are forgotten: arguments that differ at each step make new ones.
const MAX_PLANS: usize = 1 << 16;

/// A placement's ranks, its shape, the names of its axes; and SBPs.
type SpecKey = (Vec<usize>, Vec<usize>, Vec<String>, NdSbp);

/// One for each process group that placements were made of.
pub struct Runtime {
    world: ProcessGroup,
    /// Process groups of parts of it.
    pub groups: Groups,
    /// Makes global tensors.
    pub globals: Globals<Spec>,
    /// By what they say, with numbers that stay: plans know specs by them.
    specs: Mutex<HashMap<SpecKey, (u64, Weak<Spec>)>>,
    plans: Mutex<FxHashMap<Box<[u64]>, Arc<Plan>>>,
    boxings: Mutex<FxHashMap<Box<[u64]>, Arc<Boxing>>>,
    generator: Mutex<Generator>,
    /// Large tensors are where other ranks can read them.
    _allocator: Option<Arc<ArenaAllocatorGuard>>,
    replicas: Mutex<Vec<Arc<Replicas>>>,
    /// Leaves by where their locals are in memory, which the replicas keep.
    leaves: Mutex<FxHashMap<usize, (Arc<Replicas>, usize)>>,
}

impl Runtime {
    /// The one of this group, made if it has none.
    pub fn of(group: &ProcessGroup) -> Result<Arc<Self>> {
        static RUNTIMES: Mutex<Vec<Weak<Runtime>>> = Mutex::new(Vec::new());
        let mut runtimes = lock(&RUNTIMES);
        runtimes.retain(|runtime| runtime.strong_count() > 0);
        // Dropped after the lock, should this be the last handle.
        let all: Vec<Arc<Self>> = runtimes.iter().filter_map(Weak::upgrade).collect();
        if let Some(runtime) = all.iter().find(|runtime| runtime.world == *group) {
            return Ok(runtime.clone());
        }
        // Threads have one allocator, and a GPU its own.
        let is_shared =
            group.world_size() > 1 && !group.is_in_process() && group.cuda_device().is_none();
        let runtime = Arc::new(Self {
            world: group.clone(),
            groups: Groups::new(group),
            globals: Globals::register::<Operations>()?,
            specs: Mutex::default(),
            plans: Mutex::default(),
            boxings: Mutex::default(),
            generator: Mutex::new(Generator::new(0)),
            _allocator: is_shared
                .then(|| ArenaAllocatorGuard::install(group.arena_handle()))
                .flatten(),
            replicas: Mutex::default(),
            leaves: Mutex::default(),
        });
        runtimes.push(Arc::downgrade(&runtime));
        drop(runtimes);
        Ok(runtime)
    }

    /// The group of all ranks.
    pub fn world(&self) -> &ProcessGroup {
        &self.world
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// The spec of this placement and SBP.
    pub fn spec(&self, placement: &Placement, sbp: &[Sbp]) -> Arc<Spec> {
        let (ranks, shape) = (placement.ranks().to_vec(), placement.shape().to_vec());
        let key = (ranks, shape, placement.names().to_vec(), sbp.to_vec());
        let mut specs = lock(&self.specs);
        let (id, known) = specs.entry(key).or_insert_with(|| (Spec::next_id(), Weak::new()));
        known.upgrade().unwrap_or_else(|| {
            let spec = Arc::new(Spec::new(*id, placement.clone(), sbp.to_vec()));
            *known = Arc::downgrade(&spec);
            spec
        })
    }

    /// The plan of an operation.
    pub fn plan(&self, key: &[u64]) -> Option<Arc<Plan>> {
        lock(&self.plans).get(key).cloned()
    }

    /// Keeps the plan of an operation.
    pub fn keep_plan(&self, key: &[u64], plan: &Arc<Plan>) {
        let mut plans = lock(&self.plans);
        if plans.len() >= MAX_PLANS {
            plans.clear();
        }
        plans.insert(key.into(), plan.clone());
    }

    /// The boxing of tensors of this shape between two layouts.
    pub fn boxing(&self, shape: &[usize], from: Layout, to: Layout) -> Arc<Boxing> {
        thread_local! {
            static KEY: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
        }
        KEY.with_borrow_mut(|key| {
            key.clear();
            add_numbers(key, shape);
            for Layout { placement, sbp } in [from, to] {
                add_numbers(key, placement.ranks());
                add_numbers(key, placement.shape());
                key.extend(sbp.iter().map(|sbp| match *sbp {
                    Sbp::Split(dim) => dim as u64,
                    Sbp::Broadcast => u64::MAX,
                    Sbp::Partial(op) => u64::MAX - 1 - op as u64,
                }));
            }
            if let Some(boxing) = lock(&self.boxings).get(&key[..]) {
                return boxing.clone();
            }
            let boxing = Arc::new(Boxing::new(self.rank(), shape, from, to));
            let mut boxings = lock(&self.boxings);
            if boxings.len() >= MAX_PLANS {
                boxings.clear();
            }
            boxings.insert(key[..].into(), boxing.clone());
            boxing
        })
    }

    /// Reduces the gradients of these leaves in buckets.
    pub fn add_replicas(&self, replicas: Arc<Replicas>) {
        let mut all = lock(&self.replicas);
        let new: Vec<usize> = replicas.addresses().map(|(address, _)| address).collect();
        // Models that are gone, or are distributed anew.
        all.retain(|old| {
            !old.are_gone() && old.addresses().any(|(address, _)| !new.contains(&address))
        });
        all.push(replicas);
        let mut leaves = lock(&self.leaves);
        leaves.clear();
        for replicas in &*all {
            let addresses = replicas.addresses();
            leaves.extend(addresses.map(|(at, index)| (at, (Arc::clone(replicas), index))));
        }
    }

    /// The leaf whose local is here.
    pub fn replica(&self, address: usize) -> Option<(Arc<Replicas>, usize)> {
        lock(&self.leaves).get(&address).cloned()
    }

    /// Where random numbers come from: the same on all ranks.
    pub fn generator(&self) -> MutexGuard<'_, Generator> {
        lock(&self.generator)
    }
}

/// Appends numbers, and how many there are.
fn add_numbers(key: &mut Vec<u64>, numbers: &[usize]) {
    key.push(numbers.len() as u64);
    key.extend(numbers.iter().map(|&number| number as u64));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
