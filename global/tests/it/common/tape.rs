//! Traces of models, made without libtorch: the operations that it would dispatch, and those of its
//! backward formulas. Each is chosen by the rules, as when it runs.

use std::collections::HashMap;

use flow_global::rules::infer::infer;
use flow_global::rules::op::{Arg, Input, Op};
use flow_global::trace::{Phase, Role, Trace};
use flow_global::{Placement, Sbp};
use tch::Kind;

type Gradients = Vec<(usize, usize)>;
type Backward = Box<dyn Fn(&mut Tape, usize) -> Gradients>;

/// Records operations, and runs backward over them. Tensors are ids of values.
pub struct Tape {
    pub trace: Trace,
    pub placement: Placement,
    nodes: Vec<(usize, u64, Backward)>,
    phase: Phase,
    node: Option<u64>,
}

const T: [Arg; 7] = [
    Arg::Tensor(0),
    Arg::Tensor(1),
    Arg::Tensor(2),
    Arg::Tensor(3),
    Arg::Tensor(4),
    Arg::Tensor(5),
    Arg::Tensor(6),
];

fn floats(shape: &[usize]) -> Input {
    Input::new(shape, Kind::Float)
}

fn ints(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&size| size as i64).collect()
}

fn swapped(shape: &[usize], one: usize, other: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    shape.swap(one, other);
    shape
}

impl Tape {
    pub fn new(placement: &Placement) -> Self {
        let (trace, nodes) = (Trace::default(), Vec::new());
        Self { trace, placement: placement.clone(), nodes, phase: Phase::Forward, node: None }
    }

    pub fn input(&mut self, name: &str, shape: &[usize], sbp: &[Sbp]) -> usize {
        self.trace.leaf(Role::Input, name, floats(shape), &self.placement, sbp)
    }

    pub fn weight(&mut self, name: &str, shape: &[usize], sbp: &[Sbp]) -> usize {
        self.trace.leaf(Role::Weight, name, floats(shape), &self.placement, sbp)
    }

    pub fn shape(&self, value: usize) -> Vec<usize> {
        self.trace.values[value].tensor.shape.clone()
    }

    /// An operation; its results have these shapes.
    fn call(
        &mut self,
        name: &str,
        args: &[Arg],
        inputs: &[usize],
        results: &[&[usize]],
    ) -> Vec<usize> {
        let in_place = name.ends_with('_');
        let values = &self.trace.values;
        let tensors = inputs.iter().map(|&id| values[id].tensor.clone()).collect();
        let name = name.trim_end_matches('_');
        let op = Op::new(name, "", args.to_vec(), tensors, results.len(), in_place);
        let have: Vec<_> = inputs.iter().map(|&id| values[id].sbp.clone()).collect();
        let choice = infer(&op, &self.placement, &have);
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        let results: Vec<_> = results.iter().map(|shape| Some(floats(shape))).collect();
        let phase = (self.phase, self.node);
        let ids = self.trace.call(&op, &self.placement, &inputs, choice.as_ref(), &results, phase);
        ids.into_iter().flatten().collect()
    }

    /// An operation with a backward.
    fn node(
        &mut self,
        name: &str,
        args: &[Arg],
        inputs: &[usize],
        results: &[&[usize]],
        backward: impl Fn(&mut Tape, &[usize], usize) -> Gradients + 'static,
    ) -> usize {
        let node = self.nodes.len() as u64;
        self.node = Some(node);
        let results = self.call(name, args, inputs, results);
        self.node = None;
        let first = results[0];
        let backward = move |tape: &mut Tape, gradient| backward(tape, &results, gradient);
        self.nodes.push((first, node, Box::new(backward)));
        first
    }

    fn one(&mut self, name: &str, args: &[Arg], inputs: &[usize], shape: &[usize]) -> usize {
        self.call(name, args, inputs, &[shape])[0]
    }

    fn plain_t(&mut self, x: usize) -> usize {
        let shape = swapped(&self.shape(x), 0, 1);
        self.one("t", &T[..1], &[x], &shape)
    }

    fn plain_transpose(&mut self, x: usize, one: usize, other: usize) -> usize {
        let shape = swapped(&self.shape(x), one, other);
        let args = [T[0].clone(), Arg::Int(one as i64), Arg::Int(other as i64)];
        self.one("transpose", &args, &[x], &shape)
    }

    fn plain_view(&mut self, x: usize, shape: &[usize]) -> usize {
        self.one("view", &[T[0].clone(), Arg::Ints(ints(shape).into())], &[x], shape)
    }

    fn plain_mm(&mut self, a: usize, b: usize) -> usize {
        let shape = [self.shape(a)[0], self.shape(b)[1]];
        self.one("mm", &T[..2], &[a, b], &shape)
    }

    fn plain_bmm(&mut self, a: usize, b: usize) -> usize {
        let shape = [self.shape(a)[0], self.shape(a)[1], self.shape(b)[2]];
        self.one("bmm", &T[..2], &[a, b], &shape)
    }

    pub fn t(&mut self, x: usize) -> usize {
        let shape = swapped(&self.shape(x), 0, 1);
        self.node("t", &T[..1], &[x], &[&shape], move |tape, _, g| vec![(x, tape.plain_t(g))])
    }

    pub fn view(&mut self, x: usize, shape: &[usize]) -> usize {
        let before = self.shape(x);
        let args = [T[0].clone(), Arg::Ints(ints(shape).into())];
        self.node("view", &args, &[x], &[shape], move |tape, _, g| {
            vec![(x, tape.plain_view(g, &before))]
        })
    }

    pub fn transpose(&mut self, x: usize, one: usize, other: usize) -> usize {
        let shape = swapped(&self.shape(x), one, other);
        let args = [T[0].clone(), Arg::Int(one as i64), Arg::Int(other as i64)];
        self.node("transpose", &args, &[x], &[&shape], move |tape, _, g| {
            vec![(x, tape.plain_transpose(g, one, other))]
        })
    }

    pub fn clone(&mut self, x: usize) -> usize {
        let shape = self.shape(x);
        self.node("clone", &[T[0].clone(), Arg::None], &[x], &[&shape], move |_, _, g| vec![(x, g)])
    }

    fn mm_backward(&mut self, a: usize, b: usize, g: usize) -> Gradients {
        let other = self.plain_t(b);
        let of_a = self.plain_mm(g, other);
        let other = self.plain_t(a);
        vec![(a, of_a), (b, self.plain_mm(other, g))]
    }

    pub fn addmm(&mut self, bias: usize, a: usize, b: usize) -> usize {
        let shape = [self.shape(a)[0], self.shape(b)[1]];
        let args = [&T[..3], &[Arg::Int(1), Arg::Int(1)]].concat();
        self.node("addmm", &args, &[bias, a, b], &[&shape], move |tape, _, g| {
            let mut gradients = tape.mm_backward(a, b, g);
            let args = [T[0].clone(), Arg::Ints(vec![0].into()), Arg::Bool(true), Arg::None];
            let sum = tape.one("sum", &args, &[g], &[1, shape[1]]);
            gradients.push((bias, tape.plain_view(sum, &[shape[1]])));
            gradients
        })
    }

    pub fn bmm(&mut self, a: usize, b: usize) -> usize {
        let shape = [self.shape(a)[0], self.shape(a)[1], self.shape(b)[2]];
        self.node("bmm", &T[..2], &[a, b], &[&shape], move |tape, _, g| {
            let other = tape.plain_transpose(b, 1, 2);
            let of_a = tape.plain_bmm(g, other);
            let other = tape.plain_transpose(a, 1, 2);
            vec![(a, of_a), (b, tape.plain_bmm(other, g))]
        })
    }

    pub fn add(&mut self, x: usize, y: usize) -> usize {
        let shape = self.shape(x);
        let args = [&T[..2], &[Arg::Int(1)]].concat();
        self.node("add", &args, &[x, y], &[&shape], move |_, _, g| vec![(x, g), (y, g)])
    }

    pub fn scale(&mut self, x: usize, by: f64) -> usize {
        let shape = self.shape(x);
        let args = [T[0].clone(), Arg::Float(by)];
        self.node("mul", &args, &[x], &[&shape], move |tape, _, g| {
            let shape = tape.shape(g);
            vec![(x, tape.one("mul", &[T[0].clone(), Arg::Float(by)], &[g], &shape))]
        })
    }

    /// `relu` or `gelu`.
    pub fn activation(&mut self, name: &'static str, x: usize) -> usize {
        let shape = self.shape(x);
        self.node(
            name,
            &[T[0].clone(), Arg::Other],
            &[x],
            &[&shape.clone()],
            move |tape, own, g| {
                let (name, saved) = match name {
                    "relu" => ("threshold_backward", own[0]),
                    _ => ("gelu_backward", x),
                };
                let args = [&T[..2], &[Arg::Other]].concat();
                vec![(x, tape.one(name, &args, &[g, saved], &shape))]
            },
        )
    }

    pub fn softmax(&mut self, x: usize) -> usize {
        let shape = self.shape(x);
        let args = [T[0].clone(), Arg::Int(-1), Arg::Bool(false)];
        self.node("_softmax", &args, &[x], &[&shape.clone()], move |tape, own, g| {
            let args = [&T[..2], &[Arg::Int(-1), Arg::Int(6)]].concat();
            vec![(x, tape.one("_softmax_backward_data", &args, &[g, own[0]], &shape))]
        })
    }

    /// Scaled dot-product attention of `[samples, heads, length, width]`.
    pub fn attention(&mut self, q: usize, k: usize, v: usize) -> usize {
        const NAME: &str = "_scaled_dot_product_flash_attention_for_cpu";
        const BACKWARD: &str = "_scaled_dot_product_flash_attention_for_cpu_backward";
        let shape = self.shape(q);
        let args = [&T[..3], &[Arg::Float(0.0), Arg::Bool(true)]].concat();
        let results: [&[usize]; 2] = [&shape.clone(), &shape.clone()[..3]];
        self.node(NAME, &args, &[q, k, v], &results, move |tape, own, g| {
            let args = [&T[..6], &[Arg::Float(0.0), Arg::Bool(true)]].concat();
            let inputs = [g, q, k, v, own[0], own[1]];
            let own = tape.call(BACKWARD, &args, &inputs, &[&shape, &shape, &shape]);
            vec![(q, own[0]), (k, own[1]), (v, own[2])]
        })
    }

    pub fn layer_norm(&mut self, x: usize, weight: usize, bias: usize) -> usize {
        let shape = self.shape(x);
        let width = [*shape.last().unwrap()];
        let rows = [&shape[..shape.len() - 1], &[1]].concat();
        let sizes = ints(&width);
        let args = [
            T[0].clone(),
            Arg::Ints(sizes.clone().into()),
            T[1].clone(),
            T[2].clone(),
            Arg::Float(1e-5),
        ];
        let results: [&[usize]; 3] = [&shape.clone(), &rows.clone(), &rows];
        self.node("native_layer_norm", &args, &[x, weight, bias], &results, move |tape, own, g| {
            let sizes = ints(&width);
            let mut args = T[..6].to_vec();
            args.insert(2, Arg::Ints(sizes.clone().into()));
            args.push(Arg::Other);
            let inputs = [g, x, own[1], own[2], weight, bias];
            let results: [&[usize]; 3] = [&shape, &width, &width];
            let own = tape.call("native_layer_norm_backward", &args, &inputs, &results);
            vec![(x, own[0]), (weight, own[1]), (bias, own[2])]
        })
    }

    /// The mean square of differences.
    pub fn mse_loss(&mut self, x: usize, y: usize) -> usize {
        let shape = self.shape(x);
        let args = [&T[..2], &[Arg::Int(1)]].concat();
        self.node("mse_loss", &args, &[x, y], &[&[]], move |tape, _, g| {
            let args = [&T[..3], &[Arg::Int(1)]].concat();
            vec![(x, tape.one("mse_loss_backward", &args, &[g, x, y], &shape))]
        })
    }

    /// `to_global`, and `grad_sbp`.
    pub fn pin(&mut self, x: usize, sbp: &[Sbp], gradient: Option<&[Sbp]>) -> usize {
        let node = self.nodes.len() as u64;
        let placement = self.placement.clone();
        let pinned = self.trace.convert(x, &placement, sbp, (Phase::Forward, Some(node)));
        let gradient = gradient.map(<[Sbp]>::to_vec);
        let backward = move |tape: &mut Tape, g| {
            let phase = (Phase::Backward, Some(node));
            let placement = tape.placement.clone();
            let own = gradient.as_ref();
            vec![(x, own.map_or(g, |sbp| tape.trace.convert(g, &placement, sbp, phase)))]
        };
        self.nodes.push((pinned, node, Box::new(backward)));
        pinned
    }

    /// Runs backward from a tensor whose gradient is B; returns the gradients of all tensors.
    pub fn backward(&mut self, from: usize) -> HashMap<usize, usize> {
        self.phase = Phase::Backward;
        let shape = self.shape(from);
        let args = [T[0].clone(), Arg::None];
        let mut gradients = HashMap::from([(from, self.one("ones_like", &args, &[from], &shape))]);
        for (output, node, backward) in std::mem::take(&mut self.nodes).into_iter().rev() {
            let Some(&gradient) = gradients.get(&output) else { continue };
            self.node = Some(node);
            let parts = backward(self, gradient);
            self.node = None;
            for (value, part) in parts {
                let sum = match gradients.get(&value) {
                    Some(&known) => {
                        let shape = self.shape(part);
                        self.one("add", &[&T[..2], &[Arg::Int(1)]].concat(), &[known, part], &shape)
                    }
                    None => part,
                };
                gradients.insert(value, sum);
            }
        }
        self.phase = Phase::Forward;
        gradients
    }

    /// Each weight, and its gradient, boxed to it.
    fn boxed(&mut self, gradients: &HashMap<usize, usize>) -> Vec<(usize, usize)> {
        let weights = 0..self.trace.values.len();
        let known = weights.filter(|&id| self.trace.values[id].role == Role::Weight);
        let known = known.filter_map(|id| Some((id, *gradients.get(&id)?)));
        let known: Vec<_> = known.collect();
        known.into_iter().map(|(id, own)| (id, self.trace.gradient(own, id))).collect()
    }

    /// Gradients are boxed to their leaves, which take a step.
    pub fn sgd(&mut self, gradients: &HashMap<usize, usize>) {
        for (weight, gradient) in self.boxed(gradients) {
            let shape = self.shape(weight);
            let args = [&T[..2], &[Arg::Float(-0.1)]].concat();
            self.one("add_", &args, &[weight, gradient], &shape);
        }
    }

    /// As [`Tape::sgd`], with two tensors of state for each weight.
    pub fn adam(&mut self, gradients: &HashMap<usize, usize>) {
        for (weight, gradient) in self.boxed(gradients) {
            let shape = self.shape(weight);
            let sbp = self.trace.values[weight].sbp.clone();
            let mean = self.input("", &shape, &sbp);
            let square = self.input("", &shape, &sbp);
            let number = Arg::Float(0.9);
            self.one("mul_", &[T[0].clone(), number.clone()], &[mean], &shape);
            let args = [&T[..2], std::slice::from_ref(&number)].concat();
            self.one("add_", &args, &[mean, gradient], &shape);
            self.one("mul_", &[T[0].clone(), number.clone()], &[square], &shape);
            let args = [&T[..3], std::slice::from_ref(&number)].concat();
            self.one("addcmul_", &args, &[square, gradient, gradient], &shape);
            let root = self.one("sqrt", &T[..1], &[square], &shape);
            self.one("add_", &[T[0].clone(), number], &[root], &shape);
            self.one("addcdiv_", &args, &[weight, mean, root], &shape);
        }
    }
}
