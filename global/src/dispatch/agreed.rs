//! What all ranks must agree on in an operation: its name, its arguments, and the SBPs of its tensors.

use std::sync::Arc;

use flow_autograd::global::{Argument, Call};

use crate::compare;
use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::rules::op::{Arg, Op};
use crate::runtime::Runtime;
use crate::sbp::{text, NdSbp, Sbp};
use crate::sequence::Operation;
use crate::spec::Spec;

/// The operation, as it is compared. `have` are the SBPs of its tensors.
pub fn operation(
    call: &Call<'_, Spec>,
    op: &Op<'_>,
    have: &[NdSbp],
    placement: &Placement,
) -> Arc<Operation> {
    let kind = |tensor: usize| call.kind(tensor).map_or(-1, |kind| kind as i64);
    let is_global = |tensor: usize| call.spec(tensor).is_some();
    let tensors: Vec<_> = (0..call.tensors())
        .map(|tensor| (call.sizes(tensor), kind(tensor), is_global(tensor), &have[tensor]))
        .collect();
    // Plans do not know numbers with a fraction.
    let args: Vec<String> = op
        .args
        .iter()
        .map(|arg| match arg {
            Arg::Float(_) => "float".to_owned(),
            arg => format!("{arg:?}"),
        })
        .collect();
    let name = call.name;
    let given = |tensor: usize| match call.is_defined(tensor) {
        true if is_global(tensor) => {
            Some(format!("{:?} {}", call.sizes(tensor), text(&have[tensor])))
        }
        true => Some(format!("{:?}", call.sizes(tensor))),
        false => None,
    };
    let numbers = op.args.iter().filter_map(|arg| match arg {
        Arg::Int(value) => Some(value.to_string()),
        Arg::Bool(value) => Some(value.to_string()),
        Arg::Ints(values) => Some(format!("{values:?}")),
        _ => None,
    });
    let given: Vec<String> = (0..call.tensors()).filter_map(given).chain(numbers).collect();
    let text = format!("{name}({})", given.join(", "));
    // The same in place and not: autograd chooses by what else uses a gradient.
    let what = (op.name, call.overload, tensors, args);
    // What autograd may do to keep a gradient: to copy it, or not.
    let is_copy = match op.name {
        "clone" | "detach" | "new_empty_strided" => true,
        "copy" => is_global(1) && have[0] == have[1] && call.sizes(0) == call.sizes(1),
        _ => false,
    };
    Operation::new(placement, what, text, is_copy)
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

/// The plain tensors and the numbers with a fraction among the arguments, with digests of what is in
/// them.
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
        let plain = |&tensor: &usize| call.spec(tensor).is_none() && !call.is_written(argument);
        for tensor in tensors.filter(plain) {
            let Some(tensor) = call.tensor(tensor) else { continue };
            let what = format!("argument {argument}, a plain tensor {:?}", tensor.size());
            given.push((what, compare::digest_of_tensor(&tensor)?));
        }
    }
    Ok(given)
}

/// The error of an input that cannot be boxed.
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

/// What all ranks have to do, where one may have left the others alone.
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
