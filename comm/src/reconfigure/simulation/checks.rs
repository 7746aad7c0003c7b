//! What must always hold.

use std::time::Duration;

use super::cluster::{Cluster, PREFIX, Phase, USUAL_DELAY};
use crate::bootstrap::JoinError;
use crate::bootstrap::lineage::{Members, Process};
use crate::error::Error;
use crate::json::from_json;

impl Cluster {
    /// No process that lives is taken for dead.
    pub fn check_write(&mut self, key: &str, value: &[u8]) {
        let Some(rest) = key.strip_prefix(PREFIX).and_then(|rest| rest.strip_prefix("epoch/"))
        else {
            return;
        };
        let (epoch, what) = rest.split_once('/').unwrap();
        let epoch: u64 = epoch.parse().unwrap();
        let before = self.decided.get(&(epoch - 1)).map_or(&[][..], |members| &members.processes);
        let living: Vec<&Process> =
            before.iter().filter(|process| self.slot_of(process.pid).is_alive).collect();
        let mut left_out = Vec::new();
        if what.starts_with("present/") {
            self.came.entry(epoch).or_insert(self.now);
            if !self.values.contains_key(&format!("{PREFIX}epoch/{epoch}/begun")) {
                self.fail(format!("{key} waits for others, which cannot know that"));
            }
        } else if let Some(seat) = what.strip_prefix("lost/") {
            left_out = living
                .iter()
                .filter(|process| process.seat.number.to_string() == seat)
                .map(|process| process.describe())
                .collect();
        } else if what == "membership" {
            let members: Members = from_json(value, key).unwrap();
            left_out = living
                .iter()
                .filter(|process| !members.processes.iter().any(|member| member.is(process)))
                .map(|process| process.describe())
                .collect();
            // One whose store does not answer cannot say that it has given up.
            let mut new = members
                .processes
                .iter()
                .filter(|process| !before.iter().any(|member| member.is(process)));
            let gone = new.find(|process| {
                let slot = self.slot_of(process.pid);
                slot.has_store && slot.gave_up.is_some_and(|time| time < self.came[&epoch])
            });
            if let Some(gone) = gone {
                let gone = gone.describe();
                self.fail(format!("the members of epoch {epoch} wait for {gone}, which gave up"));
            }
            let seats: Vec<usize> = members.processes.iter().map(|p| p.seat.number).collect();
            if !seats.is_sorted_by(|one, other| one < other) {
                self.fail(format!("the members of epoch {epoch} are in disorder: {seats:?}"));
            }
            for (number, reason) in &members.refused {
                let value = &self.values[&format!("{PREFIX}newcomer/{number}")];
                let process: Option<Process> = from_json(value, key).unwrap();
                if let Some(process) = process {
                    self.slots[process.pid as usize - 100].refusal = Some(reason.clone());
                }
            }
            self.decided.insert(epoch, members);
        }
        if !left_out.is_empty() {
            self.fail(format!("{key} leaves out {left_out:?}, which live"));
        }
    }

    /// A job does not begin only if one of its processes has ended or is to end.
    pub fn check_begun(&mut self, process: usize, joined: &Result<(), JoinError>, took: Duration) {
        self.check_time(process, took);
        self.has_begun |= joined.is_ok();
        let Err(error) = joined else { return };
        self.errors += 1;
        self.log(|| format!("{} does not begin: {error:?}", self.name(process)));
        let mut slots = self.slots[..self.faults.size].iter();
        let are_well = slots.all(|slot| slot.is_alive && slot.interrupted.is_none());
        let is_interrupted = self.slots[process].interrupted.is_some();
        if self.faults.are_gentle && are_well
            || matches!(error, JoinError::Interrupted) && !is_interrupted
        {
            self.fail(format!("{} does not begin without a reason: {error:?}", self.name(process)));
        }
    }

    /// All that have an epoch have the same one.
    pub fn check_returned(&mut self, process: usize, members: &Members, took: Duration) {
        self.check_time(process, took);
        if !members.processes.iter().any(|member| self.slot_of(member.pid).has_state) {
            self.fail(format!("nothing is left of what the job has done: {members:?}"));
        }
        self.slots[process].has_state = true;
        let own = &self.slots[process].process;
        if !members.processes.iter().any(|member| member.is(own)) {
            self.fail(format!("{} is no member: {members:?}", self.name(process)));
        }
        let first = self.returned.entry(members.epoch).or_insert_with(|| members.clone());
        if first != members {
            let failure = format!("two memberships of one epoch: {first:?}, {members:?}");
            self.fail(failure);
        }
    }

    /// An error says what is true.
    pub fn check_error(&mut self, process: usize, error: &Error, took: Duration) {
        self.errors += 1;
        self.log(|| format!("{} has an error: {error}", self.name(process)));
        self.check_time(process, took);
        let text = error.to_string();
        let is_interrupted = matches!(error, Error::Interrupted { .. });
        let all_ended = text.contains("ranks that had joined the job have ended")
            || text.contains("all its ranks have ended");
        let with_state: Vec<&Process> = self
            .living()
            .iter()
            .filter(|slot| slot.has_state && !matches!(slot.phase, Phase::GivesUp))
            .map(|slot| &slot.process)
            .collect();
        // A launcher starts nobody in vain.
        let refusal = self.slots[process].refusal.as_ref().filter(|_| !self.faults.launched);
        let is_refused = refusal.is_some_and(|reason| text.contains(reason));
        if all_ended && !with_state.is_empty() {
            self.fail(format!("{text}; but {with_state:?} live"));
        } else if self.faults.are_gentle && !all_ended && !is_refused && !is_interrupted {
            self.fail(format!("{} gives up without a reason: {text}", self.name(process)));
        } else if is_interrupted && self.slots[process].interrupted.is_none() {
            self.fail(format!("{} was not interrupted: {text}", self.name(process)));
        } else if text.contains("program was interrupted") {
            self.fail(format!("{} was interrupted, and says: {text}", self.name(process)));
        }
    }

    /// No call takes too long, nor goes on when its program is interrupted.
    fn check_time(&mut self, process: usize, took: Duration) {
        let slot = &self.slots[process];
        let bound = self.faults.bound() * slot.slowness;
        let message = self.faults.delay.max(USUAL_DELAY);
        let soon = Duration::from_secs(1) + 20 * message * slot.slowness;
        let waited = slot.interrupted.map_or(Duration::ZERO, |time| self.now - time);
        if took > bound {
            self.fail(format!("{} took {took:?}, more than {bound:?}", self.name(process)));
        } else if slot.is_interrupted && waited > soon {
            self.fail(format!("{} was interrupted {waited:?} ago", self.name(process)));
        }
    }

    /// Long after the last fault all that live are members of one group.
    pub fn check_settled(&mut self) {
        let living = self.living();
        let Some(first) = living.first() else { return };
        let expected: Vec<u32> = match &first.phase {
            Phase::Trains(members) => members.processes.iter().map(|p| p.pid).collect(),
            _ => Vec::new(),
        };
        let are_together = living.iter().all(|slot| match (&slot.phase, &first.phase) {
            (Phase::Trains(members), Phase::Trains(others)) => members == others,
            _ => false,
        });
        let mut pids: Vec<u32> = living.iter().map(|slot| slot.process.pid).collect();
        pids.sort_by_key(|pid| self.slots[*pid as usize - 100].process.seat.number);
        if !are_together || pids != expected {
            let states: Vec<String> = living
                .iter()
                .map(|slot| format!("{}: {:?}", slot.process.describe(), slot.phase))
                .collect();
            self.fail(format!("not all are in one group: {}", states.join("; ")));
        }
    }
}
