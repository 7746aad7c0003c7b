//! Reports that ranks of a group exchange, also when the group has failed.

use std::time::{Duration, Instant};

use super::member::Member;
use crate::world::EXIT_REPORT_TIMEOUT;

impl Member {
    /// Gives the others this rank's report under a key, and waits for theirs, at most for `time`.
    /// Returns them by rank in this group; None of those that give none. Reports go through the
    /// store, so this works where the group has failed. A rank's first report under a key stays:
    /// the others never see a later one under the same key.
    pub fn exchange_reports(&self, key: &str, own: &[u8], time: Duration) -> Vec<Option<Vec<u8>>> {
        let mut reports = vec![None; self.world_size()];
        reports[self.rank()] = Some(own.to_vec());
        let core = self.core();
        let Some(store) = core.world.store() else { return reports };
        let keys: Vec<String> =
            (0..core.size()).map(|rank| core.key(&format!("report/{key}/{rank}"))).collect();
        // If the store is gone, so are the others.
        let _ = store.compare_and_set(&keys[core.rank], None, own);
        let deadline = Instant::now() + time;
        for rank in core.ranks_where(|rank| rank != self.rank()) {
            let left = deadline.saturating_duration_since(Instant::now());
            reports[rank] = store.get(&keys[rank], left).ok();
        }
        if core.world.hosts_store() {
            // The others ask for them as well.
            std::thread::sleep(EXIT_REPORT_TIMEOUT);
        }
        reports
    }
}
