//! The rank that was the last to arrive in each collective.

use std::collections::BTreeMap;

use super::format::TimelineEvent;

/// Operations that ranks count each for itself: nobody waits for all of a group.
const MESSAGES: [&str; 3] = ["send", "recv", "batch_send_recv"];

/// The group, and the operation's number in it.
type Operation = (String, u64);

/// The last of those that arrived in an operation.
struct Last {
    rank: u32,
    /// The time in microseconds.
    started: f64,
    /// Others arrived as well.
    has_others: bool,
}

/// The last rank to arrive, of the ranks whose events were added.
#[derive(Default)]
pub struct Arrivals(BTreeMap<Operation, Last>);

impl Arrivals {
    /// Takes an event of a rank. Those that are no collective do not count.
    pub fn add(&mut self, event: &TimelineEvent) {
        let Some(operation) = operation(event) else { return };
        let started = event.arguments.started.unwrap_or(event.start);
        let arrived = Last { rank: event.pid, started, has_others: false };
        let last = self.0.entry(operation).or_insert(arrived);
        if last.rank != event.pid {
            last.has_others = true;
            if last.started <= started {
                (last.rank, last.started) = (event.pid, started);
            }
        }
    }

    /// Returns the last rank to arrive in the collective of this event; None for other events, and
    /// where a single rank has recorded it.
    pub fn last(&self, event: &TimelineEvent) -> Option<u32> {
        let last = self.0.get(&operation(event)?).filter(|last| last.has_others)?;
        Some(last.rank)
    }

    /// Returns the last rank of each collective in which several arrived.
    pub fn last_of_each(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.values().filter(|last| last.has_others).map(|last| last.rank)
    }

    /// Returns the number of collectives.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

fn operation(event: &TimelineEvent) -> Option<Operation> {
    let is_collective = event.kind == "X" && !MESSAGES.contains(&event.name.as_str());
    let sequence = event.arguments.sequence.filter(|_| is_collective)?;
    Some((event.arguments.group.to_string(), sequence))
}
