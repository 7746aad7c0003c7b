//! What is said when a job has failed.

use std::collections::VecDeque;

use crate::worker::{signal_name, End};

/// Lines of stderr in a report.
const TAIL_LINES: usize = 20;

/// Bytes of stderr that are kept of each worker.
const TAIL_BYTES: usize = 1 << 15;

/// The last of what a worker wrote to its stderr.
#[derive(Default)]
pub struct Tail(VecDeque<u8>);

impl Tail {
    pub fn push(&mut self, bytes: &[u8]) {
        let kept = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
        let excess = (self.0.len() + kept.len()).saturating_sub(TAIL_BYTES);
        self.0.drain(..excess);
        self.0.extend(kept);
    }

    /// The last lines, as they would stand on a terminal: of a progress bar only its last state.
    fn lines(&self) -> Vec<String> {
        let bytes: Vec<u8> = self.0.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<_> = text.lines().map(|line| line.trim_end_matches('\r')).collect();
        let shown = lines.iter().skip(lines.len().saturating_sub(TAIL_LINES));
        shown.map(|line| line.rsplit('\r').next().unwrap_or_default().to_string()).collect()
    }
}

/// How far the launcher went to stop a worker.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub enum Stopped {
    No,
    Asked,
    Killed,
}

/// One worker, at the end of the job.
pub struct Outcome<'a> {
    pub rank: u32,
    pub local_rank: u32,
    pub pid: i32,
    /// None if it could not be killed.
    pub end: Option<End>,
    pub stopped: Stopped,
    pub tail: &'a Tail,
}

/// In a line, how a worker that failed did so.
pub fn summary(worker: &Outcome, host: &str) -> String {
    let what = match worker.end {
        Some(End::Signal(signal)) => format!("was killed by signal {signal} ({})", signal_name(signal)),
        Some(End::Exit(code)) => format!("failed with exit code {code}"),
        None => "failed".into(),
    };
    let Outcome { rank, local_rank, pid, .. } = worker;
    format!("rank {rank} (local rank {local_rank}, pid {pid}, host {host}) {what}")
}

/// All there is to say of the worker that failed first.
pub fn cause(worker: &Outcome, host: &str) -> String {
    let mut report = format!("{}\n", summary(worker, host));
    let tail = worker.tail.lines();
    match tail.len() {
        0 => report.push_str("it wrote nothing to stderr\n"),
        1 => report.push_str("the last line of its stderr:\n"),
        count => report.push_str(&format!("the last {count} lines of its stderr:\n")),
    }
    for line in tail {
        report.push_str(&format!("  | {line}\n"));
    }
    report
}

/// What became of the workers of this node but for the one (by index) that failed first, if there are others.
pub fn others(outcomes: &[Outcome], failed: Option<usize>) -> Option<String> {
    let others: Vec<_> =
        outcomes.iter().enumerate().filter(|(index, _)| Some(*index) != failed).map(|(_, outcome)| outcome).collect();
    let who = if failed.is_some() { "the others" } else { "on this node" };
    (!others.is_empty()).then(|| format!("{who}: {}", fates(&others)))
}

/// What is said of workers that did not stop when the launcher was told to; nothing if all did.
pub fn unwilling(outcomes: &[Outcome], signal: i32) -> Option<String> {
    let killed: Vec<_> = outcomes.iter().filter(|outcome| outcome.stopped == Stopped::Killed).map(|o| o.rank).collect();
    let name = signal_name(signal);
    (!killed.is_empty()).then(|| format!("{} did not stop on {name} and had to be killed", ranks(&killed)))
}

fn fates(outcomes: &[&Outcome]) -> String {
    let mut groups: Vec<(String, Vec<u32>)> = Vec::new();
    for outcome in outcomes {
        let fate = match (outcome.end, outcome.stopped) {
            (None, _) => "could not be killed".into(),
            (Some(End::Exit(0 | 143) | End::Signal(15)), Stopped::Asked) => "stopped by flow-launch".into(),
            (Some(end), Stopped::Asked) => format!("asked to stop, ended with {end}"),
            (Some(_), Stopped::Killed) => "killed by flow-launch after the grace period".into(),
            (Some(End::Exit(0)), Stopped::No) => "had finished".into(),
            (Some(end), Stopped::No) => format!("failed too ({end})"),
        };
        match groups.iter_mut().find(|(known, _)| *known == fate) {
            Some((_, ranks)) => ranks.push(outcome.rank),
            None => groups.push((fate, vec![outcome.rank])),
        }
    }
    groups.iter().map(|(fate, members)| format!("{} {fate}", ranks(members))).collect::<Vec<_>>().join("; ")
}

/// "rank 3", "ranks 0, 2-7": ranks come in ascending order.
pub fn ranks(ranks: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *rank => *last = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let run = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    let list = runs.iter().map(run).collect::<Vec<_>>().join(", ");
    format!("{} {list}", if ranks.len() == 1 { "rank" } else { "ranks" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_in_runs() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[0, 2, 3, 4, 7]), "ranks 0, 2-4, 7");
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
        let outcome = |rank, end, stopped, tail| Outcome { rank, local_rank: rank, pid: 7, end, stopped, tail };
        let outcomes = [
            outcome(0, Some(End::Signal(15)), Stopped::Asked, &empty),
            outcome(1, Some(End::Signal(11)), Stopped::No, &said),
            outcome(2, Some(End::Exit(0)), Stopped::No, &empty),
            outcome(3, Some(End::Signal(9)), Stopped::Killed, &empty),
            outcome(4, Some(End::Exit(1)), Stopped::Asked, &empty),
        ];
        let report = cause(&outcomes[1], "node0") + &others(&outcomes, Some(1)).unwrap();
        let lines: Vec<_> = report.lines().collect();
        assert_eq!(lines[0], "rank 1 (local rank 1, pid 7, host node0) was killed by signal 11 (SIGSEGV)");
        assert_eq!(lines[1..3], ["the last line of its stderr:", "  | boom"]);
        assert_eq!(
            lines[3],
            "the others: rank 0 stopped by flow-launch; rank 2 had finished; \
             rank 3 killed by flow-launch after the grace period; \
             rank 4 asked to stop, ended with exit code 1"
        );
        assert_eq!(unwilling(&outcomes, 15).unwrap(), "rank 3 did not stop on SIGTERM and had to be killed");
        assert_eq!(unwilling(&outcomes[..3], 15), None);
    }
}
