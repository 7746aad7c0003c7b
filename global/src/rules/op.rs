//! An operation as rules see it: its name, its arguments, and what its tensors look like.

use std::borrow::Cow;
use std::ops::Range;

use tch::Kind;

use crate::kinds::is_float;
use crate::sbp::{B, Sbp};

/// An operation of libtorch (`aten::`) that is to run on global tensors.
#[derive(Clone, Debug)]
pub struct Op<'a> {
    /// The name without `aten::`, and without the `_` at the end of an in-place operation.
    pub name: &'a str,
    /// The overload, as in `sum.dim_IntList`; empty for the default one.
    pub overload: &'a str,
    /// The arguments, in the order of the schema.
    pub args: Vec<Arg<'a>>,
    /// The tensors among the arguments, in order.
    pub inputs: Vec<Input>,
    /// The number of tensors that it returns.
    pub outputs: usize,
    /// Whether it writes its first tensor, or the running statistics.
    pub in_place: bool,
    /// Its first tensor may be written in another layout, which is boxed back then.
    pub boxes_written: bool,
    /// Ranks on the axis of the placement that is being decided.
    pub ranks: usize,
    /// Sizes of each input that the axes decided before have left, in the last and so smallest part.
    pub left: Vec<Vec<usize>>,
}

/// An argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg<'a> {
    /// An optional argument that is not there.
    None,
    /// The index of an input.
    Tensor(usize),
    /// A list of tensors: the indices of inputs.
    Tensors(Range<usize>),
    /// A number, also of an enum.
    Int(i64),
    /// A number.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// Sizes, dimensions and the like.
    Ints(Cow<'a, [i64]>),
    /// An argument of a type that no rule looks at.
    Other,
}

/// A tensor that an operation gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Sizes of the logical tensor.
    pub shape: Vec<usize>,
    /// The kind of its elements; None for an optional tensor that is not there.
    pub kind: Option<Kind>,
}

impl Input {
    /// Describes a tensor of this logical shape and kind.
    pub fn new(shape: impl Into<Vec<usize>>, kind: Kind) -> Self {
        Self { shape: shape.into(), kind: Some(kind) }
    }

    /// Stands for an optional tensor that is not there.
    pub fn absent() -> Self {
        Self { shape: Vec::new(), kind: None }
    }

    /// Returns whether the tensor is there.
    pub fn is_defined(&self) -> bool {
        self.kind.is_some()
    }

    /// Returns whether its elements are numbers of floating point.
    pub fn is_float(&self) -> bool {
        self.kind.is_some_and(is_float)
    }

    /// Returns the tensor's own dimension that becomes dimension `dim` of a result with `rank`
    /// dimensions, to which the tensor is broadcast. None if the tensor has none there.
    pub fn dim_in(&self, dim: usize, rank: usize) -> Option<usize> {
        (dim + self.shape.len()).checked_sub(rank)
    }

    /// Returns the SBP that the tensor is to have where a result of `rank` dimensions, to which it
    /// is broadcast, is split along `dim`.
    pub fn split_as(&self, dim: usize, rank: usize) -> Sbp {
        match self.dim_in(dim, rank) {
            Some(own) if self.shape[own] != 1 => Sbp::Split(own),
            _ => B,
        }
    }

    /// Returns bytes of an element; 0 if the tensor is not there.
    pub fn bytes(&self) -> usize {
        self.kind.map_or(0, Kind::elt_size_in_bytes)
    }
}

impl<'a> Op<'a> {
    /// Describes an operation before any axis is decided.
    pub fn new(
        name: &'a str,
        overload: &'a str,
        args: Vec<Arg<'a>>,
        inputs: Vec<Input>,
        outputs: usize,
        in_place: bool,
    ) -> Self {
        let left = inputs.iter().map(|input| input.shape.clone()).collect();
        Self {
            name,
            overload,
            args,
            inputs,
            outputs,
            in_place,
            boxes_written: false,
            ranks: 1,
            left,
        }
    }

    /// Returns the number of dimensions of an input.
    pub fn rank(&self, input: usize) -> usize {
        self.inputs[input].shape.len()
    }

    /// Returns the number of dimensions of what pointwise operations make of all inputs.
    pub fn broadcast_rank(&self) -> usize {
        self.inputs.iter().map(|input| input.shape.len()).max().unwrap_or(0)
    }

    /// Returns a number that is an argument.
    pub fn int(&self, arg: usize) -> Option<i64> {
        match self.args.get(arg)? {
            Arg::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns whether an argument is true.
    pub fn flag(&self, arg: usize) -> bool {
        matches!(self.args.get(arg), Some(Arg::Bool(true)))
    }

    /// Returns a list that is an argument; empty if there is none.
    pub fn ints(&self, arg: usize) -> &[i64] {
        match self.args.get(arg) {
            Some(Arg::Ints(values)) => values,
            _ => &[],
        }
    }

    /// Returns a dimension that is an argument, of a tensor with `rank` dimensions; negative ones
    /// count from the end. None if it is missing or out of range.
    pub fn dim(&self, arg: usize, rank: usize) -> Option<usize> {
        dim(self.int(arg)?, rank)
    }

    /// Dimensions that are an argument; all, if it is missing or empty.
    pub fn dims(&self, arg: usize, rank: usize) -> Vec<usize> {
        match self.ints(arg) {
            [] => (0..rank).collect(),
            dims => dims.iter().filter_map(|&value| dim(value, rank)).collect(),
        }
    }

    /// Returns whether an input must be as it is, because the operation writes it: also the running
    /// statistics of batch norm, whose schema does not say so.
    pub fn is_fixed(&self, input: usize) -> bool {
        let has_statistics = matches!(
            self.name,
            "cudnn_batch_norm" | "native_batch_norm" | "_native_batch_norm_legit"
        );
        let is_written = if has_statistics { (3..5).contains(&input) } else { input == 0 };
        self.in_place && !self.boxes_written && is_written
    }

    /// Returns whether the argument is a tensor, and not a number.
    pub fn is_tensor(&self, arg: usize) -> bool {
        matches!(self.args.get(arg), Some(Arg::Tensor(_)))
    }
}

fn dim(value: i64, rank: usize) -> Option<usize> {
    let value = if value < 0 { value + rank as i64 } else { value };
    usize::try_from(value).ok().filter(|&dim| dim < rank)
}

/// SBPs of an operation's tensors on one axis of a placement, with which it may run on the locals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The SBP that each input is to have.
    pub inputs: Vec<Sbp>,
    /// The SBP of each result then.
    pub outputs: Vec<Sbp>,
    /// Arguments that are the logical shape of a tensor which this SBP splits.
    pub shapes: Vec<(usize, Sbp)>,
    /// The operation is not simply run on the locals, but by code of its rule.
    pub has_code: bool,
}

impl Signature {
    /// Makes a signature without shapes and code.
    pub fn new(inputs: impl Into<Vec<Sbp>>, outputs: impl Into<Vec<Sbp>>) -> Self {
        Self { inputs: inputs.into(), outputs: outputs.into(), shapes: Vec::new(), has_code: false }
    }

    /// Makes the signature that has this SBP for all tensors.
    pub fn all(op: &Op, sbp: Sbp) -> Self {
        Self::new(vec![sbp; op.inputs.len()], vec![sbp; op.outputs])
    }

    /// Splits a pointwise operation along a dimension of the result. Inputs that are broadcast along
    /// it are B.
    pub fn aligned(op: &Op, dim: usize) -> Self {
        let rank = op.broadcast_rank();
        let mut inputs: Vec<Sbp> =
            op.inputs.iter().map(|input| input.split_as(dim, rank)).collect();
        if inputs.iter().all(|&sbp| sbp == B) {
            // The result itself has one element there, so nothing is broadcast.
            let own = op.inputs.iter().map(|input| input.dim_in(dim, rank));
            inputs = own.map(|own| own.map_or(B, Sbp::Split)).collect();
        }
        Self::new(inputs, vec![Sbp::Split(dim); op.outputs])
    }

    /// Argument `arg` is the logical shape of a tensor that `sbp` splits.
    pub fn with_shape(mut self, arg: usize, sbp: Sbp) -> Self {
        self.shapes.push((arg, sbp));
        self
    }

    /// Sets whether code of the rule runs.
    pub fn with_code(mut self, has_code: bool) -> Self {
        self.has_code = has_code;
        self
    }
}

/// The signatures of some operations, on one axis of a placement.
pub struct Rule {
    /// Names of the operations, without `aten::` and the `_` of in-place ones.
    pub names: &'static [&'static str],
    /// The candidates, in the order in which equally cheap ones are taken.
    pub signatures: fn(&Op) -> Vec<Signature>,
}
