//! What an operation needs, on tensors of these sizes and specs: decided once, and kept.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};

use flow_autograd::global::{Argument, Call, Wrapping};
use tch::{Kind, Tensor};

use super::agreed;
use super::op::{op_of, Written};
use crate::boxing::execute::Boxing;
use crate::boxing::plan::Layout;
use crate::code::{self, Code};
use crate::compare;
use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::policy;
use crate::region::{regions, shape};
use crate::rules::infer::{infer, Choice};
use crate::rules::op::Op;
use crate::rules::rule;
use crate::runtime::Runtime;
use crate::sbp::{NdSbp, Sbp, B};
use crate::sequence::Operation;
use crate::spec::Spec;

/// Operations that would change the sizes of a tensor, or its memory.
const RESIZES: &[&str] = &["aten::resize_", "aten::resize_as_", "aten::set_"];

/// How an operation is carried out.
pub struct Plan {
    /// Without `aten::`.
    pub name: String,
    /// By tensor.
    pub inputs: Vec<Input>,
    /// What is wanted of each tensor, and what the results have then.
    pub choice: Choice,
    /// Lists that are sizes of this rank's local: the argument, and its value.
    pub ints: Vec<(usize, Vec<i64>)>,
    /// By return.
    pub outputs: Vec<Output>,
    /// Tensors that are written in another layout than their own, and the result that is written
    /// there, if it is not the input itself.
    pub write_backs: Vec<(usize, Option<usize>)>,
    /// `out` tensors, and the result of each: they may get other sizes.
    pub outs: Vec<(usize, usize)>,
    /// Plain tensors that are written, where ranks outside the placement do not write theirs.
    pub plain_written: Vec<usize>,
    /// How these get back.
    pub backs: BTreeMap<usize, Arc<Boxing>>,
    /// Each rank draws random numbers of its own: those of the first one count.
    pub is_drawn_apart: bool,
    /// Runs instead of the operation.
    pub code: Option<Code>,
    /// The code looks at shapes only, so that ranks outside the placement run it too.
    pub needs_shapes_only: bool,
    /// The shapes of results depend on values: the first rank of the placement sends them to ranks
    /// outside.
    pub is_sent: bool,
    /// What ranks outside the placement know of the results, once it was found out.
    /// Without and with gradients: some kernels then give more.
    pub outside: [OnceLock<Vec<Outside>>; 2],
    /// Counted, and compared with what other ranks run; None if a rank may run it alone.
    pub operation: Option<Arc<Operation>>,
}

/// What the operation gets as an input.
pub enum Input {
    /// The local as it is.
    Own,
    /// The local, as a handle of its own.
    Handle,
    /// An empty tensor, to be filled.
    Empty,
    /// What boxing makes of the local.
    Boxed {
        /// How.
        boxing: Arc<Boxing>,
        /// What there is.
        from: NdSbp,
        /// What is wanted.
        to: NdSbp,
        /// The operation writes it.
        is_written: bool,
    },
}

/// What is known of a result.
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

/// What is known of a tensor that is not here.
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

/// What a result is part of.
#[derive(Clone)]
pub struct Output {
    /// The layout of the logical tensor.
    pub sbp: NdSbp,
    /// The same, while a tensor has it, and its number.
    pub spec: (Weak<Spec>, u64),
    /// Dimensions that are split, and their logical sizes.
    pub split_dims: Vec<i32>,
    /// See `split_dims`.
    pub split_sizes: Vec<i64>,
    /// Of a view; empty if it is contiguous.
    pub strides: Vec<i64>,
    /// All ranks have all of it.
    pub shares: bool,
    /// A view that does not share memory.
    pub is_detached_view: bool,
    /// It is an argument.
    pub is_written: bool,
}

impl Plan {
    /// Decides for the tensors of a call.
    pub fn new(call: &Call<'_, Spec>, placement: &Placement, runtime: &Runtime) -> Result<Self> {
        let arguments = call.arguments();
        let written = Written::of(call, &arguments);
        for &tensor in &written.tensors {
            if call.is_detached_view(tensor) {
                return Err(Error::Unsupported {
                    operation: call.name.to_owned(),
                    reason:
                        "it would write a view of a global tensor that had to be boxed, and so \
                             does not share the tensor's memory: write to the tensor itself, or \
                             split it along another dimension"
                            .to_owned(),
                });
            }
        }
        let full_name = call.name;
        if RESIZES.contains(&full_name) {
            return Err(Error::Unsupported {
                operation: full_name.to_owned(),
                reason:
                    "the sizes of a global tensor cannot be changed in place: make a new tensor \
                         (narrow, reshape, zeros), and give it to all who hold the old one by \
                         set_data"
                        .to_owned(),
            });
        }
        let name = full_name.strip_prefix("aten::").unwrap_or(full_name);
        let rule_name = written.rule_name(call);
        let op = op_of(call, rule_name, &arguments, &written);
        let axes = placement.axes();
        let have: Vec<NdSbp> = (0..call.tensors())
            .map(|tensor| {
                call.spec(tensor).map_or_else(|| vec![B; axes], |spec| spec.sbp().to_vec())
            })
            .collect();
        let given = &have[..op.inputs.len()];
        // If what is written fits no signature, another layout is written, and that boxed back.
        let elsewhere = || infer(&Op { in_place: false, ..op.clone() }, placement, given);
        // Code gives its results, and writes no `out`.
        let can_run = |choice: &Choice| !choice.has_code || written.outs.is_empty();
        let ruled = infer(&op, placement, given).or_else(elsewhere).filter(can_run);
        let is_drawn_apart = ruled.is_none() && call.is_random && placement.ranks().len() > 1;
        let is_inside = placement.ranks().len() == runtime.world().world_size();
        // Numbers as indices say how many elements there will be, masks do not.
        let is_mask = |tensor| matches!(call.kind(tensor), Some(Kind::Bool | Kind::Uint8));
        let is_dynamic = match name {
            "index" | "index_put" | "index_put_" | "_index_put_impl_" => {
                (1..call.tensors()).any(is_mask)
            }
            _ => call.is_dynamic && ruled.is_none(),
        };
        let is_sent = is_dynamic && !is_inside;
        let choice = match ruled {
            Some(choice) => choice,
            None => {
                if rule(rule_name).is_none() {
                    policy::gathered(name)?;
                }
                gathered(&op, axes)
            }
        };
        let sizes: Vec<Vec<usize>> =
            (0..call.tensors()).map(|tensor| shape(call.sizes(tensor))).collect();
        let code = match choice.has_code {
            true => Some(code::of(rule_name).ok_or_else(|| Error::Unsupported {
                operation: full_name.to_owned(),
                reason: "its rule has no code".to_owned(),
            })?),
            false => code::always(rule_name),
        };
        let mut plan = Self {
            name: name.to_owned(),
            inputs: Vec::new(),
            choice: choice.clone(),
            ints: ints(&op, &choice, placement, runtime.rank()),
            outputs: Vec::new(),
            write_backs: Vec::new(),
            outs: Vec::new(),
            plain_written: Vec::new(),
            backs: BTreeMap::new(),
            is_drawn_apart,
            is_sent,
            code,
            needs_shapes_only: code::always(rule_name).is_some(),
            outside: Default::default(),
            operation: None,
        };
        for tensor in 0..op.inputs.len() {
            let (from, to) = (&have[tensor], &choice.inputs[tensor]);
            let is_written = written.tensors.contains(&tensor);
            let input = match call.kind(tensor) {
                None => Input::Own,
                Some(_) if lies_alike(placement, from, to) => {
                    if call.reshapes && is_written {
                        Input::Handle
                    } else {
                        Input::Own
                    }
                }
                Some(kind) => {
                    let boxing = |from: &[Sbp], to: &[Sbp]| {
                        let layouts = [from, to].map(|sbp| Layout { placement, sbp });
                        let boxing =
                            Boxing::between(runtime, &sizes[tensor], layouts[0], layouts[1]);
                        // An error of all ranks, of those outside the placement too.
                        let checked = boxing.check_kind(kind);
                        checked.map_err(|error| agreed::unboxed(call, tensor, from, to, error))?;
                        Ok::<_, Error>(boxing)
                    };
                    if is_written && !call.reshapes {
                        plan.write_backs.push((tensor, None));
                        plan.backs.insert(tensor, boxing(to, from)?);
                    }
                    let boxing = boxing(from, to)?;
                    Input::Boxed { boxing, from: from.clone(), to: to.clone(), is_written }
                }
            };
            plan.inputs.push(input);
        }
        let is_boxed = |input: &Input| matches!(input, Input::Boxed { .. });
        let is_detached = call.is_view
            && (plan.inputs.iter().any(is_boxed)
                || (0..call.tensors()).any(|tensor| call.is_detached_view(tensor)));
        let strides = match call.is_view {
            true => call.view_strides().unwrap_or_default(),
            false => Vec::new(),
        };
        for index in 0..call.returns {
            let sbp = choice.outputs[index].clone();
            let (split_dims, split_sizes) = splits(&op, &choice, &sbp);
            plan.outputs.push(Output {
                spec: (Weak::new(), 0),
                split_dims,
                split_sizes,
                strides: strides.clone(),
                shares: sbp.iter().all(|&sbp| sbp == B),
                is_detached_view: is_detached,
                is_written: call.written(index).is_some(),
                sbp,
            });
        }
        // What `out` gets: directly if the result has its layout, else boxed.
        for (index, &argument) in written.outs.iter().enumerate() {
            let Argument::Tensor(tensor) = arguments[argument] else { continue };
            plan.outs.push((tensor, index));
            let (own, gets) = (&have[tensor], &choice.outputs[index]);
            let is_same = lies_alike(placement, own, gets) && call.spec(tensor).is_some();
            plan.inputs.push(if is_same { Input::Own } else { Input::Empty });
            plan.choice.inputs.push(gets.clone());
            if !is_same {
                plan.write_backs.push((tensor, Some(index)));
                let [from, to] = [gets, own].map(|sbp| Layout { placement, sbp });
                plan.backs.insert(tensor, Boxing::between(runtime, &sizes[tensor], from, to));
            }
        }
        if compare::is_on() || !plan.is_harmless(call, &written, &have) {
            plan.operation = Some(agreed::operation(call, &op, &have, placement));
        }
        if !is_inside {
            let is_plain = |&tensor: &usize| call.spec(tensor).is_none();
            plan.plain_written = written.tensors.iter().copied().filter(is_plain).collect();
        }
        for output in &mut plan.outputs {
            let spec = Spec::of(placement, &output.sbp)?;
            output.spec = (Arc::downgrade(&spec), spec.id());
        }
        Ok(plan)
    }

    /// On a rank of the placement: whether the operation runs on the locals as they are, and nothing
    /// is left to do then.
    pub fn is_local(
        &self,
        call: &Call<'_, Spec>,
        placement: &Placement,
        runtime: &Runtime,
    ) -> bool {
        let is_own = |input: &Input| matches!(input, Input::Own);
        // Ranks outside receive numbers.
        let is_inside = placement.ranks().len() == runtime.world().world_size();
        self.code.is_none()
            && self.inputs.iter().all(is_own)
            && self.write_backs.is_empty()
            && self.plain_written.is_empty()
            && self.outs.is_empty()
            && !self.is_drawn_apart
            && !self.is_sent
            && !call.reshapes
            && (is_inside || call.gives_tensors)
    }

    /// Whether a rank may run it alone: it needs nothing of others, writes nothing, and its results
    /// are the same on all ranks, or those of its input. So each rank may print what is B, and
    /// autograd may copy a gradient on some ranks.
    fn is_harmless(&self, call: &Call<'_, Spec>, written: &Written, have: &[NdSbp]) -> bool {
        let is_b = |sbp: &NdSbp| sbp.iter().all(|&sbp| sbp == B);
        let is_same = call.is_view || matches!(self.name.as_str(), "clone" | "detach");
        let is_alone = self.code.is_none()
            && !self.is_sent
            && !call.is_random
            && self.inputs.iter().all(|input| matches!(input, Input::Own))
            && written.tensors.is_empty();
        is_alone && (is_same || (have.iter().all(is_b) && self.choice.outputs.iter().all(is_b)))
    }
}

impl Output {
    /// The spec, on the placement of the operation.
    pub fn spec(&self, placement: &Placement) -> Arc<Spec> {
        let (spec, id) = &self.spec;
        spec.upgrade().unwrap_or_else(|| Spec::again(*id, placement, &self.sbp))
    }

    /// For the call that returns it.
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

    /// The sizes of the logical tensor, of which this rank has a local.
    pub fn logical(&self, local: &Tensor) -> Vec<i64> {
        let mut sizes = local.size();
        for (&dim, &size) in self.split_dims.iter().zip(&self.split_sizes) {
            sizes[dim as usize] = size;
        }
        sizes
    }
}

/// All tensors B: what every operation can run on.
fn gathered(op: &Op<'_>, axes: usize) -> Choice {
    let all = |count: usize| vec![vec![B; axes]; count];
    Choice {
        inputs: all(op.inputs.len()),
        outputs: all(op.outputs),
        shapes: Vec::new(),
        has_code: false,
    }
}

/// Whether each rank has the same of a tensor with these two SBPs: an axis of one rank has all.
fn lies_alike(placement: &Placement, one: &[Sbp], other: &[Sbp]) -> bool {
    let mut axes = one.iter().zip(other).zip(placement.shape());
    axes.all(|((one, other), &extent)| one == other || extent == 1)
}

/// Lists that are the shape of a tensor: the sizes of this rank's part.
fn ints(
    op: &Op<'_>,
    choice: &Choice,
    placement: &Placement,
    rank: usize,
) -> Vec<(usize, Vec<i64>)> {
    // A rank outside finds out what the first one has.
    let position = placement.position(rank).unwrap_or(0);
    let local = |(argument, sbp): &(usize, NdSbp)| {
        let asked = op.ints(*argument);
        let known = known_sizes(op, *argument);
        let local = regions(placement, sbp, &known).swap_remove(position).shape();
        let size = |(&asked, &local): (&i64, &usize)| match asked {
            -1 if op.name == "expand" => -1,
            _ => local as i64,
        };
        (*argument, asked.iter().zip(&local).map(size).collect())
    };
    choice.shapes.iter().map(local).collect()
}

/// The sizes that a list asks for; -1 is what is left of the first input.
fn known_sizes(op: &Op<'_>, argument: usize) -> Vec<usize> {
    let asked = op.ints(argument);
    let elements: usize = op.inputs[0].shape.iter().product();
    let known: usize = asked.iter().filter_map(|&size| usize::try_from(size).ok()).product();
    let left = elements.checked_div(known).unwrap_or(0);
    asked.iter().map(|&size| usize::try_from(size).unwrap_or(left)).collect()
}

/// The dimensions of a result that are split, and their logical sizes: as an argument says, or as
/// those of the first input that is split on the same axis.
fn splits(op: &Op<'_>, choice: &Choice, sbp: &[Sbp]) -> (Vec<i32>, Vec<i64>) {
    let mut splits = BTreeMap::new();
    for (axis, dim) in sbp.iter().enumerate().filter_map(|(axis, sbp)| Some((axis, sbp.dim()?))) {
        let named = choice.shapes.iter().find(|(_, sbps)| sbps[axis] == Sbp::Split(dim));
        let named = named.and_then(|&(arg, _)| known_sizes(op, arg).get(dim).copied());
        let of_input = || {
            let inputs = op.inputs.iter().zip(&choice.inputs).filter(|(input, _)| input.is_defined);
            inputs.into_iter().find_map(|(input, sbp)| Some(input.shape[sbp[axis].dim()?]))
        };
        if let Some(size) = named.or_else(of_input) {
            splits.insert(dim as i32, size as i64);
        }
    }
    splits.into_iter().unzip()
}
