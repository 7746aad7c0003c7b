//! What all global tensors of a process group share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use flow_autograd::global::Globals;
use flow_tensor::ProcessGroup;
use rustc_hash::FxHashMap;

use crate::dispatch::{Operations, Plan};
use crate::error::Result;
use crate::groups::Groups;
use crate::placement::Placement;
use crate::random::Generator;
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
    specs: Mutex<HashMap<SpecKey, Weak<Spec>>>,
    plans: Mutex<FxHashMap<Box<[u64]>, Arc<Plan>>>,
    generator: Mutex<Generator>,
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
        let runtime = Arc::new(Self {
            world: group.clone(),
            groups: Groups::new(group),
            globals: Globals::register::<Operations>()?,
            specs: Mutex::default(),
            plans: Mutex::default(),
            generator: Mutex::new(Generator::new(0)),
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
        if let Some(spec) = specs.get(&key).and_then(Weak::upgrade) {
            return spec;
        }
        let spec = Arc::new(Spec::new(placement.clone(), sbp.to_vec()));
        specs.insert(key, Arc::downgrade(&spec));
        spec
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

    /// Where random numbers come from: the same on all ranks.
    pub fn generator(&self) -> MutexGuard<'_, Generator> {
        lock(&self.generator)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
