//! Groups that only their members make, over keys in the store: see `agreement`.

use std::sync::Arc;

use super::agreement::Agreement;
use super::cuda::Cuda;
use super::new_group_call::NewGroupCall;
use super::parts::{NewGroup, Parts};
use super::split::check_members;
use super::{ProcessGroup, group_of};
use crate::error::Result;
use crate::internode::presence::Presence;
use crate::operation_context::OperationContext;
use crate::shm::arena::{Block, no_room};
use crate::shm::control::Control;

impl ProcessGroup {
    /// Makes a group of some of this group's ranks, given by their ranks in this group, which only
    /// they call: all with the same list. They are numbered in its order: with `[4, 2, 3]`, rank 4
    /// becomes rank 0.
    ///
    /// `key` names the group while it is made; no other group uses it then. It can be used again
    /// once no member can still be on its way to the earlier group. A rank that makes several
    /// groups one after the other makes them in the same order as the others, or all wait for the
    /// timeout. Threads may make several at once. Over NCCL the members connect when they first
    /// call [`ProcessGroup::nccl`].
    ///
    /// # Errors
    ///
    /// Lists that differ, on all members that have come; a member that has ended or left this
    /// group, or does not come in time. This group stays usable. The key of an attempt that failed
    /// cannot be used again. Where this group has failed, this works all the same: the ranks that
    /// are left can make a group of their own. That ends once a rank [reconfigures](Self::reconfigure)
    /// the job: then members that wait get an error.
    ///
    /// Over several nodes without flow-launch, only the first ranks of nodes see each other die.
    /// Other members on another node that have died are missed when the time is over.
    pub fn new_group_of(&self, ranks: &[usize], key: &str) -> Result<Self> {
        let group = self.parts(&"new_group_of")?;
        let core = &group.core;
        check_members(self, "new_group_of", ranks)?;
        if !ranks.contains(&core.rank) {
            let reason = format!("{ranks:?} must have this rank, {}, among them", core.rank);
            return Err(self.caller().argument("new_group_of", reason));
        }
        let locals: Vec<usize> =
            ranks.iter().copied().filter(|member| core.locals.contains(member)).collect();
        let first = locals[0]; // this rank is one of them
        let mut block = None;
        if first == core.rank {
            block = core.world.new_control_block(ranks.len(), locals.len());
        }
        let own_offset = block.as_ref().map(Block::offset);
        let call = NewGroupCall { group, ranks, key };
        let (presence, offset) = match core.world.store() {
            Some(store) if ranks.len() > 1 => {
                let mut agreement = Agreement::new(&call, store);
                let agreed =
                    OperationContext::within(self.timeout, || agreement.reach(first, own_offset));
                if agreed.is_err() && agreement.may_succeed {
                    // The others may use it.
                    if let Some(block) = block.take() {
                        block.leak();
                    }
                }
                agreed?
            }
            _ => (Presence::new(&core.world, call.new_name()), own_offset),
        };
        let bytes = Control::bytes(ranks.len(), locals.len());
        let offset = offset
            .filter(|&offset| core.is_reachable(first, offset, bytes))
            .ok_or_else(|| call.failed(no_room("a group", core.ranks[first])))?;
        let arena = Arc::clone(&core.world.arena);
        let new_group = NewGroup {
            world: Arc::clone(&core.world),
            control: Control::attach(arena, offset, ranks.len(), locals.len()),
            ranks: ranks.iter().map(|&member| core.ranks[member]).collect(),
            timeout: self.timeout(),
            block,
            name: presence.group.clone(),
            presence,
        };
        let parts = Parts::new(new_group, "new_group_of")?;
        // Splitting this group's communicator takes all its ranks.
        let cuda = Cuda { device: self.cuda_device(), group: None };
        Ok(group_of(parts, self.local_rank(), cuda))
    }
}
