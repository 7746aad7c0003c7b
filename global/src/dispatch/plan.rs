//! The plan of an operation on tensors of these sizes and specs: made once, and kept.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};

use flow_autograd::global::{Call, Wrapping};
use tch::{Kind, Tensor};

use crate::boxing::execute::Boxing;
use crate::code::Code;
use crate::placement::Placement;
use crate::rules::infer::Choice;
use crate::runtime::Runtime;
use crate::sbp::NdSbp;
use crate::sequence::AgreedOperation;
use crate::spec::Spec;

/// The steps that carry out an operation.
pub struct ExecutionPlan {
    /// The name without `aten::`.
    pub name: String,
    /// The source of each tensor that the operation gets.
    pub inputs: Vec<InputSource>,
    /// The SBPs that the tensors are to have, and those of the results then.
    pub choice: Choice,
    /// Lists that are sizes of this rank's local: the argument, and its value.
    pub ints: Vec<(usize, Vec<i64>)>,
    /// The layout of each result.
    pub outputs: Vec<OutputLayout>,
    /// Tensors that are written in another layout than their own, and the result that is written
    /// there, if it is not the input itself.
    pub write_backs: Vec<(usize, Option<usize>)>,
    /// `out` tensors, and the result of each: they may get other sizes.
    pub outs: Vec<(usize, usize)>,
    /// The boxings back of the tensors in `write_backs`.
    pub backs: BTreeMap<usize, Arc<Boxing>>,
    /// Plain tensors that are written, where ranks outside the placement do not write theirs.
    pub plain_written: Vec<usize>,
    /// Each rank draws random numbers of its own: those of the first one count.
    pub is_drawn_apart: bool,
    /// Runs instead of the operation.
    pub code: Option<Code>,
    /// The code looks at shapes only, so that ranks outside the placement run it too.
    pub needs_shapes_only: bool,
    /// The shapes of results depend on values: the first rank of the placement sends them to ranks
    /// outside.
    pub is_sent: bool,
    /// The results as ranks outside the placement know them, once these have found out. Without and
    /// with gradients: some kernels give more then.
    pub outside: [OnceLock<Vec<Outside>>; 2],
    /// Counted, and compared with what other ranks run; None if a rank may run it alone.
    pub operation: Option<Arc<AgreedOperation>>,
}

/// The source of an input.
pub enum InputSource {
    /// The local as it is.
    Own,
    /// The local, as a handle of its own.
    Handle,
    /// An empty tensor, to be filled.
    Empty,
    /// The local, boxed to other SBPs.
    Boxed {
        /// The boxing.
        boxing: Arc<Boxing>,
        /// The SBP of the tensor.
        from: NdSbp,
        /// The SBP that is wanted.
        to: NdSbp,
        /// The operation writes it.
        is_written: bool,
        /// The operation reads its memory as if it had no gaps.
        is_contiguous: bool,
    },
}

/// A result, as a rank outside the placement knows it.
#[derive(Clone, Debug)]
pub enum Outside {
    /// A tensor.
    Tensor(Meta),
    /// A list of tensors.
    Tensors(Vec<Meta>),
    /// An undefined tensor.
    Undefined,
    /// A number, which the first rank of the placement sends.
    Scalar,
}

/// The description of a tensor that is not here.
#[derive(Clone, Debug)]
pub struct Meta {
    /// Logical sizes.
    pub sizes: Vec<i64>,
    /// The kind of its elements.
    pub kind: Kind,
    /// Its conj bit.
    pub is_conj: bool,
    /// Its neg bit.
    pub is_neg: bool,
}

/// The layout of the logical tensor that a result is a part of.
#[derive(Clone)]
pub struct OutputLayout {
    /// The layout of the logical tensor.
    pub sbp: NdSbp,
    /// The spec, while a tensor has it, and its number.
    pub spec: (Weak<Spec>, u64),
    /// Dimensions that are split.
    pub split_dims: Vec<i32>,
    /// The logical sizes of `split_dims`.
    pub split_sizes: Vec<i64>,
    /// The strides of a view; empty if it is contiguous.
    pub strides: Vec<i64>,
    /// All ranks have all of it.
    pub shares: bool,
    /// A view that does not share memory.
    pub is_detached_view: bool,
    /// Whether it is an argument, which the operation writes.
    pub is_written: bool,
}

impl ExecutionPlan {
    /// Returns whether the operation, on a rank of the placement, runs on the locals as they are,
    /// and nothing is left to do then.
    pub fn is_local(
        &self,
        call: &Call<'_, Spec>,
        placement: &Placement,
        runtime: &Runtime,
    ) -> bool {
        // Ranks outside receive numbers.
        let is_inside = placement.ranks().len() == runtime.world().world_size();
        self.code.is_none()
            && self.inputs.iter().all(|input| matches!(input, InputSource::Own))
            && self.write_backs.is_empty()
            && self.plain_written.is_empty()
            && self.outs.is_empty()
            && !self.is_drawn_apart
            && !self.is_sent
            && !call.reshapes
            && (is_inside || call.gives_tensors)
    }
}

impl OutputLayout {
    /// Returns the spec, on the placement of the operation.
    pub fn spec(&self, placement: &Placement) -> Arc<Spec> {
        let (spec, id) = &self.spec;
        spec.upgrade().unwrap_or_else(|| Spec::again(*id, placement, &self.sbp))
    }

    /// Describes the result to the call that returns it.
    pub fn of<'a>(&'a self, spec: &'a Arc<Spec>) -> Wrapping<'a, Spec> {
        Wrapping {
            spec,
            split_dims: &self.split_dims,
            split_sizes: &self.split_sizes,
            strides: &self.strides,
            shares: self.shares,
            is_detached_view: self.is_detached_view,
        }
    }

    /// Returns the sizes of the logical tensor, of which this rank has a local.
    pub fn logical(&self, local: &Tensor) -> Vec<i64> {
        let mut sizes = local.size();
        for (&dim, &size) in self.split_dims.iter().zip(&self.split_sizes) {
            sizes[dim as usize] = size;
        }
        sizes
    }
}
