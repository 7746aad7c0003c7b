//! Convolutions and what samples images: the batch is split, or channels.

use super::op::{Arg, Op, Rule, Signature};
use super::views::moved;
use crate::sbp::{B, P, S};

/// The rules of this file's operations.
pub const RULES: &[Rule] = &[
    Rule { names: &["convolution"], signatures: convolution },
    Rule { names: &["convolution_backward"], signatures: convolution_backward },
    Rule { names: SAMPLING, signatures: sampling },
    // No views, as libtorch gives other sizes if there are no images.
    Rule {
        names: &["pixel_shuffle", "pixel_unshuffle"],
        signatures: |op| moved(op, |dim, rank| (dim + 3 < rank).then_some(dim)),
    },
];

/// Each image and channel by itself.
const SAMPLING: &[&str] = &[
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward",
    "adaptive_max_pool2d",
    "adaptive_max_pool2d_backward",
    "avg_pool2d",
    "avg_pool2d_backward",
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "reflection_pad2d",
    "reflection_pad2d_backward",
    "replication_pad2d",
    "replication_pad2d_backward",
    "upsample_bilinear2d",
    "upsample_bilinear2d_backward",
    "upsample_nearest2d",
    "upsample_nearest2d_backward",
];

fn convolution(op: &Op) -> Vec<Signature> {
    // (input, weight, bias, stride, padding, dilation, transposed, output padding, groups)
    let batch = Signature::new([S(0), B, B], [S(0)]);
    let is_simple = op.int(8) == Some(1) && !op.flag(6);
    let channels = is_simple.then(|| Signature::new([B, S(0), S(0)], [S(1)]));
    [batch].into_iter().chain(channels).collect()
}

fn convolution_backward(op: &Op) -> Vec<Signature> {
    // (gradient, input, weight, bias sizes, stride, padding, dilation, transposed, output padding,
    // groups, mask)
    let batch = Signature::new([S(0), S(0), B], [S(0), P, P]);
    let is_simple = op.int(9) == Some(1) && !op.flag(7);
    let channels = is_simple.then(|| {
        let signature = Signature::new([S(1), B, S(0)], [P, S(0), S(0)]);
        // Without a bias its size is 0.
        match op.args.get(3) {
            Some(Arg::Ints(sizes)) if sizes[..] != [0] => signature.with_shape(3, S(0)),
            _ => signature,
        }
    });
    [batch].into_iter().chain(channels).collect()
}

fn sampling(op: &Op) -> Vec<Signature> {
    // Without a batch the first dimension is that of channels: it may be split as well.
    let dims = 0..op.rank(0).saturating_sub(2);
    // (gradient, output size, input size, scales)
    let has_input_size = op.name.starts_with("upsample") && op.name.ends_with("_backward");
    let mut signatures = Vec::new();
    for dim in dims {
        let signature = Signature::all(op, S(dim));
        signatures.push(if has_input_size { signature.with_shape(2, S(dim)) } else { signature });
    }
    signatures
}
