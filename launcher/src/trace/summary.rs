//! The text of `flow-launch trace FILE`. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::arrivals::Arrivals;
use super::buckets;
use super::format::{Timeline, TimelineEvent};
use super::intervals::{Interval, median, overlap, total, union};

/// The factor by which a straggler computes longer than the median rank.
const STRAGGLES: f64 = 1.1;

/// The number of steps that are listed with their slowest rank.
const LISTED: usize = 10;

/// The events of one rank, as far as the summary needs them.
#[derive(Default)]
struct Rank {
    communication: Vec<Interval>,
    backward: Vec<Interval>,
    waits: Vec<Interval>,
    /// For each step, the time in its phases without waits.
    busy: BTreeMap<u64, f64>,
    /// Steps in which this rank was the slowest.
    slowest: usize,
    /// Collectives that this rank was the last to arrive in.
    last: usize,
}

impl Rank {
    fn add(&mut self, event: &TimelineEvent) {
        let interval = (event.start, event.start + event.duration);
        match event.category.as_str() {
            "comm" => self.communication.push(interval),
            "wait" => self.waits.push(interval),
            "phase" if event.name == "backward" => self.backward.push(interval),
            _ => {}
        }
        let sign = match event.category.as_str() {
            "phase" => 1.0,
            "wait" => -1.0,
            _ => return,
        };
        if let Some(step) = event.arguments.step {
            *self.busy.entry(step).or_default() += sign * event.duration;
        }
    }

    /// Returns the mean time in which it computes, per step.
    fn mean(&self) -> f64 {
        // Not `sum`, which is -0 for no steps.
        self.busy.values().fold(0.0, |total, time| total + time) / self.busy.len().max(1) as f64
    }
}

/// The rank that computed longest in a step. Times are in microseconds.
struct Slowest {
    step: u64,
    rank: u32,
    time: f64,
    /// The time of the median rank.
    median: f64,
}

impl Slowest {
    /// Finds the slowest rank of a step; None if no rank was in it.
    fn of(step: u64, ranks: &BTreeMap<u32, Rank>) -> Option<Slowest> {
        let times = ranks.iter().filter_map(|(rank, of)| Some((*of.busy.get(&step)?, *rank)));
        let times: Vec<_> = times.collect();
        let (time, rank) = *times.iter().max_by(|one, other| one.0.total_cmp(&other.0))?;
        let median = median(times.into_iter().map(|(time, _)| time).collect());
        Some(Slowest { step, rank, time, median })
    }

    /// Returns by how much the slowest rank was slower than the median rank.
    fn behind(&self) -> f64 {
        self.time - self.median
    }
}

/// Makes a table with a line for each rank. It has the time in communication, and the share of it
/// that is hidden behind backward. It also has the time in waits, and the mean time to compute a
/// step. It also says in how many steps the rank was the slowest, and in how many collectives it
/// was the last to arrive. Then the stragglers, and the steps in which the slowest rank was
/// furthest behind, and the buckets that were waited for.
pub fn describe(timeline: &Timeline) -> String {
    let mut ranks: BTreeMap<u32, Rank> = BTreeMap::new();
    let mut arrivals = Arrivals::default();
    for event in timeline.events.iter().filter(|event| event.kind == "X") {
        ranks.entry(event.pid).or_default().add(event);
        arrivals.add(event);
    }
    for rank in arrivals.last_of_each() {
        ranks.entry(rank).or_default().last += 1;
    }
    let steps: BTreeSet<u64> = ranks.values().flat_map(|rank| rank.busy.keys().copied()).collect();
    let slowest: Vec<_> = steps.iter().filter_map(|step| Slowest::of(*step, &ranks)).collect();
    for Slowest { rank, .. } in &slowest {
        ranks.entry(*rank).or_default().slowest += 1;
    }
    table(&ranks, steps.len(), arrivals.count())
        + &stragglers(&ranks)
        + &furthest_behind(slowest)
        + LEGEND
        + &buckets::describe(timeline)
}

const LEGEND: &str = "
comm: time in which a collective of the rank was running; hidden: the share of it during backward
and outside waits; compute: mean time in the phases of a step, without waits; slowest in: steps in
which the rank computed longest; last to arrive in: collectives that this rank began last.
";

fn table(ranks: &BTreeMap<u32, Rank>, steps: usize, operations: usize) -> String {
    let mut text = format!("{} ranks, {steps} steps, {operations} collectives\n\n", ranks.len());
    text += "rank    comm ms   hidden    wait ms   compute ms   slowest in   last to arrive in\n";
    for (number, rank) in ranks {
        let communication = union(rank.communication.clone());
        let waits = union(rank.waits.clone());
        let behind = overlap(&communication, &union(rank.backward.clone()));
        let hidden = total(&behind) - total(&overlap(&behind, &waits));
        let time = total(&communication);
        let share = if time > 0.0 { 100.0 * hidden / time } else { 0.0 };
        let _ = writeln!(
            text,
            "{number:>4} {:>10.1} {share:>7.0}% {:>10.1} {:>12.1} {:>12} {:>19}",
            time / 1e3,
            total(&waits) / 1e3,
            rank.mean() / 1e3,
            rank.slowest,
            rank.last
        );
    }
    text
}

/// Returns the ranks whose mean time to compute a step is well above that of the median rank.
fn stragglers(ranks: &BTreeMap<u32, Rank>) -> String {
    let computing: Vec<_> = ranks.iter().filter(|(_, rank)| !rank.busy.is_empty()).collect();
    let median = median(computing.iter().map(|(_, rank)| rank.mean()).collect());
    let late = computing.into_iter().filter(|(_, rank)| rank.mean() > STRAGGLES * median);
    let late: Vec<_> = late
        .map(|(number, rank)| format!("rank {number} ({:.1} x the median)", rank.mean() / median))
        .collect();
    let late = if late.is_empty() { "none".into() } else { late.join(", ") };
    format!("\nstragglers: {late}\n")
}

/// Returns the slowest rank of the steps in which it took most more than the median rank.
fn furthest_behind(mut slowest: Vec<Slowest>) -> String {
    slowest.retain(|step| step.behind() > 0.0);
    slowest.sort_by(|one, other| other.behind().total_cmp(&one.behind()));
    slowest.truncate(LISTED);
    if slowest.is_empty() {
        return String::new();
    }
    let mut text = String::from("\n   step   slowest rank   compute ms   median ms\n");
    for Slowest { step, rank, time, median } in slowest {
        let _ = writeln!(text, "{step:>7} {rank:>14} {:>12.1} {:>11.1}", time / 1e3, median / 1e3);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn event(rank: u32, category: &str, name: &str, time: (u32, u32), arguments: Value) -> Value {
        let (start, end) = time;
        let duration = end - start;
        json!({"ph": "X", "cat": category, "name": name, "pid": rank, "tid": 0, "ts": start,
               "dur": duration, "args": arguments})
    }

    fn lines(events: Vec<Value>) -> Vec<String> {
        let timeline = json!({"traceEvents": events, "otherData": {}});
        let text = describe(&serde_json::from_value(timeline).unwrap());
        let lines = text.lines().take_while(|line| !line.starts_with("comm:"));
        let words = lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        words.filter(|line| !line.is_empty()).collect()
    }

    #[test]
    fn communication_behind_backward_is_hidden_unless_it_is_waited_for() {
        let operation = json!({"group": "world", "sequence": 1});
        let events = vec![
            json!({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}),
            event(0, "phase", "backward", (0, 10_000), json!({"step": 0})),
            event(0, "comm", "all_reduce", (2_000, 6_000), operation.clone()),
            // It overlaps the first one, and half of it is waited for.
            event(
                0,
                "comm",
                "all_reduce",
                (5_000, 10_000),
                json!({"group": "world", "sequence": 2}),
            ),
            event(0, "wait", "bucket", (8_000, 10_000), json!({"step": 0, "bucket": 1})),
            event(1, "phase", "backward", (0, 10_000), json!({"step": 0})),
            event(1, "comm", "all_reduce", (9_000, 11_000), operation),
        ];
        let expected = [
            "2 ranks, 1 steps, 2 collectives",
            "rank comm ms hidden wait ms compute ms slowest in last to arrive in",
            "0 8.0 75% 2.0 8.0 0 0",
            "1 2.0 50% 0.0 10.0 1 1",
            "stragglers: rank 1 (1.2 x the median)",
            "step slowest rank compute ms median ms",
            "0 1 10.0 8.0",
        ];
        assert_eq!(lines(events), expected);
    }

    #[test]
    fn the_slowest_rank_of_a_step_is_the_one_that_computes_longest() {
        let mut events = Vec::new();
        for (step, slowest) in [(0, 2), (1, 2), (2, 0)] {
            for rank in 0..3 {
                let begin = step * 100;
                let own = if rank == slowest { 90 } else { 40 };
                let step = json!({"step": step});
                events.push(event(rank, "phase", "forward", (begin, begin + 10), step.clone()));
                events.push(event(
                    rank,
                    "phase",
                    "backward",
                    (begin + 10, begin + 100),
                    step.clone(),
                ));
                events.push(event(
                    rank,
                    "wait",
                    "bucket",
                    (begin + 10 + own - 10, begin + 100),
                    step,
                ));
            }
        }
        let lines = lines(events);
        let slowest: Vec<_> =
            lines[2..5].iter().map(|line| line.split(' ').nth(5).unwrap()).collect();
        assert_eq!(slowest, ["1", "0", "2"]);
        assert_eq!(lines[5], "stragglers: rank 2 (1.3 x the median)");
        // Where ranks were equally far behind, the first steps come first.
        let steps: Vec<_> = lines[7..].iter().map(|line| &line[..3]).collect();
        assert_eq!(steps, ["0 2", "1 2", "2 0"]);
    }

    #[test]
    fn an_empty_timeline_has_an_empty_table() {
        assert_eq!(lines(Vec::new())[0], "0 ranks, 0 steps, 0 collectives");
    }
}
