//! What the agreement needs of the process that it runs in.

use std::time::Instant;

use crate::bootstrap::JoinError;
use crate::bootstrap::lineage::{Lineage, Members, Process};
use crate::bootstrap::system::System;
use crate::stall::Stall;

/// A process of the job: a real one, or one of a simulation.
pub trait Runtime {
    type System: System;
    /// What members have when they have met.
    type Group;

    fn system(&self) -> &Self::System;

    /// Begins a wait that is reported when it becomes long, if somebody listens.
    fn begin_wait(&self) -> Option<Stall<'_>>;

    /// Meets the members, of which this process is one, and returns the group of all when all have it.
    fn meet(
        &self,
        lineage: &Lineage,
        members: &Members,
        own: &Process,
        deadline: Instant,
    ) -> Result<Self::Group, JoinError>;
}
