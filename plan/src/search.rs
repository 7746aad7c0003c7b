//! All layouts of so many ranks, by predicted time.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::cost::Costs;
use crate::error::{Error, Result};
use crate::layout::{Constraints, Layout, Recompute};
use crate::prediction::{Prediction, Stages};
use crate::schedule::ScheduleKind;
use crate::task::Task;

/// The most chunks that interleaved schedules are tried with.
const MOST_CHUNKS: usize = 8;

/// What is tried where nothing else is wanted: what Flow has. It has no selective recomputation, and
/// no stages 2 and 3 of ZeRO.
const RECOMPUTATIONS: [Recompute; 2] = [Recompute::None, Recompute::Full];
const ZERO_STAGES: RangeInclusive<u8> = 0..=1;

/// More ranks are refused: finding their divisors takes too long.
const MOST_RANKS: usize = 1 << 32;

/// What a search has found.
pub struct Plans {
    /// The fastest layouts that fit in memory, the fastest first. Of the layouts of one mesh, those
    /// are left out that another one beats in both time and memory.
    pub best: Vec<Prediction>,
    /// The layout that needs the least memory, be it enough or not.
    pub smallest: Prediction,
    /// How many layouts were predicted.
    pub tried: usize,
    /// How many of them fit in memory.
    pub fit: usize,
}

/// What a search keeps of a layout.
#[derive(Clone, Copy)]
struct Candidate {
    step: f64,
    memory: f64,
    layout: Layout,
}

impl Candidate {
    fn by_time(&self, other: &Self) -> Ordering {
        let by_step = self.step.total_cmp(&other.step);
        by_step.then(self.memory.total_cmp(&other.memory)).then(self.layout.cmp(&other.layout))
    }

    fn by_memory(&self, other: &Self) -> Ordering {
        self.memory.total_cmp(&other.memory).then(self.by_time(other))
    }
}

/// Predicts all layouts of `ranks` ranks that have the wanted parts (those of the task count where
/// `wanted` has none), and returns the `top` fastest. Selective recomputation and stages 2 and 3 of
/// ZeRO, which Flow does not have, are tried only if wanted. The same input gives the same result.
///
/// # Errors
/// No layout has the wanted parts and divides the model and the batch; 0 ranks, or more than 2^32.
pub fn search(task: &Task, ranks: usize, wanted: &Constraints, top: usize) -> Result<Plans> {
    if !(1..=MOST_RANKS).contains(&ranks) {
        return Err(Error::Impossible { ranks, reason: "give 1 to 2^32 ranks".into() });
    }
    let wanted = wanted.or(task.layout);
    wanted.check()?;
    let (mut tried, mut fit) = (0, 0);
    let mut smallest: Option<Candidate> = None;
    let mut best: Vec<Candidate> = Vec::new();
    // By the number of stages.
    let mut ranges_of = BTreeMap::new();
    // Why the last layout could not be that was the furthest from being one.
    let mut reason = None;
    for mesh in meshes(task, ranks, &wanted, &mut reason) {
        let mut candidates = Vec::new();
        for variant in variants(task, &mesh, &wanted) {
            let costs = Costs::new(&task.model, &task.cluster, &task.training, &variant);
            for scheduled in schedules(task, &variant, &wanted, &mut reason) {
                let count = scheduled.stages();
                let ranges = ranges_of.entry(count).or_insert_with(|| task.model.stages(count));
                let stages = Stages::new(task, &scheduled, &costs, ranges);
                for zero in choices(wanted.zero, if mesh.data > 1 { ZERO_STAGES } else { 0..=0 }) {
                    let layout = Layout { zero, ..scheduled };
                    tried += 1;
                    let Prediction { time, memory, .. } = stages.predict(task, &layout, &costs);
                    let candidate = Candidate { step: time.step, memory: memory.total, layout };
                    if smallest.as_ref().is_none_or(|least| candidate.by_memory(least).is_lt()) {
                        smallest = Some(candidate);
                    }
                    if memory.fits {
                        fit += 1;
                        candidates.push(candidate);
                    }
                }
            }
        }
        candidates.sort_by(Candidate::by_time);
        let mut least = f64::INFINITY;
        candidates.retain(|candidate| {
            let is_smaller = candidate.memory < least;
            least = least.min(candidate.memory);
            is_smaller
        });
        best.extend(candidates);
        best.sort_by(Candidate::by_time);
        best.truncate(top);
    }
    let Some(smallest) = smallest else {
        let reason = reason.unwrap_or_else(|| not_a_mesh(ranks, &wanted));
        return Err(Error::Impossible { ranks, reason });
    };
    let predict = |candidate: &Candidate| crate::predict(task, &candidate.layout);
    let best = best.iter().map(predict).collect::<Result<_>>()?;
    Ok(Plans { best, smallest: predict(&smallest)?, tried, fit })
}

/// The layouts that differ in the mesh only.
fn meshes(
    task: &Task,
    ranks: usize,
    wanted: &Constraints,
    reason: &mut Option<String>,
) -> Vec<Layout> {
    let mut meshes = Vec::new();
    for tensor in divisors(ranks) {
        for pipeline in divisors(ranks / tensor) {
            let data = ranks / tensor / pipeline;
            let is_wanted = |wanted: Option<usize>, size| wanted.is_none_or(|want| want == size);
            let mesh = Constraints {
                data: Some(data),
                tensor: Some(tensor),
                pipeline: Some(pipeline),
                ..Constraints::default()
            };
            let mesh = mesh.filled();
            let sizes = [(wanted.data, data), (wanted.tensor, tensor), (wanted.pipeline, pipeline)];
            if sizes.iter().all(|&(wanted, size)| is_wanted(wanted, size)) {
                match mesh.reason_against(&task.model, task.batch) {
                    None => meshes.push(mesh),
                    Some(against) => *reason = Some(against),
                }
            }
        }
    }
    meshes
}

/// The mesh with each micro-batch and each way of recomputing and splitting activations.
fn variants(task: &Task, mesh: &Layout, wanted: &Constraints) -> Vec<Layout> {
    let mut variants = Vec::new();
    let sizes = match wanted.micro_batch {
        Some(size) => vec![size],
        None => divisors(task.batch / mesh.data),
    };
    let sequence = if mesh.tensor > 1 { vec![false, true] } else { vec![false] };
    for micro_batch in sizes {
        for recompute in choices(wanted.recompute, RECOMPUTATIONS) {
            for sequence_parallel in choices(wanted.sequence_parallel, sequence.clone()) {
                variants.push(Layout { micro_batch, recompute, sequence_parallel, ..*mesh });
            }
        }
    }
    variants
}

/// The layout with each schedule that it can have.
fn schedules(
    task: &Task,
    variant: &Layout,
    wanted: &Constraints,
    reason: &mut Option<String>,
) -> Vec<Layout> {
    let chunks_of = |schedule| match schedule {
        ScheduleKind::Interleaved => 2..=wanted.chunks.unwrap_or(0).max(MOST_CHUNKS),
        ScheduleKind::ZbV => 2..=2,
        _ => 1..=1,
    };
    // One rank has no pipeline: all schedules are the same.
    let kinds = match variant.pipeline {
        1 => vec![ScheduleKind::OneFOneB],
        _ => {
            let has_chunks = |kind: &ScheduleKind| {
                wanted.chunks.is_none_or(|chunks| chunks_of(*kind).contains(&chunks))
            };
            ScheduleKind::ALL.into_iter().filter(has_chunks).collect()
        }
    };
    let mut schedules = Vec::new();
    for schedule in choices(wanted.schedule, kinds) {
        let chunks = chunks_of(schedule);
        for chunks in choices(wanted.chunks, chunks) {
            // The stage of ZeRO is checked here; the caller tries the others.
            let zero = wanted.zero.unwrap_or(0);
            let layout = Layout { schedule, chunks, zero, ..*variant };
            match layout.reason_against(&task.model, task.batch) {
                None => schedules.push(layout),
                Some(against) => *reason = Some(against),
            }
        }
    }
    schedules
}

/// What is wanted, else all there is.
fn choices<T>(wanted: Option<T>, all: impl IntoIterator<Item = T>) -> Vec<T> {
    match wanted {
        Some(wanted) => vec![wanted],
        None => all.into_iter().collect(),
    }
}

/// All divisors, ascending.
fn divisors(number: usize) -> Vec<usize> {
    let root = (1..).take_while(|divisor| divisor * divisor <= number);
    let low: Vec<usize> = root.filter(|divisor| number.is_multiple_of(*divisor)).collect();
    let high = low.iter().rev().map(|divisor| number / divisor);
    let high = high.filter(|divisor| divisor * divisor > number);
    low.iter().copied().chain(high).collect()
}

/// Why no mesh has the wanted sizes.
fn not_a_mesh(ranks: usize, wanted: &Constraints) -> String {
    let sizes = [wanted.data, wanted.tensor, wanted.pipeline];
    let [data, tensor, pipeline] =
        sizes.map(|size| size.map_or("any".into(), |size| size.to_string()));
    format!("dp {data} x tp {tensor} x pp {pipeline} are not {ranks}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_all_and_ascend() {
        assert_eq!(divisors(1), [1]);
        assert_eq!(divisors(12), [1, 2, 3, 4, 6, 12]);
        assert_eq!(divisors(16), [1, 2, 4, 8, 16]);
        assert_eq!(divisors(0), [0; 0]);
    }
}
