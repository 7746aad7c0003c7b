//! Workers that wait long for each other, as they tell through their store, and what follows from
//! it. Pure: the time comes in.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::report::ranks;

/// How long others that wait too may take to say so, before a report is made.
const TOGETHER: Duration = Duration::from_secs(1);

/// What a worker tells of a wait: when it has become long, and when it is over.
#[derive(Debug, Deserialize)]
pub struct Wait {
    rank: u32,
    /// Tells the waits of a rank apart, which may have several threads.
    id: u64,
    /// The operation with its sequence number and bucket. None: it has gone on.
    operation: Option<String>,
    /// How long it has waited, in seconds.
    #[serde(default)]
    seconds: f64,
    /// The ranks it waits for.
    #[serde(default)]
    missing: Vec<u32>,
}

struct Waiting {
    operation: String,
    since: Instant,
    missing: Vec<u32>,
}

/// The long waits of a round.
#[derive(Default)]
pub struct Waits {
    limit: Option<Duration>,
    waiting: BTreeMap<(u32, u64), Waiting>,
    /// When to report what has not been reported yet.
    report_at: Option<Instant>,
    /// When everything was stopped: until when, and for how long.
    pauses: Vec<(Instant, Duration)>,
}

/// What is to be done.
#[derive(Debug, PartialEq)]
pub enum Finding {
    /// To be said.
    Report(String),
    /// The round has failed, for this reason.
    Hung(String),
}

impl Finding {
    pub fn report(&self) -> &str {
        match self {
            Finding::Report(report) | Finding::Hung(report) => report,
        }
    }
}

impl Waits {
    /// Nobody waits yet. A wait of more than `limit` fails the round.
    pub fn new(limit: Option<Duration>) -> Waits {
        Waits { limit, ..Waits::default() }
    }

    /// A worker has told of a wait.
    pub fn take(&mut self, wait: Wait, now: Instant) {
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
            .insert((wait.rank, wait.id), Waiting { operation, since, missing: wait.missing });
        self.report_at.get_or_insert(now + TOGETHER);
    }

    /// A worker has ended: it waits no more.
    pub fn ended(&mut self, rank: u32) {
        self.waiting.retain(|(waiting, _), _| *waiting != rank);
    }

    /// For so long, until now, everything was stopped: nobody has waited.
    pub fn paused(&mut self, time: Duration, now: Instant) {
        self.pauses.push((now, time));
        self.waiting.values_mut().for_each(|waiting| waiting.since += time);
        self.report_at.iter_mut().for_each(|at| *at += time);
    }

    /// When [`Waits::elapsed`] is to be called.
    pub fn deadline(&self) -> Option<Instant> {
        let oldest = self.waiting.values().map(|waiting| waiting.since).min();
        let limit = oldest.zip(self.limit).map(|(since, limit)| since + limit);
        self.report_at.into_iter().chain(limit).min()
    }

    /// Time has passed.
    pub fn elapsed(&mut self, now: Instant) -> Option<Finding> {
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
            return Some(Finding::Hung(report));
        }
        self.report_at.filter(|at| *at <= now)?;
        self.report_at = None;
        oldest.map(|waited| Finding::Report(self.report(waited)))
    }

    /// Who is where and waits for whom; first those who keep others waiting without waiting
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
        for ((rank, _), Waiting { operation, missing, .. }) in &self.waiting {
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
            let wait = if members.len() == 1 { "waits" } else { "wait" };
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

    fn wait(rank: u32, operation: &str, missing: &[u32]) -> Wait {
        Wait {
            rank,
            id: 0,
            operation: Some(operation.into()),
            seconds: 30.0,
            missing: missing.into(),
        }
    }

    #[test]
    fn reports_name_who_is_where_and_who_is_absent() {
        let (mut waits, now) = (Waits::new(None), Instant::now());
        waits.take(wait(0, "all_reduce #5 (bucket 2)", &[1]), now);
        waits.take(wait(2, "all_reduce #5 (bucket 2)", &[1]), now);
        assert_eq!(waits.elapsed(now), None);
        assert_eq!(waits.deadline(), Some(now + TOGETHER));
        let report =
            "no progress for 31 s: rank 1 is in no collective\nranks 0, 2 wait in all_reduce #5 (bucket 2) for rank 1";
        assert_eq!(waits.elapsed(now + TOGETHER), Some(Finding::Report(report.into())));
        assert_eq!((waits.deadline(), waits.elapsed(now + TOGETHER * 2)), (None, None));
    }

    #[test]
    fn those_who_wait_for_each_other_are_all_named() {
        let (mut waits, now) = (Waits::new(None), Instant::now());
        waits.take(wait(0, "barrier #1", &[1]), now);
        waits.take(wait(1, "all_reduce #7", &[0]), now);
        let Some(Finding::Report(report)) = waits.elapsed(now + TOGETHER) else { panic!() };
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
        let (mut waits, now) = (Waits::new(Some(Duration::from_secs(40))), Instant::now());
        waits.take(wait(0, "barrier #1", &[1]), now);
        waits
            .take(Wait { rank: 0, id: 0, operation: None, seconds: 0.0, missing: Vec::new() }, now);
        assert_eq!(waits.elapsed(now + TOGETHER), None);
        waits.take(wait(1, "barrier #1", &[0]), now);
        waits.ended(1);
        assert_eq!(waits.elapsed(now + Duration::from_secs(60)), None);
    }

    #[test]
    fn time_spent_stopped_is_no_wait() {
        let seconds = Duration::from_secs;
        let (mut waits, now) = (Waits::new(Some(seconds(40))), Instant::now());
        waits.take(wait(0, "barrier #1", &[1]), now);
        waits.elapsed(now + TOGETHER);
        waits.paused(seconds(100), now + seconds(105));
        assert_eq!(waits.deadline(), Some(now + seconds(110)));
        // This one was stopped, too, and says that it has waited for 108 seconds.
        waits.take(Wait { seconds: 108.0, ..wait(1, "barrier #1", &[0]) }, now + seconds(106));
        waits.ended(0);
        waits.elapsed(now + seconds(108));
        assert_eq!(waits.deadline(), Some(now + seconds(138)));
    }

    #[test]
    fn beyond_the_limit_the_round_has_failed() {
        let (mut waits, now) = (Waits::new(Some(Duration::from_secs(40))), Instant::now());
        waits.take(wait(0, "barrier #1", &[1]), now);
        waits.elapsed(now + TOGETHER);
        assert_eq!(waits.deadline(), Some(now + Duration::from_secs(10)));
        let Some(Finding::Hung(report)) = waits.elapsed(now + Duration::from_secs(10)) else {
            panic!()
        };
        assert_eq!(report.lines().last(), Some("that is a failure, as --hang-timeout is 40 s"));
        assert_eq!(waits.deadline(), None);
    }
}
