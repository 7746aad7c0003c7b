//! Models whose steps are traced.

use std::collections::HashMap;

use flow_global::trace::Trace;
use flow_global::{B, Placement, Sbp};

use super::tape::Tape;

/// Layers of a multi-layer perceptron with this width; a step with this optimizer.
pub fn mlp(
    placement: &Placement,
    samples: usize,
    widths: &[usize],
    data: &[Sbp],
    weights: impl Fn(&str) -> Vec<Sbp>,
) -> Trace {
    let mut tape = Tape::new(placement);
    let last = widths.len() - 2;
    let mut x = tape.input("x", &[samples, widths[0]], data);
    let y = tape.input("y", &[samples, widths[last + 1]], data);
    for (layer, pair) in widths.windows(2).enumerate() {
        let name = |what: &str| format!("{}.{what}", ["a", "b", "c", "d", "e"][layer]);
        let (weight, bias) = (name("weight"), name("bias"));
        let w = tape.weight(&weight, &[pair[1], pair[0]], &weights(&weight));
        let b = tape.weight(&bias, &[pair[1]], &weights(&bias));
        let w = tape.t(w);
        x = tape.addmm(b, x, w);
        if layer < last {
            x = tape.activation("relu", x);
        }
    }
    let loss = tape.mse_loss(x, y);
    let gradients = tape.backward(loss);
    tape.sgd(&gradients);
    tape.trace
}

/// An optimizer, which takes the gradients of all tensors.
pub type Update = fn(&mut Tape, &HashMap<usize, usize>);

/// A GPT of some blocks on embedded tokens.
pub struct Gpt {
    pub samples: usize,
    pub length: usize,
    pub width: usize,
    pub heads: usize,
    pub blocks: usize,
    pub optimizer: Option<Update>,
    /// Attention is one operation.
    pub is_fused: bool,
    /// Megatron's four.
    pub is_pinned: bool,
}

impl Gpt {
    pub fn trace(
        &self,
        placement: &Placement,
        data: &[Sbp],
        weights: impl Fn(&str) -> Vec<Sbp>,
    ) -> Trace {
        let mut tape = Tape::new(placement);
        let &Gpt { samples, length, width, heads, .. } = self;
        let tokens = samples * length;
        let whole = [samples, length, width];
        let mut x = tape.input("x", &whole, data);
        let before = vec![B; placement.axes()];
        let pins = |tape: &mut Tape, x, is_before: bool| {
            if self.is_pinned { tape.pin(x, &before, is_before.then_some(&before)) } else { x }
        };
        for block in 0..self.blocks {
            let weight = |tape: &mut Tape, name: &str, shape: &[usize]| {
                let sbp = weights(name);
                tape.weight(&format!("h.{block}.{name}"), shape, &sbp)
            };
            let linear = |tape: &mut Tape, name: &str, x: usize, from: usize, to: usize| {
                let bias = weight(tape, &format!("{name}.bias"), &[to]);
                let weight = weight(tape, &format!("{name}.weight"), &[to, from]);
                let shape = tape.shape(x);
                let rows = tape.view(x, &[tokens, from]);
                let weight = tape.t(weight);
                let y = tape.addmm(bias, rows, weight);
                tape.view(y, &[shape[0], shape[1], to])
            };
            let norm = |tape: &mut Tape, name: &str, x: usize| {
                let sbp = |what: &str| weights(&format!("{name}.{what}"));
                let full = |what: &str| format!("h.{block}.{name}.{what}");
                let weight = tape.weight(&full("weight"), &[width], &sbp("weight"));
                let bias = tape.weight(&full("bias"), &[width], &sbp("bias"));
                tape.layer_norm(x, weight, bias)
            };
            let n = norm(&mut tape, "ln1", x);
            let n = pins(&mut tape, n, true);
            let each = width / heads;
            let split = |tape: &mut Tape, name: &str| {
                let y = linear(tape, name, n, width, width);
                let y = tape.view(y, &[samples, length, heads, each]);
                tape.transpose(y, 1, 2)
            };
            let [q, k, v] = ["q", "k", "v"].map(|name| split(&mut tape, name));
            let a = if self.is_fused {
                tape.attention(q, k, v)
            } else {
                let k = tape.transpose(k, 2, 3);
                let q = tape.clone(q);
                let k = tape.clone(k);
                let v = tape.clone(v);
                let q = tape.view(q, &[samples * heads, length, each]);
                let k = tape.view(k, &[samples * heads, each, length]);
                let v = tape.view(v, &[samples * heads, length, each]);
                let scores = tape.bmm(q, k);
                let scores = tape.view(scores, &[samples, heads, length, length]);
                let scores = tape.scale(scores, 0.125);
                let scores = tape.softmax(scores);
                let scores = tape.view(scores, &[samples * heads, length, length]);
                let a = tape.bmm(scores, v);
                tape.view(a, &[samples, heads, length, each])
            };
            let a = tape.transpose(a, 1, 2);
            let a = tape.clone(a);
            let a = tape.view(a, &whole);
            let a = linear(&mut tape, "proj", a, width, width);
            let a = pins(&mut tape, a, false);
            x = tape.add(x, a);
            let n = norm(&mut tape, "ln2", x);
            let n = pins(&mut tape, n, true);
            let h = linear(&mut tape, "up", n, width, 4 * width);
            let h = tape.activation("gelu", h);
            let h = linear(&mut tape, "down", h, 4 * width, width);
            let h = pins(&mut tape, h, false);
            x = tape.add(x, h);
        }
        let gradients = tape.backward(x);
        if let Some(optimizer) = self.optimizer {
            optimizer(&mut tape, &gradients);
        }
        tape.trace
    }
}

/// Megatron's weights: columns, then rows.
pub fn megatron(name: &str) -> Sbp {
    let (layer, what) = name.split_once('.').unwrap();
    match (layer, what) {
        ("q" | "k" | "v" | "up", _) => Sbp::Split(0),
        ("proj" | "down", "weight") => Sbp::Split(1),
        _ => B,
    }
}
