//! What a step costs: bytes received, work, memory.

use std::ops::AddAssign;

use crate::placement::Placement;
use crate::region::part;
use crate::sbp::Sbp;

/// The prices of bytes, work and memory for the planner. One byte received from another rank
/// counts as 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// How many floating-point operations a rank does in the time in which it receives a byte. The
    /// more it is, the more is computed on all ranks alike to save bytes.
    ///
    /// 100 by default. About 10 for cores that share memory, 1000 for GPUs with NVLink, 10000 for
    /// GPUs with a network between them.
    pub flops_per_byte: f64,
    /// The price of a byte of a weight or of an optimizer's state, for each rank that has it. 0 by
    /// default: memory is free.
    pub memory: f64,
}

impl Default for Costs {
    fn default() -> Self {
        Self { flops_per_byte: 100.0, memory: 0.0 }
    }
}

/// The cost of a step for each rank, on average.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Bytes that it receives from others.
    pub bytes: f64,
    /// Floating-point operations. Matrix products and convolutions count as what they multiply and
    /// add; views as nothing; others as 16 for each element read or written, as they wait for
    /// memory.
    pub flops: f64,
    /// Bytes of weights and of the optimizer's state that it has.
    pub memory: f64,
}

impl Cost {
    /// All of it, in bytes received.
    pub fn total(&self, costs: &Costs) -> f64 {
        self.bytes + self.flops / costs.flops_per_byte + self.memory * costs.memory
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.flops += other.flops;
        self.memory += other.memory;
    }
}

const PER_ELEMENT: f64 = 16.0;

const VIEWS: &[&str] = &[
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "detach",
    "expand",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
];

/// Floating-point operations on tensors of these shapes.
pub(super) fn flops(name: &str, inputs: &[Vec<usize>], outputs: &[Vec<usize>]) -> f64 {
    let elements = |shape: &Vec<usize>| shape.iter().product::<usize>() as f64;
    let product = |one: usize, other: usize| match (inputs.get(one), inputs.get(other)) {
        (Some(one), Some(other)) => 2.0 * elements(one) * other.last().map_or(1.0, |&n| n as f64),
        _ => 0.0,
    };
    // Each element of the result takes as much as a filter has elements.
    let filters = |result: Option<&Vec<usize>>, weight: usize| match (result, inputs.get(weight)) {
        (Some(result), Some(weight)) if !weight.is_empty() => {
            2.0 * elements(result) * elements(weight) / weight[0].max(1) as f64
        }
        _ => 0.0,
    };
    let attention = |query: usize| match (inputs.get(query), inputs.get(query + 1)) {
        (Some(query), Some(key)) => elements(query) * key.get(2).map_or(1.0, |&n| n as f64),
        _ => 0.0,
    };
    match name {
        "mm" | "bmm" => product(0, 1),
        "addmm" | "baddbmm" => product(1, 2),
        "convolution" => filters(outputs.first(), 1),
        "convolution_backward" => 2.0 * filters(inputs.first(), 2),
        "embedding" => PER_ELEMENT * outputs.iter().map(elements).sum::<f64>(),
        _ if name.starts_with("_scaled_dot_product") => {
            if name.ends_with("_backward") {
                10.0 * attention(1)
            } else {
                4.0 * attention(0)
            }
        }
        _ if VIEWS.contains(&name) => 0.0,
        _ => PER_ELEMENT * inputs.iter().chain(outputs).map(elements).sum::<f64>(),
    }
}

/// The shape of the largest part that a rank has.
pub(super) fn local(shape: &[usize], placement: &Placement, sbp: &[Sbp]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    for (sbp, &extent) in sbp.iter().zip(placement.shape()) {
        if let Some(size) = sbp.dim().and_then(|dim| shape.get_mut(dim)) {
            *size = part(*size, extent, 0).len();
        }
    }
    shape
}
