//! The state that all global tensors of a process group share.

use std::any::Any;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use flow_tensor::{ArenaAllocatorGuard, ProcessGroup};

use crate::groups::Groups;

/// One for each process group that placements were made of.
pub struct Runtime {
    world: ProcessGroup,
    /// Process groups of parts of it.
    pub groups: Groups,
    parts: Parts,
    /// Large tensors are where other ranks can read them.
    _allocator: Option<Arc<ArenaAllocatorGuard>>,
}

impl Runtime {
    /// Returns the runtime of this group, made if it has none.
    pub fn of(group: &ProcessGroup) -> Arc<Self> {
        static RUNTIMES: Mutex<Vec<Weak<Runtime>>> = Mutex::new(Vec::new());
        let mut runtimes = RUNTIMES.lock().unwrap_or_else(PoisonError::into_inner);
        runtimes.retain(|runtime| runtime.strong_count() > 0);
        // Dropped after the lock, should this be the last handle.
        let all: Vec<Arc<Self>> = runtimes.iter().filter_map(Weak::upgrade).collect();
        if let Some(runtime) = all.iter().find(|runtime| runtime.world == *group) {
            drop(runtimes);
            return runtime.clone();
        }
        // Threads have one allocator, and a GPU its own.
        let is_shared =
            group.world_size() > 1 && !group.is_in_process() && group.cuda_device().is_none();
        let runtime = Arc::new(Self {
            world: group.clone(),
            groups: Groups::new(group),
            parts: Parts::default(),
            _allocator: is_shared
                .then(|| ArenaAllocatorGuard::install(group.arena_handle()))
                .flatten(),
        });
        runtimes.push(Arc::downgrade(&runtime));
        drop(runtimes);
        runtime
    }

    /// Returns the group of all ranks.
    pub fn world(&self) -> &ProcessGroup {
        &self.world
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// Returns the value of this type that the group keeps, made when first asked for: caches, the
    /// generator of random numbers, buckets.
    pub fn part<T: Default + Send + Sync + 'static>(&self) -> &T {
        self.parts.find()
    }
}

/// Values of different types: a list that only grows, and is read without a lock.
#[derive(Default)]
struct Parts(OnceLock<(Box<dyn Any + Send + Sync>, Box<Parts>)>);

impl Parts {
    fn find<T: Default + Send + Sync + 'static>(&self) -> &T {
        let mut parts = self;
        loop {
            let (part, rest) = parts.0.get_or_init(|| (Box::<T>::default(), Box::default()));
            match part.downcast_ref() {
                Some(part) => return part,
                None => parts = rest,
            }
        }
    }
}
