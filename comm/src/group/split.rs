//! Sub-groups that all ranks of a group make together, in one collective for all of them.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use flow_kernels::{DType, digest};

use super::cuda::Cuda;
use super::member::Member;
use super::parts::{NewGroup, Parts};
use super::{ProcessGroup, group_of};
use crate::collectives::all_gather;
use crate::descriptor::OpDescriptor;
use crate::error::{Error, Result};
use crate::internode::presence::Presence;
use crate::kind::Kind;
use crate::memory::{BufferView, Buffers};
use crate::shm::arena::no_room;
use crate::shm::control::Control;
use crate::world::World;

/// A number in place of the offset of a sub-group's control block. This rank allocates none, as it
/// is not the first member on its node.
const NOT_FIRST: u64 = u64::MAX;
/// A number in place of that offset: this rank's memory has no room for the block.
const FULL: u64 = u64::MAX - 1;

impl ProcessGroup {
    /// Makes a group of some of this group's ranks, given by their ranks in this group. They are
    /// numbered in the order of the list: with `[4, 2, 3]`, rank 4 becomes rank 0. Called by all
    /// ranks of this group with the same list; `None` on ranks that are not in it.
    ///
    /// # Errors
    ///
    /// A list with a rank twice, or without ranks; on all ranks, lists that differ, and too little
    /// shared memory.
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Self>> {
        new_group_in(self, &self.core().world, ranks)
    }

    /// Divides this group into groups of the ranks that give the same color, as `MPI_Comm_split`
    /// does. Each is numbered by ascending key, and where keys are equal in the order of this
    /// group. A rank without a color gets `None`. Called by all ranks of this group.
    ///
    /// # Errors
    ///
    /// On all ranks: another rank calls something else, too little shared memory.
    pub fn split(&self, color: Option<usize>, key: i64) -> Result<Option<Self>> {
        self.parts(&"split")?;
        let own = [u64::from(color.is_some()), color.unwrap_or(0) as u64, key as u64];
        let words = exchange_words(self, &own)?;
        let mut members: Vec<usize> =
            (0..self.world_size()).filter(|&rank| words[rank][..2] == own[..2]).collect();
        members.sort_by_key(|&rank| words[rank][2] as i64);
        let members = color.is_some().then_some(&members[..]);
        make_group(self, &self.core().world, "split", &words, members)
    }
}

/// Makes a group as [`ProcessGroup::new_group`] does, in the memory of `world`: that of `parent`, or
/// that of another join of the same ranks.
pub fn new_group_in(
    parent: &ProcessGroup,
    world: &Arc<World>,
    ranks: &[usize],
) -> Result<Option<ProcessGroup>> {
    check_members(parent, "new_group", ranks)?;
    let members = ranks.contains(&parent.rank()).then_some(ranks);
    make_group(parent, world, "new_group", &ranks, members)
}

/// Checks that `ranks` are different ranks of the group.
pub fn check_members(group: &Member, operation: &str, ranks: &[usize]) -> Result<()> {
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let last = group.world_size() - 1;
    if sorted.len() == ranks.len() && sorted.last().is_some_and(|&highest| highest <= last) {
        return Ok(());
    }
    let reason = format!("{ranks:?} must be different ranks from 0 to {last}");
    Err(group.caller().argument(operation, reason))
}

/// Makes the sub-group of `members`, which each of them gives in the same order; other ranks give
/// the members of another sub-group, or none. One collective of all ranks, which compares `agreed`,
/// makes all sub-groups.
pub fn make_group(
    parent: &ProcessGroup,
    world: &Arc<World>,
    operation: &str,
    agreed: &(impl Hash + Debug),
    members: Option<&[usize]>,
) -> Result<Option<ProcessGroup>> {
    let group = parent.parts(&operation)?;
    let core = &group.core;
    let members = members.unwrap_or_default();
    let locals: Vec<usize> =
        members.iter().copied().filter(|member| core.locals.contains(member)).collect();
    // On each node the first member there has the memory.
    let first = locals.first().copied();
    let block =
        (first == Some(core.rank)).then(|| world.new_control_block(members.len(), locals.len()));
    let offset = match &block {
        Some(Some(block)) => block.offset() as u64,
        Some(None) => FULL,
        None => NOT_FIRST,
    };
    let child = core.children.fetch_add(1, Ordering::Relaxed);
    // In another world the name must be none of its own.
    let prefix = if Arc::ptr_eq(world, &core.world) { "" } else { &core.world.prefix };
    let family = format!("{prefix}{}.{child}", core.name);
    let presence = first.map(|_| Presence::new(world, family.clone()));
    let words = exchange_words(parent, &[digest(agreed), offset])?;
    check_words(group, operation, agreed, &words)?;
    let member = match first.zip(presence) {
        Some((first, presence)) => {
            let offset = words[first][1] as usize;
            let arena = Arc::clone(&world.arena);
            let new_group = NewGroup {
                world: Arc::clone(world),
                ranks: members.iter().map(|&member| core.ranks[member]).collect(),
                control: Control::attach(arena, offset, members.len(), locals.len()),
                block: block.flatten(),
                // The first member tells the sub-groups of one collective apart.
                name: format!("{family}:{}", core.ranks[members[0]]),
                presence,
                timeout: parent.timeout(),
            };
            Some(Parts::new(new_group, operation)?)
        }
        None => None,
    };
    let cuda = split_cuda(parent, member.as_ref())?;
    Ok(member.map(|parts| group_of(parts, parent.local_rank(), cuda)))
}

/// Checks that all ranks make the same sub-groups, and that there is memory for all of them.
fn check_words(
    group: &Parts,
    operation: &str,
    agreed: &(impl Hash + Debug),
    words: &[Vec<u64>],
) -> Result<()> {
    let core = &group.core;
    let rank = core.world.rank;
    let own = words[core.rank][0];
    if let Some(other) = words.iter().position(|words| words[0] != own) {
        let detail = format!(
            "rank {rank} called {operation} with {agreed:?}, rank {} with other ranks",
            core.ranks[other]
        );
        return Err(group.failure.fail(Error::Mismatch { rank, detail }));
    }
    if let Some(full) = words.iter().position(|words| words[1] == FULL) {
        let reason = no_room("a group", core.ranks[full]);
        return Err(Error::System { rank, operation: operation.into(), reason });
    }
    Ok(())
}

/// Makes a sub-group's part on GPUs, where `parent` has one. All ranks of `parent` call this.
fn split_cuda(parent: &Member, member: Option<&Parts>) -> Result<Cuda> {
    // Not locked while the ranks wait for each other.
    let Cuda { device, group } = parent.cuda().clone();
    let group = match group {
        Some(group) => group.split(member.map(|member| &member.failure))?.map(Arc::new),
        None => None,
    };
    Ok(Cuda { device, group })
}

/// Returns all ranks' words, in rank order: for the group's own bookkeeping.
pub fn exchange_words(group: &ProcessGroup, own: &[u64]) -> Result<Vec<Vec<u64>>> {
    let mut all = vec![0_u64; own.len() * group.world_size()];
    let input = BufferView { data: own.as_ptr().cast_mut().cast(), bytes: size_of_val(own) };
    let output = BufferView { data: all.as_mut_ptr().cast(), bytes: size_of_val(&all[..]) };
    let operation = OpDescriptor::new(Kind::NewGroup, DType::U8, input.bytes);
    group.collective(operation, Buffers::new(input, output), all_gather::run)?;
    Ok(all.chunks(own.len()).map(<[u64]>::to_vec).collect())
}
