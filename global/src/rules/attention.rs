//! Scaled dot-product attention: samples or heads are split.

use super::op::{Input, Op, Rule, Signature};
use crate::sbp::{Sbp, B};

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
    let heads = |input: &Input| input.shape.get(1).copied();
    // The gradient comes first in a backward.
    let first = usize::from(op.name.ends_with("_backward"));
    let tensors = op.inputs.get(first..first + 3).unwrap_or_default();
    let are_alike = tensors.iter().all(|input| heads(input) == heads(&tensors[0]));
    let dims = if are_alike { 0..2 } else { 0..1 };
    let signature = |dim: usize| {
        let size = op.inputs[0].shape.get(dim);
        let sbp = |input: &Input| match input.shape.get(dim) {
            own if input.is_defined && input.shape.len() > 2 && own == size => Sbp::Split(dim),
            _ => B,
        };
        let inputs: Vec<Sbp> = op.inputs.iter().map(sbp).collect();
        Signature::new(inputs, vec![Sbp::Split(dim); op.outputs])
    };
    dims.map(signature).collect()
}
