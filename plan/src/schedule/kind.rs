//! The names of schedules.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The name of a schedule, which orders the forwards and backwards of the ranks of a pipeline.
/// [`Schedule`](super::Schedule) has a constructor for each, with its source.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum ScheduleKind {
    /// All forwards, then all backwards.
    #[serde(rename = "gpipe")]
    Gpipe,
    /// One forward, one backward.
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B with several chunks of layers on each rank.
    #[serde(rename = "interleaved")]
    Interleaved,
    /// 1F1B in which weights' gradients fill the gaps.
    #[serde(rename = "zb-h1")]
    ZbH1,
    /// ZB-H1 with two chunks on each rank, the second on the way back.
    #[serde(rename = "zb-v")]
    ZbV,
}

impl ScheduleKind {
    /// All variants.
    pub const ALL: [Self; 5] =
        [Self::Gpipe, Self::OneFOneB, Self::Interleaved, Self::ZbH1, Self::ZbV];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved => "interleaved",
            Self::ZbH1 => "zb-h1",
            Self::ZbV => "zb-v",
        }
    }

    /// Returns the schedule of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns the stages of a rank, if each of `ranks` ranks has `chunks` stages.
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

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}
