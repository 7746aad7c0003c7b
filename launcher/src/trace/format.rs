//! The JSON of a timeline, as Chrome and Perfetto read it.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// A timeline whose events are only copied.
#[derive(Deserialize)]
pub struct RawTimeline {
    #[serde(rename = "traceEvents")]
    pub events: Vec<Box<RawValue>>,
    #[serde(rename = "otherData")]
    pub origin: Box<RawValue>,
}

/// A timeline of one or more ranks. Fields that the summary does not need are skipped.
#[derive(Deserialize)]
pub struct Timeline {
    #[serde(rename = "traceEvents")]
    pub events: Vec<TimelineEvent>,
    #[serde(rename = "otherData", default)]
    job: Job,
}

/// The job of a timeline, as far as the summary needs it.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Job {
    world_size: usize,
}

impl Timeline {
    /// Returns how many ranks of the job have no events here.
    pub fn missing_ranks(&self) -> usize {
        let ranks: BTreeSet<u32> = self.events.iter().map(|event| event.pid).collect();
        self.job.world_size.saturating_sub(ranks.len())
    }
}

/// An event of a rank. Times are in microseconds.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct TimelineEvent {
    /// `X` for one with a duration.
    #[serde(rename = "ph")]
    pub kind: String,
    /// `comm`, `phase`, `wait` or `buckets`.
    #[serde(rename = "cat")]
    pub category: String,
    pub name: String,
    /// The rank.
    pub pid: u32,
    #[serde(rename = "ts")]
    pub start: f64,
    #[serde(rename = "dur")]
    pub duration: f64,
    #[serde(rename = "args")]
    pub arguments: Arguments,
}

/// The `args` of an event that are read.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Arguments {
    pub step: Option<u64>,
    pub group: serde_json::Value,
    pub sequence: Option<u64>,
    /// The time at which the operation began; `start` is later where events of a thread would
    /// overlap.
    pub started: Option<f64>,
    pub queued: Option<f64>,
    pub bucket: Option<u32>,
    pub bytes: u64,
    pub backend: String,
    pub failed: bool,
    /// The tensors of the group's buckets.
    pub buckets: Vec<BucketTensors>,
}

impl Arguments {
    /// Returns the name of the group.
    pub fn group_name(&self) -> String {
        self.group.as_str().map_or_else(|| self.group.to_string(), str::to_owned)
    }
}

/// The tensors of a bucket.
#[derive(Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct BucketTensors {
    /// Tensors of different classes, such as types, share no bucket.
    pub class: u8,
    /// The bytes of each, in the order in which gradients come.
    pub tensors: Vec<u64>,
    /// The time from the first gradient to each of these, in microseconds.
    pub ready: Vec<u64>,
}

/// The job from which a merged timeline comes.
#[derive(Serialize)]
pub struct Origin<'a> {
    pub world_size: u32,
    /// `otherData` of each rank.
    pub ranks: &'a [Box<RawValue>],
}
