//! What a pipeline's schedule costs, as formulas: idle time, and how many micro-batches' activations
//! a rank holds.

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
/// the p ranks are equal.
pub fn bubble(kind: ScheduleKind, chunks: usize, others: Work) -> f64 {
    let Work { forward, backward_input, backward_weight } = others;
    match kind {
        ScheduleKind::Gpipe | ScheduleKind::OneFOneB => others.total(),
        ScheduleKind::Interleaved => others.total() / chunks as f64,
        ScheduleKind::ZbH1 => (forward + backward_input - backward_weight).max(0.0),
        // The last rank's first forward comes after one chunk of each other rank. No other time is
        // idle where the three parts take as long.
        ScheduleKind::ZbV => forward / chunks as f64,
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
        // Forwards of chunks before the first backward, and one more (Korthikanti et al. 2022,
        // section 4.2.3, for rank 0).
        ScheduleKind::Interleaved => {
            let warmup = 2 * (ranks - 1 - rank) + (chunks - 1) * ranks + 1;
            warmup.min(chunks * micro_batches) as f64 / chunks as f64
        }
        ScheduleKind::ZbH1 | ScheduleKind::ZbV => micro_batches.min(ranks) as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: Work = Work { forward: 3.0, backward_input: 3.0, backward_weight: 3.0 };

    #[test]
    fn published_bubbles() {
        // (p - 1)(tf + tb), and 1/v of that, as in Narayanan et al. 2021, section 2.2.
        assert_eq!(bubble(ScheduleKind::OneFOneB, 1, WORK), 9.0);
        assert_eq!(bubble(ScheduleKind::Gpipe, 1, WORK), 9.0);
        assert_eq!(bubble(ScheduleKind::Interleaved, 3, WORK), 3.0);
        // (p - 1)(TF + TB - TW), as in Qi et al. 2023, table 2.
        assert_eq!(bubble(ScheduleKind::ZbH1, 1, WORK), 3.0);
    }

    #[test]
    fn published_activations() {
        // p micro-batches on rank 0, and 1 + (p - 1) / (p v) times as much when interleaved, as in
        // Korthikanti et al. 2022, section 4.2.3.
        assert_eq!(in_flight(ScheduleKind::OneFOneB, 1, 0, 8, 64), 8.0);
        assert_eq!(in_flight(ScheduleKind::Interleaved, 2, 0, 8, 64), 8.0 * (1.0 + 7.0 / 16.0));
        assert_eq!(in_flight(ScheduleKind::Gpipe, 1, 0, 8, 64), 64.0);
        assert_eq!(in_flight(ScheduleKind::OneFOneB, 1, 7, 8, 64), 1.0);
    }

    #[test]
    fn stages_of_a_v() {
        let stages = |rank| ScheduleKind::ZbV.stages_of(rank, 4, 2).collect::<Vec<_>>();
        assert_eq!([stages(0), stages(3)], [[0, 7], [3, 4]]);
        let stages = |rank| ScheduleKind::Interleaved.stages_of(rank, 4, 2).collect::<Vec<_>>();
        assert_eq!([stages(0), stages(3)], [[0, 4], [3, 7]]);
    }
}
