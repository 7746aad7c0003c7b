//! Runs a case on global tensors, and compares.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use flow_global::region::regions;
use flow_global::{B, GlobalTensor, NdSbp, P, Placement, Result, S, Sbp};
use flow_tensor::ProcessGroup;
use tch::{Kind, Tensor};

use super::case::{Case, Evaluation, difference, weight};

/// A case on plain tensors.
pub struct Check<'a> {
    case: &'a Case,
    values: Vec<Tensor>,
    expected: Evaluation,
}

/// A rank, and the placement that it has made.
#[derive(Clone, Copy)]
pub struct Own<'a> {
    pub rank: usize,
    pub placement: &'a Placement,
}

impl<'a> Check<'a> {
    /// Runs the case on plain tensors; what is random, as one rank does.
    ///
    /// # Errors
    /// It panics.
    pub fn new(case: &'a Case) -> std::result::Result<Self, String> {
        let values = case.values();
        let run = || if case.draws { drawn(case, &values) } else { Ok(case.plain(&values)) };
        let expected = quietly(run)?;
        Ok(Self { case, values, expected })
    }

    /// SBPs of all inputs: all that there are, or as many as are tried, evenly spread.
    pub fn combinations(&self, mesh: &[usize], tried: usize) -> Vec<Vec<NdSbp>> {
        let each: Vec<Vec<NdSbp>> = self.values.iter().map(|value| sbps(value, mesh)).collect();
        let total: usize = each.iter().map(Vec::len).product();
        let mut stride = total.div_ceil(tried);
        // A divisor of their number would pass over some SBPs of an input.
        while each.iter().any(|sbps| gcd(stride, sbps.len()) > 1) {
            stride += 1;
        }
        let combination = |index: usize| {
            let mut rest = index * stride % total;
            let mut next = |sbps: &Vec<NdSbp>| {
                let sbp = sbps[rest % sbps.len()].clone();
                rest /= sbps.len();
                sbp
            };
            each.iter().map(&mut next).collect()
        };
        (0..total.min(tried)).map(combination).collect()
    }

    /// Runs combination number `index`, and compares.
    ///
    /// # Errors
    /// What differs, or what the case panicked with.
    pub fn run(
        &self,
        own: Own<'_>,
        sbps: &[NdSbp],
        index: usize,
    ) -> std::result::Result<(), String> {
        quietly(|| self.compare(&evaluate(self.case, &self.values, own, sbps, index)?))
    }

    fn compare(&self, found: &Evaluation) -> std::result::Result<(), String> {
        let (case, expected) = (self.case, &self.expected);
        if found.outputs.len() != expected.outputs.len() {
            return Err(format!("{} results", found.outputs.len()));
        }
        for (index, (found, expected)) in found.outputs.iter().zip(&expected.outputs).enumerate() {
            if found.is_global() == case.reads {
                return Err(format!("result {index}: is_global() is {}", found.is_global()));
            }
            if found.requires_grad() != expected.requires_grad() && !case.draws {
                return Err(format!(
                    "result {index}: requires_grad() is {}",
                    found.requires_grad()
                ));
            }
            same(case, found, expected).map_err(|error| format!("result {index} {error}"))?;
        }
        for (index, both) in found.gradients.iter().zip(&expected.gradients).enumerate() {
            match both {
                (None, None) => {}
                (Some(found), Some(expected)) => {
                    if !found.is_global() {
                        return Err(format!("gradient {index} is not global"));
                    }
                    same(case, found, expected)
                        .map_err(|error| format!("gradient {index} {error}"))?;
                }
                (None, Some(_)) => return Err(format!("gradient {index} is missing")),
                (Some(_), None) => return Err(format!("gradient {index} should not be there")),
            }
        }
        Ok(())
    }
}

/// What one rank draws.
fn drawn(case: &Case, values: &[Tensor]) -> std::result::Result<Evaluation, String> {
    let group = ProcessGroup::in_process(1).unwrap().remove(0);
    let placement = Placement::new(&group, [0]).unwrap();
    let own = Own { rank: 0, placement: &placement };
    let evaluation = evaluate(case, values, own, &vec![vec![B]; values.len()], 0)?;
    let full = |tensor: &Tensor| tensor.full().unwrap();
    let outputs = evaluation.outputs.iter().map(full).collect();
    let gradients = evaluation.gradients.iter().map(|one| one.as_ref().map(full)).collect();
    Ok(Evaluation { outputs, gradients })
}

fn evaluate(
    case: &Case,
    values: &[Tensor],
    own: Own<'_>,
    sbps_of_inputs: &[NdSbp],
    index: usize,
) -> std::result::Result<Evaluation, String> {
    flow_global::manual_seed(own.placement, 7).map_err(|error| error.to_string())?;
    let mut inputs = Vec::new();
    for ((value, sbp), input) in values.iter().zip(sbps_of_inputs).zip(&case.inputs) {
        let global = own.global(value, sbp, input.has_great_terms);
        inputs.push(global.map_err(|error| error.to_string())?);
    }
    // Gradients of the results lie in all ways, too.
    let weight = |output: usize, tensor: &Tensor| {
        let weight = weight(output, tensor);
        let all = sbps(&weight, own.placement.shape());
        own.global(&weight, &all[(index * 7 + output) % all.len()], false).unwrap()
    };
    Ok(case.evaluate(&inputs, weight))
}

/// Compares a result with a plain tensor.
fn same(case: &Case, found: &Tensor, expected: &Tensor) -> std::result::Result<(), String> {
    if found.size() != expected.size() || found.kind() != expected.kind() {
        return Err(format!("is said to be {:?}{:?}", found.kind(), found.size()));
    }
    let sbp = found.sbp().map_or_else(|_| String::new(), |sbp| format!("{sbp:?} "));
    let full = found.full().map_err(|error| error.to_string())?;
    if full.is_global() {
        return Err("is global when full".into());
    }
    difference(&full, expected, case.is_single)
        .map_or(Ok(()), |difference| Err(format!("{sbp}{difference}")))
}

impl Own<'_> {
    /// A plain tensor as a global one: each rank gives its part. Terms are multiples of the tensor
    /// that add up to it, or the tensor with great numbers that cancel each other.
    ///
    /// # Errors
    /// As of `to_global`.
    pub fn global(self, value: &Tensor, sbp: &[Sbp], has_great_terms: bool) -> Result<Tensor> {
        let Some(position) = self.placement.position(self.rank) else {
            return value.zeros_like().to_global(self.placement, sbp);
        };
        let shape: Vec<usize> = value.size().iter().map(|&size| size as usize).collect();
        let region = regions(self.placement, sbp, &shape).swap_remove(position);
        let ranges = region.0.iter().enumerate();
        let part = ranges.fold(value.shallow_clone(), |part, (dim, range)| {
            part.narrow(dim as i64, range.start as i64, range.len() as i64)
        });
        let (mut terms, mut is_last) = (1, true);
        let at = self.placement.coordinates(position);
        for ((sbp, at), &extent) in sbp.iter().zip(at).zip(self.placement.shape()) {
            if sbp.is_partial() {
                terms *= extent as i64;
                is_last &= at + 1 == extent;
            }
        }
        let is_half = matches!(value.kind(), Kind::Half | Kind::BFloat16);
        let local = match (terms, is_last) {
            (1, _) => part.copy(),
            // Where others would cancel all digits.
            (_, false) if is_half => part.zeros_like(),
            (_, true) if is_half => part.copy(),
            (_, false) if has_great_terms => part.zeros_like() + great(value.kind()),
            (_, true) if has_great_terms => part - great(value.kind()) * (terms - 1),
            (_, false) => part.g_mul_scalar(2),
            (_, true) => part.g_mul_scalar(3 - 2 * terms),
        };
        local.to_global(self.placement, sbp)
    }
}

/// A number that the next narrower kinds of floating point round. Sums of a few, and products of two,
/// are exact in the kind itself; bytes count modulo 256.
fn great(kind: Kind) -> i64 {
    match kind {
        Kind::Double | Kind::Int64 => (1 << 25) + 1,
        Kind::Uint8 => 51,
        _ => (1 << 16) + 1,
    }
}

/// Every SBP of a tensor on a mesh. Truth values have no terms.
fn sbps(tensor: &Tensor, mesh: &[usize]) -> Vec<NdSbp> {
    let terms = (tensor.kind() != Kind::Bool).then_some(P);
    let one: Vec<Sbp> = (0..tensor.dim()).map(S).chain([B]).chain(terms).collect();
    mesh.iter().fold(vec![Vec::new()], |all: Vec<NdSbp>, _| {
        let with = |sbp| one.iter().map(move |&last| [sbp, &[last][..]].concat());
        all.iter().flat_map(|sbp| with(&sbp[..])).collect()
    })
}

fn gcd(one: usize, other: usize) -> usize {
    if other == 0 { one } else { gcd(other, one % other) }
}

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Calls a function whose panic is an error, and not printed.
fn quietly<T>(
    function: impl FnOnce() -> std::result::Result<T, String>,
) -> std::result::Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !IS_QUIET.get() {
                usual(info);
            }
        }));
    });
    IS_QUIET.set(true);
    // One that panicked in `no_grad` has left its thread without gradients.
    let result = catch_unwind(AssertUnwindSafe(|| tch::with_grad(function)));
    IS_QUIET.set(false);
    result.unwrap_or_else(|panic| Err(message(panic.as_ref())))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
    let text = text.unwrap_or_else(|| "panicked".into());
    let first = text.split("\\nException raised").next().unwrap_or_default();
    first.replace("called `Result::unwrap()` on an `Err` value: ", "")
}
