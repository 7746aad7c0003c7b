//! The agreement in a process of a job.

use std::sync::Arc;
use std::time::{Duration, Instant};

use flow_store::Store;

use super::agreement::{store_failed, system};
use super::membership::join_members;
use super::runtime::Runtime;
use crate::bootstrap::JoinError;
use crate::bootstrap::lineage::{Lineage, Members, Process, Seat};
use crate::env::{Membership, Rendezvous};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::interrupt::ends_call;
use crate::shm::arena::Arena;
use crate::stall::{Stall, StallReporter};
use crate::trace::ranks_have_changed;
use crate::world::World;

/// This process with a connection to its job's store.
pub struct ProcessRuntime {
    store: Store,
    /// This process' memory; None of a newcomer.
    arena: Option<Arc<Arena>>,
    /// The timeout of the group to be.
    group_timeout: Duration,
    local_rank: usize,
    waits: Option<StallReporter>,
}

impl ProcessRuntime {
    /// Connects a member of `world` to the store.
    pub fn of_member(
        world: &World,
        lineage: &Lineage,
        timeout: Duration,
        group_timeout: Duration,
        local_rank: usize,
    ) -> Result<Self> {
        Ok(Self {
            store: connect(&lineage.membership, world.seat(), timeout)?,
            arena: Some(Arc::clone(&world.arena)),
            group_timeout,
            local_rank,
            waits: StallReporter::from_env(world.seats[world.rank]).filter(|_| lineage.launched),
        })
    }

    /// Connects a newcomer, and tells flow-launch that it waits to be taken in.
    pub fn of_newcomer(lineage: &Lineage, seat: Seat, timeout: Duration) -> Result<Self> {
        let runtime = Self {
            store: connect(&lineage.membership, seat.number, timeout)?,
            arena: None,
            group_timeout: timeout,
            local_rank: lineage.membership.local_rank,
            waits: StallReporter::from_env(seat).filter(|_| lineage.launched),
        };
        runtime.report_newcomer(true);
        Ok(runtime)
    }

    fn report_newcomer(&self, waits: bool) {
        if let Some(reporter) = &self.waits {
            reporter.newcomer(&self.store, waits);
        }
    }

    /// Returns the group of all ranks, when all have it.
    fn group_of(&self, world: World, deadline: Instant) -> Result<ProcessGroup> {
        world.join_trace();
        let group = ProcessGroup::of_world(Arc::new(world), self.group_timeout, self.local_rank)?;
        // Before the others can go on, and end.
        if self.arena.is_none() {
            self.report_newcomer(false);
        }
        group.with_timeout(deadline.saturating_duration_since(Instant::now())).barrier()?;
        Ok(group)
    }
}

impl Runtime for ProcessRuntime {
    type System = Store;
    type Group = ProcessGroup;

    fn system(&self) -> &Store {
        &self.store
    }

    fn begin_wait(&self) -> Option<Stall<'_>> {
        self.waits.as_ref().map(|waits| waits.begin(&self.store))
    }

    fn meet(
        &self,
        lineage: &Lineage,
        members: &Members,
        own: &Process,
        deadline: Instant,
    ) -> Result<ProcessGroup, JoinError> {
        let world = join_members(lineage, members, own, self.arena.as_ref(), deadline)?;
        let group = self.group_of(world, deadline).map_err(|error| match error {
            Error::Interrupted { .. } => JoinError::Interrupted,
            error => JoinError::Failed(error.to_string()),
        })?;
        // All ranks have come so far: nothing of the groups of before is under way.
        if let Some(arena) = &self.arena {
            arena.lift_quarantine();
        }
        ranks_have_changed();
        Ok(group)
    }
}

fn connect(membership: &Membership, seat: usize, timeout: Duration) -> Result<Store> {
    let Rendezvous::Server { address, token } = &membership.rendezvous else {
        return Err(system(seat, "there is no store".into()));
    };
    Store::connect_unless(ends_call, address, token, timeout)
        .map_err(|error| store_failed(seat, error))
}
