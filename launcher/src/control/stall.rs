//! Finds workers that wait long for each other, from what they report through their store. Pure:
//! the time is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::report::text::{printable, ranks};

/// The time to collect reports of other workers before the first message.
const COALESCE_WINDOW: Duration = Duration::from_secs(1);

/// A worker's report of a wait: sent when the wait has become long, and when it is over.
#[derive(Debug, Deserialize)]
pub struct StallUpdate {
    pub rank: u32,
    /// The number of workers that had this rank before in the round.
    #[serde(default)]
    pub replacement: u32,
    /// Identifies the wait, as a rank may have several threads.
    id: u64,
    /// The operation with its sequence number and bucket. None: the wait is over.
    operation: Option<String>,
    /// Seconds that it has waited.
    #[serde(default)]
    seconds: f64,
    /// The ranks it waits for.
    #[serde(default)]
    missing: Vec<u32>,
    /// The operations that its flight recorders have under way, and those that completed and failed
    /// last.
    #[serde(default)]
    activity: String,
}

struct Stall {
    replacement: u32,
    operation: String,
    since: Instant,
    missing: Vec<u32>,
    activity: String,
}

impl Stall {
    /// Whether both are the same wait.
    fn is_same(&self, other: &Stall) -> bool {
        (self.replacement, &self.operation, &self.missing)
            == (other.replacement, &other.operation, &other.missing)
    }

    /// Whether a report says the same of both.
    fn is_like(&self, other: &Stall) -> bool {
        (&self.operation, &self.missing, &self.activity)
            == (&other.operation, &other.missing, &other.activity)
    }
}

/// The stalls of a round.
#[derive(Default)]
pub struct StallTracker {
    limit: Option<Duration>,
    waiting: BTreeMap<(u32, u64), Stall>,
    /// The time at which to report stalls that are not reported yet.
    report_at: Option<Instant>,
    /// Times when everything was suspended: the end of each, and for how long.
    pauses: Vec<(Instant, Duration)>,
}

/// The action on stalls.
#[derive(Debug, PartialEq)]
pub enum StallAction {
    /// Print the report.
    Report(String),
    /// Act on a wait that is longer than the limit.
    Fail(Hang),
}

/// A wait that is longer than `--hang-timeout`.
#[derive(Debug, PartialEq)]
pub struct Hang {
    pub report: String,
    /// The rank that all others wait for, in one step or more, and that waits for none.
    pub culprit: Option<u32>,
}

impl StallAction {
    /// Returns the report.
    pub fn report(&self) -> &str {
        match self {
            StallAction::Report(report) | StallAction::Fail(Hang { report, .. }) => report,
        }
    }
}

impl StallTracker {
    /// Makes a tracker without stalls. A wait longer than `limit` fails the round.
    pub fn new(limit: Option<Duration>) -> StallTracker {
        StallTracker { limit, ..StallTracker::default() }
    }

    /// Takes a worker's report.
    pub fn update(&mut self, wait: StallUpdate, now: Instant) {
        let Some(operation) = wait.operation else {
            self.waiting.remove(&(wait.rank, wait.id));
            return;
        };
        let waited = Duration::try_from_secs_f64(wait.seconds).unwrap_or_default();
        let mut since = now.checked_sub(waited).unwrap_or(now);
        // The worker does not know that it was suspended.
        for (end, time) in self.pauses.iter().rev() {
            since += end.saturating_duration_since(since).min(*time);
        }
        let StallUpdate { rank, replacement, id, missing, activity, .. } = wait;
        let stall = Stall { replacement, operation, since, missing, activity };
        // Workers repeat their reports.
        let is_known = self.waiting.get(&(rank, id)).is_some_and(|known| known.is_same(&stall));
        if !is_known {
            self.waiting.insert((rank, id), stall);
            self.report_at.get_or_insert(now + COALESCE_WINDOW);
        }
    }

    /// Notes that a worker has ended, which was started in place of so many others: it no longer waits.
    pub fn rank_exited(&mut self, rank: u32, replacement: u32) {
        self.waiting
            .retain(|(waiting, _), stall| (*waiting, stall.replacement) != (rank, replacement));
    }

    /// Notes that everything was suspended for this long, until now: that time does not count.
    pub fn paused(&mut self, time: Duration, now: Instant) {
        self.pauses.push((now, time));
        self.waiting.values_mut().for_each(|waiting| waiting.since += time);
        self.report_at.iter_mut().for_each(|at| *at += time);
    }

    /// Returns when to call [`StallTracker::elapsed`].
    pub fn deadline(&self) -> Option<Instant> {
        let oldest = self.waiting.values().map(|waiting| waiting.since).min();
        let limit = oldest.zip(self.limit).map(|(since, limit)| since + limit);
        self.report_at.into_iter().chain(limit).min()
    }

    /// Reports stalls that are due.
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
            let culprit = self.culprit();
            self.waiting.clear();
            self.report_at = None;
            return Some(StallAction::Fail(Hang { report, culprit }));
        }
        self.report_at.filter(|at| *at <= now)?;
        self.report_at = None;
        oldest.map(|waited| StallAction::Report(self.report(waited)))
    }

    /// Returns the ranks that others wait for and that are in no collective themselves.
    fn absent(&self) -> Vec<u32> {
        let missing: BTreeSet<u32> =
            self.waiting.values().flat_map(|waiting| waiting.missing.iter().copied()).collect();
        let waiting: BTreeSet<u32> = self.waiting.keys().map(|(rank, _)| *rank).collect();
        missing.difference(&waiting).copied().collect()
    }

    /// Returns the one absent rank, if every wait leads to it.
    fn culprit(&self) -> Option<u32> {
        let [culprit] = self.absent()[..] else { return None };
        let mut held_up = BTreeSet::from([culprit]);
        loop {
            let count = held_up.len();
            for ((rank, _), stall) in &self.waiting {
                if stall.missing.iter().any(|missing| held_up.contains(missing)) {
                    held_up.insert(*rank);
                }
            }
            if held_up.len() == count {
                break;
            }
        }
        self.waiting.keys().all(|(rank, _)| held_up.contains(rank)).then_some(culprit)
    }

    /// Says which ranks wait where and for which others. Ranks that others wait for and that are in
    /// no collective themselves come first.
    fn report(&self, waited: Duration) -> String {
        let absent = self.absent();
        let mut report = format!("no progress for {} s", waited.as_secs());
        if !absent.is_empty() {
            let does = if absent.len() == 1 { "is" } else { "are" };
            report += &format!(": {} {does} in no collective", ranks(&absent));
        }
        // Ranks that report the same share a line.
        let mut lines: Vec<(&Stall, Vec<u32>)> = Vec::new();
        for ((rank, _), stall) in &self.waiting {
            match lines.iter_mut().find(|(other, _)| other.is_like(stall)) {
                Some((_, members)) => members.push(*rank),
                None => lines.push((stall, vec![*rank])),
            }
        }
        for (Stall { operation, missing, activity, .. }, members) in lines {
            let who = ranks(&members);
            let wait = if members.len() == 1 { "waits" } else { "wait" };
            // All may have begun it, and the device or the network has not completed it.
            let whom =
                if missing.is_empty() { String::new() } else { format!(" for {}", ranks(missing)) };
            report += &format!("\n{who} {wait} in {operation}{whom}");
            if !activity.is_empty() {
                report += &format!(" [{}]", printable(activity));
            }
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
            replacement: 0,
            id: 0,
            operation: Some(operation.into()),
            seconds: 30.0,
            missing: missing.into(),
            activity: String::new(),
        }
    }

    #[test]
    fn reports_name_who_is_where_and_who_is_absent() {
        let (mut stalls, now) = (StallTracker::new(None), Instant::now());
        stalls.update(wait(0, "all_reduce #5 (bucket 2)", &[1]), now);
        stalls.update(wait(2, "all_reduce #5 (bucket 2)", &[1]), now);
        assert_eq!(stalls.elapsed(now), None);
        assert_eq!(stalls.deadline(), Some(now + COALESCE_WINDOW));
        let report = "no progress for 31 s: rank 1 is in no collective\nranks 0, 2 wait in all_reduce #5 \
             (bucket 2) for rank 1";
        assert_eq!(stalls.elapsed(now + COALESCE_WINDOW), Some(StallAction::Report(report.into())));
        assert_eq!((stalls.deadline(), stalls.elapsed(now + COALESCE_WINDOW * 2)), (None, None));
    }

    #[test]
    fn reports_say_what_the_flight_recorders_have() {
        let (mut stalls, now) = (StallTracker::new(None), Instant::now());
        for (rank, last) in [(0, 4), (2, 4), (3, 3)] {
            let activity = format!("under way: all_reduce #5; last completed: barrier #{last}");
            stalls.update(StallUpdate { activity, ..wait(rank, "all_reduce #5", &[1]) }, now);
        }
        let Some(StallAction::Report(report)) = stalls.elapsed(now + COALESCE_WINDOW) else {
            panic!()
        };
        let lines: Vec<_> = report.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "ranks 0, 2 wait in all_reduce #5 for rank 1 [under way: all_reduce #5; last \
                 completed: barrier #4]",
                "rank 3 waits in all_reduce #5 for rank 1 [under way: all_reduce #5; last \
                 completed: barrier #3]"
            ]
        );
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
                "rank 0 waits in barrier #1 for rank 1",
                "rank 1 waits in all_reduce #7 for rank 0"
            ]
        );
    }

    #[test]
    fn who_goes_on_is_forgotten() {
        let (mut stalls, now) = (StallTracker::new(Some(Duration::from_secs(40))), Instant::now());
        stalls.update(wait(0, "barrier #1", &[1]), now);
        stalls.update(StallUpdate { operation: None, ..wait(0, "", &[]) }, now);
        assert_eq!(stalls.elapsed(now + COALESCE_WINDOW), None);
        stalls.update(wait(1, "barrier #1", &[0]), now);
        stalls.rank_exited(1, 0);
        assert_eq!(stalls.elapsed(now + Duration::from_secs(60)), None);
    }

    #[test]
    fn a_report_that_is_repeated_says_nothing_new() {
        let (mut stalls, now) = (StallTracker::new(None), Instant::now());
        stalls.update(wait(0, "barrier #1", &[1]), now);
        assert!(stalls.elapsed(now + COALESCE_WINDOW).is_some());
        stalls.update(wait(0, "barrier #1", &[1]), now + Duration::from_secs(30));
        assert_eq!(stalls.deadline(), None);
        stalls.update(wait(0, "barrier #1", &[2]), now + Duration::from_secs(31));
        assert!(stalls.deadline().is_some());
    }

    #[test]
    fn the_end_of_a_worker_leaves_the_waits_of_the_next_one() {
        let (mut stalls, now) = (StallTracker::new(None), Instant::now());
        stalls.update(StallUpdate { replacement: 1, ..wait(1, "barrier #1", &[0]) }, now);
        stalls.rank_exited(1, 0);
        assert_eq!(stalls.waiting.len(), 1);
        stalls.rank_exited(1, 1);
        assert_eq!(stalls.waiting.len(), 0);
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
        stalls.rank_exited(0, 0);
        stalls.elapsed(now + seconds(108));
        assert_eq!(stalls.deadline(), Some(now + seconds(138)));
    }

    #[test]
    fn the_culprit_is_the_one_rank_that_all_waits_lead_to() {
        let culprit = |waits: &[(u32, &[u32])]| {
            let (mut stalls, now) = (StallTracker::new(None), Instant::now());
            for (rank, missing) in waits {
                stalls.update(wait(*rank, "barrier #1", missing), now);
            }
            stalls.culprit()
        };
        assert_eq!(culprit(&[(0, &[1]), (2, &[1])]), Some(1));
        // A pipeline: each waits for the one before.
        assert_eq!(culprit(&[(1, &[0]), (2, &[1]), (3, &[2])]), Some(0));
        assert_eq!(culprit(&[(0, &[1, 2]), (1, &[2])]), Some(2));
        assert_eq!(culprit(&[(0, &[1, 2])]), None);
        // Two of them wait for each other, or one for the device.
        assert_eq!(culprit(&[(0, &[1]), (2, &[3]), (3, &[2])]), None);
        assert_eq!(culprit(&[(0, &[1]), (2, &[])]), None);
        assert_eq!(culprit(&[(0, &[1]), (1, &[0])]), None);
    }

    #[test]
    fn beyond_the_limit_the_round_has_failed() {
        let (mut stalls, now) = (StallTracker::new(Some(Duration::from_secs(40))), Instant::now());
        stalls.update(wait(0, "barrier #1", &[1]), now);
        stalls.elapsed(now + COALESCE_WINDOW);
        assert_eq!(stalls.deadline(), Some(now + Duration::from_secs(10)));
        let Some(StallAction::Fail(hang)) = stalls.elapsed(now + Duration::from_secs(10)) else {
            panic!()
        };
        assert_eq!(hang.culprit, Some(1));
        assert_eq!(
            hang.report.lines().last(),
            Some("that is a failure, as --hang-timeout is 40 s")
        );
        assert_eq!(stalls.deadline(), None);
    }
}
