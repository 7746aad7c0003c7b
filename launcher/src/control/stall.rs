//! Workers that wait long for each other, as they tell through their store, and what follows from
//! it. Pure: the time comes in.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::report::text::ranks;

/// How long others that wait too may take to say so, before a report is made.
const COALESCE_WINDOW: Duration = Duration::from_secs(1);

/// What a worker tells of a wait: when it has become long, and when it is over.
#[derive(Debug, Deserialize)]
pub struct StallUpdate {
    rank: u32,
    /// Tells the stalls of a rank apart, which may have several threads.
    id: u64,
    /// The operation with its sequence number and bucket. None: it has gone on.
    operation: Option<String>,
    /// How long it has waited, in seconds.
    #[serde(default)]
    seconds: f64,
    /// The ranks it stalls for.
    #[serde(default)]
    missing: Vec<u32>,
}

struct Stall {
    operation: String,
    since: Instant,
    missing: Vec<u32>,
}

/// The long stalls of a round.
#[derive(Default)]
pub struct StallTracker {
    limit: Option<Duration>,
    waiting: BTreeMap<(u32, u64), Stall>,
    /// When to report what has not been reported yet.
    report_at: Option<Instant>,
    /// When everything was stopped: until when, and for how long.
    pauses: Vec<(Instant, Duration)>,
}

/// What is to be done.
#[derive(Debug, PartialEq)]
pub enum StallAction {
    /// To be said.
    Report(String),
    /// The round has failed, for this reason.
    Fail(String),
}

impl StallAction {
    pub fn report(&self) -> &str {
        match self {
            StallAction::Report(report) | StallAction::Fail(report) => report,
        }
    }
}

impl StallTracker {
    /// Nobody stalls yet. A wait of more than `limit` fails the round.
    pub fn new(limit: Option<Duration>) -> StallTracker {
        StallTracker { limit, ..StallTracker::default() }
    }

    /// A worker has told of a wait.
    pub fn update(&mut self, wait: StallUpdate, now: Instant) {
        let Some(operation) = wait.operation else {
            self.waiting.remove(&(wait.rank, wait.id));
            return;
        };
        let waited = Duration::try_from_secs_f64(wait.seconds).unwrap_or_default();
        let mut since = now.checked_sub(waited).unwrap_or(now);
        // The worker does not know that it was stopped.
        for (end, time) in self.pauses.iter().rev() {
            since += end.saturating_duration_since(since).min(*time);
        }
        self.waiting
            .insert((wait.rank, wait.id), Stall { operation, since, missing: wait.missing });
        self.report_at.get_or_insert(now + COALESCE_WINDOW);
    }

    /// A worker has ended: it stalls no more.
    pub fn rank_exited(&mut self, rank: u32) {
        self.waiting.retain(|(waiting, _), _| *waiting != rank);
    }

    /// For so long, until now, everything was stopped: nobody has waited.
    pub fn paused(&mut self, time: Duration, now: Instant) {
        self.pauses.push((now, time));
        self.waiting.values_mut().for_each(|waiting| waiting.since += time);
        self.report_at.iter_mut().for_each(|at| *at += time);
    }

    /// When [`StallTracker::elapsed`] is to be called.
    pub fn deadline(&self) -> Option<Instant> {
        let oldest = self.waiting.values().map(|waiting| waiting.since).min();
        let limit = oldest.zip(self.limit).map(|(since, limit)| since + limit);
        self.report_at.into_iter().chain(limit).min()
    }

    /// Time has passed.
    pub fn elapsed(&mut self, now: Instant) -> Option<StallAction> {
        let oldest =
            self.waiting.values().map(|waiting| now.saturating_duration_since(waiting.since)).max();
        if let Some((waited, limit)) =
            oldest.zip(self.limit).filter(|(waited, limit)| waited >= limit)
        {
            let report = self.report(waited);
            let report = format!(
                "{report}\nthat is a failure, as --hang-timeout is {} s",
                limit.as_secs_f64()
            );
            self.waiting.clear();
            self.report_at = None;
            return Some(StallAction::Fail(report));
        }
        self.report_at.filter(|at| *at <= now)?;
        self.report_at = None;
        oldest.map(|waited| StallAction::Report(self.report(waited)))
    }

    /// Who is where and stalls for whom; first those who keep others waiting without waiting
    /// themselves.
    fn report(&self, waited: Duration) -> String {
        let missing: BTreeSet<u32> =
            self.waiting.values().flat_map(|waiting| waiting.missing.iter().copied()).collect();
        let is_waiting = |rank: &u32| self.waiting.keys().any(|(waiting, _)| waiting == rank);
        let absent: Vec<u32> = missing.into_iter().filter(|rank| !is_waiting(rank)).collect();
        let mut report = format!("no progress for {} s", waited.as_secs());
        if !absent.is_empty() {
            let does = if absent.len() == 1 { "is" } else { "are" };
            report += &format!(": {} {does} in no collective", ranks(&absent));
        }
        let mut places: Vec<(&str, &[u32], Vec<u32>)> = Vec::new();
        for ((rank, _), Stall { operation, missing, .. }) in &self.waiting {
            match places
                .iter_mut()
                .find(|(known, awaited, _)| known == operation && awaited == missing)
            {
                Some((_, _, members)) => members.push(*rank),
                None => places.push((operation, missing, vec![*rank])),
            }
        }
        for (operation, missing, members) in places {
            let who = ranks(&members);
            let wait = if members.len() == 1 { "stalls" } else { "wait" };
            // All may have begun it, and the device or the network not have come to its end.
            let whom =
                if missing.is_empty() { String::new() } else { format!(" for {}", ranks(missing)) };
            report += &format!("\n{who} {wait} in {operation}{whom}");
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(rank: u32, operation: &str, missing: &[u32]) -> StallUpdate {
        StallUpdate {
            rank,
            id: 0,
            operation: Some(operation.into()),
            seconds: 30.0,
            missing: missing.into(),
        }
    }

    #[test]
    fn reports_name_who_is_where_and_who_is_absent() {
        let (mut stalls, now) = (StallTracker::new(None), Instant::now());
        stalls.update(wait(0, "all_reduce #5 (bucket 2)", &[1]), now);
        stalls.update(wait(2, "all_reduce #5 (bucket 2)", &[1]), now);
        assert_eq!(stalls.elapsed(now), None);
        assert_eq!(stalls.deadline(), Some(now + COALESCE_WINDOW));
        let report =
            "no progress for 31 s: rank 1 is in no collective\nranks 0, 2 wait in all_reduce #5 (bucket 2) for rank 1";
        assert_eq!(stalls.elapsed(now + COALESCE_WINDOW), Some(StallAction::Report(report.into())));
        assert_eq!((stalls.deadline(), stalls.elapsed(now + COALESCE_WINDOW * 2)), (None, None));
    }

    #[test]
    fn those_who_wait_for_each_other_are_all_named() {
        let (mut stalls, now) = (StallTracker::new(None), Instant::now());
        stalls.update(wait(0, "barrier #1", &[1]), now);
        stalls.update(wait(1, "all_reduce #7", &[0]), now);
        let Some(StallAction::Report(report)) = stalls.elapsed(now + COALESCE_WINDOW) else {
            panic!()
        };
        let lines: Vec<_> = report.lines().collect();
        assert_eq!(
            lines[..],
            [
                "no progress for 31 s",
                "rank 0 stalls in barrier #1 for rank 1",
                "rank 1 stalls in all_reduce #7 for rank 0"
            ]
        );
    }

    #[test]
    fn who_goes_on_is_forgotten() {
        let (mut stalls, now) = (StallTracker::new(Some(Duration::from_secs(40))), Instant::now());
        stalls.update(wait(0, "barrier #1", &[1]), now);
        stalls.update(
            StallUpdate { rank: 0, id: 0, operation: None, seconds: 0.0, missing: Vec::new() },
            now,
        );
        assert_eq!(stalls.elapsed(now + COALESCE_WINDOW), None);
        stalls.update(wait(1, "barrier #1", &[0]), now);
        stalls.rank_exited(1);
        assert_eq!(stalls.elapsed(now + Duration::from_secs(60)), None);
    }

    #[test]
    fn time_spent_stopped_is_no_wait() {
        let seconds = Duration::from_secs;
        let (mut stalls, now) = (StallTracker::new(Some(seconds(40))), Instant::now());
        stalls.update(wait(0, "barrier #1", &[1]), now);
        stalls.elapsed(now + COALESCE_WINDOW);
        stalls.paused(seconds(100), now + seconds(105));
        assert_eq!(stalls.deadline(), Some(now + seconds(110)));
        // This one was stopped, too, and says that it has waited for 108 seconds.
        stalls.update(
            StallUpdate { seconds: 108.0, ..wait(1, "barrier #1", &[0]) },
            now + seconds(106),
        );
        stalls.rank_exited(0);
        stalls.elapsed(now + seconds(108));
        assert_eq!(stalls.deadline(), Some(now + seconds(138)));
    }

    #[test]
    fn beyond_the_limit_the_round_has_failed() {
        let (mut stalls, now) = (StallTracker::new(Some(Duration::from_secs(40))), Instant::now());
        stalls.update(wait(0, "barrier #1", &[1]), now);
        stalls.elapsed(now + COALESCE_WINDOW);
        assert_eq!(stalls.deadline(), Some(now + Duration::from_secs(10)));
        let Some(StallAction::Fail(report)) = stalls.elapsed(now + Duration::from_secs(10)) else {
            panic!()
        };
        assert_eq!(report.lines().last(), Some("that is a failure, as --hang-timeout is 40 s"));
        assert_eq!(stalls.deadline(), None);
    }
}
