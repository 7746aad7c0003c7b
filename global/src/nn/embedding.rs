//! An embedding whose vocabulary is split.

use std::borrow::Borrow;

use tch::{nn, Kind, Tensor};

use super::{pinned, summed, variable, with_axis};
use crate::error::Result;
use crate::local::from_local;
use crate::placement::Placement;
use crate::region::{regions, shape};
use crate::sbp::{Sbp, B, P, S};
use crate::tensor::GlobalTensor;

/// An embedding, each rank of which has the vectors of a part of the vocabulary.
#[derive(Debug)]
pub struct VocabEmbedding {
    /// Vocabulary by width, S(0) on the axis.
    pub ws: Tensor,
    axis: usize,
    result: Sbp,
}

/// An embedding whose vocabulary is split over an axis of the placement. Name, sizes and initial
/// values are those of [`nn::embedding`]; no rank has more than its part.
///
/// # Errors
/// The placement has no such axis.
pub fn vocab_embedding<'a>(
    path: impl Borrow<nn::Path<'a>>,
    vocabulary: i64,
    width: i64,
    placement: &Placement,
    axis: usize,
    init: nn::Init,
) -> Result<VocabEmbedding> {
    let weight = ("weight", &[vocabulary, width][..], init);
    let ws = variable(path.borrow(), weight, placement, (axis, S(0)))?;
    Ok(VocabEmbedding { ws, axis, result: B })
}

impl VocabEmbedding {
    /// Has the result split by this dimension on the layer's axis, as
    /// [`RowLinear::scattered`](super::RowLinear::scattered).
    pub fn scattered(mut self, dim: usize) -> Self {
        self.result = S(dim);
        self
    }

    /// The vectors of these indices, reduced: B on the layer's axis, or split as
    /// [`scattered`](Self::scattered) says. The gradient of the weight is made where its rows are.
    ///
    /// # Errors
    /// The indices are plain or placed on other ranks, or a collective fails.
    pub fn f_forward(&self, indices: &Tensor) -> Result<Tensor> {
        let placement = self.ws.placement()?;
        let indices = pinned(&indices.to_global(&placement, indices.sbp()?)?, self.axis, B)?;
        let weight = self.ws.to_local()?;
        let sizes = self.ws.size();
        let own = match placement.position(placement.runtime()?.rank()) {
            Some(position) => {
                let all = regions(&placement, &self.ws.sbp()?, &shape(&sizes));
                let rows = &all[position].0[0];
                found(&weight, &indices.to_local()?, rows.start as i64, rows.len() as i64)?
            }
            None => weight,
        };
        let sizes = [indices.size(), vec![sizes[1]]].concat();
        let terms = from_local(&own, sizes, &placement, with_axis(&indices, self.axis, P)?)?;
        summed(&terms, self.axis, self.result)
    }
}

/// The vectors of indices, of which this rank has `count` rows from `start` on: zeros for others.
fn found(weight: &Tensor, indices: &Tensor, start: i64, count: i64) -> Result<Tensor> {
    if count == 0 {
        // A part without rows still depends on its weight.
        let sizes = [indices.size(), vec![weight.size()[1]]].concat();
        let zeros = Tensor::f_zeros(&sizes[..], (weight.kind(), weight.device()))?;
        return Ok(zeros.f_add(&weight.f_sum(weight.kind())?)?);
    }
    let is_own = indices.f_ge(start)?.f_logical_and(&indices.f_lt(start + count)?)?;
    let rows = indices.f_sub_scalar(start)?.f_clamp(0, count - 1)?.f_to_kind(Kind::Int64)?;
    let found = Tensor::f_embedding(weight, &rows, -1, false, false)?;
    Ok(found.f_mul(&is_own.f_unsqueeze(-1)?.f_to_kind(weight.kind())?)?)
}

impl nn::Module for VocabEmbedding {
    fn forward(&self, indices: &Tensor) -> Tensor {
        self.f_forward(indices).expect("vocab_embedding")
    }
}
