//! The timers of torchelastic's watchdog: a process that does not release its timer in time is
//! killed. Pure: takes workers' requests and the time, returns the timers that have expired.

use std::collections::HashMap;

use serde::Deserialize;

/// Bytes of a line. Clients write at most PIPE_BUF bytes at once.
const MAX_LINE_BYTES: usize = 8192;

/// The most timers at a time.
const MAX_TIMERS: usize = 1 << 16;

/// torch's `FileTimerRequest`, a line of JSON.
#[derive(Deserialize)]
struct TimerRequest {
    pid: i32,
    scope_id: String,
    /// The time of expiration in seconds since 1970; a negative one releases the timer.
    expiration_time: f64,
    signal: i32,
}

struct Timer {
    expiration: f64,
    signal: i32,
}

/// A process whose timer has expired.
#[derive(Debug, PartialEq)]
pub struct Expired {
    pub pid: i32,
    pub scope: String,
    /// The signal to send, if any.
    pub signal: Option<i32>,
    /// Seconds since it expired.
    pub late: f64,
}

/// The timers that are set, and bytes of a request that is not complete.
#[derive(Default)]
pub struct Timers {
    /// The timers by process and scope.
    timers: HashMap<(i32, String), Timer>,
    /// The start of an incomplete line.
    unfinished: Vec<u8>,
    has_complained: bool,
}

impl Timers {
    /// Takes bytes that workers have written. Returns the first malformed request, once.
    pub fn take(&mut self, bytes: &[u8]) -> Option<String> {
        let mut complaint = None;
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.unfinished.extend_from_slice(part);
            if part.ends_with(b"\n") || self.unfinished.len() > MAX_LINE_BYTES {
                let line = std::mem::take(&mut self.unfinished);
                complaint = complaint.or(self.request(&line).err());
            }
        }
        complaint.filter(|_| !std::mem::replace(&mut self.has_complained, true))
    }

    fn request(&mut self, line: &[u8]) -> Result<(), String> {
        let request: TimerRequest = serde_json::from_slice(line)
            .map_err(|error| format!("a malformed timer request: {error}"))?;
        let key = (request.pid, request.scope_id);
        if request.expiration_time < 0.0 {
            self.timers.remove(&key);
        } else if self.timers.len() < MAX_TIMERS || self.timers.contains_key(&key) {
            self.timers
                .insert(key, Timer { expiration: request.expiration_time, signal: request.signal });
        } else {
            return Err(format!("more than {MAX_TIMERS} timers"));
        }
        Ok(())
    }

    /// Returns when the next one expires.
    pub fn next(&self) -> Option<f64> {
        self.timers.values().map(|timer| timer.expiration).min_by(f64::total_cmp)
    }

    /// Returns the processes whose timers have expired, in that order; each with its first expired
    /// timer that has a signal, as in torch. All timers of such a process are removed.
    pub fn expired(&mut self, now: f64) -> Vec<Expired> {
        let mut due: Vec<_> =
            self.timers.iter().filter(|(_, timer)| timer.expiration <= now).collect();
        due.sort_by(|(_, left), (_, right)| left.expiration.total_cmp(&right.expiration));
        let mut expired: Vec<Expired> = Vec::new();
        for ((pid, scope), timer) in due {
            let signal = Some(timer.signal).filter(|signal| *signal > 0);
            let found =
                Expired { pid: *pid, scope: scope.clone(), signal, late: now - timer.expiration };
            match expired.iter_mut().find(|known| known.pid == *pid) {
                None => expired.push(found),
                Some(known) if known.signal.is_none() && signal.is_some() => *known = found,
                Some(_) => {}
            }
        }
        self.timers.retain(|(pid, _), _| expired.iter().all(|gone| gone.pid != *pid));
        expired
    }

    /// Forgets all of them.
    pub fn clear(&mut self) {
        self.timers.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(pid: i32, scope: &str, expiration: f64, signal: i32) -> String {
        format!(
            "{{\"version\": 1, \"pid\": {pid}, \"scope_id\": \"{scope}\", \"expiration_time\": \
             {expiration}, \"signal\": {signal}}}\n"
        )
    }

    fn set(timers: &mut Timers, pid: i32, scope: &str, expiration: f64, signal: i32) {
        assert_eq!(timers.take(line(pid, scope, expiration, signal).as_bytes()), None);
    }

    fn expired(pid: i32, scope: &str, signal: Option<i32>, late: f64) -> Expired {
        Expired { pid, scope: scope.into(), signal, late }
    }

    #[test]
    fn what_is_released_in_time_does_not_expire() {
        let mut timers = Timers::default();
        set(&mut timers, 7, "a", 100.5, 9);
        set(&mut timers, 8, "a", 100.0, 9);
        assert_eq!(timers.next(), Some(100.0));
        set(&mut timers, 8, "a", -1.0, 0);
        set(&mut timers, 9, "never set", -1.0, 0);
        assert_eq!((timers.next(), timers.expired(100.0)), (Some(100.5), vec![]));
        assert_eq!(timers.expired(101.0), [expired(7, "a", Some(9), 0.5)]);
        assert_eq!((timers.next(), timers.expired(200.0)), (None, vec![]));
        set(&mut timers, 7, "a", 1.0, 9);
        timers.clear();
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn a_timer_that_is_set_again_is_the_same_one() {
        let mut timers = Timers::default();
        set(&mut timers, 7, "a", 1.0, 9);
        set(&mut timers, 7, "a", 3.0, 9);
        assert_eq!(timers.expired(2.0), []);
        assert_eq!(timers.expired(3.0), [expired(7, "a", Some(9), 0.0)]);
    }

    #[test]
    fn each_process_goes_by_its_first_timer_with_a_signal() {
        let mut timers = Timers::default();
        for (scope, expiration, signal) in
            [("c", 3.0, 15), ("a", 1.0, 0), ("b", 2.0, 9), ("later", 9.0, 9)]
        {
            set(&mut timers, 7, scope, expiration, signal);
        }
        set(&mut timers, 6, "none", 0.5, -1);
        assert_eq!(
            timers.expired(4.0),
            [expired(6, "none", None, 3.5), expired(7, "b", Some(9), 2.0)]
        );
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn malformed_requests_are_reported_once_and_skipped() {
        let mut timers = Timers::default();
        assert!(timers.take(b"nonsense\n").unwrap().contains("a malformed timer request"));
        assert_eq!(timers.take(&vec![b'x'; 10 * MAX_LINE_BYTES]), None);
        assert!(timers.unfinished.len() <= MAX_LINE_BYTES);
        timers.take(b"\n");
        set(&mut timers, 7, "a", 1.0, 9);
        assert_eq!(timers.expired(1.0).len(), 1);
    }

    #[test]
    fn their_number_is_bounded() {
        let mut timers = Timers::default();
        (0..MAX_TIMERS as i32).for_each(|pid| set(&mut timers, pid, "a", 1.0, 9));
        assert!(timers.take(line(-7, "a", 1.0, 9).as_bytes()).unwrap().contains("more than"));
        set(&mut timers, 7, "a", 2.0, 9);
        assert_eq!(timers.timers.len(), MAX_TIMERS);
    }

    proptest! {
        #[test]
        fn lines_may_come_in_any_pieces(cuts in prop::collection::vec(1usize..40, 1..20)) {
            let lines = (0..9).map(|pid| line(pid, "a", f64::from(pid), 9));
            let whole = lines.collect::<String>().into_bytes();
            let (mut timers, mut rest) = (Timers::default(), &whole[..]);
            for cut in cuts {
                let (part, later) = rest.split_at(cut.min(rest.len()));
                prop_assert_eq!(timers.take(part), None);
                rest = later;
            }
            prop_assert_eq!(timers.take(rest), None);
            let pids: Vec<_> = timers.expired(9.0).into_iter().map(|expired| expired.pid).collect();
            prop_assert_eq!(pids, (0..9).collect::<Vec<_>>());
        }
    }
}
