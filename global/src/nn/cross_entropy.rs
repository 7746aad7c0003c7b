//! Cross entropy of classes that are split over ranks.

use flow_comm::ReduceOp;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::local::from_local;
use crate::region::{regions, shape};
use crate::sbp::{B, NdSbp, P, S, Sbp};
use crate::tensor::GlobalTensor;

/// Samples of this class do not count, as in libtorch.
const IGNORED: i64 = -100;

/// Returns the cross entropy of each sample. The last dimension of `logits` has the classes, and
/// may be split on any axes of the placement; `target` has the true classes, with the other
/// dimensions of `logits`. A sample of class -100 has the loss 0. Logits of half precision are
/// added up in `f32`.
///
/// The logits stay where they are: three numbers for each sample are reduced.
///
/// # Errors
/// A tensor is plain, the sizes do not fit, or a collective fails.
pub fn parallel_cross_entropy(logits: &Tensor, target: &Tensor) -> Result<Tensor> {
    let placement = logits.placement()?;
    let sizes = logits.size();
    let samples = match sizes.split_last() {
        Some((_, samples)) if samples == target.size() => samples.to_vec(),
        _ => {
            return Err(Error::Unsupported {
                operation: "parallel_cross_entropy".to_owned(),
                reason: format!(
                    "logits of shape {sizes:?} need targets of the same shape without the last \
                     dimension, and these have {:?}",
                    target.size()
                ),
            });
        }
    };
    let classes = S(samples.len());
    // Partial sums cannot be exponentiated.
    let mut sbp = logits.sbp()?;
    sbp.iter_mut().filter(|sbp| sbp.is_partial()).for_each(|sbp| *sbp = classes);
    target.sbp()?; // global, too
    let target = target.to_global(&placement, replaced(&sbp, classes, B))?;
    let logits = logits.to_global(&placement, &sbp)?;
    let local = logits.to_local()?;
    let position = placement.position(placement.runtime()?.rank());
    let own = match position {
        Some(position) => {
            let classes = regions(&placement, &sbp, &shape(&sizes)).swap_remove(position);
            let classes = classes.0[samples.len()].clone();
            Some((classes.start as i64, classes.len() as i64))
        }
        None => None,
    };
    let wide = if local.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let local = local.f_to_kind(wide)?;
    let greatest = tch::no_grad(|| {
        let of_part = match own {
            Some((_, count)) => greatest(&local.detach(), count, &sizes_of(&local))?,
            None => local.detach(),
        };
        let greatest = replaced(&sbp, classes, Sbp::Partial(ReduceOp::Max));
        let all = from_local(&of_part, &samples, &placement, greatest)?;
        all.to_global(&placement, replaced(&sbp, classes, B))?.to_local()
    })?;
    let terms = match own {
        Some(classes) => terms(&local, &greatest, &target.to_local()?, classes)?,
        None => local,
    };
    // The sum and the true class's logit, in one tensor.
    let partial = shifted(&replaced(&sbp, classes, P));
    let whole = shifted(&replaced(&sbp, classes, B));
    let both = from_local(&terms, [&[2], &samples[..]].concat(), &placement, partial)?;
    let both = both.to_global(&placement, whole)?;
    let losses = both.f_select(0, 0)?.f_log()?.f_sub(&both.f_select(0, 1)?)?;
    Ok(losses.f_masked_fill(&target.f_eq(IGNORED)?, 0.0)?)
}

/// Returns the SBP with another one in place of `from`.
fn replaced(sbp: &[Sbp], from: Sbp, to: Sbp) -> NdSbp {
    sbp.iter().map(|&sbp| if sbp == from { to } else { sbp }).collect()
}

/// Returns the SBP of a tensor with one more dimension, the first.
fn shifted(sbp: &[Sbp]) -> NdSbp {
    let axes = sbp.iter().map(|sbp| match *sbp {
        Sbp::Split(dim) => S(dim + 1),
        other => other,
    });
    axes.collect()
}

/// Returns the sizes of the samples of this rank's logits.
fn sizes_of(logits: &Tensor) -> Vec<i64> {
    let mut sizes = logits.size();
    sizes.pop();
    sizes
}

/// Returns the greatest logit of each sample in this rank's classes.
fn greatest(logits: &Tensor, classes: i64, samples: &[i64]) -> Result<Tensor> {
    Ok(match classes {
        0 => Tensor::f_full(samples, f64::NEG_INFINITY, (logits.kind(), logits.device()))?,
        _ => logits.f_amax([-1], false)?,
    })
}

/// Returns for each sample the sum of this rank's exponentials, and the true class's logit if that
/// is here: both without the greatest logit.
fn terms(
    logits: &Tensor,
    greatest: &Tensor,
    target: &Tensor,
    (start, count): (i64, i64),
) -> Result<Tensor> {
    let logits = logits.f_sub(&greatest.f_unsqueeze(-1)?)?;
    let sum = logits.f_exp()?.f_sum_dim_intlist([-1].as_slice(), false, logits.kind())?;
    let found = match count {
        0 => sum.f_zeros_like()?,
        _ => {
            let is_own = target.f_ge(start)?.f_logical_and(&target.f_lt(start + count)?)?;
            let index = target.f_sub_scalar(start)?.f_clamp(0, count - 1)?.f_unsqueeze(-1)?;
            let found = logits.f_gather(-1, &index, false)?.f_squeeze_dim(-1)?;
            found.f_mul(&is_own.f_to_kind(logits.kind())?)?
        }
    };
    Ok(Tensor::f_stack(&[sum, found], 0)?)
}
