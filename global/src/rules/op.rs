//! An operation as rules see it: its name, its arguments, and what its tensors look like.

use std::borrow::Cow;
use std::ops::Range;

use crate::sbp::{Sbp, B};

/// An operation of libtorch (`aten::`) that is to run on global tensors.
#[derive(Clone, Debug)]
pub struct Op<'a> {
    /// Without `aten::`, and without the `_` at the end of an in-place operation.
    pub name: &'a str,
    /// As in `sum.dim_IntList`; empty for the default one.
    pub overload: &'a str,
    /// In the order of the schema.
    pub args: Vec<Arg<'a>>,
    /// The tensors among the arguments, in order.
    pub inputs: Vec<Input>,
    /// How many tensors it returns.
    pub outputs: usize,
    /// It writes its first tensor, or the running statistics.
    pub in_place: bool,
    /// Ranks on the axis of the placement that is being decided.
    pub ranks: usize,
}

/// An argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg<'a> {
    /// An optional argument that is not there.
    None,
    /// The index of an input.
    Tensor(usize),
    /// Of a list of tensors: the indices of inputs.
    Tensors(Range<usize>),
    /// A number, also of an enum.
    Int(i64),
    /// A number.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// Sizes, dimensions and the like.
    Ints(Cow<'a, [i64]>),
    /// Of a type that no rule looks at.
    Other,
}

/// A tensor that an operation gets. Sizes are logical.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Sizes of the logical tensor.
    pub shape: Vec<usize>,
    /// Whether its kind is one of floating point.
    pub is_float: bool,
    /// Bytes of an element.
    pub bytes: usize,
    /// False for an optional tensor that is not there.
    pub is_defined: bool,
}

impl Op<'_> {
    /// The number of dimensions of an input.
    pub fn rank(&self, input: usize) -> usize {
        self.inputs[input].shape.len()
    }

    /// The number of dimensions of what pointwise operations make of all inputs.
    pub fn broadcast_rank(&self) -> usize {
        self.inputs.iter().map(|input| input.shape.len()).max().unwrap_or(0)
    }

    /// A number that is an argument.
    pub fn int(&self, arg: usize) -> Option<i64> {
        match self.args.get(arg)? {
            Arg::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// Whether an argument is true.
    pub fn flag(&self, arg: usize) -> bool {
        matches!(self.args.get(arg), Some(Arg::Bool(true)))
    }

    /// A list that is an argument; empty if there is none.
    pub fn ints(&self, arg: usize) -> &[i64] {
        match self.args.get(arg) {
            Some(Arg::Ints(values)) => values,
            _ => &[],
        }
    }

    /// A dimension that is an argument, of a tensor with `rank` dimensions; negative ones count from
    /// the end. None if it is missing or out of range.
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

    /// Whether an input must be as it is, because the operation writes it: also the running
    /// statistics of batch norm, whose schema does not say so.
    pub fn is_fixed(&self, input: usize) -> bool {
        let has_statistics = matches!(
            self.name,
            "cudnn_batch_norm" | "native_batch_norm" | "_native_batch_norm_legit"
        );
        self.in_place && if has_statistics { (3..5).contains(&input) } else { input == 0 }
    }

    /// Whether partial sums stay so in the kind that an argument is, the input's if it is none: a
    /// sum of rounded numbers is not the rounded sum.
    pub fn keeps_terms(&self, arg: usize) -> bool {
        // libtorch's numbers of kinds: integers, then those of floating point, complex ones and
        // bf16 with them.
        match self.int(arg) {
            None | Some(5..=10 | 15) => true,
            Some(kind) => (0..5).contains(&kind) && !self.inputs[0].is_float,
        }
    }

    /// Whether the argument is a tensor, and not a number.
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
    /// What each input is to have.
    pub inputs: Vec<Sbp>,
    /// What each result has then.
    pub outputs: Vec<Sbp>,
    /// Arguments that are the logical shape of a tensor which this SBP splits.
    pub shapes: Vec<(usize, Sbp)>,
    /// The operation is not simply run on the locals, but by code of its rule.
    pub has_code: bool,
}

impl Signature {
    /// Without shapes and code.
    pub fn new(inputs: impl Into<Vec<Sbp>>, outputs: impl Into<Vec<Sbp>>) -> Self {
        let (inputs, outputs) = (inputs.into(), outputs.into());
        Self { inputs, outputs, shapes: Vec::new(), has_code: false }
    }

    /// The same for all tensors.
    pub fn all(op: &Op, sbp: Sbp) -> Self {
        Self::new(vec![sbp; op.inputs.len()], vec![sbp; op.outputs])
    }

    /// Of a pointwise operation: split along a dimension of the result. Inputs that are broadcast
    /// along it are B.
    pub fn aligned(op: &Op, dim: usize) -> Self {
        let missing = |input: &Input| op.broadcast_rank() - input.shape.len();
        let own_dim = |input: &Input| dim.checked_sub(missing(input)).filter(|_| input.is_defined);
        // Where the result itself has one element, nothing is broadcast.
        let sizes = op.inputs.iter().filter_map(|input| Some(input.shape[own_dim(input)?]));
        let is_one = sizes.into_iter().all(|size| size == 1);
        let sbp = |input: &Input| match own_dim(input) {
            Some(own) if is_one || input.shape[own] != 1 => Sbp::Split(own),
            _ => B,
        };
        Self::new(op.inputs.iter().map(sbp).collect::<Vec<_>>(), vec![Sbp::Split(dim); op.outputs])
    }

    /// Argument `arg` is the logical shape of a tensor that `sbp` splits.
    pub fn with_shape(mut self, arg: usize, sbp: Sbp) -> Self {
        self.shapes.push((arg, sbp));
        self
    }

    /// Whether code of the rule runs.
    pub fn with_code(mut self, has_code: bool) -> Self {
        self.has_code = has_code;
        self
    }
}

/// The signatures of some operations, on one axis of a placement.
pub struct Rule {
    /// Of the operations, without `aten::` and the `_` of in-place ones.
    pub names: &'static [&'static str],
    /// The candidates, in the order in which equally cheap ones are taken.
    pub signatures: fn(&Op) -> Vec<Signature>,
}
