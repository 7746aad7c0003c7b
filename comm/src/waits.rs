//! Long waits are told to flow-launch, so that a job that hangs says who is where and who waits for
//! whom.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::store::Store;

/// How long a wait must be to be told, in seconds; set by flow-launch.
const REPORT: &str = "FLOW_REPORT_WAITS";
/// How often it is seen whether a long wait is for others than before.
const AGAIN: Duration = Duration::from_secs(1);

/// A rank's way to tell of its long waits.
pub struct Waits {
    rank: usize,
    after: Duration,
}

impl Waits {
    /// For rank `rank` of the job; None unless flow-launch listens.
    pub fn from_env(rank: usize) -> Option<Waits> {
        let seconds = std::env::var(REPORT).ok()?.parse().ok()?;
        Some(Waits { rank, after: Duration::try_from_secs_f64(seconds).ok()? })
    }

    /// A wait that begins now.
    pub fn begin<'a>(&'a self, store: &'a Store) -> LongWait<'a> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        LongWait {
            waits: self,
            store,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            next: self.after,
            told: None,
        }
    }
}

/// One wait. When it is dropped, having been told, flow-launch is told that it is over.
pub struct LongWait<'a> {
    waits: &'a Waits,
    store: &'a Store,
    id: u64,
    /// How long it has waited when it is next looked at.
    next: Duration,
    /// The ranks that were missing when it was last told.
    told: Option<Vec<usize>>,
}

impl LongWait<'_> {
    /// Tells of the wait if it has become long, and again when it is for others than before.
    pub fn look(
        &mut self,
        waited: Duration,
        operation: &dyn Display,
        missing: impl FnOnce() -> Vec<usize>,
    ) {
        if waited < self.next {
            return;
        }
        self.next = waited + AGAIN;
        let missing = missing();
        if self.told.as_ref() == Some(&missing) {
            return;
        }
        let (operation, seconds) = (operation.to_string(), waited.as_secs_f64());
        self.post(serde_json::json!({
            "rank": self.waits.rank, "id": self.id, "operation": operation, "seconds": seconds, "missing": missing,
        }));
        self.told = Some(missing);
    }

    fn post(&self, message: serde_json::Value) {
        // The wait goes on all the same.
        if let Err(error) = self.store.post(message.to_string().as_bytes()) {
            log::debug!("rank {}: cannot tell flow-launch of a wait: {error}", self.waits.rank);
        }
    }
}

impl Drop for LongWait<'_> {
    fn drop(&mut self) {
        if self.told.is_some() {
            self.post(serde_json::json!({ "rank": self.waits.rank, "id": self.id }));
        }
    }
}
