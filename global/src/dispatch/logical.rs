//! An operation on the logical tensors, as libtorch sees it: whether their sizes fit, and what it gives.
//!
//! libtorch sees the locals' sizes, and these may fit where the logical ones do not. Of tensors with 2
//! rows and with 4, split by rows, each of two ranks has 1 row and 2: libtorch would broadcast the 1. So
//! the operation runs once on tensors of the logical sizes that have no elements (libtorch's device
//! `meta`). [`sizes`](crate::rules::sizes) checks operations that libtorch has not for these.

use flow_autograd::global::{Call, LocalResult};
use tch::Tensor;

use super::plan::OutputLayout;
use crate::code::draws;
use crate::error::{Error, Result};
use crate::sbp::{B, NdSbp};
use crate::spec::Spec;

/// The results of an operation on the logical tensors, without elements. Empty if libtorch cannot tell, or
/// nobody asks.
pub struct LogicalResults(Vec<LocalResult>);

impl LogicalResults {
    /// Runs the operation on the logical tensors if some of them are not B, as `have` says, or to see the
    /// strides of views. Of an operation that draws random numbers only the arguments are checked.
    ///
    /// # Errors
    /// The operation's own, the same on all ranks: the sizes or the arguments do not fit.
    pub fn of(call: &Call<'_, Spec>, have: &[NdSbp]) -> Result<Self> {
        let are_whole = have.iter().flatten().all(|&sbp| sbp == B);
        if call.is_random {
            if draws(call.name) {
                call.check_arguments().map_err(|error| unfit(call, error))?;
            }
            return Ok(Self(Vec::new()));
        }
        if (are_whole && !call.is_view) || lacks_first_row(call) {
            return Ok(Self(Vec::new()));
        }
        match call.run_on_meta() {
            Ok(true) => {
                let results = (0..call.returns).map(|index| call.result(index));
                Ok(Self(results.collect::<std::result::Result<_, _>>()?))
            }
            Ok(false) => Ok(Self(Vec::new())),
            // The locals have the same sizes, and libtorch sees more of them.
            Err(_) if are_whole => Ok(Self(Vec::new())),
            Err(error) => Err(unfit(call, error)),
        }
    }

    /// Returns the strides of the first tensor; none if they are not known.
    pub fn strides(&self) -> Vec<i64> {
        self.tensors(0).next().map(|tensor| tensor.stride()).unwrap_or_default()
    }

    /// Checks that a result has the sizes that its layout says.
    ///
    /// # Errors
    /// It has others: the rule is wrong.
    pub fn check(&self, call: &Call<'_, Spec>, index: usize, output: &OutputLayout) -> Result<()> {
        for tensor in self.tensors(index) {
            let sizes = tensor.size();
            for (&dim, size) in output.split_dims.iter().zip(&output.split_sizes) {
                if sizes.get(dim as usize) != Some(size) {
                    let reason = format!(
                        "result {index} is {sizes:?}, but Flow's rule splits {size} elements of its \
                         dimension {dim}; make the inputs B by to_sbp, and report this"
                    );
                    return Err(Error::Unsupported { operation: call.name.to_owned(), reason });
                }
            }
        }
        Ok(())
    }

    /// Returns the tensors of a result.
    fn tensors(&self, index: usize) -> impl Iterator<Item = &Tensor> {
        let (one, list) = match self.0.get(index) {
            Some(LocalResult::Tensor(one)) => (one.as_ref(), &[][..]),
            Some(LocalResult::Tensors(list)) => (None, &list[..]),
            _ => (None, &[][..]),
        };
        one.into_iter().chain(list)
    }
}

/// Returns whether libtorch's kernel for tensors without elements looks at a first row that is not there.
fn lacks_first_row(call: &Call<'_, Spec>) -> bool {
    let name = call.name.trim_start_matches("aten::").trim_end_matches('_');
    matches!(name, "index_add" | "index_copy" | "index_reduce")
        && (0..call.tensors()).any(|tensor| call.sizes(tensor).contains(&0))
}

/// Returns the error of logical sizes that do not fit, with what libtorch says in one line.
fn unfit(call: &Call<'_, Spec>, error: flow_autograd::Error) -> Error {
    let reason = match error {
        flow_autograd::Error::Libtorch { reason, .. } => reason,
        other => other.to_string(),
    };
    let lines: Vec<&str> = reason.lines().map(str::trim).collect();
    Error::Unsupported { operation: call.name.to_owned(), reason: lines.join(" ") }
}
