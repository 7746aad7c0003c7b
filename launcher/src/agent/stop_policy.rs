//! Decides when workers are stopped and which event is the root cause. Pure: the time is an
//! argument.

use std::time::{Duration, Instant, SystemTime};

use rustix::process::Signal;

use crate::agent::exit_status::ExitStatus;

/// The event that made the job stop before its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cause {
    /// This worker (by index) failed first.
    Failure(usize),
    /// The launcher was sent this signal.
    Signal(i32),
    /// The coordinator asked for it: the cause is on another node.
    Coordinator,
}

/// The action on all workers that have not ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Action {
    Nothing,
    Send(i32),
    Kill,
    /// They cannot be killed (stuck in the kernel): stop waiting for them.
    Abandon,
}

/// Signals within this time count as one: GNU timeout signals its child, and then the child's
/// process group.
const COALESCE_WINDOW: Duration = Duration::from_millis(200);
/// The time to wait for the end of a worker that has recorded its error.
const ENDING: Duration = Duration::from_secs(2);
/// The time to wait for the end of a killed process.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// A worker (by index) that has ended, and when it recorded an error, if it did.
pub type Ended = (usize, ExitStatus, Option<SystemTime>);

/// At the first failure or signal, all are asked to stop. After the grace period, or at a second
/// Ctrl-C, they are killed. Other repeated signals do not kill: schedulers repeat them.
pub struct StopPolicy {
    grace: Duration,
    cause: Option<Cause>,
    /// Failures seen before the root cause is decided.
    ends: Vec<Ended>,
    deadline: Option<Instant>,
    /// The times at which the first signal and the first SIGINT arrived.
    signalled: Option<Instant>,
    interrupted: Option<Instant>,
    killed: bool,
    /// They were killed because the grace period had passed.
    expired: bool,
}

impl StopPolicy {
    /// Makes the policy of a round. `grace` is the time from asking workers to stop to killing
    /// them.
    pub fn new(grace: Duration) -> StopPolicy {
        StopPolicy {
            grace,
            cause: None,
            ends: Vec::new(),
            deadline: None,
            signalled: None,
            interrupted: None,
            killed: false,
            expired: false,
        }
    }

    /// Returns what made the job stop, once it stops.
    pub fn cause(&self) -> Option<Cause> {
        self.cause
    }

    /// Returns when to call [`StopPolicy::elapsed`].
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Workers have been asked to stop and are being given time to do so.
    pub fn in_grace(&self) -> bool {
        self.cause.is_some() && !self.killed
    }

    /// Whether the workers were killed because the grace period had passed.
    pub fn has_expired(&self) -> bool {
        self.expired
    }

    /// Whether the launcher itself was signalled to end, and the workers have been killed.
    pub fn must_leave(&self) -> bool {
        self.signalled.is_some() && self.killed
    }

    /// Returns the rest of the grace period.
    pub fn time_left(&self, now: Instant) -> Duration {
        self.deadline.map(|deadline| deadline.saturating_duration_since(now)).unwrap_or_default()
    }

    /// Notes that everything was suspended for this long.
    pub fn paused(&mut self, time: Duration) {
        for moment in
            [&mut self.deadline, &mut self.signalled, &mut self.interrupted].into_iter().flatten()
        {
            *moment += time;
        }
    }

    /// Notes that these workers (by index, in rank order) have ended, each with the time of the
    /// error that it recorded. `is_ending`: a worker that has not ended yet has recorded an error
    /// too, and may be the first that failed.
    pub fn ended(&mut self, ends: &[Ended], is_ending: bool, now: Instant) -> Action {
        if self.cause.is_some() {
            return Action::Nothing;
        }
        self.ends.extend(ends.iter().filter(|(_, end, _)| end.is_failure()));
        if is_ending && !self.ends.is_empty() {
            self.deadline.get_or_insert(now + ENDING);
            return Action::Nothing;
        }
        self.blame(now)
    }

    fn blame(&mut self, now: Instant) -> Action {
        match root_cause(&self.ends) {
            Some(worker) => self.stop(Cause::Failure(worker), Signal::TERM.as_raw(), now),
            None => Action::Nothing,
        }
    }

    /// Notes that the workers must stop for a reason outside this node.
    pub fn stop_requested(&mut self, now: Instant) -> Action {
        match self.cause {
            None => self.stop(Cause::Coordinator, Signal::TERM.as_raw(), now),
            Some(_) => Action::Nothing,
        }
    }

    /// Notes that the launcher received a signal. None if the signal changes nothing and needs no
    /// message; `Action::Nothing` if workers are stopping already.
    pub fn signalled(&mut self, signal: i32, now: Instant) -> Option<Action> {
        let is_interrupt = signal == Signal::INT.as_raw();
        let mut earlier = [self.signalled, self.interrupted].into_iter().flatten();
        if earlier.any(|earlier| now.saturating_duration_since(earlier) < COALESCE_WINDOW) {
            return None;
        }
        let is_first = self.signalled.is_none();
        self.signalled.get_or_insert(now);
        let is_again = is_interrupt && self.interrupted.is_some();
        if is_interrupt {
            self.interrupted.get_or_insert(now);
        }
        match self.cause {
            None => Some(self.stop(Cause::Signal(signal), signal, now)),
            Some(_) if self.killed => None,
            Some(_) if is_again => Some(self.kill(now)),
            Some(_) => (is_first || is_interrupt).then_some(Action::Nothing),
        }
    }

    /// Acts on a deadline that has passed.
    pub fn elapsed(&mut self, now: Instant) -> Action {
        match self.deadline {
            Some(deadline) if deadline <= now && self.cause.is_none() => self.blame(now),
            Some(deadline) if deadline <= now && !self.killed => {
                self.expired = true;
                self.kill(now)
            }
            Some(deadline) if deadline <= now => {
                self.deadline = None;
                Action::Abandon
            }
            _ => Action::Nothing,
        }
    }

    fn stop(&mut self, cause: Cause, signal: i32, now: Instant) -> Action {
        self.cause = Some(cause);
        self.deadline = Some(now + self.grace);
        Action::Send(signal)
    }

    fn kill(&mut self, now: Instant) -> Action {
        self.killed = true;
        self.deadline = Some(now + LAST_WAIT);
        Action::Kill
    }
}

/// Returns the root cause among failures seen together: a crash, or else the error recorded first,
/// or else the lowest rank. A crash goes before an exit code, as a worker that misses its peer ends
/// with an exit code.
fn root_cause(failures: &[Ended]) -> Option<usize> {
    let first = failures.iter().min_by_key(|(worker, end, time)| {
        // In this order, false comes before true.
        (!end.is_crash(), time.is_none(), *time, *worker)
    });
    first.map(|(worker, ..)| *worker)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    #[test]
    fn success_stops_nobody() {
        let mut policy = StopPolicy::new(GRACE);
        assert_eq!(
            policy.ended(&[(0, ExitStatus::Exit(0), None)], true, Instant::now()),
            Action::Nothing
        );
        assert_eq!((policy.cause(), policy.deadline()), (None, None));
    }

    #[test]
    fn first_failure_then_grace_then_kill_then_abandon() {
        let (mut policy, now) = (StopPolicy::new(GRACE), Instant::now());
        assert_eq!(policy.ended(&[(2, ExitStatus::Exit(1), None)], false, now), Action::Send(15));
        assert!(policy.in_grace());
        assert_eq!(policy.ended(&[(0, ExitStatus::Signal(9), None)], false, now), Action::Nothing);
        assert_eq!(policy.cause(), Some(Cause::Failure(2)));
        assert_eq!(policy.elapsed(now + GRACE / 2), Action::Nothing);
        assert_eq!(policy.elapsed(now + GRACE), Action::Kill);
        assert!(!policy.in_grace() && policy.has_expired());
        assert_eq!(policy.elapsed(now + GRACE), Action::Nothing);
        assert_eq!(policy.elapsed(now + GRACE + LAST_WAIT), Action::Abandon);
        assert_eq!(policy.deadline(), None);
        assert!(!policy.must_leave());
    }

    #[test]
    fn a_signal_is_passed_on_and_a_second_interrupt_kills() {
        let (mut policy, now) = (StopPolicy::new(GRACE), Instant::now());
        assert_eq!(policy.signalled(2, now), Some(Action::Send(2)));
        assert!(!policy.must_leave());
        assert_eq!(policy.ended(&[(0, ExitStatus::Signal(2), None)], false, now), Action::Nothing);
        assert_eq!(policy.signalled(2, now + COALESCE_WINDOW / 2), None);
        assert_eq!(policy.signalled(15, now + COALESCE_WINDOW), None);
        assert!(policy.in_grace() && !policy.must_leave());
        assert_eq!(policy.signalled(2, now + COALESCE_WINDOW), Some(Action::Kill));
        assert_eq!(policy.cause(), Some(Cause::Signal(2)));
        assert!(policy.must_leave() && !policy.has_expired());
        assert_eq!(policy.signalled(2, now + 3 * COALESCE_WINDOW), None);
    }

    #[test]
    fn signals_that_are_repeated_do_not_kill() {
        let (mut policy, now) = (StopPolicy::new(GRACE), Instant::now());
        assert_eq!(policy.signalled(15, now), Some(Action::Send(15)));
        for (times, signal) in [(1, 15), (2, 1), (3, 3), (4, 15)] {
            assert_eq!(policy.signalled(signal, now + times * COALESCE_WINDOW), None);
        }
        // An interrupt says first what the next one does.
        assert_eq!(policy.signalled(2, now + 5 * COALESCE_WINDOW), Some(Action::Nothing));
        assert_eq!(policy.time_left(now + 5 * COALESCE_WINDOW), GRACE - 5 * COALESCE_WINDOW);
        assert_eq!(policy.signalled(2, now + 6 * COALESCE_WINDOW), Some(Action::Kill));
    }

    #[test]
    fn time_spent_stopped_does_not_count() {
        let (mut policy, now) = (StopPolicy::new(GRACE), Instant::now());
        policy.signalled(15, now);
        policy.paused(GRACE);
        assert_eq!(policy.elapsed(now + GRACE), Action::Nothing);
        assert_eq!(policy.elapsed(now + 2 * GRACE), Action::Kill);
    }

    #[test]
    fn the_coordinator_stops_workers_and_later_signals_do_not_kill() {
        let (mut policy, now) = (StopPolicy::new(GRACE), Instant::now());
        assert_eq!(policy.stop_requested(now), Action::Send(15));
        assert_eq!(policy.cause(), Some(Cause::Coordinator));
        assert_eq!(policy.stop_requested(now), Action::Nothing);
        assert_eq!(policy.signalled(15, now), Some(Action::Nothing));
        assert_eq!(policy.signalled(15, now + GRACE / 2), None);
        assert_eq!(policy.cause(), Some(Cause::Coordinator));
        let mut signalled = StopPolicy::new(GRACE);
        signalled.signalled(2, now);
        assert_eq!(signalled.stop_requested(now), Action::Nothing);
        assert_eq!(signalled.cause(), Some(Cause::Signal(2)));
    }

    #[test]
    fn of_failures_seen_together_a_crash_is_the_cause() {
        let (exit, term, kill) =
            (ExitStatus::Exit(1), ExitStatus::Signal(15), ExitStatus::Signal(9));
        let root_cause = |ends: &[(usize, ExitStatus)]| {
            let ends: Vec<_> = ends.iter().map(|(worker, end)| (*worker, *end, None)).collect();
            super::root_cause(&ends)
        };
        assert_eq!(root_cause(&[]), None);
        assert_eq!(root_cause(&[(1, exit), (2, exit)]), Some(1));
        assert_eq!(root_cause(&[(0, exit), (1, term), (2, kill)]), Some(2));
        assert_eq!(root_cause(&[(0, exit), (1, term)]), Some(0));
    }

    #[test]
    fn of_errors_seen_together_the_first_recorded_is_the_cause() {
        let (exit, kill) = (ExitStatus::Exit(1), ExitStatus::Signal(9));
        let at = |millis| Some(SystemTime::UNIX_EPOCH + Duration::from_millis(millis));
        assert_eq!(
            root_cause(&[(0, exit, at(7000)), (1, exit, at(6500)), (2, exit, at(6500))]),
            Some(1)
        );
        assert_eq!(root_cause(&[(0, exit, None), (1, exit, at(7000))]), Some(1));
        assert_eq!(root_cause(&[(0, exit, at(1000)), (1, kill, None)]), Some(1));
    }

    /// Its peers may be faster.
    #[test]
    fn a_worker_that_has_recorded_its_error_is_waited_for() {
        let (exit, now) = (ExitStatus::Exit(1), Instant::now());
        let at = |millis| Some(SystemTime::UNIX_EPOCH + Duration::from_millis(millis));
        let mut policy = StopPolicy::new(GRACE);
        assert_eq!(policy.ended(&[(0, exit, at(20))], true, now), Action::Nothing);
        assert_eq!(policy.elapsed(now), Action::Nothing);
        assert_eq!(policy.ended(&[(1, exit, at(10))], false, now), Action::Send(15));
        assert_eq!(policy.cause(), Some(Cause::Failure(1)));
        let mut policy = StopPolicy::new(GRACE);
        assert_eq!(policy.ended(&[(0, exit, at(20))], true, now), Action::Nothing);
        assert_eq!(policy.elapsed(now + ENDING), Action::Send(15));
        assert_eq!(policy.cause(), Some(Cause::Failure(0)));
        assert_eq!(policy.deadline(), Some(now + ENDING + GRACE));
    }
}
