//! Groups that change: the members that are left, and newcomers, agree on who goes on, without a new
//! process.
//!
//! The agreement goes through the store. Each epoch has its own keys:
//!
//! | key | value |
//! |---|---|
//! | `epoch/N/begun` | a member of the epoch before reconfigures |
//! | `epoch/N/present/SEAT` | this member of the epoch before is there |
//! | `epoch/N/lost/SEAT` | a rank has seen that it has ended |
//! | `epoch/N/membership` | the members: the first such list counts |
//! | `newcomer/I` | a process that wants to join; null when it has given up |
//!
//! A member proposes the next members when each of those before is present or has ended. Then all of
//! them join as a program's ranks do at its start (`bootstrap`). If one ends meanwhile, they go on to
//! the next epoch.

mod agreement;
mod changes;
mod decision;
mod membership;
mod process_runtime;
mod runtime;
#[cfg(test)]
mod simulation;

use std::sync::Arc;
use std::time::Duration;

use crate::bootstrap::lineage::{Lineage, Members, Seat};
use crate::env::Membership;
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::settings;
use crate::world::World;
use agreement::{Agreement, system};
use membership::{OPERATION, own_process};
use process_runtime::ProcessRuntime;

impl ProcessGroup {
    /// Makes a group of those ranks of this one that are left, and of processes that have come
    /// since: see [`ProcessGroup::join_running`]. The ranks keep their order; a newcomer that was
    /// started for a rank that has ended has its place. All ranks that live call this, whether the
    /// group has failed or not. Collectives that are under way in it, or in groups made from it, end
    /// with an error, and nothing of them arrives later. No thread of the program is in `send` or
    /// `recv` meanwhile. Sub-groups, meshes and the use of GPUs are made anew from the new group, as
    /// a newcomer does.
    ///
    /// Waits for all ranks that live, as long as the group's timeout. If a rank ends meanwhile, the
    /// others go on without it.
    ///
    /// The shared memory stays as it is, so that tensors in it are reduced in place as before. That
    /// of a process that has ended is free when all ranks have dropped the groups that it was in. If
    /// the job has more ranks on a machine than it began with, its groups get other shared memory,
    /// and tensors of before are copied when they are reduced.
    ///
    /// Works for the group of all ranks that [`ProcessGroup::from_env`] or this makes, where the
    /// rendezvous store has survived: flow-launch's does.
    ///
    /// # Errors
    ///
    /// This is a sub-group, or one of threads or over MPI; the store is gone; ranks that live do not
    /// come within the timeout.
    pub fn reconfigure(&self) -> Result<Self> {
        let world = Arc::clone(&self.parts(&OPERATION)?.core.world);
        let lineage = self.check_reconfigurable(&world)?;
        // Those whose operations end now may ask why.
        changes::begin(&world, &lineage)?;
        // Nothing writes to this rank's memory any more once all ranks have come so far.
        world.end_groups("it reconfigures the job");
        let timeout = self.timeout();
        let own = own_process(&lineage, world.seats[world.rank], Some(&world.arena));
        let group_timeout = self.core().timeout();
        let runtime =
            ProcessRuntime::of_member(&world, &lineage, timeout, group_timeout, self.local_rank())?;
        Agreement::new(runtime, lineage, own, timeout).go_on()
    }

    /// Joins a job that runs already, when its ranks call [`ProcessGroup::reconfigure`] next. Where
    /// the rank that had this number has ended, this process takes its place.
    /// [`ProcessGroup::from_env`] does this in a process that flow-launch has started for one that
    /// has ended.
    ///
    /// # Errors
    ///
    /// The rank with this number lives, the job does not take this process in within the timeout, or
    /// there is no store.
    pub fn join_running(membership: &Membership, timeout: Duration) -> Result<Self> {
        let seat = Seat { number: membership.rank, replacement: settings::replacement() };
        let lineage = Lineage {
            membership: membership.clone(),
            launched: settings::has_place(seat.number, membership.world_size),
            prefix: "world/0/".to_owned(),
            members: Members { epoch: 0, processes: vec![], newcomers: 0, refused: vec![] },
        };
        if !membership.rendezvous.outlives_ranks() {
            let reason = "the job has no store that survives its ranks: start it with flow-launch";
            return Err(system(seat.number, reason.into()));
        }
        let own = own_process(&lineage, seat, None);
        let runtime = ProcessRuntime::of_newcomer(&lineage, seat, timeout)?;
        Agreement::new(runtime, lineage, own, timeout).join_running()
    }

    /// Returns how many processes wait to join: call [`ProcessGroup::reconfigure`] on all ranks to
    /// take them in.
    ///
    /// # Errors
    ///
    /// As those of `reconfigure`.
    pub fn newcomers(&self) -> Result<usize> {
        let world = &self.parts(&"newcomers")?.core.world;
        let lineage = self.check_reconfigurable(world)?;
        changes::count_newcomers(world, &lineage)
    }

    /// Returns whether the ranks change: another one has called [`ProcessGroup::reconfigure`], one has
    /// ended, or an operation of this rank has failed because of another one. A rank that takes no part in what the others do learns it by this. Each rank may call it, and
    /// no other one needs to.
    ///
    /// # Errors
    ///
    /// As those of `reconfigure`.
    pub fn is_changing(&self) -> Result<bool> {
        let world = &self.parts(&"is_changing")?.core.world;
        let lineage = self.check_reconfigurable(world)?;
        changes::have_begun(world, &lineage)
    }

    /// Returns whether the job can [`reconfigure`](Self::reconfigure) this group: it is the group of all
    /// ranks, and the job has a store that survives them.
    pub fn can_reconfigure(&self) -> bool {
        self.parts(&OPERATION)
            .is_ok_and(|parts| self.check_reconfigurable(&parts.core.world).is_ok())
    }

    /// Returns how many times the ranks had changed when this group, or the one that it was made from, was made: 0 until
    /// the first [`reconfigure`](Self::reconfigure).
    pub fn epoch(&self) -> u64 {
        let Ok(parts) = self.parts(&OPERATION) else { return 0 };
        parts.core.world.lineage.as_ref().map_or(0, |lineage| lineage.members.epoch)
    }

    /// Returns whether this process has come to a job that ran already: it was no member of the group
    /// before this one.
    pub fn is_newcomer(&self) -> bool {
        let Ok(parts) = self.parts(&OPERATION) else { return false };
        let world = &parts.core.world;
        let Some(lineage) = &world.lineage else { return false };
        let own = lineage.members.processes.get(world.rank);
        lineage.members.epoch > 0 && own.is_some_and(|process| process.memory.is_none())
    }

    fn check_reconfigurable(&self, world: &World) -> Result<Lineage> {
        let reason = match &world.lineage {
            _ if self.world_size() < world.size => {
                "this is a sub-group: reconfigure the group of all ranks, and make it anew"
            }
            Some(lineage) if lineage.membership.rendezvous.outlives_ranks() => {
                return Ok(lineage.clone());
            }
            Some(_) => "the job has no store that survives its ranks: start it with flow-launch",
            None => "the ranks are threads of one process, which end together",
        };
        Err(self.caller().argument(OPERATION, reason.into()))
    }
}
