//! How a network and its batches lie on a mesh.

use flow_global::{B, NdSbp, P, S, Sbp};

/// The SBP of a variable, by its name and number of dimensions.
type Weight = dyn Fn(&str, usize) -> NdSbp + Sync;

/// SBPs of one training.
pub struct Layout {
    pub name: &'static str,
    /// Of the batch and its targets.
    pub data: NdSbp,
    pub weight: Box<Weight>,
}

fn layout(
    name: &'static str,
    data: &[Sbp],
    weight: impl Fn(&str, usize) -> NdSbp + Sync + 'static,
) -> Layout {
    Layout { name, data: data.to_vec(), weight: Box::new(weight) }
}

/// The layer, and whether it is its weight.
fn part(name: &str) -> (&str, bool) {
    let (layer, kind) = name.rsplit_once('.').unwrap_or(("", name));
    (layer, kind == "weight")
}

/// As Megatron-LM: a layer's columns, then the next one's rows, are split, and the vocabulary.
fn tensor_parallel(name: &str) -> Sbp {
    match part(name) {
        ("column" | "query" | "key" | "value" | "up", _) => S(0),
        ("row" | "projection" | "down", true) => S(1),
        ("head" | "words", true) => S(0),
        _ => B,
    }
}

/// Output channels are split, and what belongs to each.
fn channel_parallel(name: &str) -> Sbp {
    match part(name) {
        (layer, _) if layer.starts_with("convolution") || layer.starts_with("norm") => S(0),
        _ => B,
    }
}

/// Along the first dimension, if there is one.
fn split(dims: usize) -> Sbp {
    if dims > 0 { S(0) } else { B }
}

/// Layouts of any network on one axis.
pub fn of_data() -> Vec<Layout> {
    vec![
        layout("all B", &[B], |_, _| vec![B]),
        layout("data parallel", &[S(0)], |_, _| vec![B]),
        layout("weights S(0)", &[S(0)], |_, dims| vec![split(dims)]),
    ]
}

pub fn of_tensors() -> Vec<Layout> {
    vec![layout("tensor parallel", &[B], |name, _| vec![tensor_parallel(name)])]
}

pub fn of_channels() -> Vec<Layout> {
    vec![layout("channel parallel", &[B], |name, _| vec![channel_parallel(name)])]
}

/// What nobody would choose.
pub fn odd() -> Vec<Layout> {
    let columns = |_: &str, dims: usize| vec![if dims > 1 { S(1) } else { split(dims) }];
    vec![
        layout("data B, weights S(0)", &[B], |_, dims| vec![split(dims)]),
        layout("columns, S(1)", &[S(0)], columns),
        layout("rows or columns by turns", &[S(0)], |name, dims| match name.len() % 3 {
            0 if dims > 1 => vec![S(1)],
            1 => vec![split(dims)],
            _ => vec![B],
        }),
    ]
}

/// What only floating-point batches can be.
pub fn of_terms() -> Vec<Layout> {
    vec![layout("data P", &[P], |_, _| vec![B]), layout("data S(1)", &[S(1)], |_, _| vec![B])]
}

/// On two axes.
pub fn hybrid() -> Vec<Layout> {
    vec![
        layout("hybrid", &[S(0), B], |name, _| vec![B, tensor_parallel(name)]),
        layout("hybrid of channels", &[S(0), B], |name, _| vec![B, channel_parallel(name)]),
        layout("data parallel on both", &[S(0), S(0)], |_, _| vec![B, B]),
        layout("weights on both", &[S(0), B], |_, dims| vec![split(dims), split(dims)]),
        layout("crossed", &[B, S(0)], |name, dims| {
            vec![tensor_parallel(name), if dims > 1 { S(1) } else { B }]
        }),
    ]
}
