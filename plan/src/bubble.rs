//! What a pipeline's schedule costs, as formulas: idle time, and how many activations a rank holds.

use serde::{Deserialize, Serialize};

/// The order in which the ranks of a pipeline do their forwards and backwards.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al. 2019).
    #[serde(rename = "gpipe")]
    Gpipe,
    /// One forward, one backward (Narayanan et al. 2021, section 2.2.1).
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B with several chunks of layers on each rank (section 2.2.2 there).
    #[serde(rename = "interleaved")]
    Interleaved,
    /// Weights' gradients fill the gaps (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
    #[serde(rename = "zb-h1")]
    ZbH1,
    /// The same with two chunks on each rank, the second on the way back (Qi et al. 2024, "Pipeline
    /// Parallelism with Controllable Memory").
    #[serde(rename = "zb-v")]
    ZbV,
}

impl ScheduleKind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Gpipe, Self::OneFOneB, Self::Interleaved, Self::ZbH1, Self::ZbV];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved => "interleaved",
            Self::ZbH1 => "zb-h1",
            Self::ZbV => "zb-v",
        }
    }

    /// With fewer micro-batches than this, `ranks` ranks wait for each other between chunks and
    /// phases, too: more than [`bubble`] says.
    pub fn fewest_micro_batches(self, ranks: usize) -> usize {
        match self {
            Self::Gpipe | Self::OneFOneB => 1,
            Self::Interleaved | Self::ZbH1 => ranks,
            Self::ZbV => (2 * ranks).saturating_sub(1),
        }
    }

    /// The stages of a rank of `ranks`, with `chunks` for each.
    pub fn stages_of(
        self,
        rank: usize,
        ranks: usize,
        chunks: usize,
    ) -> impl Iterator<Item = usize> {
        (0..chunks).map(move |chunk| match self {
            Self::ZbV if chunk % 2 == 1 => (chunk + 1) * ranks - 1 - rank,
            _ => chunk * ranks + rank,
        })
    }
}

/// Seconds of one micro-batch, on all chunks of a rank.
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
}

/// Seconds that a rank waits for others in a step, before its first forward and after its last
/// backward. `others` is the work of all ranks but the slowest, added up: (p - 1) times a rank's if
/// the p ranks are equal. Holds from [`ScheduleKind::fewest_micro_batches`] on, and in zero bubble
/// schedules where gradients of inputs take the longest and those of weights the shortest.
pub fn bubble(kind: ScheduleKind, chunks: usize, others: Work) -> f64 {
    let Work { forward, backward_input, backward_weight } = others;
    match kind {
        ScheduleKind::Gpipe | ScheduleKind::OneFOneB => others.total(),
        ScheduleKind::Interleaved => others.total() / chunks as f64,
        ScheduleKind::ZbH1 => (forward + backward_input - backward_weight).max(0.0),
        // Found with the simulator; the papers only say that ranks are not idle in between.
        ScheduleKind::ZbV => (backward_input / 2.0).max(backward_input - backward_weight),
    }
}

/// How many micro-batches' activations a rank holds at most, of its chunks together.
pub fn in_flight(
    kind: ScheduleKind,
    chunks: usize,
    rank: usize,
    ranks: usize,
    micro_batches: usize,
) -> f64 {
    match kind {
        ScheduleKind::Gpipe => micro_batches as f64,
        ScheduleKind::OneFOneB => micro_batches.min(ranks - rank) as f64,
        // As `Schedule::interleaved` says, by the size of the first group of micro-batches.
        ScheduleKind::Interleaved => {
            let group = micro_batches.div_ceil((micro_batches / ranks).max(1));
            let most = 2 * (ranks - 1 - rank) + (chunks - 1) * group + 1;
            most.min(chunks * micro_batches) as f64 / chunks as f64
        }
        ScheduleKind::ZbH1 | ScheduleKind::ZbV => micro_batches.min(ranks) as f64,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schedule::{simulate, Costs, Schedule};

    #[test]
    fn published_activations() {
        // p micro-batches on rank 0, and 1 + (p - 1) / (p v) times as much when interleaved, as in
        // Korthikanti et al. 2022, section 4.2.3.
        assert_eq!(in_flight(ScheduleKind::OneFOneB, 1, 0, 8, 64), 8.0);
        assert_eq!(in_flight(ScheduleKind::Interleaved, 2, 0, 8, 64), 8.0 * (1.0 + 7.0 / 16.0));
        assert_eq!(in_flight(ScheduleKind::Gpipe, 1, 0, 8, 64), 64.0);
        assert_eq!(in_flight(ScheduleKind::OneFOneB, 1, 7, 8, 64), 1.0);
    }

    proptest! {
        /// Times are quarters, so that sums of them are exact.
        #[test]
        fn formulas_are_what_the_simulator_says(
            kind in prop::sample::select(ScheduleKind::ALL.to_vec()),
            ranks in 1..9usize,
            several in 2..5usize,
            more in 0..20usize,
            weight in 1..8u8,
            longer in 0..8u8,
            longest in 0..8u8,
        ) {
            let chunks = match kind {
                ScheduleKind::Interleaved => several,
                ScheduleKind::ZbV => 2,
                _ => 1,
            };
            let micro_batches = kind.fewest_micro_batches(ranks) + more;
            let quarters = |count: u8| f64::from(count) / 4.0;
            let costs = Costs {
                forward: quarters(weight + longer),
                backward_input: quarters(weight + longer + longest),
                backward_weight: quarters(weight),
                send: 0.0,
            };
            let schedule = Schedule::named(kind.name(), ranks, chunks, micro_batches).unwrap();
            let timeline = simulate(&schedule, &costs).unwrap();
            let times = |count: usize| Work {
                forward: count as f64 * costs.forward,
                backward_input: count as f64 * costs.backward_input,
                backward_weight: count as f64 * costs.backward_weight,
            };
            let idle = bubble(kind, chunks, times(chunks * (ranks - 1)));
            prop_assert_eq!(timeline.total(), times(chunks * micro_batches).total() + idle);
            for rank in 0..ranks {
                let stages: Vec<_> = kind.stages_of(rank, ranks, chunks).collect();
                prop_assert_eq!(stages, schedule.stages_of(rank));
                let held = in_flight(kind, chunks, rank, ranks, micro_batches);
                let simulated = timeline.peak_activations(rank) as f64 / chunks as f64;
                prop_assert_eq!(held, simulated);
            }
        }
    }
}
