//! Scaled dot-product attention: samples or heads are split.

use super::op::{Op, Signature};
use super::Rule;
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

/// Inputs that do not have the dimension, such as a mask for all heads, are B.
fn attention(op: &Op) -> Vec<Signature> {
    let signature = |dim: usize| {
        let size = op.inputs[0].shape.get(dim);
        let sbp = |input: &crate::rules::op::Input| match input.shape.get(dim) {
            own if input.is_defined && own.is_some() && own == size => Sbp::Split(dim),
            _ => B,
        };
        let inputs: Vec<Sbp> = op.inputs.iter().map(sbp).collect();
        Signature::new(inputs, vec![Sbp::Split(dim); op.outputs])
    };
    (0..2).map(signature).collect()
}
