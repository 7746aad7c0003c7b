//! All ranks must agree on an operation's name, its arguments, and the SBPs of its tensors.

use std::sync::Arc;

use flow_autograd::global::{Argument, Call};

use crate::compare;
use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::rules::op::{Arg, Op};
use crate::runtime::Runtime;
use crate::sbp::{NdSbp, Sbp, text};
use crate::sequence::AgreedOperation;
use crate::spec::Spec;

/// Returns the operation, as it is compared. `have` are the SBPs of its tensors.
pub fn operation(
    call: &Call<'_, Spec>,
    op: &Op<'_>,
    have: &[NdSbp],
    placement: &Placement,
) -> Arc<AgreedOperation> {
    let mut tensors = Vec::new();
    let mut args = Vec::new();
    // For the error of ranks that differ.
    let mut words = Vec::new();
    for (tensor, sbp) in have.iter().enumerate() {
        let sizes = call.sizes(tensor);
        let kind = call.kind(tensor).map_or(-1, |kind| kind as i64);
        let is_global = call.spec(tensor).is_some();
        tensors.push((sizes, kind, is_global, sbp));
        if is_global {
            words.push(format!("{sizes:?} {}", text(sbp)));
        } else if call.is_defined(tensor) {
            words.push(format!("{sizes:?}"));
        }
    }
    for arg in &op.args {
        args.push(match arg {
            // Plans do not know numbers with a fraction.
            Arg::Float(_) => "float".to_owned(),
            arg => format!("{arg:?}"),
        });
        match arg {
            Arg::Int(value) => words.push(value.to_string()),
            Arg::Bool(value) => words.push(value.to_string()),
            Arg::Ints(values) => words.push(format!("{values:?}")),
            _ => {}
        }
    }
    let text = format!("{}({})", call.name, words.join(", "));
    // The same in place and not: autograd chooses by what else uses a gradient.
    let what = (op.name, call.overload, tensors, args);
    // What autograd may do to keep a gradient: to copy it, or not.
    let is_copy = match op.name {
        "clone" | "detach" | "new_empty_strided" => true,
        "copy" => call.spec(1).is_some() && have[0] == have[1] && call.sizes(0) == call.sizes(1),
        _ => false,
    };
    AgreedOperation::new(placement, what, text, is_copy)
}

/// Compares the operation, and the bytes of plain tensors, with what the other ranks of the placement
/// run, before it runs.
pub fn compare(call: &Call<'_, Spec>, placement: &Placement, runtime: &Runtime) -> Result<()> {
    compare::operations(call.name, placement, runtime)?;
    let all: Vec<usize> = (0..placement.ranks().len()).collect();
    let remedy = "plain tensors and numbers count as B, the same on all ranks (give parts by \
                  to_global)";
    compare::values(call.name, (placement, &[all]), runtime, &given(call)?, remedy)
}

/// Returns the plain tensors and the numbers with a fraction among the arguments, with digests of
/// what is in them.
fn given(call: &Call<'_, Spec>) -> Result<Vec<(String, u64)>> {
    let mut given = Vec::new();
    for (argument, value) in call.arguments().into_iter().enumerate() {
        let tensors = match value {
            Argument::Float(value) => {
                given.push((format!("argument {argument}, {value}"), value.to_bits()));
                continue;
            }
            Argument::Tensor(tensor) => tensor..tensor + 1,
            Argument::Tensors(first, count) => first..first + count,
            _ => continue,
        };
        if call.is_written(argument) {
            continue;
        }
        for tensor in tensors.filter(|&tensor| call.spec(tensor).is_none()) {
            let Some(tensor) = call.tensor(tensor) else { continue };
            let what = format!("argument {argument}, a plain tensor {:?}", tensor.size());
            given.push((what, compare::digest_of_tensor(&tensor)?));
        }
    }
    Ok(given)
}

/// Returns the error of an input that cannot be boxed.
pub fn unboxed(
    call: &Call<'_, Spec>,
    input: usize,
    from: &[Sbp],
    to: &[Sbp],
    source: Error,
) -> Error {
    Error::Boxing {
        operation: call.name.to_owned(),
        what: format!("input {input}, {:?}, from {from:?} to {to:?}", call.sizes(input)),
        source: Box::new(source),
        advice: advice(call.name),
    }
}

/// Says what all ranks have to do, where one may have left the others alone.
pub fn advice(operation: &str) -> &'static str {
    match operation {
        "aten::_local_scalar_dense" => {
            " (to read a value of a tensor that is split or partial, or lies on some ranks only, all \
             ranks must take part: call full() or double_value() on all of them, or to_local() on \
             one)"
        }
        "aten::masked_select" => {
            " (to print a tensor that is split or partial, call full() on all ranks, and print that)"
        }
        _ => "",
    }
}
