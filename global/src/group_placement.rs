//! Placements on a process group: where global tensors begin.

use flow_autograd::global::Globals;
use flow_tensor::ProcessGroup;

use crate::dispatch::GlobalDispatcher;
use crate::error::Result;
use crate::placement::{Placement, Ranks};

impl Placement {
    /// Places tensors on these ranks of a group, in an array of one axis (`[0, 1]`) or more (`[[0,
    /// 1], [2, 3]]`). All ranks of the group make the same placements, those outside a placement as
    /// well.
    ///
    /// # Errors
    /// No ranks, a rank twice or that the group does not have, or parts of different shapes.
    pub fn new(group: &ProcessGroup, ranks: impl Ranks) -> Result<Self> {
        Globals::register::<GlobalDispatcher>()?;
        Self::of(ranks)?.on(group)
    }

    /// Places tensors on all ranks of a group, in one axis.
    ///
    /// # Errors
    /// As of [`Placement::new`].
    pub fn all(group: &ProcessGroup) -> Result<Self> {
        Self::new(group, (0..group.world_size()).collect::<Vec<_>>())
    }

    /// Has the operations of all ranks on global tensors of this placement's group fail with `cause`,
    /// those that are under way as well. For a rank that fails where the others cannot see it.
    pub fn abort(&self, cause: &str) {
        if let Ok(runtime) = self.runtime() {
            runtime.world().abort(cause);
            runtime.groups.abort(cause);
        }
    }
}
