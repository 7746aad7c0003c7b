//! Embeddings of a split vocabulary.

use tch::Tensor;

use super::context::Context;
use crate::error::Result;

/// Rows that other ranks have give zeros: the results are partial sums.
pub fn embedding(context: &mut Context<'_, '_>) -> Result<()> {
    // (weight, indices, padding index, scaling by frequency, sparse)
    let (weight, indices) = (context.local(0)?, context.local(1)?);
    let rows = context.region(0).0[0].clone();
    let (start, end) = (rows.start as i64, rows.end as i64);
    let is_own = indices.f_ge(start)?.f_logical_and(&indices.f_lt(end)?)?;
    let own = (&indices - start).f_clamp(0, (end - start - 1).max(0))?;
    let found = Tensor::f_embedding(&weight, &own, -1, false, false)?;
    let local = found * is_own.f_unsqueeze(-1)?.f_to_kind(weight.kind())?;
    let shape = [context.shape(1), vec![context.shape(0)[1]]].concat();
    context.give(0, &local, &shape)
}
