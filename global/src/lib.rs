//! Global tensors: where a tensor lies (placement) and how (SBP).

pub mod boxing;
pub mod checkpoint;
mod error;
mod groups;
pub mod init;
mod placement;
pub mod random;
pub mod region;
pub mod rules;
mod sbp;
pub mod schedule;

pub use error::{Error, Result};
pub use groups::Groups;
pub use placement::{Placement, Ranks};
pub use sbp::{NdSbp, Sbp, B, P, S};
