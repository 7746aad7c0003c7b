//! Long waits are reported to flow-launch, so that the report of a job that hangs says which rank
//! waits where, and for which ranks.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use flow_store::Store;

use crate::bootstrap::lineage::Seat;
use crate::trace::activity;

/// The variable with the length of a wait that is reported, in seconds; set by flow-launch.
const REPORT: &str = "FLOW_REPORT_STALLS";
/// The interval at which a stall checks whether it waits for other ranks than before.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The interval at which a report is repeated: another agent may lead the job by then.
const REPEAT_INTERVAL: Duration = Duration::from_secs(30);

/// Reports this rank's long waits to flow-launch.
pub struct StallReporter {
    seat: Seat,
    after: Duration,
}

impl StallReporter {
    /// Returns the reporter of this process; None unless flow-launch listens.
    pub fn from_env(seat: Seat) -> Option<StallReporter> {
        let seconds = std::env::var(REPORT).ok()?.parse().ok()?;
        Some(StallReporter { seat, after: Duration::try_from_secs_f64(seconds).ok()? })
    }

    /// Begins a wait.
    pub fn begin<'a>(&'a self, store: &'a Store) -> Stall<'a> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Stall {
            reporter: self,
            store,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            next: self.after,
            reported: None,
        }
    }

    /// Reports whether this process, which was started in place of others, waits to join. The next leader
    /// of the job finds this in the store.
    pub fn newcomer(&self, store: &Store, waits: bool) {
        let Seat { number, replacement } = self.seat;
        let said: &[u8] = if waits { b"waits" } else { b"joined" };
        if let Err(error) = store.set(&format!("newcomer/{number}.{replacement}"), said) {
            log::debug!("rank {number}: cannot say whether it waits: {error}");
        }
        let report = serde_json::json!({
            "rank": self.seat.number,
            "replacement": self.seat.replacement,
            "waits": waits,
        });
        self.send(store, &report);
    }

    fn send(&self, store: &Store, message: &serde_json::Value) {
        // The wait goes on all the same.
        if let Err(error) = store.send(message.to_string().as_bytes()) {
            log::debug!("rank {}: cannot report a wait to flow-launch: {error}", self.seat.number);
        }
    }
}

/// A wait for other ranks. If it was reported, dropping it reports that it is over.
pub struct Stall<'a> {
    reporter: &'a StallReporter,
    store: &'a Store,
    id: u64,
    /// The time that the wait has lasted when it next checks.
    next: Duration,
    /// The ranks that were missing in the last report, and the time that the wait had lasted.
    reported: Option<(Vec<usize>, Duration)>,
}

impl Stall<'_> {
    /// Reports the wait if it has become long, and again from time to time, or when it is for other ranks
    /// than before.
    pub fn check(
        &mut self,
        waited: Duration,
        operation: &dyn Display,
        missing: impl FnOnce() -> Vec<usize>,
    ) {
        if waited < self.next {
            return;
        }
        self.next = waited + CHECK_INTERVAL;
        let missing = missing();
        if let Some((before, at)) = &self.reported
            && *before == missing
            && waited < *at + REPEAT_INTERVAL
        {
            return;
        }
        self.report(serde_json::json!({
            "rank": self.reporter.seat.number,
            "replacement": self.reporter.seat.replacement,
            "id": self.id,
            "operation": operation.to_string(),
            "seconds": waited.as_secs_f64(),
            "missing": missing,
            "activity": activity(),
        }));
        self.reported = Some((missing, waited));
    }

    fn report(&self, message: serde_json::Value) {
        self.reporter.send(self.store, &message);
    }
}

impl Drop for Stall<'_> {
    fn drop(&mut self) {
        if self.reported.is_some() {
            let Seat { number, replacement } = self.reporter.seat;
            self.report(serde_json::json!({
                "rank": number,
                "replacement": replacement,
                "id": self.id,
            }));
        }
    }
}
