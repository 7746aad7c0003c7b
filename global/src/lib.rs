//! Global tensors: one tensor on many ranks, with a [`Placement`] (which ranks) and an [`Sbp`] for
//! each axis of it (the layout there). It is an ordinary `tch::Tensor`: `tch`'s operations, modules,
//! optimizers and `VarStore`, and libtorch's autograd, work on it.
//!
//! ```
//! use flow_global::{self as global, GlobalTensor, Placement, B, S};
//! use flow_tensor::{ProcessGroup, TensorCollectives};
//! use tch::{nn, nn::Module, Kind};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let group = ProcessGroup::from_env()?; // ranks from flow-launch; alone: one rank
//! let placement = Placement::all(&group)?;
//! let vs = nn::VarStore::new(group.device());
//! let layer = nn::linear(vs.root(), 5, 8, Default::default());
//! global::distribute(&vs, &placement, |_, _| [B])?; // the layer's variables are global now
//! let x = global::randn([4, 5], Kind::Float, &placement, [S(0)])?;
//! let y = layer.forward(&x); // each rank computes its rows
//! assert_eq!((y.size(), y.sbp()?), (vec![4, 8], vec![S(0)]));
//! y.sum(Kind::Float).backward(); // data parallel: gradients are all-reduced
//! let rows = y.to_local()?; // this rank's part
//! let all = y.full()?; // all of it, as a plain tensor on each rank
//! # assert_eq!((rows.size(), all.size()), (vec![4, 8], vec![4, 8]));
//! # Ok(())
//! # }
//! ```
//!
//! | to | use |
//! |---|---|
//! | say on which ranks a tensor is placed | [`Placement::new`], [`Placement::all`], [`Placement::named`] |
//! | say with which layout | [`S`], [`B`], [`P`], [`Sbp::Partial`] |
//! | make a tensor | [`zeros`], [`ones`], [`full`], [`empty`], [`arange`], [`linspace`], [`eye`] |
//! | draw one, with the values of one device | [`rand`], [`randn`], [`normal`], [`randint`], [`randperm`]; [`manual_seed`], [`rng_state`], [`set_rng_state`] |
//! | make one like another | [`zeros_like`] and others; [`new_zeros`] and others |
//! | give each rank its part of a tensor that all have | [`distribute_tensor`] |
//! | make a tensor of the ranks' parts | [`GlobalTensor::to_global`]; [`from_local`], without communication |
//! | change placement or SBP | [`GlobalTensor::to_global`], [`to_sbp`](GlobalTensor::to_sbp), [`to_placement`](GlobalTensor::to_placement), [`grad_sbp`](GlobalTensor::grad_sbp) |
//! | look at one | [`is_global`](GlobalTensor::is_global), [`placement`](GlobalTensor::placement), [`sbp`](GlobalTensor::sbp) |
//! | get this rank's part, or all of it | [`to_local`](GlobalTensor::to_local), [`full`](GlobalTensor::full) |
//! | do it with vectors, maps, pairs, options | [`to_global()`], [`to_local()`], [`Nested`] |
//! | make a model global, and plain again | [`distribute`], [`undistribute`]; [`to_global_in_place`] for one tensor |
//! | layers split over ranks | [`nn`] |
//! | reduce gradients once for several backwards | [`no_sync()`] |
//! | clip gradients, train in half precision | [`clip_grad_norm`], [`clip_grad_value`], [`GradScaler`] |
//! | split an optimizer's state over ranks | [`ShardedOptimizer`] |
//! | see what is moved, and why | [`explain()`], [`record()`], [`gathered_operations`]; [`mod@explain`], [`trace`] |
//! | have SBPs chosen | [`planner`] |
//! | have inputs on different placements moved | [`move_inputs`] |
//! | save and resume | [`checkpoint`] |
//! | train in OneFlow's views | [`view`], [`lr_scheduler`], [`init`] |
//! | look below: which part a rank has, how tensors are boxed, what operations need, random bits | [`region`], [`boxing`], [`Groups`], [`rules`], [`random`] |

pub mod boxing;
mod cache;
pub mod checkpoint;
mod clip;
mod code;
mod compare;
mod convert;
mod create;
mod deferred;
mod dispatch;
mod distribute;
mod error;
pub mod explain;
mod gradients;
mod group_placement;
mod groups;
mod handle;
pub mod init;
mod kinds;
mod like;
mod line;
mod local;
pub mod lr_scheduler;
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
mod sequence;
mod shared_parameters;
mod spec;
mod tensor;
pub mod trace;
pub mod view;
mod zero;

pub use clip::{clip_grad_norm, clip_grad_value};
pub use create::{
    arange, arange_start, arange_start_step, empty, eye, full, linspace, manual_seed, normal, ones,
    rand, randint, randn, randperm, rng_state, set_rng_state, zeros,
};
pub use deferred::{PartialGradients, no_sync};
pub use distribute::{distribute, to_global_in_place, undistribute};
pub use error::{Error, Result};
pub use flow_ddp::{GradScaler, ScaledOptimizer};
pub use groups::Groups;
pub use like::{
    empty_like, full_like, new_empty, new_full, new_ones, new_tensor, new_zeros, ones_like,
    rand_like, randint_like, randn_like, zeros_like,
};
pub use local::{distribute_tensor, from_local};
pub use nested::{Nested, to_global, to_local};
pub use placement::{Placement, Ranks};
pub use policy::{gathered_operations, move_inputs};
pub use record::{explain, record};
pub use sbp::{B, NdSbp, P, S, Sbp};
pub use tensor::GlobalTensor;
pub use zero::ShardedOptimizer;
