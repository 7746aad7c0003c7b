//! Who uses which region of the arena, and when the memory of a process that has ended is free.
//!
//! A process that is killed leaves its region as it was. Others may have mapped parts of it: control
//! blocks, machine buffers. When none of them uses the join any more, the pages go back to the
//! system. A newcomer may have taken the region over before: it allocates behind what was there.

use std::sync::atomic::Ordering;

use super::join_memory::JoinMemory;
use crate::liveness::has_ended;

/// A rank's use of the memory that it shares with the ranks of a join on its node. The last one to
/// drop it frees the memory of those that have ended, and the join's own.
pub struct Tenancy {
    pub memory: JoinMemory,
    /// This rank's number among those of the node.
    index: usize,
    /// The ranks of the node.
    tenants: Vec<Tenant>,
}

/// A rank of the node.
pub struct Tenant {
    /// The number of its region.
    pub region: usize,
    /// The offset at which its memory begins.
    base: usize,
    pid: u32,
}

impl Tenancy {
    /// Begins the use, once all ranks of the node have attached; `regions` are theirs.
    pub fn new(memory: JoinMemory, index: usize, regions: &[usize]) -> Self {
        let mut tenants = Vec::with_capacity(regions.len());
        for (local, &region) in regions.iter().enumerate() {
            let pid = memory.local(local).pid.load(Ordering::Acquire);
            tenants.push(Tenant { region, base: memory.arena.base(region), pid });
        }
        Self { memory, index, tenants }
    }

    /// Returns the region of the rank with this index among those of the node.
    pub fn region(&self, index: usize) -> usize {
        self.tenants[index].region
    }
}

impl Drop for Tenancy {
    fn drop(&mut self) {
        let memory = &self.memory;
        memory.local(self.index).left.store(1, Ordering::SeqCst);
        let mut ended = Vec::new();
        for (index, tenant) in self.tenants.iter().enumerate() {
            if memory.local(index).left.load(Ordering::SeqCst) != 0 {
                continue;
            }
            if !has_ended(tenant.pid) {
                return;
            }
            ended.push(tenant);
        }
        for tenant in ended {
            memory.arena.free_region(tenant.region, tenant.base);
        }
        memory.arena.discard(memory.offset, memory.bytes());
    }
}
