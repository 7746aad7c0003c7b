//! Element-wise reduction over raw memory, as fast as the memory allows.
//!
//! [`reduce`] is compiled several times, each for one instruction set, and picks the best that the
//! CPU has at run time. All of them give the same bits: sums are taken in the order of the sources, or in
//! that of a tree, and nothing is fused. Only which NaN a result is, where several came in, is left open.

pub mod cuda;
mod digest;
mod number;
mod reduce;
mod types;

pub use digest::digest;
pub use half::{bf16, f16};
pub use reduce::{average, reduce, sum_in_tree};
pub use types::{DType, Element, ReduceOp, UnknownCode};
