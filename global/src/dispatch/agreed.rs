//! What all ranks must agree on in an operation: its name, its arguments, and how its tensors lie.

use std::sync::{Arc, OnceLock};

use flow_autograd::global::{Argument, Call};
use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::line::line;
use crate::placement::Placement;
use crate::policy;
use crate::rules::op::{Arg, Op};
use crate::runtime::Runtime;
use crate::sbp::{text, NdSbp};
use crate::sequence::{self, digest_of, Operation};
use crate::spec::Spec;

/// Whether `FLOW_GLOBAL_DEBUG` is 1: ranks compare each operation, and plain tensors.
pub fn is_compared() -> bool {
    static IS_COMPARED: OnceLock<bool> = OnceLock::new();
    *IS_COMPARED.get_or_init(|| policy::is_set("FLOW_GLOBAL_DEBUG"))
}

/// The operation, as it is compared. `have` is how its tensors lie.
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
    let name = call.name();
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
    let told = format!("{name}({})", given.join(", "));
    // The same in place and not: autograd chooses by what else uses a gradient.
    let what = (op.name, call.overload(), tensors, args);
    Operation::new(placement, what, told)
}

/// Compares the operation, and the bytes of plain tensors, with what the other ranks of the placement
/// run, before it runs.
pub fn compare(call: &Call<'_, Spec>, placement: &Placement, runtime: &Runtime) -> Result<()> {
    let ranks = placement.ranks();
    if ranks.len() < 2 {
        return Ok(());
    }
    let (group, groups) = (runtime.groups.group(ranks)?, &runtime.groups);
    let own = sequence::digest_of(placement);
    let gather = |words: &[i64]| {
        let mut all = vec![0_i64; words.len() * ranks.len()];
        let gathered = group.all_gather(words, &mut all[..]);
        let explained =
            |error| sequence::explained(Error::Comm(error), groups, Some((&group, ranks)), own);
        gathered.map_err(explained)?;
        Ok::<_, Error>(all.chunks(words.len()).map(<[i64]>::to_vec).collect::<Vec<_>>())
    };
    let fail = |reason: String| Error::Differs { operation: call.name().to_owned(), reason };
    let digests = gather(&[sequence::digest(groups, own) as i64])?;
    if digests.iter().any(|digest| digest != &digests[0]) {
        let key = format!("debug {}", sequence::count(groups, own));
        let what = sequence::differences(&key, groups, (&group, ranks), own);
        return Err(fail(format!(
            "{what}; all ranks must run the same operations on global tensors, in the same order"
        )));
    }
    let given: Vec<(String, i64)> = given(call)?;
    if given.is_empty() {
        return Ok(());
    }
    let words: Vec<i64> = given.iter().map(|(_, digest)| *digest).collect();
    let all = gather(&words)?;
    for (index, (what, _)) in given.iter().enumerate() {
        let differs = |position: &usize| all[*position][index] != all[0][index];
        let others: Vec<usize> =
            (0..ranks.len()).filter(differs).map(|position| ranks[position]).collect();
        if !others.is_empty() {
            let at = line().map_or(String::new(), |line| format!(" at {line},"));
            return Err(fail(format!(
                "{what}{at} differs from rank {}'s on the ranks {others:?}: plain tensors and \
                 numbers count as B, the same on all ranks (give parts by to_global)",
                ranks[0]
            )));
        }
    }
    Ok(())
}

/// The plain tensors and the numbers with a fraction among the arguments, with digests of what is in
/// them.
fn given(call: &Call<'_, Spec>) -> Result<Vec<(String, i64)>> {
    let mut given = Vec::new();
    for (argument, value) in call.arguments().into_iter().enumerate() {
        let tensors = match value {
            Argument::Float(value) => {
                given.push((format!("argument {argument}, {value},"), value.to_bits() as i64));
                continue;
            }
            Argument::Tensor(tensor) => tensor..tensor + 1,
            Argument::Tensors(first, count) => first..first + count,
            _ => continue,
        };
        let plain = |&tensor: &usize| call.spec(tensor).is_none() && !call.is_written(argument);
        for tensor in tensors.filter(plain) {
            let Some(tensor) = call.tensor(tensor) else { continue };
            let what = format!("argument {argument}, a plain tensor {:?},", tensor.size());
            given.push((what, digest_of_tensor(&tensor)? as i64));
        }
    }
    Ok(given)
}

fn digest_of_tensor(tensor: &Tensor) -> Result<u64> {
    let own = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
    Ok(digest_of(flow_autograd::bytes(&own)?))
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
