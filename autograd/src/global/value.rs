//! Arguments and results of operations.

use std::sync::Arc;

use tch::Tensor;

use crate::ffi::global::{self as ffi, ArgumentView, OutputView, ScalarView};
use crate::ffi::slice;

/// An argument of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument<'a> {
    /// An optional argument that is not there, with the index of its undefined tensor if it would be
    /// one.
    None(Option<usize>),
    /// The index of a tensor.
    Tensor(usize),
    /// A list of tensors: the index of the first, and how many.
    Tensors(usize, usize),
    /// A number, also of an enum.
    Int(i64),
    /// A number.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// Sizes, dimensions and the like.
    Ints(&'a [i64]),
    /// An argument of another type.
    Other,
}

impl Argument<'_> {
    /// # Safety
    ///
    /// The list in `raw`, if it is one, must outlive the result.
    pub(super) unsafe fn of(raw: &ArgumentView) -> Self {
        match raw.tag {
            ffi::NONE => Self::None((raw.count > 0).then_some(raw.first as usize)),
            ffi::TENSOR => Self::Tensor(raw.first as usize),
            ffi::TENSORS => Self::Tensors(raw.first as usize, raw.count as usize),
            ffi::INT => Self::Int(raw.integer),
            ffi::FLOAT => Self::Float(raw.number),
            ffi::BOOL => Self::Bool(raw.integer != 0),
            // SAFETY: the caller's promise.
            ffi::INTS => Self::Ints(unsafe { slice(raw.integers, raw.count as usize) }),
            _ => Self::Other,
        }
    }
}

/// A result of the operation on the local tensors.
#[derive(Debug)]
pub enum LocalResult {
    /// A tensor; None for an undefined one.
    Tensor(Option<Tensor>),
    /// A list of tensors.
    Tensors(Vec<Tensor>),
    /// A number.
    Scalar(Scalar),
}

/// A number that an operation returns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A number.
    Int(i64),
    /// A number.
    Float(f64),
    /// A flag.
    Bool(bool),
}

impl Scalar {
    /// Returns what C++ reads.
    pub(super) fn view(self) -> ScalarView {
        match self {
            Self::Int(integer) => ScalarView { tag: ffi::INT, integer, number: 0.0 },
            Self::Float(number) => ScalarView { tag: ffi::FLOAT, integer: 0, number },
            Self::Bool(flag) => {
                ScalarView { tag: ffi::BOOL, integer: i64::from(flag), number: 0.0 }
            }
        }
    }
}

/// The way in which a result of the local operation becomes a global tensor.
#[derive(Debug)]
pub struct Wrapping<'a, S> {
    /// The layout of the logical tensor.
    pub spec: &'a Arc<S>,
    /// Dimensions that are split.
    pub split_dims: &'a [i32],
    /// Their logical sizes.
    pub split_sizes: &'a [i64],
    /// Strides of the logical tensor; empty if it is contiguous.
    pub strides: &'a [i64],
    /// All ranks have all of it.
    pub shares: bool,
    /// Whether it should be a view of an input, and does not share that one's memory.
    pub is_detached_view: bool,
}

impl<S> Wrapping<'_, S> {
    /// Returns what C++ reads.
    pub(super) fn view(&self) -> OutputView {
        assert!(
            self.split_dims.len() == self.split_sizes.len(),
            "each dimension that is split has a size"
        );
        OutputView {
            spec: Arc::as_ptr(self.spec).cast(),
            split_dims: self.split_dims.as_ptr(),
            split_sizes: self.split_sizes.as_ptr(),
            splits: self.split_dims.len(),
            strides: self.strides.as_ptr(),
            stride_count: self.strides.len(),
            shares: self.shares,
            detached_view: self.is_detached_view,
        }
    }
}
