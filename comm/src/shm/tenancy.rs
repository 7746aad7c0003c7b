//! Who uses which region of the arena, and when the memory of a process that has ended is free.
//!
//! A process that is killed leaves its region as it was. Others may have mapped parts of it: control
//! blocks, machine buffers. Its pages go back to the system when none of them uses a join that it was
//! in. A newcomer may have taken the region over before: it allocates behind what was there.
//!
//! What a rank has itself allocated for all of them is free when all others have left the join, or have
//! ended.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use super::arena::{Arena, Block};
use super::join_memory::{JoinMemory, LocalRank};
use crate::liveness::has_ended;

/// A rank's use of the memory that it shares with the ranks of a join on its node.
pub struct Tenancy {
    pub memory: JoinMemory,
    /// This rank's number among those of the node.
    index: usize,
    /// The ranks of the node.
    tenants: Arc<[Tenant]>,
    /// This rank's blocks that others may use until they leave.
    blocks: Mutex<Vec<Block>>,
}

/// A rank of the node.
struct Tenant {
    /// The number of its region.
    region: usize,
    /// The offset at which its memory begins.
    base: usize,
    pid: u32,
}

impl Tenancy {
    /// Begins the use, once all ranks of the node have attached; `regions` are theirs. `block` is that
    /// of the join's memory, in the rank that has made it.
    pub fn new(memory: JoinMemory, index: usize, regions: &[usize], block: Option<Block>) -> Self {
        memory.arena.free_retired();
        let mut tenants = Vec::with_capacity(regions.len());
        for (local, &region) in regions.iter().enumerate() {
            let pid = memory.local(local).pid.load(Ordering::Acquire);
            let base = memory.arena.base(region);
            memory.arena.hold(base, 1);
            tenants.push(Tenant { region, base, pid });
        }
        let blocks = Mutex::new(block.into_iter().collect());
        Self { memory, index, tenants: tenants.into(), blocks }
    }

    /// Returns the region of the rank with this index among those of the node.
    pub fn region(&self, index: usize) -> usize {
        self.tenants[index].region
    }

    /// Keeps a block of this rank until no other rank can use it.
    pub fn retire(&self, block: Block) {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).push(block);
    }
}

impl Drop for Tenancy {
    fn drop(&mut self) {
        let memory = &self.memory;
        memory.local(self.index).left.store(1, Ordering::SeqCst);
        let own = std::process::id();
        for tenant in self.tenants.iter() {
            memory.arena.hold(tenant.base, -1);
            if tenant.pid != own && has_ended(tenant.pid) {
                memory.arena.free_ended(tenant.region, tenant.base);
            }
        }
        let blocks = self.blocks.get_mut().unwrap_or_else(PoisonError::into_inner);
        let offset = memory.offset;
        let tenants = Arc::clone(&self.tenants);
        memory
            .arena
            .retire(std::mem::take(blocks), move |arena| has_ended_for(arena, offset, &tenants));
        memory.arena.free_retired();
    }
}

/// Whether all ranks have left the join whose memory is there, or have ended. Once that memory is used
/// for something else they have, whatever is read there.
fn has_ended_for(arena: &Arena, offset: usize, tenants: &[Tenant]) -> bool {
    tenants.iter().enumerate().all(|(index, tenant)| {
        LocalRank::of(arena, offset, index).left.load(Ordering::SeqCst) != 0
            || tenant.pid != std::process::id() && has_ended(tenant.pid)
    })
}
