//! The search for the fastest layouts.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use crate::cost::LayerCosts;
use crate::error::{Error, Result};
use crate::layout::{Constraints, Layout, Recompute};
use crate::prediction::{Prediction, Stages, predict};
use crate::schedule::ScheduleKind;
use crate::task::Task;

/// The most chunks that interleaved schedules are tried with, unless more are wanted.
const MOST_CHUNKS: usize = 8;

/// The recomputations that are tried unless others are wanted: Flow has no selective one.
const RECOMPUTATIONS: [Recompute; 2] = [Recompute::None, Recompute::Full];

/// The most ranks of a search. Finding the divisors of more takes too long.
const MOST_RANKS: usize = 1 << 32;

/// The layouts that a search has found.
pub struct SearchResult {
    /// The fastest layouts that fit in memory, the fastest first. A layout is left out if another one
    /// of the same mesh beats it in both time and memory.
    pub best: Vec<Prediction>,
    /// The layout that needs the least memory, whether it fits or not.
    pub smallest: Prediction,
    /// The number of predicted layouts.
    pub tried: usize,
    /// The number of layouts that fit in memory.
    pub fit: usize,
}

/// A layout with the numbers that the search sorts by.
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

/// Predicts all layouts of `ranks` ranks that have the wanted parts, and returns the `top` fastest.
///
/// A part that `wanted` leaves out is that of the task. What Flow cannot run is tried only if wanted. The
/// same input gives the same result.
///
/// # Errors
/// No layout has the wanted parts and divides the model and the batch; 0 ranks, or more than 2^32.
pub fn search(task: &Task, ranks: usize, wanted: &Constraints, top: usize) -> Result<SearchResult> {
    if !(1..=MOST_RANKS).contains(&ranks) {
        return Err(Error::Impossible { ranks, reason: "give 1 to 2^32 ranks".into() });
    }
    let wanted = wanted.or(task.layout);
    wanted.check()?;
    let mut search = Search {
        task,
        wanted: &wanted,
        ranges_of: BTreeMap::new(),
        smallest: None,
        tried: 0,
        fit: 0,
        reason: None,
    };
    let mut best: Vec<Candidate> = Vec::new();
    for mesh in search.meshes(ranks) {
        best.extend(search.best_of(&mesh));
        best.sort_by(Candidate::by_time);
        best.truncate(top);
    }
    let Some(smallest) = search.smallest else {
        let reason = search.reason.unwrap_or_else(|| not_a_mesh(ranks, &wanted));
        return Err(Error::Impossible { ranks, reason });
    };
    Ok(SearchResult {
        best: best.iter().map(|found| predict(task, &found.layout)).collect::<Result<_>>()?,
        smallest: predict(task, &smallest.layout)?,
        tried: search.tried,
        fit: search.fit,
    })
}

/// A search under way.
struct Search<'a> {
    task: &'a Task,
    wanted: &'a Constraints,
    /// The layers of each stage, by the number of stages.
    ranges_of: BTreeMap<usize, Vec<Range<usize>>>,
    /// The layout that needs the least memory so far.
    smallest: Option<Candidate>,
    tried: usize,
    fit: usize,
    /// The reason against the last impossible layout.
    reason: Option<String>,
}

impl Search<'_> {
    /// Returns the layouts of a mesh that fit in memory, the fastest first, without those that another
    /// one beats in both time and memory.
    fn best_of(&mut self, mesh: &Layout) -> Vec<Candidate> {
        let task = self.task;
        let mut candidates = Vec::new();
        for variant in self.variants(mesh) {
            let costs = LayerCosts::new(&task.model, &task.cluster, &task.training, &variant);
            for scheduled in self.schedules(&variant) {
                let count = scheduled.stages();
                let ranges =
                    self.ranges_of.entry(count).or_insert_with(|| task.model.stages(count));
                let stages = Stages::new(task, &scheduled, &costs, ranges);
                for layout in self.shardings(&scheduled) {
                    let prediction = stages.predict(task, &layout, &costs);
                    candidates.extend(self.candidate(&prediction));
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
        candidates
    }

    /// Counts a predicted layout, and returns it if it fits in memory.
    fn candidate(&mut self, prediction: &Prediction) -> Option<Candidate> {
        let Prediction { layout, time, memory, .. } = prediction;
        let candidate = Candidate { step: time.step, memory: memory.total, layout: *layout };
        self.tried += 1;
        if self.smallest.as_ref().is_none_or(|least| candidate.by_memory(least).is_lt()) {
            self.smallest = Some(candidate);
        }
        if !memory.fits {
            return None;
        }
        self.fit += 1;
        Some(candidate)
    }

    /// Returns the layouts that differ in the mesh only.
    fn meshes(&mut self, ranks: usize) -> Vec<Layout> {
        let mut meshes = Vec::new();
        for tensor in divisors(ranks) {
            for pipeline in divisors(ranks / tensor) {
                let data = ranks / tensor / pipeline;
                if self.wanted.data.is_some_and(|wanted| wanted != data)
                    || self.wanted.tensor.is_some_and(|wanted| wanted != tensor)
                    || self.wanted.pipeline.is_some_and(|wanted| wanted != pipeline)
                {
                    continue;
                }
                let mesh = Layout { data, tensor, pipeline, ..Constraints::default().filled() };
                if self.is_possible(&mesh) {
                    meshes.push(mesh);
                }
            }
        }
        meshes
    }

    /// Returns the mesh with each micro-batch and each way of recomputing and splitting activations.
    fn variants(&self, mesh: &Layout) -> Vec<Layout> {
        let wanted = self.wanted;
        let mut variants = Vec::new();
        let sizes = match wanted.micro_batch {
            Some(size) => vec![size],
            None => divisors(self.task.batch / mesh.data),
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

    /// Returns the layout with each schedule that it can have.
    fn schedules(&mut self, variant: &Layout) -> Vec<Layout> {
        let wanted = self.wanted;
        // One rank has no pipeline: all schedules are the same.
        let mut kinds = vec![ScheduleKind::OneFOneB];
        if variant.pipeline > 1 {
            kinds = ScheduleKind::ALL.to_vec();
            kinds.retain(|&kind| {
                wanted.chunks.is_none_or(|chunks| self.chunks_of(kind).contains(&chunks))
            });
        }
        let mut schedules = Vec::new();
        for schedule in choices(wanted.schedule, kinds) {
            for chunks in choices(wanted.chunks, self.chunks_of(schedule)) {
                // The wanted stage of ZeRO is checked here; the caller tries the others.
                let Layout { zero, shared_weights, .. } = wanted.filled();
                let layout = Layout { schedule, chunks, zero, shared_weights, ..*variant };
                if self.is_possible(&layout) {
                    schedules.push(layout);
                }
            }
        }
        schedules
    }

    /// Returns the layout with each way of sharing out the state of the model. Of stages 2 and 3 of ZeRO
    /// Flow has its `Fsdp` and its `FullyShard`.
    fn shardings(&self, scheduled: &Layout) -> Vec<Layout> {
        let Constraints { zero, shared_weights, .. } = *self.wanted;
        let mut layouts = Vec::new();
        if shared_weights != Some(true) {
            let mut stages = vec![0];
            if scheduled.data > 1 {
                stages.push(1);
            }
            if can_fully_shard(scheduled) {
                stages.push(3);
            }
            for zero in choices(zero, stages) {
                layouts.push(Layout { zero, shared_weights: false, ..*scheduled });
            }
        }
        if shared_weights != Some(false) && zero.is_none_or(|zero| zero == 2) {
            let shared = Layout { zero: 2, shared_weights: true, ..*scheduled };
            let is_useful = scheduled.data > 1 || shared_weights.is_some();
            if is_useful && self.reason_against(&shared).is_none() {
                layouts.push(shared);
            }
        }
        layouts
    }

    /// Returns the numbers of chunks that a schedule is tried with.
    fn chunks_of(&self, schedule: ScheduleKind) -> RangeInclusive<usize> {
        match schedule {
            ScheduleKind::Interleaved => 2..=self.wanted.chunks.unwrap_or(0).max(MOST_CHUNKS),
            ScheduleKind::ZbV => 2..=2,
            _ => 1..=1,
        }
    }

    fn reason_against(&self, layout: &Layout) -> Option<String> {
        layout.reason_against(&self.task.model, self.task.batch, &self.task.cluster)
    }

    /// Checks a layout, and keeps the reason if it is impossible.
    fn is_possible(&mut self, layout: &Layout) -> bool {
        let reason = self.reason_against(layout);
        let is_possible = reason.is_none();
        self.reason = reason.or(self.reason.take());
        is_possible
    }
}

/// Returns whether Flow's `FullyShard` can run a layout: data parallelism alone.
fn can_fully_shard(layout: &Layout) -> bool {
    let Layout { data, tensor, pipeline, recompute, .. } = *layout;
    data > 1 && tensor * pipeline == 1 && recompute != Recompute::Selective
}

/// Returns the wanted value, or all values if none is wanted.
fn choices<T>(wanted: Option<T>, all: impl IntoIterator<Item = T>) -> Vec<T> {
    match wanted {
        Some(wanted) => vec![wanted],
        None => all.into_iter().collect(),
    }
}

/// Returns all divisors, ascending.
fn divisors(number: usize) -> Vec<usize> {
    let root = (1..).take_while(|divisor| divisor * divisor <= number);
    let low: Vec<usize> = root.filter(|divisor| number.is_multiple_of(*divisor)).collect();
    let high = low.iter().rev().map(|divisor| number / divisor);
    let high = high.filter(|divisor| divisor * divisor > number);
    low.iter().copied().chain(high).collect()
}

/// Says why no mesh has the wanted sizes.
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
