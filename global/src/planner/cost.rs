//! What a step costs: bytes received, work, memory.

use std::ops::AddAssign;

use crate::placement::Placement;
use crate::region::part;
use crate::sbp::Sbp;

/// The prices of bytes, work and memory for the planner. One byte received from another rank
/// counts as 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// The number of floating-point operations that a rank does while it receives a byte. The
    /// more it is, the more is computed on all ranks alike to save bytes.
    ///
    /// 100 by default. About 10 for cores that share memory, 1000 for GPUs with NVLink, 10000 for
    /// GPUs with a network between them.
    pub flops_per_byte: f64,
    /// The price of a byte of a weight or of an optimizer's state, for each rank that has it. 0 by
    /// default: memory is free.
    pub memory: f64,
}

impl Default for Prices {
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
    /// add, and views as nothing. Others count as 16 for each element read or written, as they wait
    /// for memory.
    pub flops: f64,
    /// Bytes of weights and of the optimizer's state that it has.
    pub memory: f64,
}

impl Cost {
    /// Returns all of it, in bytes received.
    pub fn total(&self, prices: &Prices) -> f64 {
        self.bytes + self.flops / prices.flops_per_byte + self.memory * prices.memory
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
    match (name, inputs) {
        ("mm" | "bmm", [one, other, ..]) | ("addmm" | "baddbmm", [_, one, other, ..]) => {
            2.0 * elements(one) * other.last().map_or(1.0, |&columns| columns as f64)
        }
        ("convolution", [_, weight, ..]) => {
            outputs.first().map_or(0.0, |result| convolution(result, weight))
        }
        ("convolution_backward", [gradient, _, weight, ..]) => 2.0 * convolution(gradient, weight),
        ("embedding", _) => PER_ELEMENT * outputs.iter().map(|shape| elements(shape)).sum::<f64>(),
        (_, [_, query, key, ..])
            if name.starts_with("_scaled_dot_product") && name.ends_with("_backward") =>
        {
            10.0 * attention(query, key)
        }
        (_, [query, key, ..]) if name.starts_with("_scaled_dot_product") => {
            4.0 * attention(query, key)
        }
        _ if VIEWS.contains(&name) => 0.0,
        _ => PER_ELEMENT * inputs.iter().chain(outputs).map(|shape| elements(shape)).sum::<f64>(),
    }
}

fn elements(shape: &[usize]) -> f64 {
    shape.iter().product::<usize>() as f64
}

/// Counts a convolution: each element of the result takes as much as a filter has elements.
fn convolution(result: &[usize], weight: &[usize]) -> f64 {
    let filters = weight.first().map_or(1, |&filters| filters.max(1));
    2.0 * elements(result) * elements(weight) / filters as f64
}

/// Counts attention: each query is multiplied with each key.
fn attention(query: &[usize], key: &[usize]) -> f64 {
    elements(query) * key.get(2).map_or(1.0, |&keys| keys as f64)
}

/// Returns the shape of the largest part that a rank has.
pub(super) fn local(shape: &[usize], placement: &Placement, sbp: &[Sbp]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    for (sbp, &extent) in sbp.iter().zip(placement.shape()) {
        if let Some(size) = sbp.dim().and_then(|dim| shape.get_mut(dim)) {
            *size = part(*size, extent, 0).len();
        }
    }
    shape
}
