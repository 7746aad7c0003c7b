//! How far the ranks of a group are with NCCL. Each publishes its last operation in the store.

use std::sync::Arc;

use flow_store::Store;

use super::progress::{EnqueuedOp, LastOperation};
use crate::group::core::GroupCore;

/// The last operations that the ranks of a group have published.
pub struct PeerProgress {
    core: Arc<GroupCore>,
    /// Begins the keys under which the ranks publish them.
    prefix: String,
}

impl PeerProgress {
    /// Returns the progress of the ranks of a group.
    pub fn new(core: &Arc<GroupCore>, prefix: String) -> Self {
        Self { core: Arc::clone(core), prefix }
    }

    /// Publishes this rank's last operation. Returns its number.
    pub fn publish(&self, last: Option<EnqueuedOp>) -> Option<u64> {
        let store = self.store()?;
        let last = last?;
        let key = format!("{}at/{}", self.prefix, self.core.rank);
        let progress = serde_json::to_vec(&last.published()).unwrap_or_default();
        if let Err(error) = store.set(&key, &progress) {
            log::debug!("rank {}: {error}", self.core.world.rank);
        }
        Some(last.number)
    }

    /// Whether a rank has begun its part of an operation, according to the store.
    pub fn has_begun(&self, rank: usize, operation: &EnqueuedOp) -> bool {
        self.of(rank).is_some_and(|last| operation.is_begun_by(&last))
    }

    /// Returns the ranks that have not begun the operation; the other ranks of messages.
    pub fn late<'a>(&'a self, operation: &'a EnqueuedOp) -> impl Iterator<Item = usize> + 'a {
        (0..self.core.size()).filter(move |&rank| {
            if operation.op.descriptor.kind.is_message() {
                operation.may_need(rank)
            } else {
                rank != self.core.rank && !self.has_begun(rank, operation)
            }
        })
    }

    /// Describes the ranks of [`PeerProgress::late`].
    pub fn missing(&self, operation: &EnqueuedOp) -> String {
        let mut late = Vec::new();
        for rank in self.late(operation) {
            let peer = self.core.world.describe(self.core.ranks[rank]);
            late.push(match self.of(rank) {
                Some(last) => format!("{peer}, which is at {}", last.text),
                None => format!("{peer}, which has begun nothing"),
            });
        }
        if late.is_empty() {
            return "the device or the network: all ranks have begun it".into();
        }
        late.join("; ")
    }

    /// Returns a rank of the job that has called another operation instead, and that operation.
    pub fn find_other_operation(&self, operation: &EnqueuedOp) -> Option<(usize, String)> {
        (0..self.core.size()).filter(|&rank| rank != self.core.rank).find_map(|rank| {
            let last = self.of(rank).filter(|last| operation.disagrees(last))?;
            Some((self.core.ranks[rank], last.text))
        })
    }

    /// Returns the last operation that a rank has published.
    fn of(&self, rank: usize) -> Option<LastOperation> {
        let text = self.store()?.try_get(&format!("{}at/{rank}", self.prefix)).ok()??;
        serde_json::from_slice(&text).ok()
    }

    fn store(&self) -> Option<&Store> {
        self.core.world.store()
    }
}
