//! Embeddings of a split vocabulary.

use std::ops::Range;

use tch::{Device, Tensor};

use super::context::Context;
use crate::error::{Error, Result};

/// Looks up indices in this rank's rows. Rows that other ranks have give zeros: the results are
/// partial sums.
pub fn embedding(context: &mut Context<'_, '_>) -> Result<()> {
    // (weight, indices, padding index, scaling by frequency, sparse)
    let weight = context.local(0)?;
    let indices = context.local(1)?;
    let rows = context.region(0).0[0].clone();
    let [vocabulary, width] = context.shape(0)[..] else {
        return Err(context.fail("the weight must have two dimensions"));
    };
    let local = found(&weight, &indices, rows, vocabulary)?;
    let shape = [context.shape(1), vec![width]].concat();
    context.give(0, &local, &shape)
}

/// Returns the vectors of indices, of which this rank has these rows: zeros for others.
/// Differentiable.
///
/// # Errors
/// On the CPU, an index that is no row of the vocabulary, as in libtorch. On a GPU the host does not
/// wait for the indices.
pub fn found(
    weight: &Tensor,
    indices: &Tensor,
    rows: Range<usize>,
    vocabulary: usize,
) -> Result<Tensor> {
    if indices.device() == Device::Cpu && indices.numel() > 0 {
        let [least, greatest] = [indices.f_min()?, indices.f_max()?].map(|i| i.int64_value(&[]));
        let wrong = if least < 0 { least } else { greatest };
        if wrong < 0 || wrong >= vocabulary as i64 {
            return Err(Error::Unsupported {
                operation: "embedding".to_owned(),
                reason: format!("index {wrong} is no row of a weight with {vocabulary} rows"),
            });
        }
    }
    if rows.is_empty() {
        // A part without rows still depends on its weight.
        let sizes = [indices.size(), vec![weight.size()[1]]].concat();
        let zeros = Tensor::f_zeros(&sizes[..], (weight.kind(), weight.device()))?;
        return Ok(zeros.f_add(&weight.f_sum(weight.kind())?)?);
    }
    let start = rows.start as i64;
    let end = rows.end as i64;
    let is_other = indices.f_lt(start)?.f_logical_or(&indices.f_ge(end)?)?;
    let own = indices.f_sub_scalar(start)?.f_clamp(0, end - start - 1)?;
    let found = Tensor::f_embedding(weight, &own, -1, false, false)?;
    // Not by a product: a row may be infinite.
    Ok(found.f_masked_fill(&is_other.f_unsqueeze(-1)?, 0.0)?)
}
