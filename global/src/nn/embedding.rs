//! An embedding whose vocabulary is split.

use std::borrow::Borrow;

use tch::{Tensor, nn};

use super::{pinned, summed, variable, with_axis};
use crate::code::indexing::found;
use crate::error::Result;
use crate::local::from_local;
use crate::placement::Placement;
use crate::region::{regions, shape};
use crate::sbp::{B, P, S, Sbp};
use crate::tensor::GlobalTensor;

/// An embedding, each rank of which has the vectors of a part of the vocabulary.
#[derive(Debug)]
pub struct VocabEmbedding {
    /// Vocabulary by width, S(0) on the axis.
    pub ws: Tensor,
    axis: usize,
    result: Sbp,
}

/// Returns an embedding whose vocabulary is split over an axis of the placement. Name, sizes and
/// initial values are those of [`nn::embedding`]; no rank has more than its part.
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

    /// Returns the vectors of these indices, reduced: B on the layer's axis, or split as
    /// [`scattered`](Self::scattered) says. The gradient of the weight is made where its rows are.
    ///
    /// # Errors
    /// The indices are plain or placed on other ranks, one is no row (on a GPU this is not checked), or
    /// a collective fails.
    pub fn f_forward(&self, indices: &Tensor) -> Result<Tensor> {
        let placement = self.ws.placement()?;
        let indices = pinned(&indices.to_global(&placement, indices.sbp()?)?, self.axis, B)?;
        let weight = self.ws.to_local()?;
        let sizes = self.ws.size();
        let own = match placement.position(placement.runtime()?.rank()) {
            Some(position) => {
                let all = regions(&placement, &self.ws.sbp()?, &shape(&sizes));
                let rows = all[position].0[0].clone();
                found(&weight, &indices.to_local()?, rows, shape(&sizes)[0])?
            }
            None => weight,
        };
        let sizes = [indices.size(), vec![sizes[1]]].concat();
        let terms = from_local(&own, sizes, &placement, with_axis(&indices, self.axis, P)?)?;
        summed(&terms, self.axis, self.result)
    }
}

impl nn::Module for VocabEmbedding {
    fn forward(&self, indices: &Tensor) -> Tensor {
        self.f_forward(indices).expect("vocab_embedding")
    }
}
