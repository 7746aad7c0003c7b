//! Formulas of pipeline schedules: how long ranks wait.
//!
//! Tests compare them, and those of `activations`, with the simulator.

use crate::schedule::ScheduleKind;

/// Seconds that one micro-batch takes in a stage, or in several.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct StageTime {
    /// The forward.
    pub forward: f64,
    /// The backward's gradients of inputs, and the recomputation for them.
    pub backward_input: f64,
    /// The backward's gradients of weights.
    pub backward_weight: f64,
}

impl StageTime {
    /// Returns the seconds of forward and backward.
    pub fn total(&self) -> f64 {
        self.forward + self.backward_input + self.backward_weight
    }

    /// Returns the seconds of the backward.
    fn backward(&self) -> f64 {
        self.backward_input + self.backward_weight
    }

    fn sum<'a>(works: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut sum = Self::default();
        for work in works {
            sum.forward += work.forward;
            sum.backward_input += work.backward_input;
            sum.backward_weight += work.backward_weight;
        }
        sum
    }

    fn minus(&self, other: &Self) -> Self {
        Self {
            forward: self.forward - other.forward,
            backward_input: self.backward_input - other.backward_input,
            backward_weight: self.backward_weight - other.backward_weight,
        }
    }
}

/// Returns the most seconds that one of these takes for a micro-batch.
fn longest(works: &[StageTime]) -> f64 {
    works.iter().map(StageTime::total).fold(0.0, f64::max)
}

/// Seconds of a step in which the average rank of a pipeline does not compute.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Waits {
    /// Waiting for stages that take longer than the average.
    pub imbalance: f64,
    /// Waiting for the first micro-batch to come, and for the last to go.
    pub bubble: f64,
    /// Waiting for messages on their way.
    pub sends: f64,
}

impl ScheduleKind {
    /// Returns the fewest micro-batches for which [`waits`] holds. With fewer, `ranks` ranks also wait
    /// for each other between chunks and phases.
    pub fn fewest_micro_batches(self, ranks: usize) -> usize {
        match self {
            Self::Gpipe | Self::OneFOneB => 1,
            Self::Interleaved | Self::ZbH1 => ranks,
            Self::ZbV => (2 * ranks).saturating_sub(1),
        }
    }
}

/// Predicts how long the ranks of a pipeline wait in a step. `stages` is each stage's work. `send` is
/// the time from a send until the receive is over; it keeps no rank busy.
///
/// The formulas hold from [`ScheduleKind::fewest_micro_batches`] on. In zero bubble schedules
/// gradients of inputs must take the longest and those of weights the shortest.
///
/// All formulas are exact for equal stages and short sends: shorter than half a stage's gradients of
/// weights (zb), or than its forward (interleaved). Otherwise gpipe is exact, and 1f1b and zb-h1 are
/// upper bounds. Interleaved and zb-v are then a few percent off, either way, with stages as `split`
/// deals them out.
pub fn waits(
    kind: ScheduleKind,
    ranks: usize,
    stages: &[StageTime],
    send: f64,
    micro_batches: usize,
) -> Waits {
    let pipeline = Pipeline::new(kind, ranks, stages, send, micro_batches);
    let (pace, bubble, sends) = match kind {
        ScheduleKind::Gpipe => pipeline.gpipe(),
        ScheduleKind::OneFOneB => pipeline.one_f_one_b(),
        ScheduleKind::Interleaved => pipeline.interleaved(),
        ScheduleKind::ZbH1 => pipeline.zb_h1(),
        ScheduleKind::ZbV => pipeline.zb_v(),
    };
    let mean = pipeline.all.total() / ranks as f64;
    // Rounding may make these less than 0.
    let imbalance = (pipeline.count * (pace - mean)).max(0.0);
    Waits { imbalance, bubble: bubble.max(0.0), sends }
}

/// The quantities in the formulas of all schedules.
struct Pipeline<'a> {
    /// The work of each stage.
    stages: &'a [StageTime],
    /// The work of all stages.
    all: StageTime,
    /// The work of the slowest rank.
    slowest: StageTime,
    /// The work of the other ranks.
    others: StageTime,
    ranks: usize,
    /// The number of borders between neighbouring ranks.
    hops: f64,
    /// The number of micro-batches.
    count: f64,
    /// Seconds from a send until the receive is over.
    send: f64,
}

/// Each schedule's time between two micro-batches, its bubble, and what sends add.
impl<'a> Pipeline<'a> {
    fn new(
        kind: ScheduleKind,
        ranks: usize,
        stages: &'a [StageTime],
        send: f64,
        micro_batches: usize,
    ) -> Self {
        let chunks = stages.len() / ranks;
        let slowest = (0..ranks)
            .map(|rank| {
                StageTime::sum(kind.stages_of(rank, ranks, chunks).map(|stage| &stages[stage]))
            })
            .max_by(|a, b| a.total().total_cmp(&b.total()))
            .unwrap_or_default();
        let all = StageTime::sum(stages);
        Self {
            stages,
            all,
            slowest,
            others: all.minus(&slowest),
            ranks,
            hops: (ranks - 1) as f64,
            count: micro_batches as f64,
            send,
        }
    }

    /// All ranks wait for the slowest forward, then for the slowest backward.
    fn gpipe(&self) -> (f64, f64, f64) {
        let forward = self.stages.iter().map(|work| work.forward).fold(0.0, f64::max);
        let backward = self.stages.iter().map(StageTime::backward).fold(0.0, f64::max);
        let pace = forward + backward;
        (pace, self.all.total() - pace, 2.0 * self.hops * self.send)
    }

    fn one_f_one_b(&self) -> (f64, f64, f64) {
        let pace = self.slowest.total();
        let stalls = round_trip(self.stages, self.send) - pace;
        let sends = 2.0 * self.hops * self.send + (self.count - 1.0) * stalls;
        (pace, self.others.total(), sends)
    }

    /// Ranks wait for each other chunk by chunk.
    fn interleaved(&self) -> (f64, f64, f64) {
        let bubble = self
            .stages
            .chunks(self.ranks)
            .map(|chunk| StageTime::sum(chunk).total() - longest(chunk))
            .fold(0.0, f64::max);
        if self.ranks == 1 {
            return (self.pace_by_chunk(), bubble, 0.0);
        }
        // Below this a send is over before its receiver has time for what is sent.
        let forward = self.stages.iter().map(|work| work.forward).fold(f64::INFINITY, f64::min);
        let total = self.stages.iter().map(StageTime::total).fold(f64::INFINITY, f64::min);
        let late = ((self.send - forward) / 2.0).max((self.send - total / 2.0) / 2.0).max(0.0);
        let chunks = self.stages.len() / self.ranks;
        let borders = (self.stages.len() - 1) as f64;
        let stalls = 2.0 * late * (self.count * chunks as f64 + self.hops);
        (self.pace_by_chunk(), bubble, stalls + 2.0 * borders * (self.send - late))
    }

    /// The first rank begins p - 1 forwards before the last, and gets the last gradient p - 1
    /// gradients of inputs after it. Meanwhile it does p - 1 gradients of weights. With sends, as
    /// the simulator has it, that path crosses each border four times.
    fn zb_h1(&self) -> (f64, f64, f64) {
        let StageTime { forward, backward_input, backward_weight } = self.others;
        let bubble = forward + backward_input - backward_weight;
        if self.ranks == 1 {
            return (self.slowest.total(), bubble, 0.0);
        }
        let late = self.late_beside_weights();
        let stalls = 2.0 * late * (self.count + self.hops);
        (self.slowest.total(), bubble, stalls + 4.0 * self.hops * (self.send - late))
    }

    /// The later of the two ends in `Schedule::zb_v` counts. A rank has two stages, so that a hop is
    /// half a rank's. The time that sends add was found with the simulator.
    fn zb_v(&self) -> (f64, f64, f64) {
        // Ranks wait for some stages of others, not for all: the middle is closest.
        let pace = (self.slowest.total() + self.pace_by_chunk()) / 2.0;
        if self.ranks == 1 {
            return (pace, 0.0, 0.0);
        }
        let late = self.late_beside_weights();
        let stalls = 2.0 * late * (2.0 * self.count + self.hops);
        let bubble = self.bubble_of_v(0.0);
        (pace, bubble, stalls + self.bubble_of_v(self.send - late) - bubble)
    }

    /// Returns the bubble of ZB-V with sends that take so long.
    fn bubble_of_v(&self, send: f64) -> f64 {
        let StageTime { backward_input, backward_weight, .. } = self.others;
        let there = (5.0 * self.hops - 2.0) * send;
        let back = (6.0 * self.hops - 2.0) * send;
        (backward_input / 2.0 + there).max(backward_input - backward_weight + back)
    }

    /// Returns the time between two micro-batches if ranks wait for the slowest stage of each
    /// chunk.
    fn pace_by_chunk(&self) -> f64 {
        self.stages.chunks(self.ranks).map(longest).sum()
    }

    /// Returns the delay of a send that runs beside gradients of weights.
    fn late_beside_weights(&self) -> f64 {
        let weights = self.stages.iter().map(|work| work.backward_weight);
        (self.send - weights.fold(f64::INFINITY, f64::min) / 2.0).max(0.0)
    }
}

/// Returns the time between two micro-batches in 1F1B. Rank r holds p - r activations, so that it waits
/// for a gradient from rank q after q - r + 1 micro-batches. The time is the longest mean over
/// neighbouring ranks of their work and the sends there and back between them.
fn round_trip(stages: &[StageTime], send: f64) -> f64 {
    let mut period = longest(stages);
    // Each round finds neighbours that take longer than `period` on average, and their mean.
    loop {
        let mut most_excess = 0.0;
        let mut ranks_of_most = 1.0;
        let mut excess = 0.0;
        let mut ranks = 0.0;
        for stage in stages {
            if excess <= 0.0 {
                excess = 0.0;
                ranks = 0.0;
            }
            excess = excess + stage.total() + 2.0 * send - period;
            ranks += 1.0;
            if excess > most_excess {
                most_excess = excess;
                ranks_of_most = ranks;
            }
        }
        let longer = (most_excess - 2.0 * send) / ranks_of_most;
        if longer.is_nan() || longer <= 1e-12 * period {
            return period;
        }
        period += longer;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::activations::{in_flight, in_flight_of_chunk, weights_pending};
    use crate::schedule::{Action, Costs, Schedule, Timeline, simulate_stages};

    fn kinds() -> impl Strategy<Value = (ScheduleKind, usize)> {
        (prop::sample::select(ScheduleKind::ALL.to_vec()), 2..5usize).prop_map(|(kind, several)| {
            let chunks = match kind {
                ScheduleKind::Interleaved => several,
                ScheduleKind::ZbV => 2,
                _ => 1,
            };
            (kind, chunks)
        })
    }

    /// What a rank has of a chunk at most: forwards without `until`.
    fn most(timeline: &Timeline, rank: usize, is: impl Fn(Action) -> i64) -> usize {
        let mut now = 0;
        let steps = timeline.intervals(rank).iter().map(|interval| {
            now += is(interval.action);
            now
        });
        usize::try_from(steps.max().unwrap_or(0)).unwrap()
    }

    fn timeline(
        kind: ScheduleKind,
        stages: &[StageTime],
        send: f64,
        ranks: usize,
        count: usize,
    ) -> Timeline {
        let chunks = stages.len() / ranks;
        let schedule = Schedule::named(kind.name(), ranks, chunks, count).unwrap();
        let costs = |&StageTime { forward, backward_input, backward_weight }: &StageTime| Costs {
            forward,
            backward_input,
            backward_weight,
            send,
        };
        simulate_stages(&schedule, &stages.iter().map(costs).collect::<Vec<_>>()).unwrap()
    }

    /// What the formulas have for a step.
    fn step(
        kind: ScheduleKind,
        stages: &[StageTime],
        send: f64,
        ranks: usize,
        count: usize,
    ) -> f64 {
        let Waits { imbalance, bubble, sends } = waits(kind, ranks, stages, send, count);
        let mean = StageTime::sum(stages).total() / ranks as f64;
        count as f64 * mean + imbalance + bubble + sends
    }

    proptest! {
        /// Times are quarters, so that sums of them are nearly exact.
        #[test]
        fn equal_stages_take_what_the_simulator_says(
            (kind, chunks) in kinds(),
            ranks in 1..9usize,
            more in 0..20usize,
            weight in 2..8u8,
            longer in 0..8u8,
            longest in 0..8u8,
            send in 0..5u8,
        ) {
            let quarters = |count: u8| f64::from(count) / 4.0;
            let work = StageTime {
                forward: quarters(weight + longer),
                backward_input: quarters(weight + longer + longest),
                backward_weight: quarters(weight),
            };
            // At most half of the gradients of weights, the shortest.
            let send = quarters(weight) * f64::from(send) / 8.0;
            let mut count = kind.fewest_micro_batches(ranks) + more;
            if send > 0.0 {
                count = match kind {
                    // With whole groups all sends are on the way; less are with others.
                    ScheduleKind::Interleaved => count.next_multiple_of(ranks),
                    ScheduleKind::OneFOneB => 1 + count.next_multiple_of(ranks),
                    ScheduleKind::ZbH1 => count + ranks,
                    _ => count,
                };
            }
            let stages = vec![work; ranks * chunks];
            let simulated = timeline(kind, &stages, send, ranks, count);
            let planned = step(kind, &stages, send, ranks, count);
            prop_assert!((planned / simulated.total() - 1.0).abs() < 1e-9,
                "{kind} {planned} {}", simulated.total());
            for rank in 0..ranks {
                let of: Vec<_> = kind.stages_of(rank, ranks, chunks).collect();
                let schedule = Schedule::named(kind.name(), ranks, chunks, count).unwrap();
                prop_assert_eq!(&of, &schedule.stages_of(rank));
                prop_assert_eq!(
                    in_flight(kind, chunks, rank, ranks, count), simulated.peak_activations(rank)
                );
                for (chunk, &stage) in of.iter().enumerate() {
                    let held = most(&simulated, rank, |action| match action {
                        _ if action.stage() != stage => 0,
                        Action::Forward { .. } => 1,
                        Action::Backward { .. } | Action::BackwardWeight { .. } => -1,
                        _ => 0,
                    });
                    let planned = in_flight_of_chunk(kind, (chunk, chunks), rank, ranks, count);
                    prop_assert!(held <= planned, "{kind} {held} {planned}");
                    if kind != ScheduleKind::Interleaved || count.is_multiple_of(ranks) {
                        prop_assert_eq!(held, planned);
                    }
                    if matches!(kind, ScheduleKind::ZbH1 | ScheduleKind::ZbV) {
                        let pending = most(&simulated, rank, |action| match action {
                            _ if action.stage() != stage => 0,
                            Action::BackwardInput { .. } => 1,
                            Action::BackwardWeight { .. } => -1,
                            _ => 0,
                        });
                        prop_assert_eq!(pending, weights_pending(kind, chunk, rank));
                    }
                }
            }
        }

        /// Stages of one block or two, and a longer last one; sends of up to a block's forward.
        /// Blocks are dealt out as the planner does where that matters, else in any way.
        #[test]
        fn uneven_stages_do_not_take_longer_than_planned(
            (kind, chunks) in kinds(),
            ranks in 1..9usize,
            more in 0..40usize,
            blocks in prop::collection::vec(1..3u8, 32),
            last in 0..4u8,
            again in 0..2u8,
            send in 0..5u8,
        ) {
            let count = ranks * chunks;
            let blocks = blocks.iter().take(count).copied().map(f64::from);
            let mut sizes: Vec<f64> = match kind {
                ScheduleKind::Interleaved | ScheduleKind::ZbV => {
                    let blocks = vec![1.0; blocks.sum::<f64>() as usize];
                    crate::split(&blocks, count).iter().map(|range| range.len() as f64).collect()
                }
                _ => blocks.collect(),
            };
            sizes[count - 1] += f64::from(last) / 4.0;
            let work = |&size: &f64| StageTime {
                forward: 1.125 * size,
                backward_input: (1.125 + f64::from(again)) * size,
                backward_weight: size,
            };
            let stages: Vec<StageTime> = sizes.iter().map(work).collect();
            let count = kind.fewest_micro_batches(ranks) + more;
            let send = f64::from(send) / 4.0;
            let simulated = timeline(kind, &stages, send, ranks, count).total();
            let planned = step(kind, &stages, send, ranks, count);
            let fastest = match kind {
                ScheduleKind::Gpipe | ScheduleKind::OneFOneB | ScheduleKind::ZbH1 => 0.999_999,
                ScheduleKind::Interleaved | ScheduleKind::ZbV => 0.95,
            };
            prop_assert!(planned > fastest * simulated, "{kind} {planned} {simulated}");
            if kind == ScheduleKind::Gpipe {
                prop_assert!(planned < 1.000_001 * simulated, "{kind} {planned} {simulated}");
            }
        }
    }

    /// 80 blocks on 48 stages: one or two on each, so that ranks wait for two chunk by chunk.
    #[test]
    fn interleaved_waits_chunk_by_chunk() {
        let work = |range: std::ops::Range<usize>| {
            let blocks = range.len() as f64;
            StageTime { forward: blocks, backward_input: blocks, backward_weight: blocks }
        };
        let stages: Vec<StageTime> = crate::split(&[1.0; 80], 48).into_iter().map(work).collect();
        let kind = ScheduleKind::Interleaved;
        let simulated = timeline(kind, &stages, 0.0, 8, 128).total();
        let planned = step(kind, &stages, 0.0, 8, 128);
        assert!((1.0..1.05).contains(&(planned / simulated)), "{planned} {simulated}");
    }

    /// Sends that another rank has to wait for, micro-batch by micro-batch: numbers of
    /// `flow-plan schedule --pp 8 --micro-batches 64 --send 0.5`.
    #[test]
    fn sends_stall_each_round_of_1f1b() {
        let of = |kind, chunks: usize| {
            let part = 1.0 / chunks as f64;
            let work = StageTime { forward: part, backward_input: part, backward_weight: part };
            step(kind, &vec![work; 8 * chunks], 0.5, 8, 64)
        };
        assert!((of(ScheduleKind::Gpipe, 1) - 220.0).abs() < 1e-9);
        assert!((of(ScheduleKind::OneFOneB, 1) - 275.125).abs() < 1e-9);
        assert!((of(ScheduleKind::ZbH1, 1) - 213.0).abs() < 1e-9);
        assert!((of(ScheduleKind::Interleaved, 2) - 217.5).abs() < 1e-9);
    }
}
