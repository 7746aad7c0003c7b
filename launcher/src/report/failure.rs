//! The messages about a failed job (pure).

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use rustix::process::Signal;

use crate::agent::exit_status::ExitStatus;
use crate::agent::stop_policy::Action;
use crate::output::log_file::LogFile;
use crate::report::error_file::ErrorFile;
use crate::report::text::ranks;
use crate::signal;

/// Lines of stderr in a report.
const TAIL_LINES: usize = 20;

/// Bytes of stderr that are kept of each worker.
const TAIL_BYTES: usize = 1 << 15;

/// The end of a worker's stderr.
#[derive(Default)]
pub struct Tail(VecDeque<u8>);

impl Tail {
    /// Reads the tail of a worker that has written to the file itself.
    pub fn of_file(log: &LogFile) -> Tail {
        let mut tail = Tail::default();
        match last_bytes(log) {
            Ok(bytes) => tail.push(&bytes),
            Err(error) => log::warn!("cannot read {}: {error}", log.path.display()),
        }
        tail
    }

    /// Adds bytes, and keeps the last ones.
    pub fn push(&mut self, bytes: &[u8]) {
        let kept = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
        let excess = (self.0.len() + kept.len()).saturating_sub(TAIL_BYTES);
        self.0.drain(..excess);
        self.0.extend(kept);
    }

    /// Returns the last lines, as a terminal would show them: a progress bar is its last state
    /// only. The frames of a Rust backtrace are left out, as they would leave no room for the error
    /// above.
    fn lines(&self) -> Vec<String> {
        let bytes: Vec<u8> = self.0.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let mut lines = Vec::new();
        let mut in_backtrace = false;
        for line in text.lines() {
            if in_backtrace && line.starts_with(' ') {
                continue;
            }
            in_backtrace = line.eq_ignore_ascii_case("stack backtrace:");
            let last = line.trim_end_matches('\r').rsplit('\r').next().unwrap_or_default();
            lines.push(format!("{last}{}", if in_backtrace { " left out" } else { "" }));
        }
        lines.split_off(lines.len().saturating_sub(TAIL_LINES))
    }
}

/// The last action by which the launcher stopped a worker.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub enum Stopped {
    No,
    Asked,
    Killed,
    /// Killed when the grace period had passed.
    Overdue,
}

/// The end of one worker.
pub struct Outcome<'a> {
    pub rank: u32,
    pub local_rank: u32,
    pub pid: i32,
    /// None if it could not be killed.
    pub end: Option<ExitStatus>,
    /// The time at which it ended, or, if it recorded an error, at which that happened.
    pub time: Option<Timestamp>,
    pub stopped: Stopped,
    pub tail: &'a Tail,
    /// The error that it recorded.
    pub error: Option<&'a ErrorFile>,
    /// The file its stderr is in.
    pub log: Option<&'a Path>,
}

/// Says how a failed worker ended, in one line.
pub fn summary(worker: &Outcome, host: &str) -> String {
    let what = match worker.end {
        Some(ExitStatus::Signal(signal)) => {
            format!("was killed by signal {signal} ({})", signal::name(signal))
        }
        Some(ExitStatus::Exit(code)) => format!("failed with exit code {code}"),
        None => "failed".into(),
    };
    let Outcome { rank, local_rank, pid, .. } = worker;
    format!(
        "rank {rank} (local rank {local_rank}, pid {pid}, host {host}) {what}{}",
        at(worker.time)
    )
}

fn last_bytes(log: &LogFile) -> io::Result<Vec<u8>> {
    let mut file = File::open(&log.path)?;
    let end = file.metadata()?.len();
    file.seek(SeekFrom::Start(log.start.max(end.saturating_sub(TAIL_BYTES as u64))))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// " at 2026-01-31 12:00:00", in the time zone of this host.
fn at(time: Option<Timestamp>) -> String {
    let Some(time) = time else { return String::new() };
    time.to_zoned(TimeZone::system()).strftime(" at %Y-%m-%d %H:%M:%S").to_string()
}

/// Returns the full report on the worker that failed first.
pub fn cause(worker: &Outcome, host: &str) -> String {
    format!("{}\n{}", summary(worker, host), last_output(worker))
}

/// Returns the error that the worker recorded, or else the end of its stderr.
fn last_output(outcome: &Outcome) -> String {
    let mut recorded = Tail::default();
    if let Some(error) = outcome.error {
        recorded.push(error.traceback.as_ref().unwrap_or(&error.message).as_bytes());
    }
    let (source, lines) = match (recorded.lines(), outcome.log) {
        (lines, _) if !lines.is_empty() => ("the error it recorded".to_string(), lines),
        (_, None) => ("its stderr".to_string(), outcome.tail.lines()),
        (_, Some(log)) => (format!("its stderr ({})", log.display()), outcome.tail.lines()),
    };
    let heading = match lines.len() {
        0 => "it wrote nothing to stderr\n".to_string(),
        1 => format!("the last line of {source}:\n"),
        count => format!("the last {count} lines of {source}:\n"),
    };
    lines.iter().fold(heading, |text, line| format!("{text}  | {line}\n"))
}

/// Says how the other workers of this node ended, if there are others; `failed` is the index of the
/// one that failed first.
pub fn others(outcomes: &[Outcome], failed: Option<usize>, host: &str) -> Option<String> {
    let others: Vec<_> = outcomes
        .iter()
        .enumerate()
        .filter(|(index, _)| Some(*index) != failed)
        .map(|(_, outcome)| outcome)
        .collect();
    let who = if failed.is_some() { "the others".into() } else { format!("on host {host}") };
    (!others.is_empty()).then(|| format!("{who}: {}", exit_summaries(&others)))
}

/// Returns the message when the launcher is signalled to end: how long workers may take, and what
/// happens then.
pub fn stopping(signal: i32, action: Action, time_left: Duration) -> String {
    let name = signal::name(signal);
    let again = if signal == Signal::INT.as_raw() { "; again to kill them" } else { "" };
    match action {
        Action::Kill => format!("{name}: killing the ranks"),
        _ if time_left.is_zero() => stopping(signal, Action::Kill, time_left),
        // Whole seconds, unless it is less than one.
        _ => match time_left.as_secs_f64() {
            left if left >= 1.0 => {
                format!("{name}: waiting up to {} s for the ranks to stop{again}", left.round())
            }
            left => format!("{name}: waiting up to {left:.1} s for the ranks to stop{again}"),
        },
    }
}

/// Returns the message about workers that did not stop when the launcher was signalled; None if all
/// did.
pub fn killed_after_grace(outcomes: &[Outcome], signal: i32) -> Option<String> {
    let killed: Vec<_> = outcomes
        .iter()
        .filter(|outcome| outcome.stopped >= Stopped::Killed)
        .map(|o| o.rank)
        .collect();
    let name = signal::name(signal);
    (!killed.is_empty())
        .then(|| format!("{} did not stop on {name} and had to be killed", ranks(&killed)))
}

fn exit_summaries(outcomes: &[&Outcome]) -> String {
    let mut groups: Vec<(String, Vec<u32>)> = Vec::new();
    for outcome in outcomes {
        let ending = match (outcome.end, outcome.stopped) {
            (None, _) => "could not be killed".into(),
            (Some(ExitStatus::Exit(0 | 143) | ExitStatus::Signal(15)), Stopped::Asked) => {
                "stopped by flow-launch".into()
            }
            (Some(end), Stopped::Asked) => format!("asked to stop, ended with {end}"),
            (Some(_), Stopped::Killed) => "killed by flow-launch".into(),
            (Some(_), Stopped::Overdue) => "killed by flow-launch after the grace period".into(),
            (Some(ExitStatus::Exit(0)), Stopped::No) => "had finished".into(),
            (Some(end), Stopped::No) => format!("failed too ({end}{})", at(outcome.time)),
        };
        match groups.iter_mut().find(|(known, _)| *known == ending) {
            Some((_, ranks)) => ranks.push(outcome.rank),
            None => groups.push((ending, vec![outcome.rank])),
        }
    }
    groups
        .iter()
        .map(|(ending, members)| format!("{} {ending}", ranks(members)))
        .collect::<Vec<_>>()
        .join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_answered_by_what_follows() {
        let seconds = Duration::from_secs_f64;
        let said = stopping(2, Action::Send(2), seconds(30.0));
        assert_eq!(said, "SIGINT: waiting up to 30 s for the ranks to stop; again to kill them");
        let said = stopping(2, Action::Nothing, seconds(11.6));
        assert_eq!(said, "SIGINT: waiting up to 12 s for the ranks to stop; again to kill them");
        let said = stopping(15, Action::Send(15), seconds(0.3));
        assert_eq!(said, "SIGTERM: waiting up to 0.3 s for the ranks to stop");
        for (action, left) in [(Action::Kill, 10.0), (Action::Send(2), 0.0)] {
            assert_eq!(stopping(2, action, seconds(left)), "SIGINT: killing the ranks");
        }
    }

    #[test]
    fn tail_is_the_last_lines() {
        let mut tail = Tail::default();
        for line in 0..30 {
            tail.push(format!("line {line}\n").as_bytes());
        }
        assert_eq!(tail.lines().len(), TAIL_LINES);
        assert_eq!(tail.lines()[0], "line 10");
        tail.push(b"1%\r2%\r99%\r\nend");
        assert_eq!(tail.lines()[18..], ["99%", "end"]);
        tail.push(&vec![b'x'; 10 * TAIL_BYTES]);
        assert_eq!(tail.lines(), ["x".repeat(TAIL_BYTES)]);
    }

    #[test]
    fn the_root_cause_leads() {
        let (empty, mut said) = (Tail::default(), Tail::default());
        said.push(b"boom\n");
        let outcome = |rank, end, stopped, tail| Outcome {
            rank,
            local_rank: rank,
            pid: 7,
            end,
            time: Some(Timestamp::UNIX_EPOCH),
            stopped,
            tail,
            error: None,
            log: None,
        };
        let outcomes = [
            outcome(0, Some(ExitStatus::Signal(15)), Stopped::Asked, &empty),
            outcome(1, Some(ExitStatus::Signal(11)), Stopped::No, &said),
            outcome(2, Some(ExitStatus::Exit(0)), Stopped::No, &empty),
            outcome(3, Some(ExitStatus::Signal(9)), Stopped::Overdue, &empty),
            outcome(4, Some(ExitStatus::Exit(1)), Stopped::Asked, &empty),
            outcome(5, Some(ExitStatus::Exit(2)), Stopped::No, &empty),
            outcome(6, Some(ExitStatus::Signal(9)), Stopped::Killed, &empty),
        ];
        let report = cause(&outcomes[1], "node0") + &others(&outcomes, Some(1), "node0").unwrap();
        let lines: Vec<_> = report.lines().collect();
        let time = at(Some(Timestamp::UNIX_EPOCH));
        let cause = format!(
            "rank 1 (local rank 1, pid 7, host node0) was killed by signal 11 (SIGSEGV){time}"
        );
        assert_eq!(lines[0], cause);
        assert_eq!(lines[1..3], ["the last line of its stderr:", "  | boom"]);
        assert_eq!(
            lines[3],
            format!(
                "the others: rank 0 stopped by flow-launch; rank 2 had finished; rank 3 killed by \
                 flow-launch after the grace period; rank 4 asked to stop, ended with exit code \
                 1; rank 5 failed too (exit code 2{time}); rank 6 killed by flow-launch"
            )
        );
        assert_eq!(
            killed_after_grace(&outcomes, 15).unwrap(),
            "ranks 3, 6 did not stop on SIGTERM and had to be killed"
        );
        assert_eq!(killed_after_grace(&outcomes[..3], 15), None);
    }

    #[test]
    fn a_backtrace_leaves_room_for_the_error() {
        let mut said = Tail::default();
        said.push(b"Error: no such file\n\nStack backtrace:\n");
        said.push("   0: main\n             at ./src/main.rs:1:1\n".repeat(30).as_bytes());
        said.push(b"done\n");
        let expected = ["Error: no such file", "", "Stack backtrace: left out", "done"];
        assert_eq!(said.lines(), expected);
    }

    #[test]
    fn a_recorded_error_goes_before_stderr() {
        let mut said = Tail::default();
        said.push(b"warning\n");
        let error = |traceback| ErrorFile::new("m", traceback);
        let words = |error: Option<&ErrorFile>, log: Option<&str>| {
            last_output(&Outcome {
                rank: 0,
                local_rank: 0,
                pid: 7,
                end: Some(ExitStatus::Exit(1)),
                time: Some(Timestamp::UNIX_EPOCH),
                stopped: Stopped::No,
                tail: &said,
                error,
                log: log.map(Path::new),
            })
        };
        assert_eq!(
            words(None, Some("/logs/0/stderr.log")),
            "the last line of its stderr (/logs/0/stderr.log):\n  | warning\n"
        );
        assert_eq!(
            words(Some(&error(None)), None),
            "the last line of the error it recorded:\n  | m\n"
        );
        let both = words(Some(&error(Some("Traceback:\nboom\n"))), None);
        assert_eq!(both, "the last 2 lines of the error it recorded:\n  | Traceback:\n  | boom\n");
        assert!(words(Some(&error(Some(""))), None).contains("warning"));
    }
}
