//! A block of a GPT.

use std::convert::Infallible;

use tch::Tensor;
use tch::nn::{self, Module, SequentialT};

/// Returns a block on one process.
pub fn plain_gpt_block(path: &nn::Path, width: i64, heads: i64) -> Result<SequentialT, Infallible> {
    gpt_block(
        path,
        (width, heads),
        |name, inputs, outputs| Ok(nn::linear(path / name, inputs, outputs, Default::default())),
        |name, inputs, outputs| Ok(nn::linear(path / name, inputs, outputs, Default::default())),
    )
}

/// Returns a block of GPT-2 (Radford et al. 2019) of this width, with so many heads. Its linear
/// layers are made from their names, inputs and outputs: `column` makes those whose outputs may be
/// split over ranks, and `row` those that take such inputs.
pub fn gpt_block<C: Module + 'static, R: Module + 'static, E>(
    path: &nn::Path,
    (width, heads): (i64, i64),
    column: impl Fn(&str, i64, i64) -> Result<C, E>,
    row: impl Fn(&str, i64, i64) -> Result<R, E>,
) -> Result<SequentialT, E> {
    let norm1 = nn::layer_norm(path / "norm1", vec![width], Default::default());
    let qkv = column("qkv", width, 3 * width)?;
    let projection = row("projection", width, width)?;
    let norm2 = nn::layer_norm(path / "norm2", vec![width], Default::default());
    let up = column("up", width, 4 * width)?;
    let down = row("down", 4 * width, width)?;
    Ok(nn::seq_t()
        .add_fn(move |x| x + attention(&x.apply(&norm1).apply(&qkv), heads).apply(&projection))
        .add_fn(move |x| x + x.apply(&norm2).apply(&up).gelu("tanh").apply(&down)))
}

/// Causal attention. For each of `batch` and `tokens`, `qkv` has each head's queries, keys and
/// values, one after the other. So a part of them is some heads'.
fn attention(qkv: &Tensor, heads: i64) -> Tensor {
    let sizes = qkv.size();
    let [batch, tokens, width] = [sizes[0], sizes[1], sizes[2] / 3];
    let of_heads = qkv.view([batch, tokens, heads, 3, width / heads]).permute([3, 0, 2, 1, 4]);
    let [q, k, v] = [0, 1, 2].map(|part| of_heads.get(part));
    let attended =
        Tensor::scaled_dot_product_attention(&q, &k, &v, None::<Tensor>, 0.0, true, None, false);
    attended.transpose(1, 2).reshape([batch, tokens, width])
}
