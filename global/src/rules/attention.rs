//! Scaled dot-product attention: samples or heads are split.

use super::op::{Arg, Op, Rule, Signature};
use crate::sbp::{B, P, Sbp};

/// The rules of this file's operations.
pub const RULES: &[Rule] = &[Rule { names: ATTENTION, signatures: attention }];

const ATTENTION: &[&str] = &[
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
];

/// Samples, or heads if queries have as many as keys. Masks of words for all samples and heads are B.
fn attention(op: &Op) -> Vec<Signature> {
    // The probability of dropout is the first fraction among the arguments. CUDA's generators of the
    // ranks would draw other numbers.
    let mut fractions = op.args.iter().filter_map(|arg| match arg {
        Arg::Float(value) => Some(*value),
        _ => None,
    });
    if fractions.next().is_some_and(|dropout| dropout != 0.0) {
        return Vec::new();
    }
    // The gradient comes first in a backward.
    let first = usize::from(op.name.ends_with("_backward"));
    let tensors = op.inputs.get(first..first + 3).unwrap_or_default();
    let are_alike = tensors.iter().all(|input| input.shape.get(1) == tensors[0].shape.get(1));
    let dims = if are_alike { 0..2 } else { 0..1 };
    dims.map(|dim| split(op, first == 1, dim)).collect()
}

/// Splits a dimension of all tensors that have it as the first one does.
fn split(op: &Op, is_backward: bool, dim: usize) -> Signature {
    let size = op.inputs[0].shape.get(dim);
    let mut inputs = Vec::new();
    for input in &op.inputs {
        let has_dim = input.shape.len() > 2 && input.shape.get(dim) == size;
        inputs.push(if has_dim { Sbp::Split(dim) } else { B });
    }
    // Results and their normalizers, then the state of the random generator, which each rank has for
    // itself. Gradients of queries, keys and values, then that of the mask.
    let (split, rest) = if !is_backward {
        (2, B)
    } else if inputs.get(4) == Some(&B) {
        (3, P)
    } else {
        (3, Sbp::Split(dim))
    };
    let mut outputs = vec![Sbp::Split(dim); op.outputs.min(split)];
    outputs.resize(op.outputs, rest);
    Signature::new(inputs, outputs)
}
