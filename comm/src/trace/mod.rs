//! A record of every operation: what each rank of each group did, when, and what it does now.
//!
//! | here | what it is |
//! |---|---|
//! | [`ProcessGroup::flight_recorder`](crate::ProcessGroup::flight_recorder) | a group's last operations; always on |
//! | `FLOW_TRACE=DIR` | a file `DIR/rank<R>.json` with everything that rank R did, for Perfetto |
//! | [`phase`], [`wait`] | what the program does meanwhile, for the same file |
//!
//! docs/tracing.md says how to read them.

mod align;
mod clock;
mod recorder;
mod timeline;

pub(crate) use align::clock_offset;
pub(crate) use clock::now as ticks;
pub(crate) use recorder::{RecordId, Recorder, Start};
pub use recorder::{Backend, Record};
pub(crate) use timeline::{folder, join, Job};
pub use timeline::{is_on, phase, wait, Phase, Span};
