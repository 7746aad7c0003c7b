//! A small GPT, and the pieces of a text that it learns byte by byte.

use anyhow::{Result, ensure};
use flow::ddp::BoxError;
use flow::prelude::*;
use flow_examples::gpt_block::plain_gpt_block;
use tch::nn::{Init, SequentialT};

use crate::options::HEAD;

/// Tokens are bytes.
const VOCABULARY: i64 = 256;
/// Bytes that a prediction may look at.
const CONTEXT: usize = 64;
const BLOCKS: i64 = 2;

/// Returns a GPT of this width. It maps tokens `[samples, CONTEXT]` to the logits of what follows
/// each, `[samples * CONTEXT, 256]`.
pub fn gpt(path: &nn::Path, width: i64) -> SequentialT {
    let ws_init = Init::Randn { mean: 0.0, stdev: 0.02 };
    let config = nn::EmbeddingConfig { ws_init, ..Default::default() };
    let tokens = nn::embedding(path / "tokens", VOCABULARY, width, config);
    let positions = path.var("positions", &[CONTEXT as i64, width], ws_init);
    let mut model = nn::seq_t().add_fn(move |x| x.apply(&tokens) + &positions);
    for number in 0..BLOCKS {
        let Ok(block) = plain_gpt_block(&(path / number), width, width / HEAD);
        model = model.add(block);
    }
    model
        .add(nn::layer_norm(path / "norm", vec![width], Default::default()))
        .add(nn::linear(path / "logits", width, VOCABULARY, Default::default()))
        .add_fn(|x| x.view([-1, VOCABULARY]))
}

/// A text in pieces of `CONTEXT` bytes.
pub struct Pieces(Vec<u8>);

impl Pieces {
    /// Makes the pieces of a text.
    pub fn new(text: Vec<u8>) -> Result<Self> {
        ensure!(text.len() > CONTEXT, "the text has {} bytes: give a longer one", text.len());
        Ok(Self(text))
    }
}

impl Dataset for Pieces {
    /// Pieces `[batch, CONTEXT]`, and the bytes that follow each of their bytes, `[batch * CONTEXT]`.
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        (self.0.len() - 1) / CONTEXT
    }

    fn batch(&self, indices: &[usize]) -> Result<Self::Batch, BoxError> {
        let mut pieces = Vec::new();
        let mut following = Vec::new();
        for index in indices {
            let start = index * CONTEXT;
            pieces.extend_from_slice(&self.0[start..start + CONTEXT]);
            following.extend_from_slice(&self.0[start + 1..=start + CONTEXT]);
        }
        let pieces = Tensor::from_slice(&pieces).view([-1, CONTEXT as i64]);
        Ok((pieces.to_kind(Kind::Int64), Tensor::from_slice(&following).to_kind(Kind::Int64)))
    }
}
