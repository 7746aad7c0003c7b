//! Decides when workers are stopped and which event is to blame. Pure: time comes in as an argument.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::worker::End;

/// What made the job stop before its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cause {
    /// This worker (by index) failed first.
    Failure(usize),
    /// The launcher was sent this signal.
    Signal(i32),
    /// The coordinator has said so: the cause is elsewhere.
    Order,
}

/// What is to be done to all workers that are still there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Action {
    Nothing,
    Send(i32),
    Kill,
    /// They cannot even be killed (stuck in the kernel): no longer wait for them.
    Abandon,
}

/// Signals that come together are one wish: GNU timeout signals its child, and then the child's process group.
const TOGETHER: Duration = Duration::from_millis(200);
/// How long a killed process may take to go.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// First failure or signal: ask all to stop. After the grace period, or at a signal that comes later: kill.
pub struct Policy {
    grace: Duration,
    cause: Option<Cause>,
    deadline: Option<Instant>,
    interrupted: Option<Instant>,
    killed: bool,
}

impl Policy {
    pub fn new(grace: Duration) -> Policy {
        Policy { grace, cause: None, deadline: None, interrupted: None, killed: false }
    }

    pub fn cause(&self) -> Option<Cause> {
        self.cause
    }

    /// When [`Policy::elapsed`] is to be called.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Workers have been asked to stop and are being given time to do so.
    pub fn in_grace(&self) -> bool {
        self.cause.is_some() && !self.killed
    }

    /// Someone wants the launcher itself to end, and the time for doing so in good order is over.
    pub fn must_leave(&self) -> bool {
        self.interrupted.is_some() && self.killed
    }

    /// These workers (by index, in rank order) were seen to have ended together.
    pub fn ended(&mut self, ends: &[(usize, End)], now: Instant) -> Action {
        match root_cause(ends) {
            Some(worker) if self.cause.is_none() => self.stop(Cause::Failure(worker), Signal::SIGTERM as i32, now),
            _ => Action::Nothing,
        }
    }

    /// The workers are to stop for a reason that is not here.
    pub fn ordered(&mut self, now: Instant) -> Action {
        match self.cause {
            None => self.stop(Cause::Order, Signal::SIGTERM as i32, now),
            Some(_) => Action::Nothing,
        }
    }

    /// The launcher was sent a signal.
    pub fn signalled(&mut self, signal: i32, now: Instant) -> Action {
        let first = *self.interrupted.get_or_insert(now);
        match self.cause {
            None => self.stop(Cause::Signal(signal), signal, now),
            Some(Cause::Signal(_)) if now - first < TOGETHER => Action::Nothing,
            Some(_) if now == first && self.cause == Some(Cause::Order) => Action::Nothing,
            Some(_) => self.kill(now),
        }
    }

    /// Time has passed.
    pub fn elapsed(&mut self, now: Instant) -> Action {
        match self.deadline {
            Some(deadline) if deadline <= now && !self.killed => self.kill(now),
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

/// Of failures seen together, the one to blame: a crash (any signal but SIGTERM, with which others would have been
/// asked to stop) before an exit code, which is how a worker that misses its peer ends; then the lowest rank.
fn root_cause(ends: &[(usize, End)]) -> Option<usize> {
    let failures = || ends.iter().filter(|(_, end)| end.is_failure());
    failures().find(|(_, end)| end.is_crash()).or_else(|| failures().next()).map(|(worker, _)| *worker)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    #[test]
    fn success_stops_nobody() {
        let mut policy = Policy::new(GRACE);
        assert_eq!(policy.ended(&[(0, End::Exit(0))], Instant::now()), Action::Nothing);
        assert_eq!((policy.cause(), policy.deadline()), (None, None));
    }

    #[test]
    fn first_failure_then_grace_then_kill_then_abandon() {
        let (mut policy, now) = (Policy::new(GRACE), Instant::now());
        assert_eq!(policy.ended(&[(2, End::Exit(1))], now), Action::Send(15));
        assert!(policy.in_grace());
        assert_eq!(policy.ended(&[(0, End::Signal(9))], now), Action::Nothing);
        assert_eq!(policy.cause(), Some(Cause::Failure(2)));
        assert_eq!(policy.elapsed(now + GRACE / 2), Action::Nothing);
        assert_eq!(policy.elapsed(now + GRACE), Action::Kill);
        assert!(!policy.in_grace());
        assert_eq!(policy.elapsed(now + GRACE), Action::Nothing);
        assert_eq!(policy.elapsed(now + GRACE + LAST_WAIT), Action::Abandon);
        assert_eq!(policy.deadline(), None);
        assert!(!policy.must_leave());
    }

    #[test]
    fn a_signal_is_passed_on_and_a_second_kills() {
        let (mut policy, now) = (Policy::new(GRACE), Instant::now());
        assert_eq!(policy.signalled(2, now), Action::Send(2));
        assert!(!policy.must_leave());
        assert_eq!(policy.ended(&[(0, End::Signal(2))], now), Action::Nothing);
        assert_eq!(policy.signalled(15, now + TOGETHER / 2), Action::Nothing);
        assert!(policy.in_grace() && !policy.must_leave());
        assert_eq!(policy.signalled(15, now + TOGETHER), Action::Kill);
        assert_eq!(policy.cause(), Some(Cause::Signal(2)));
        assert!(policy.must_leave());
    }

    #[test]
    fn an_order_stops_workers_and_the_signal_that_comes_with_it_does_not_kill() {
        let (mut policy, now) = (Policy::new(GRACE), Instant::now());
        assert_eq!(policy.ordered(now), Action::Send(15));
        assert_eq!(policy.cause(), Some(Cause::Order));
        assert_eq!(policy.ordered(now), Action::Nothing);
        assert_eq!(policy.signalled(15, now), Action::Nothing);
        assert_eq!(policy.signalled(15, now + GRACE / 2), Action::Kill);
        let mut signalled = Policy::new(GRACE);
        signalled.signalled(2, now);
        assert_eq!(signalled.ordered(now), Action::Nothing);
        assert_eq!(signalled.cause(), Some(Cause::Signal(2)));
    }

    #[test]
    fn of_failures_seen_together_a_crash_is_the_cause() {
        let (exit, term, kill, fine) = (End::Exit(1), End::Signal(15), End::Signal(9), End::Exit(0));
        assert_eq!(root_cause(&[(0, fine)]), None);
        assert_eq!(root_cause(&[(0, fine), (1, exit), (2, exit)]), Some(1));
        assert_eq!(root_cause(&[(0, exit), (1, term), (2, kill)]), Some(2));
        assert_eq!(root_cause(&[(0, exit), (1, term)]), Some(0));
    }
}
