//! Global tensors: where a tensor lies (placement) and how (SBP).

pub mod boxing;
pub mod checkpoint;
mod error;
pub mod explain;
mod groups;
mod placement;
pub mod planner;
pub mod random;
pub mod region;
pub mod rules;
mod sbp;
pub mod schedule;
pub mod trace;

pub use error::{Error, Result};
pub use groups::Groups;
pub use placement::{Placement, Ranks};
pub use sbp::{NdSbp, Sbp, B, P, S};
