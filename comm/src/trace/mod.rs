//! A record of every operation: what each rank of each group did, when, and what it does now.
//!
//! | here | what it is |
//! |---|---|
//! | [`ProcessGroup::flight_recorder`](crate::Member::flight_recorder) | a group's last operations; always on |
//! | `FLOW_TRACE=DIR` | a file `DIR/rank<R>.json` with everything that rank R did, for Perfetto |
//! | [`end_step`] | the steps that `flow-launch top` shows |
//! | [`phase`], [`wait`] | what the program does meanwhile, for the same file |
//!
//! docs/tracing.md says how to read them.

mod align;
mod flight_memory;
mod record;
mod recorder;
mod registry;
mod ring;
mod slot;
mod timeline;

pub(crate) use align::clock_offset;
pub use flight_memory::end_step;
pub(crate) use flight_memory::ranks_have_changed;
pub(crate) use flow_store::clock::{Scale, now as ticks};
pub use record::Record;
pub use recorder::record_cost;
pub(crate) use recorder::{Recorder, Start};
pub(crate) use registry::activity;
#[cfg(test)]
pub(crate) use slot::CAPACITY;
pub(crate) use slot::RecordId;
pub use timeline::{BucketTensors, Phase, Span, is_on, phase, wait};
pub(crate) use timeline::{RankInfo, add_buckets, folder, join};
