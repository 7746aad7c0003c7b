//! The JSON of a timeline, as Chrome and Perfetto read it.

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
}

/// An event of a rank. Times are in microseconds.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct TimelineEvent {
    /// `X` for one with a duration.
    #[serde(rename = "ph")]
    pub kind: String,
    /// `comm`, `phase` or `wait`.
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
}

/// The job from which a merged timeline comes.
#[derive(Serialize)]
pub struct Origin<'a> {
    pub world_size: u32,
    /// `otherData` of each rank.
    pub ranks: &'a [Box<RawValue>],
}
