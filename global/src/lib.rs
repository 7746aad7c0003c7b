//! Global tensors: where a tensor lies (placement) and how (SBP).

pub mod boxing;
mod cache;
pub mod checkpoint;
mod clip;
mod code;
mod convert;
mod create;
mod dispatch;
mod distribute;
mod error;
pub mod explain;
mod grad_scaler;
mod gradients;
mod group_placement;
mod groups;
mod handle;
pub mod init;
mod kinds;
mod like;
mod line;
mod local;
mod nested;
pub mod nn;
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
mod sequence;
mod spec;
mod tensor;
pub mod trace;
pub mod view;

pub use clip::{clip_grad_norm, clip_grad_value};
pub use create::{
    arange, empty, eye, full, linspace, manual_seed, normal, ones, rand, randint, randn, randperm,
    rng_state, set_rng_state, zeros,
};
pub use distribute::{distribute, to_global_in_place};
pub use error::{Error, Result};
pub use grad_scaler::GradScaler;
pub use groups::Groups;
pub use like::{empty_like, full_like, ones_like, rand_like, randn_like, zeros_like};
pub use local::{from_local, scatter};
pub use nested::{to_global, to_local, Nested};
pub use placement::{Placement, Ranks};
pub use policy::gathered_operations;
pub use record::{explain, record};
pub use sbp::{NdSbp, Sbp, B, P, S};
pub use tensor::GlobalTensor;
