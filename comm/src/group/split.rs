//! Sub-groups that all ranks of a group make together, in one collective for all of them.

use std::hash::{Hash, Hasher};
use std::sync::atomic::Ordering;
use std::sync::Arc;

use flow_kernels::DType;

use super::parts::NewGroup;
use super::ProcessGroup;
use crate::backend::{BufferView, Buffers};
use crate::descriptor::OpDescriptor;
use crate::error::{Error, Result};
use crate::internode::presence::Presence;
use crate::kind::Kind;
use crate::shm::control::Control;
use crate::world::World;

/// In place of the offset of a sub-group's control block: this rank allocates none, as it is not
/// the first member on its node.
const NOT_FIRST: u64 = u64::MAX;
/// In place of that offset: this rank's memory has no room for the block.
const FULL: u64 = u64::MAX - 1;

impl ProcessGroup {
    /// A group of some of this group's ranks, given by their ranks in this group. They are numbered
    /// in the order of the list: with `[4, 2, 3]`, rank 4 becomes rank 0. Called by all ranks of
    /// this group with the same list; `None` on ranks that are not in it.
    ///
    /// # Errors
    ///
    /// A list with a rank twice, or without ranks; on all ranks, lists that differ, and too little
    /// shared memory.
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Self>> {
        self.new_group_in(&self.core().world, ranks)
    }

    /// As [`ProcessGroup::new_group`], in the memory of `world`: this one's or that of another join
    /// of the same ranks.
    pub(super) fn new_group_in(&self, world: &Arc<World>, ranks: &[usize]) -> Result<Option<Self>> {
        self.check_members("new_group", ranks)?;
        let members = ranks.contains(&self.rank()).then_some(ranks);
        self.make_group(world, "new_group", &ranks, members)
    }

    /// Divides this group into groups of the ranks that give the same color, as `MPI_Comm_split`
    /// does: each is numbered by ascending key, and where keys are equal in the order of this
    /// group. A rank without a color gets `None`. Called by all ranks of this group.
    ///
    /// # Errors
    ///
    /// On all ranks: another rank calls something else, too little shared memory.
    pub fn split(&self, color: Option<usize>, key: i64) -> Result<Option<Self>> {
        self.member(&"split")?;
        let own = [u64::from(color.is_some()), color.unwrap_or(0) as u64, key as u64];
        let words = self.exchange_words(&own)?;
        let same = |&rank: &usize| words[rank][..2] == own[..2];
        let mut members: Vec<usize> = (0..self.world_size()).filter(same).collect();
        members.sort_by_key(|&rank| words[rank][2] as i64);
        let members = color.is_some().then_some(&members[..]);
        self.make_group(&self.core().world, "split", &words, members)
    }

    /// Checks that `ranks` are different ranks of this group.
    pub(super) fn check_members(&self, operation: &str, ranks: &[usize]) -> Result<()> {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let last = self.world_size() - 1;
        if sorted.len() == ranks.len() && sorted.last().is_some_and(|&highest| highest <= last) {
            return Ok(());
        }
        let reason = format!("{ranks:?} must be different ranks from 0 to {last}");
        Err(self.caller().argument(operation, reason))
    }

    /// The sub-group of `members`, which each of them gives in the same order; other ranks give the
    /// members of another sub-group, or none. One collective of all ranks, which compares
    /// `agreed`, makes all sub-groups.
    pub(super) fn make_group(
        &self,
        world: &Arc<World>,
        operation: &str,
        agreed: &(impl Hash + std::fmt::Debug),
        members: Option<&[usize]>,
    ) -> Result<Option<Self>> {
        let group = self.member(&operation)?;
        let core = &group.core;
        let is_local = |member: &usize| core.locals.contains(member);
        let members = members.unwrap_or_default();
        let locals: Vec<usize> = members.iter().copied().filter(is_local).collect();
        // On each node the first member there has the memory.
        let first = locals.first().copied();
        let block = (first == Some(self.rank()))
            .then(|| world.new_control_block(members.len(), locals.len()));
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
        let fingerprint = fingerprint(agreed);
        let words = self.exchange_words(&[fingerprint, offset])?;
        if let Some(other) = words.iter().position(|words| words[0] != fingerprint) {
            let detail = format!(
                "rank {} called {operation} with {agreed:?}, rank {} with other ranks",
                core.world.rank, core.ranks[other]
            );
            return Err(group.failure.fail(Error::Mismatch { rank: core.world.rank, detail }));
        }
        if let Some(full) = words.iter().position(|words| words[1] == FULL) {
            let reason = format!("the shared memory region of rank {} is full", core.ranks[full]);
            return Err(self.system(operation, reason));
        }
        let member = first.zip(presence).map(|(first, presence)| {
            let (arena, offset) = (Arc::clone(&world.arena), words[first][1] as usize);
            let new_group = NewGroup {
                world: Arc::clone(world),
                ranks: members.iter().map(|&member| core.ranks[member]).collect(),
                control: Control::attach(arena, offset, members.len(), locals.len()),
                block: block.flatten(),
                // The first member tells the sub-groups of one collective apart.
                name: format!("{family}:{}", core.ranks[members[0]]),
                presence,
                timeout: self.timeout(),
            };
            group.sub_group(new_group, operation)
        });
        let member = member.transpose()?;
        let cuda = self.split_cuda(member.as_ref())?;
        Ok(member.map(|parts| Self::of(parts, self.inner.local_rank, cuda)))
    }

    /// All ranks' words, in rank order: for the group's own bookkeeping.
    pub(super) fn exchange_words(&self, own: &[u64]) -> Result<Vec<Vec<u64>>> {
        let mut all = vec![0_u64; own.len() * self.world_size()];
        let view = |words: *mut u64, count: usize| BufferView {
            data: words.cast(),
            bytes: count * size_of::<u64>(),
        };
        let input = view(own.as_ptr().cast_mut(), own.len());
        let output = view(all.as_mut_ptr(), all.len());
        let operation = OpDescriptor::new(Kind::NewGroup, DType::U8, input.bytes);
        self.collective(operation, Buffers::new(input, output))?;
        Ok(all.chunks(own.len()).map(<[u64]>::to_vec).collect())
    }
}

fn fingerprint(value: &impl Hash) -> u64 {
    let mut hasher = fnv::FnvHasher::default();
    value.hash(&mut hasher);
    hasher.finish()
}
