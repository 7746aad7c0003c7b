//! Scaled dot-product attention: samples or heads are split.

use super::op::{Arg, Input, Op, Rule, Signature};
use crate::sbp::{Sbp, B, P};

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
        // Results and their normalizers, then the state of the random generator, which each rank has
        // for itself. Gradients of queries, keys and values, then that of the mask.
        let of_mask = match inputs.get(4) {
            Some(&B) => P,
            _ => Sbp::Split(dim),
        };
        let outputs = (0..op.outputs).map(|output| match (first, output) {
            (0, 0..2) | (1, 0..3) => Sbp::Split(dim),
            (0, _) => B,
            _ => of_mask,
        });
        let outputs: Vec<Sbp> = outputs.collect();
        Signature::new(inputs, outputs)
    };
    dims.map(signature).collect()
}
