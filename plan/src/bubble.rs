//! What a pipeline's schedule costs, as formulas: waiting, and how many activations a rank holds.
//!
//! Tests compare all of them with the simulator.

use crate::schedule::ScheduleKind;

/// Seconds of one micro-batch in a stage, or in several.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Work {
    /// The forward.
    pub forward: f64,
    /// The backward's gradients of inputs, with what is recomputed for them.
    pub backward_input: f64,
    /// The backward's gradients of weights.
    pub backward_weight: f64,
}

impl Work {
    /// Forward and backward.
    pub fn total(&self) -> f64 {
        self.forward + self.backward_input + self.backward_weight
    }

    fn sum<'a>(works: impl IntoIterator<Item = &'a Self>) -> Self {
        works.into_iter().fold(Self::default(), |sum, work| Self {
            forward: sum.forward + work.forward,
            backward_input: sum.backward_input + work.backward_input,
            backward_weight: sum.backward_weight + work.backward_weight,
        })
    }
}

/// Seconds of a step that the average rank of a pipeline does not compute.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Waits {
    /// For stages that take longer than the average.
    pub imbalance: f64,
    /// For the first micro-batch to come, and for the last to go.
    pub bubble: f64,
    /// For what is on its way.
    pub sends: f64,
}

impl ScheduleKind {
    /// With fewer micro-batches than this, `ranks` ranks wait for each other between chunks and
    /// phases, too: more than [`waits`] says.
    pub fn fewest_micro_batches(self, ranks: usize) -> usize {
        match self {
            Self::Gpipe | Self::OneFOneB => 1,
            Self::Interleaved | Self::ZbH1 => ranks,
            Self::ZbV => (2 * ranks).saturating_sub(1),
        }
    }
}

/// How long the ranks of a pipeline wait in a step. `stages` is each stage's work, and `send` the
/// time from a send until the receive is over, which keeps no rank busy.
///
/// Holds from [`ScheduleKind::fewest_micro_batches`] on, and in zero bubble schedules where
/// gradients of inputs take the longest and those of weights the shortest. For equal stages and
/// sends that are shorter than half a stage's gradients of weights (zb) or its forward
/// (interleaved) all is exact. Otherwise gpipe is exact, 1f1b and zb-h1 are upper bounds;
/// interleaved and zb-v are a few percent off, either way, with stages as `split` deals them out.
pub fn waits(
    kind: ScheduleKind,
    ranks: usize,
    stages: &[Work],
    send: f64,
    micro_batches: usize,
) -> Waits {
    let (count, hops) = (micro_batches as f64, (ranks - 1) as f64);
    let chunks = stages.len() / ranks;
    let all = Work::sum(stages);
    let of_rank = |rank| Work::sum(kind.stages_of(rank, ranks, chunks).map(|stage| &stages[stage]));
    let by_total = |a: &Work, b: &Work| a.total().total_cmp(&b.total());
    let slowest = (0..ranks).map(of_rank).max_by(by_total).unwrap_or_default();
    let others = Work {
        forward: all.forward - slowest.forward,
        backward_input: all.backward_input - slowest.backward_input,
        backward_weight: all.backward_weight - slowest.backward_weight,
    };
    let least = |of: fn(&Work) -> f64| stages.iter().map(of).fold(f64::INFINITY, f64::min);
    let longest_of = |chunk: &[Work]| chunk.iter().map(Work::total).fold(0.0, f64::max);
    let by_chunk: f64 = stages.chunks(ranks).map(longest_of).sum();
    // `pace` is the time between two micro-batches.
    let (pace, bubble, sends) = match kind {
        // All ranks wait for the slowest forward, then for the slowest backward.
        ScheduleKind::Gpipe => {
            let backward = |work: &Work| work.backward_input + work.backward_weight;
            let longest = |of: &dyn Fn(&Work) -> f64| stages.iter().map(of).fold(0.0, f64::max);
            let pace = longest(&|work| work.forward) + longest(&backward);
            (pace, all.total() - pace, 2.0 * hops * send)
        }
        ScheduleKind::OneFOneB => {
            let stalls = round_trip(stages, send) - slowest.total();
            (slowest.total(), others.total(), 2.0 * hops * send + (count - 1.0) * stalls)
        }
        // Ranks wait for each other chunk by chunk.
        ScheduleKind::Interleaved => {
            let others = |chunk: &[Work]| Work::sum(chunk).total() - longest_of(chunk);
            let bubble = stages.chunks(ranks).map(others).fold(0.0, f64::max);
            // Below this a send is over before its receiver has time for what is sent.
            let (forward, total) = (least(|work| work.forward), least(Work::total));
            let late = ((send - forward) / 2.0).max((send - total / 2.0) / 2.0).max(0.0);
            let borders = (stages.len() - 1) as f64;
            let stalls = 2.0 * late * (count * chunks as f64 + hops);
            (by_chunk, bubble, if ranks > 1 { stalls + 2.0 * borders * (send - late) } else { 0.0 })
        }
        // The first rank begins p - 1 forwards before the last, and gets the last gradient p - 1
        // gradients of inputs after it. Meanwhile it does p - 1 gradients of weights. With sends, as
        // the simulator has it, that path crosses each border four times.
        ScheduleKind::ZbH1 => {
            let bubble = others.forward + others.backward_input - others.backward_weight;
            let late = (send - least(|work| work.backward_weight) / 2.0).max(0.0);
            let stalls = 2.0 * late * (count + hops);
            let sends = if ranks > 1 { stalls + 4.0 * hops * (send - late) } else { 0.0 };
            (slowest.total(), bubble, sends)
        }
        // Of the two ends in `Schedule::zb_v` the later counts; a rank has two stages, so that a hop
        // is half a rank's. What sends add was found with the simulator.
        ScheduleKind::ZbV => {
            let late = (send - least(|work| work.backward_weight) / 2.0).max(0.0);
            let (stalls, send) = (2.0 * late * (2.0 * count + hops), send - late);
            let (input, weight) = (others.backward_input, others.backward_weight);
            let bubble = |send: f64| {
                let (there, back) = (5.0 * hops - 2.0, 6.0 * hops - 2.0);
                (input / 2.0 + there * send).max(input - weight + back * send)
            };
            // Ranks wait for some stages of others, not for all: the middle is closest.
            let pace = (slowest.total() + by_chunk) / 2.0;
            match ranks {
                1 => (pace, 0.0, 0.0),
                _ => (pace, bubble(0.0), stalls + bubble(send) - bubble(0.0)),
            }
        }
    };
    let mean = all.total() / ranks as f64;
    // Rounding may make these less than 0.
    Waits { imbalance: (count * (pace - mean)).max(0.0), bubble: bubble.max(0.0), sends }
}

/// The time between two micro-batches in 1F1B. Rank r holds p - r activations, so that it waits for
/// a gradient from rank q after q - r + 1 micro-batches: the longest mean over neighbouring ranks of
/// their work and the sends there and back between them.
fn round_trip(stages: &[Work], send: f64) -> f64 {
    let mut period = stages.iter().map(Work::total).fold(0.0, f64::max);
    // Each round finds neighbours that take longer than `period` on average, and their mean.
    loop {
        let (mut longest, mut sum) = ((0.0, 1.0), (0.0, 0.0));
        for stage in stages {
            if sum.0 <= 0.0 {
                sum = (0.0, 0.0);
            }
            sum = (sum.0 + stage.total() + 2.0 * send - period, sum.1 + 1.0);
            if sum.0 > longest.0 {
                longest = sum;
            }
        }
        let longer = (longest.0 - 2.0 * send) / longest.1;
        if longer.is_nan() || longer <= 1e-12 * period {
            return period;
        }
        period += longer;
    }
}

/// How many micro-batches' activations of its stages a rank holds at most, of all its stages
/// together.
pub fn in_flight(
    kind: ScheduleKind,
    chunks: usize,
    rank: usize,
    ranks: usize,
    micro_batches: usize,
) -> usize {
    match kind {
        ScheduleKind::Gpipe => micro_batches,
        ScheduleKind::OneFOneB => micro_batches.min(ranks - rank),
        // As `Schedule::interleaved` says, by the size of the first group of micro-batches.
        ScheduleKind::Interleaved => {
            let (group, _) = groups(ranks, micro_batches);
            let most = 2 * (ranks - 1 - rank) + (chunks - 1) * group + 1;
            most.min(chunks * micro_batches)
        }
        ScheduleKind::ZbH1 => micro_batches.min(ranks),
        ScheduleKind::ZbV => 2 * micro_batches.min(ranks),
    }
}

/// How many micro-batches' activations a rank holds at most of its stage `chunk`.
pub fn in_flight_of_chunk(
    kind: ScheduleKind,
    (chunk, chunks): (usize, usize),
    rank: usize,
    ranks: usize,
    micro_batches: usize,
) -> usize {
    match kind {
        // A chunk's backward comes so many forwards after its own, of which every v-th group is the
        // chunk's.
        ScheduleKind::Interleaved => {
            let (group, uneven) = groups(ranks, micro_batches);
            let later = 2 * (chunks - 1 - chunk) * group + 2 * (ranks - 1 - rank) + 1;
            let later = later + 2 * uneven * (chunks - 1);
            let (rounds, rest) = (later / (group * chunks), later % (group * chunks));
            micro_batches.min(rounds * group + rest.min(group))
        }
        ScheduleKind::ZbV => {
            micro_batches.min(if chunk == 0 { 2 * ranks - rank } else { rank + 1 })
        }
        _ => in_flight(kind, chunks, rank, ranks, micro_batches),
    }
}

/// Of how many micro-batches a rank has the gradients of inputs, but not yet those of weights, of
/// its stage `chunk`, at most: in zero bubble schedules. The one that is computed counts.
pub fn weights_pending(kind: ScheduleKind, chunk: usize, rank: usize) -> usize {
    match kind {
        ScheduleKind::Gpipe | ScheduleKind::OneFOneB | ScheduleKind::Interleaved => 1,
        ScheduleKind::ZbV if chunk > 0 => rank.max(1),
        ScheduleKind::ZbH1 | ScheduleKind::ZbV => rank + 1,
    }
}

/// The largest group of micro-batches of an interleaved schedule, and whether others are smaller.
fn groups(ranks: usize, micro_batches: usize) -> (usize, usize) {
    let count = (micro_batches / ranks).max(1);
    (micro_batches.div_ceil(count), usize::from(!micro_batches.is_multiple_of(count)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schedule::{simulate_stages, Action, Costs, Schedule, Timeline};

    #[test]
    fn published_activations() {
        // p micro-batches on rank 0, and 1 + (p - 1) / (p v) times as much when interleaved, as in
        // Korthikanti et al. 2022, section 4.2.3.
        assert_eq!(in_flight(ScheduleKind::OneFOneB, 1, 0, 8, 64), 8);
        let interleaved = in_flight(ScheduleKind::Interleaved, 2, 0, 8, 64);
        assert_eq!(interleaved as f64 / 2.0, 8.0 * (1.0 + 7.0 / 16.0));
        assert_eq!(in_flight(ScheduleKind::Gpipe, 1, 0, 8, 64), 64);
        assert_eq!(in_flight(ScheduleKind::OneFOneB, 1, 7, 8, 64), 1);
        // The last stage's, on the last rank: backwards follow their forwards.
        assert_eq!(in_flight_of_chunk(ScheduleKind::Interleaved, (1, 2), 7, 8, 64), 1);
    }

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
        stages: &[Work],
        send: f64,
        ranks: usize,
        count: usize,
    ) -> Timeline {
        let chunks = stages.len() / ranks;
        let schedule = Schedule::named(kind.name(), ranks, chunks, count).unwrap();
        let costs = |&Work { forward, backward_input, backward_weight }: &Work| Costs {
            forward,
            backward_input,
            backward_weight,
            send,
        };
        simulate_stages(&schedule, &stages.iter().map(costs).collect::<Vec<_>>()).unwrap()
    }

    /// What the formulas have for a step.
    fn step(kind: ScheduleKind, stages: &[Work], send: f64, ranks: usize, count: usize) -> f64 {
        let Waits { imbalance, bubble, sends } = waits(kind, ranks, stages, send, count);
        let mean = Work::sum(stages).total() / ranks as f64;
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
            let work = Work {
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
            let work = |&size: &f64| Work {
                forward: 1.125 * size,
                backward_input: (1.125 + f64::from(again)) * size,
                backward_weight: size,
            };
            let stages: Vec<Work> = sizes.iter().map(work).collect();
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
            Work { forward: blocks, backward_input: blocks, backward_weight: blocks }
        };
        let stages: Vec<Work> = crate::split(&[1.0; 80], 48).into_iter().map(work).collect();
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
            let work = Work { forward: part, backward_input: part, backward_weight: part };
            step(kind, &vec![work; 8 * chunks], 0.5, 8, 64)
        };
        assert!((of(ScheduleKind::Gpipe, 1) - 220.0).abs() < 1e-9);
        assert!((of(ScheduleKind::OneFOneB, 1) - 275.125).abs() < 1e-9);
        assert!((of(ScheduleKind::ZbH1, 1) - 213.0).abs() < 1e-9);
        assert!((of(ScheduleKind::Interleaved, 2) - 217.5).abs() < 1e-9);
    }
}
