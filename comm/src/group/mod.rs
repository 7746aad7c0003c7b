//! Process groups: the ranks that take part in collectives together.
//!
//! Sub-groups are made in two ways, as neither can do what the other does:
//!
//! - `split` makes them in one collective of all ranks of a group (`new_group`, `split`,
//!   `duplicate`, [`Mesh`]). It takes microseconds, makes many sub-groups at once, and divides
//!   NCCL's communicator. It finds out whether a rank that is in none of them calls something else.
//! - `members` makes one by keys in the store, which its members alone read and write
//!   (`new_group_of`). Other ranks need not call it, threads may make several at once, and it works
//!   where the group itself has failed.

mod agreement;
mod arena_handle;
mod batch;
mod buckets;
pub mod core;
mod cuda;
pub mod host;
mod in_process;
mod lane;
mod machine_memory;
mod member;
mod members;
#[cfg(test)]
mod memory_order;
mod mesh;
mod messages;
mod nccl;
mod new_group_call;
mod order;
mod parts;
mod reports;
mod split;

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use flow_store::fork::Process;

use crate::env::Membership;
use crate::error::{Error, Result};
use crate::label::Label;
use crate::settings;
use crate::world::World;

pub use arena_handle::ArenaHandle;
use cuda::Cuda;
pub use lane::Lane;
use member::MAX_TIMEOUT;
pub use member::Member;
pub use mesh::{Axis, Mesh};
use parts::{NewGroup, Parts};

/// The time that ranks wait for each other unless `FLOW_TIMEOUT` (in seconds) or
/// [`Member::set_timeout`] says otherwise: as long as PyTorch's CPU groups do.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1800);

/// A group of ranks, and this process' place in it. [`Member`] has the methods that say what this
/// process is there; all of them can be called on a group.
///
/// Every rank of a group calls the same collectives in the same order with the same sizes and
/// types; the group checks that they do. Results of reductions are the same bits on all ranks:
/// operands are taken in rank order. An error makes the group unusable on all ranks; sub-groups and
/// the group they came from fail apart.
///
/// Clones are the same group. Dropping the last one waits for asynchronous operations that are
/// still under way.
///
/// A process that is forked from a rank (and is not replaced by another program) is not a member of
/// the rank's groups. All operations on them fail there at once, and dropping them does nothing. It
/// may join as a rank of its own.
#[derive(Clone)]
pub struct ProcessGroup {
    member: Arc<Member>,
    /// A digest of what else all ranks must agree on in collectives on the host.
    digest: u64,
    /// The program's name of operations on the host, if it calls them something else.
    label: Option<Label>,
    /// The time that operations on the host wait, if not as long as the group says.
    timeout: Option<Duration>,
}

/// Clones are equal, and nothing else is.
impl PartialEq for ProcessGroup {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.member, &other.member)
    }
}

impl Eq for ProcessGroup {}

impl Deref for ProcessGroup {
    type Target = Member;

    fn deref(&self) -> &Member {
        &self.member
    }
}

impl ProcessGroup {
    /// Joins the group of all ranks of the job, as the environment says. It reads flow-launch's or
    /// torchrun's variables (RANK, WORLD_SIZE, ...), OpenMPI's, or Slurm's. Without any, it makes a
    /// group of this process alone.
    ///
    /// Waits for all ranks. All ranks must call it equally often (see
    /// [`ProcessGroup::join_named`]). A process that flow-launch has started for one that has ended
    /// joins as [`ProcessGroup::join_running`] does. Errors: a contradiction in the variables, ranks that do not
    /// come.
    pub fn from_env() -> Result<Self> {
        let membership = Membership::from_env()?;
        let timeout = timeout_from_env(membership.rank)?;
        Self::join_or_replace(&membership, timeout)
    }

    /// Joins as [`ProcessGroup::from_env`] does, with the timeout given.
    pub fn from_env_within(timeout: Duration) -> Result<Self> {
        Self::join_or_replace(&Membership::from_env()?, timeout)
    }

    fn join_or_replace(membership: &Membership, timeout: Duration) -> Result<Self> {
        if settings::replacement() > 0 && Process::current().forks() == 0 {
            return Self::replace(membership, timeout);
        }
        Self::join(membership, timeout)
    }

    /// Joins a running job, once.
    fn replace(membership: &Membership, timeout: Duration) -> Result<Self> {
        static HAS_JOINED: AtomicBool = AtomicBool::new(false);
        if HAS_JOINED.swap(true, Ordering::Relaxed) {
            return Err(Error::Argument {
                rank: membership.rank,
                operation: "from_env".into(),
                reason: "a process that was started for another joins its running job once: make \
                         further groups from that of all ranks"
                    .into(),
            });
        }
        Self::join_running(membership, timeout)
    }

    /// Joins the job as [`ProcessGroup::from_env`] does, with the place in it and the timeout
    /// given.
    pub fn join(membership: &Membership, timeout: Duration) -> Result<Self> {
        Self::join_named(membership, "", timeout)
    }

    /// Joins as [`ProcessGroup::join`] does, with those ranks that join under the same name: what
    /// else they have joined, or not, does not matter. Under one name all of them must join equally
    /// often. [`ProcessGroup::join`] is to join without a name, that is under an empty one. Where
    /// MPI gives the rendezvous, all ranks of the job join in the same order, whatever the names.
    ///
    /// Processes that the ranks have forked join apart from these. If each rank forks several, each
    /// set of them, one of each rank, needs a name of its own.
    pub fn join_named(membership: &Membership, name: &str, timeout: Duration) -> Result<Self> {
        let timeout = timeout.min(MAX_TIMEOUT);
        let world = Arc::new(World::join(membership, name, timeout)?);
        world.join_trace();
        Self::of_world(world, timeout, membership.local_rank)
    }

    /// Returns the group of all ranks of a join; `local_rank` is this process' number on its machine.
    pub(crate) fn of_world(
        world: Arc<World>,
        timeout: Duration,
        local_rank: usize,
    ) -> Result<Self> {
        let parts = Parts::new(NewGroup::of_world(world, timeout), "join")?;
        Ok(group_of(parts, local_rank, Cuda::default()))
    }

    /// Returns how long this rank waits for others before the group fails.
    pub fn timeout(&self) -> Duration {
        self.timeout.unwrap_or_else(|| self.core().timeout())
    }

    /// Returns this group for collectives on the host of which all ranks must agree on a digest too:
    /// what they are part of.
    pub fn with_digest(&self, digest: u64) -> Self {
        Self { digest, ..self.clone() }
    }

    /// Returns this group for blocking operations on the host that a program calls something else:
    /// see [`Label`].
    pub fn with_label(&self, label: Label) -> Self {
        Self { label: Some(label), ..self.clone() }
    }

    /// Returns this group with a timeout of its own: operations on the host that are called on this
    /// handle wait so long. Groups made from it start with that.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # let group = flow_comm::ProcessGroup::from_env()?; // alone: a group of one
    /// group.with_timeout(Duration::from_secs(5)).barrier()?;
    /// # Ok::<(), flow_comm::Error>(())
    /// ```
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout.min(MAX_TIMEOUT)), ..self.clone() }
    }

    /// Makes a group of the same ranks with collectives of its own, which do not mix with this
    /// one's.
    pub fn duplicate(&self) -> Result<Self> {
        let all: Vec<usize> = (0..self.world_size()).collect();
        self.new_group(&all)?
            .ok_or_else(|| self.system("duplicate", "this rank is not a member".into()))
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessGroup(rank {} of {}, {:?})", self.rank(), self.world_size(), self.ranks())
    }
}

/// Returns a group that was made of these parts; `local_rank` is this process' number on its
/// machine.
fn group_of(parts: Parts, local_rank: usize, cuda: Cuda) -> ProcessGroup {
    let world = Arc::clone(&parts.core.world);
    let member = Arc::new(Member::new(parts, local_rank, cuda));
    let group: Weak<Member> = Arc::downgrade(&member);
    world.register(group);
    ProcessGroup { member, digest: 0, label: None, timeout: None }
}

fn timeout_from_env(rank: usize) -> Result<Duration> {
    let timeout = settings::timeout().map_err(|reason| Error::Argument {
        rank,
        operation: "from_env".into(),
        reason,
    })?;
    Ok(timeout.unwrap_or(DEFAULT_TIMEOUT))
}
