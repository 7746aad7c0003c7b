//! How long ranks waited for each bucket, and for whom. Pure.

use std::collections::BTreeMap;

use super::steps::{GroupSteps, Step};
use crate::trace::intervals::{overlap, total};

/// The share of the time for late ranks from which one rank is to blame for it.
const TO_BLAME: f64 = 0.75;

/// How long ranks waited for a bucket in a step: means over steps and ranks, in microseconds.
#[derive(Clone, Default)]
pub struct Waited {
    /// While it was reduced.
    pub network: f64,
    /// Before all ranks had begun it.
    pub late: f64,
    /// The part of `late` for each rank that began it last.
    by: BTreeMap<u32, f64>,
}

impl Waited {
    /// Returns the whole time.
    pub fn time(&self) -> f64 {
        self.network + self.late
    }

    /// Returns the rank that is the last in most of the time in which ranks wait for a late one, and
    /// its part of that time; None if it is now one and now another.
    pub fn late_rank(&self) -> Option<(u32, f64)> {
        let most = self.by.iter().max_by(|one, other| one.1.total_cmp(other.1));
        let (rank, time) = most.filter(|(_, time)| **time >= TO_BLAME * self.late)?;
        Some((*rank, *time))
    }

    /// Returns the part of `late` in which this rank was the last.
    pub fn for_rank(&self, rank: u32) -> f64 {
        self.by.get(&rank).copied().unwrap_or(0.0)
    }

    /// Returns the sum over all buckets.
    pub fn sum(buckets: &[Waited]) -> Waited {
        let mut sum = Waited::default();
        for Waited { network, late, by } in buckets {
            sum.network += network;
            sum.late += late;
            for (rank, time) in by {
                *sum.by.entry(*rank).or_default() += time;
            }
        }
        sum
    }
}

/// Finds how long ranks waited for each bucket. Buckets are reduced one after the other: a wait is
/// for the first that is not over.
pub fn waited(group: &GroupSteps) -> Vec<Waited> {
    let mut waited = vec![Waited::default(); group.bytes.len()];
    for step in &group.steps {
        let share = 1.0 / (group.steps.len() * step.ranks.len()) as f64;
        for rank in &step.ranks {
            let mut free = f64::NEG_INFINITY;
            for (bucket, waited) in waited.iter_mut().enumerate() {
                let (last, begun) = last_to_begin(step, bucket);
                let end = rank.reductions[bucket].end.max(free);
                let begun = begun.clamp(free, end);
                let late = share * total(&overlap(&rank.waits, &[(free, begun)]));
                waited.late += late;
                *waited.by.entry(last).or_default() += late;
                waited.network += share * total(&overlap(&rank.waits, &[(begun, end)]));
                free = end;
            }
        }
    }
    waited
}

/// Returns the rank that was the last to begin a bucket, and when.
pub fn last_to_begin(step: &Step, bucket: usize) -> (u32, f64) {
    let begun = step.ranks.iter().map(|rank| (rank.rank, rank.reductions[bucket].started));
    begun.fold((0, f64::NEG_INFINITY), |last, own| if own.1 >= last.1 { own } else { last })
}
