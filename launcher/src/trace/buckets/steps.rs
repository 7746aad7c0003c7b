//! What the buckets of each group did, step by step. Pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::trace::format::{BucketTensors, Timeline, TimelineEvent};
use crate::trace::intervals::{Interval, median, union};

/// A longer step than so many median ones has an evaluation or a checkpoint in it.
const LONGEST: f64 = 2.0;

/// The reduction of a bucket on a rank. Times are in microseconds.
#[derive(Clone, Copy)]
pub struct Reduction {
    /// The time at which the bucket's last gradient was there.
    pub queued: f64,
    pub started: f64,
    pub end: f64,
}

/// A backward of a rank.
pub struct Backward {
    pub rank: u32,
    /// The time of the first gradient.
    pub begin: f64,
    /// The time at which all gradients were there.
    pub computed: f64,
    /// The time in which it waited for buckets.
    pub waits: Vec<Interval>,
    /// By the number of the bucket.
    pub reductions: Vec<Reduction>,
}

/// A step of all ranks of a group.
pub struct Step {
    /// The time from its backward to the next one.
    pub time: f64,
    pub ranks: Vec<Backward>,
}

/// The steps of a group in which its buckets were those of the end.
pub struct GroupSteps {
    pub group: String,
    /// The bytes of each tensor of each bucket; empty if the timeline does not say.
    pub tensors: Vec<Vec<u64>>,
    /// For each rank, the time from the first gradient to that of each tensor: medians of some steps.
    pub ready: BTreeMap<u32, Vec<f64>>,
    /// The bytes of each bucket.
    pub bytes: Vec<u64>,
    pub steps: Vec<Step>,
    /// What keeps an estimate from being right.
    pub doubt: Option<String>,
}

impl GroupSteps {
    /// Returns when the first bucket of a rank is usually full, from the first gradient on; never if that
    /// is not known.
    pub fn first_is_full(&self, rank: &Backward) -> f64 {
        let Some(first) = self.tensors.first() else { return f64::INFINITY };
        let times = self.ready.get(&rank.rank).into_iter().flatten().take(first.len());
        times.copied().fold(0.0, f64::max)
    }
}

/// A backward of a rank, of whatever groups.
struct Phase {
    step: u64,
    begin: f64,
    end: f64,
    /// Buckets that it waited for, and when.
    waits: Vec<(u32, Interval)>,
    /// Reductions and bytes, by group and bucket.
    reduced: BTreeMap<String, BTreeMap<u32, (Reduction, u64)>>,
}

/// What is known of a group before its steps are compared.
#[derive(Default)]
struct Found {
    /// What each rank says of the buckets, in order.
    described: BTreeMap<u32, Vec<Vec<BucketTensors>>>,
    /// The phases of each step, by rank.
    steps: BTreeMap<u64, BTreeMap<u32, Phase>>,
    ranks: BTreeSet<u32>,
    doubt: Option<String>,
}

impl Found {
    fn doubt(&mut self, why: &str) {
        self.doubt.get_or_insert_with(|| why.to_owned());
    }
}

/// Returns the steps of each group that has buckets.
pub fn steps_of_groups(timeline: &Timeline) -> Vec<GroupSteps> {
    let mut groups = BTreeMap::new();
    for event in timeline.events.iter().filter(|event| event.category == "buckets") {
        let found: &mut Found = groups.entry(event.arguments.group_name()).or_default();
        let described = found.described.entry(event.pid).or_default();
        described.push(event.arguments.buckets.clone());
    }
    let mut phases = phases(timeline);
    for event in timeline.events.iter().filter(|event| is_bucket(event)) {
        let group = event.arguments.group_name();
        let found = groups.entry(group.clone()).or_default();
        if event.arguments.failed {
            found.doubt("a bucket has failed");
        }
        if event.arguments.backend == "nccl" {
            found.doubt("the host does not wait for GPUs; Ddp::stats() has their times");
        }
        let queued = event.arguments.queued.unwrap_or(event.start);
        let started = event.arguments.started.unwrap_or(event.start);
        let Some(phase) = phase_at(&mut phases, event.pid, queued) else { continue };
        let bucket = event.arguments.bucket.unwrap_or_default();
        let reduction = Reduction { queued, started, end: event.start + event.duration };
        let of_group = phase.reduced.entry(group).or_default();
        of_group.insert(bucket, (reduction, event.arguments.bytes));
    }
    distribute(phases, &mut groups);
    let groups = groups.into_iter().filter(|(_, found)| !found.steps.is_empty());
    groups.map(|(group, found)| found.compared(group)).collect()
}

/// Returns whether backward waited for buckets that no collective of the same number reduced, as
/// those of some communication hooks.
pub fn has_other_buckets(timeline: &Timeline) -> bool {
    let mut waits = timeline.events.iter().filter(|event| event.category == "wait");
    waits.any(|event| event.arguments.bucket.is_some())
}

fn is_bucket(event: &TimelineEvent) -> bool {
    event.category == "comm" && event.name == "all_reduce" && event.arguments.bucket.is_some()
}

/// Returns each rank's backwards in order, with their waits.
fn phases(timeline: &Timeline) -> BTreeMap<u32, Vec<Phase>> {
    let mut phases: BTreeMap<u32, Vec<Phase>> = BTreeMap::new();
    let spans = timeline.events.iter().filter(|event| event.kind == "X");
    for event in spans.clone().filter(|event| event.category == "phase") {
        let Some(step) = event.arguments.step.filter(|_| event.name == "backward") else {
            continue;
        };
        phases.entry(event.pid).or_default().push(Phase {
            step,
            begin: event.start,
            end: event.start + event.duration,
            waits: Vec::new(),
            reduced: BTreeMap::new(),
        });
    }
    for of_rank in phases.values_mut() {
        of_rank.sort_by(|one, other| one.begin.total_cmp(&other.begin));
    }
    for event in spans.filter(|event| event.category == "wait") {
        let Some(bucket) = event.arguments.bucket else { continue };
        if let Some(phase) = phase_at(&mut phases, event.pid, event.start) {
            phase.waits.push((bucket, (event.start, event.start + event.duration)));
        }
    }
    phases
}

/// Returns the backward of a rank in which this time is.
fn phase_at(phases: &mut BTreeMap<u32, Vec<Phase>>, rank: u32, time: f64) -> Option<&mut Phase> {
    let of_rank = phases.get_mut(&rank)?;
    let after = of_rank.partition_point(|phase| phase.begin <= time);
    of_rank.get_mut(after.checked_sub(1)?).filter(|phase| time <= phase.end)
}

/// Gives the backwards to their groups.
fn distribute(phases: BTreeMap<u32, Vec<Phase>>, groups: &mut BTreeMap<String, Found>) {
    for (rank, of_rank) in phases {
        let mut last_end = f64::NEG_INFINITY;
        for phase in of_rank {
            let is_shared = phase.begin < last_end || phase.reduced.len() > 1;
            last_end = last_end.max(phase.end);
            for group in phase.reduced.keys().filter(|_| is_shared) {
                let found = groups.entry(group.clone()).or_default();
                found.doubt("one backward goes through several models");
            }
            let Some((group, reduced)) = phase.reduced.first_key_value() else { continue };
            let found = groups.entry(group.clone()).or_default();
            if phase.waits.iter().any(|(bucket, _)| !reduced.contains_key(bucket)) {
                found.doubt("some buckets are reduced by a communication hook, or are sparse");
            }
            let last_queued = reduced.values().map(|(reduction, _)| reduction.queued);
            let last_queued = last_queued.fold(f64::NEG_INFINITY, f64::max);
            if phase.waits.iter().any(|(_, wait)| wait.0 < last_queued) {
                found.doubt("backward waits for buckets in its middle, too");
            }
            found.ranks.insert(rank);
            found.steps.entry(phase.step).or_default().insert(rank, phase);
        }
    }
}

impl Found {
    /// Returns the buckets of the end, as one rank describes them.
    fn layout(&self) -> Vec<BucketTensors> {
        let last = self.described.values().next().and_then(|described| described.last());
        last.cloned().unwrap_or_default()
    }

    /// Returns when gradients came on each rank, in backwards with these tensors.
    fn ready(&self, tensors: &[Vec<u64>]) -> BTreeMap<u32, Vec<f64>> {
        let mut ready = BTreeMap::new();
        for (rank, described) in &self.described {
            let mut times = vec![Vec::new(); tensors.iter().map(Vec::len).sum()];
            let alike = described
                .iter()
                .filter(|buckets| buckets.iter().map(|bucket| &bucket.tensors).eq(tensors));
            for buckets in alike {
                let of_all = buckets.iter().flat_map(|bucket| &bucket.ready);
                for (times, time) in times.iter_mut().zip(of_all) {
                    times.push(*time as f64);
                }
            }
            ready.insert(*rank, times.into_iter().map(median).collect());
        }
        ready
    }

    /// Returns the steps in which all ranks have reduced the buckets of the end, but for the first
    /// one of these, in which memory is touched for the first time, and the last one, whose time is
    /// not known.
    fn compared(self, group: String) -> GroupSteps {
        let layout = self.layout();
        let tensors: Vec<Vec<u64>> = layout.iter().map(|bucket| bucket.tensors.clone()).collect();
        let ready = self.ready(&tensors);
        let Found { steps, ranks, mut doubt, .. } = self;
        let mut bytes: Vec<u64> = tensors.iter().map(|tensors| tensors.iter().sum()).collect();
        if let Some(last) =
            steps.values().flat_map(BTreeMap::values).last().filter(|_| layout.is_empty())
        {
            bytes = last.reduced.values().flatten().map(|(_, (_, bytes))| *bytes).collect();
        }
        let mut kept: Vec<Step> = Vec::new();
        let mut begins = Vec::new();
        for of_ranks in steps.into_values().filter(|of_ranks| of_ranks.keys().eq(&ranks)) {
            let backwards: Option<Vec<Backward>> =
                of_ranks.into_iter().map(|(rank, phase)| phase.backward(rank, &bytes)).collect();
            if let Some(ranks) = backwards {
                begins.push(ranks[0].begin);
                kept.push(Step { time: 0.0, ranks });
            }
        }
        for (step, times) in kept.iter_mut().zip(begins.windows(2)) {
            step.time = times[1] - times[0];
        }
        kept.pop();
        let mut steps: Vec<Step> = kept.into_iter().skip(1).collect();
        let usual = median(steps.iter().map(|step| step.time).collect());
        steps.retain(|step| step.time <= LONGEST * usual);
        if layout.iter().any(|bucket| bucket.class != layout[0].class) {
            doubt.get_or_insert_with(|| "not all gradients are of one type".to_owned());
        }
        GroupSteps { group, tensors, ready, bytes, steps, doubt }
    }
}

impl Phase {
    /// Returns the backward of a group whose buckets have so many bytes; None if it had others.
    fn backward(self, rank: u32, bytes: &[u64]) -> Option<Backward> {
        let (_, reduced) = self.reduced.into_iter().next()?;
        if !reduced.keys().copied().eq(0..bytes.len() as u32)
            || !reduced.values().map(|(_, bytes)| bytes).eq(bytes)
        {
            return None;
        }
        let reductions: Vec<Reduction> = reduced.into_values().map(|(one, _)| one).collect();
        let waits = union(self.waits.into_iter().map(|(_, wait)| wait).collect());
        let last_queued = reductions.last()?.queued;
        let computed = waits.first().map_or(last_queued, |first| first.0);
        Some(Backward { rank, begin: self.begin, computed, waits, reductions })
    }
}
