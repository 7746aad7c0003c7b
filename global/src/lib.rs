//! Global tensors: where a tensor lies (placement) and how (SBP).

pub mod boxing;
pub mod checkpoint;
mod code;
mod create;
mod dispatch;
mod distribute;
mod error;
pub mod explain;
mod from_local;
mod groups;
pub mod init;
mod placement;
pub mod planner;
mod policy;
pub mod random;
mod record;
pub mod region;
mod replicas;
pub mod rules;
mod runtime;
mod sbp;
pub mod schedule;
mod spec;
mod tensor;
pub mod trace;
pub mod view;

pub use create::{
    arange, eye, full, linspace, manual_seed, ones, rand, randint, randn, randperm, rng_state,
    set_rng_state, zeros,
};
pub use distribute::{distribute, to_global_in_place};
pub use error::{Error, Result};
pub use from_local::scatter;
pub use groups::Groups;
pub use placement::{Placement, Ranks};
pub use policy::gathered_operations;
pub use record::{explain, record};
pub use sbp::{NdSbp, Sbp, B, P, S};
pub use tensor::GlobalTensor;
