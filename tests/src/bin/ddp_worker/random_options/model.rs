//! A small model of random layers, on one rank or on all ranks in one process.

use std::cell::Cell;

use flow_autograd::recompute;
use tch::nn::{ModuleT, VarStore};
use tch::{Kind, Tensor};

use crate::models::device;

pub const WIDTH: i64 = 4;
/// Elements of a vector that is large enough to be born in shared memory.
const LARGE: i64 = 17_000;
/// Rows of an embedding.
const ROWS: i64 = 7;

/// What a layer makes of its input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operation {
    Linear,
    Conv,
    BatchNorm,
    Embedding {
        sparse: bool,
    },
    Dropout,
    /// One parameter without dimensions.
    Scalar,
    /// One parameter of one element.
    One,
    /// One parameter without elements.
    Empty,
    Large,
    Complex,
    /// A buffer: the running average of the input.
    Average,
    /// A buffer of integers: how often forward has run in training mode.
    Count,
}

/// Which forwards use a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum When {
    Always,
    Never,
    /// Those of the ranks whose bit is set.
    Ranks(u64),
    /// Every other step.
    Steps,
}

impl When {
    pub fn is_now(self, rank: usize, step: usize) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Ranks(ranks) => ranks >> rank & 1 == 1,
            Self::Steps => step.is_multiple_of(2),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Layer {
    pub operation: Operation,
    pub when: When,
    /// The type of its parameters; of a complex one, that of its parts.
    pub kind: Kind,
    /// Weights of two dimensions or more lie in memory in another order.
    pub permuted: bool,
    pub frozen: bool,
    /// Its forward runs once more in backward.
    pub recomputed: bool,
    /// Its weight is that of an earlier layer.
    pub tied_to: Option<usize>,
}

impl Layer {
    /// The sizes of its parameters.
    fn sizes(&self) -> &'static [&'static [i64]] {
        match self.operation {
            Operation::Linear => &[&[WIDTH, WIDTH], &[WIDTH]],
            Operation::Conv => &[&[WIDTH, 2, 2, 1], &[WIDTH]],
            Operation::BatchNorm => &[&[WIDTH], &[WIDTH]],
            Operation::Embedding { .. } => &[&[ROWS, WIDTH]],
            Operation::Scalar => &[&[]],
            Operation::One => &[&[1]],
            Operation::Empty => &[&[0, 3]],
            Operation::Large => &[&[LARGE]],
            Operation::Complex => &[&[WIDTH]],
            Operation::Dropout | Operation::Average | Operation::Count => &[],
        }
    }

    pub fn has_parameters(&self) -> bool {
        !self.sizes().is_empty()
    }
}

/// The name of a layer's first parameter.
pub fn weight_of(layer: usize) -> String {
    format!("{layer}.weight")
}

/// A layer's tensors.
#[derive(Debug)]
struct Made {
    layer: Layer,
    parameters: Vec<Tensor>,
    buffers: Vec<Tensor>,
}

/// A rank's model.
#[derive(Debug)]
pub struct Net {
    layers: Vec<Made>,
    pub rank: usize,
    /// The number of the step that runs.
    pub step: Cell<usize>,
    /// Forward itself casts the input and all parameters.
    pub cast: Option<Kind>,
}

impl Net {
    /// Makes the model of a rank, whose values are its own. `wide` is the type of its buffers.
    pub fn new(store: &VarStore, layers: &[Layer], wide: Kind, rank: usize) -> Self {
        let mut all: Vec<Made> = Vec::new();
        for (number, &layer) in layers.iter().enumerate() {
            let path = store.root() / number;
            let mut made = Made { layer, parameters: Vec::new(), buffers: Vec::new() };
            for (index, size) in layer.sizes().iter().enumerate() {
                let name = ["weight", "bias"][index];
                if let Some(other) = layer.tied_to.filter(|_| index == 0) {
                    let tied = all[other].parameters[0].shallow_clone();
                    made.parameters.push(path.add(name, tied, false));
                    continue;
                }
                let start = (10 * number + index + 100 * rank) as f64;
                let mut tensor = values(size, start, layer.kind);
                if layer.operation == Operation::Complex {
                    tensor = Tensor::complex(&tensor, &(&tensor * 0.5 + 0.3));
                }
                if layer.permuted && size.len() > 1 {
                    let order: Vec<i64> = (0..size.len() as i64).rev().collect();
                    tensor = tensor.permute(&order).contiguous().permute(&order);
                }
                let tensor = path.add(name, tensor, true);
                made.parameters.push(tensor.set_requires_grad(!layer.frozen));
            }
            let options = (wide, device());
            match layer.operation {
                Operation::BatchNorm => {
                    let mean = Tensor::full([WIDTH], rank as f64 / 4.0, options);
                    made.buffers.push(path.add("running_mean", mean, false));
                    made.buffers.push(path.add(
                        "running_var",
                        Tensor::ones([WIDTH], options),
                        false,
                    ));
                }
                Operation::Average => {
                    let average = Tensor::full([1], rank as f64, options);
                    made.buffers.push(path.add("average", average, false));
                }
                Operation::Count => {
                    let count = Tensor::from_slice(&[rank as i64]).to_device(device());
                    made.buffers.push(path.add("count", count, false));
                }
                _ => {}
            }
            all.push(made);
        }
        Self { layers: all, rank, step: Cell::new(0), cast: None }
    }

    /// All parameters, each once.
    pub fn parameters(&self) -> Vec<Tensor> {
        let mut all = Vec::new();
        for made in &self.layers {
            let tied = usize::from(made.layer.tied_to.is_some());
            all.extend(made.parameters[tied..].iter().map(Tensor::shallow_clone));
        }
        all
    }

    /// The place of a layer's own weight among [`Net::parameters`].
    pub fn place_of_weight(&self, layer: usize) -> usize {
        let before = self.layers[..layer].iter();
        before.map(|made| made.parameters.len() - usize::from(made.layer.tied_to.is_some())).sum()
    }

    pub fn buffers(&self) -> Vec<Tensor> {
        self.layers.iter().flat_map(|made| &made.buffers).map(Tensor::shallow_clone).collect()
    }

    /// The parameters of a layer.
    pub fn parameters_of(&self, layer: usize) -> &[Tensor] {
        &self.layers[layer].parameters
    }
}

impl ModuleT for Net {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        forward(&[self], &[input.shallow_clone()], false, train).swap_remove(0)
    }
}

fn values(size: &[i64], start: f64, kind: Kind) -> Tensor {
    let count: i64 = size.iter().product();
    let angles = Tensor::arange(count, (Kind::Double, device())) * 0.37 + start;
    (angles.sin() * 0.5 + 0.1).view(size).to_kind(kind)
}

/// Runs the models of several ranks, layer by layer. `sync`: batch norms take the statistics of all of
/// them.
pub fn forward(nets: &[&Net], inputs: &[Tensor], sync: bool, train: bool) -> Vec<Tensor> {
    let mut all = Vec::new();
    for (net, input) in nets.iter().zip(inputs) {
        all.push(net.cast.map_or_else(|| input.shallow_clone(), |kind| input.to_kind(kind)));
    }
    let inputs: Vec<Tensor> = all.iter().map(Tensor::detach).collect();
    for index in 0..nets[0].layers.len() {
        let is_joint =
            sync && train && nets[0].layers[index].layer.operation == Operation::BatchNorm;
        if is_joint {
            let joined = Tensor::cat(&all, 0);
            let rows = joined.size()[0] / nets.len() as i64;
            for (number, net) in nets.iter().enumerate() {
                let made = net.cast_layer(index);
                let part = made.batch_norm(&joined, false, true);
                let part = part.narrow(0, rows * number as i64, rows);
                all[number] = part * &made.parameters[0] + &made.parameters[1];
            }
            continue;
        }
        for (number, net) in nets.iter().enumerate() {
            let layer = net.layers[index].layer;
            if !layer.when.is_now(net.rank, net.step.get()) {
                continue;
            }
            let made = net.cast_layer(index);
            all[number] = if layer.recomputed && train {
                let input = inputs[number].shallow_clone();
                // Its parameters are cast where it is computed.
                let made = net.layers[index].shallow_clone();
                let cast = net.cast;
                let compute =
                    move |x: &[Tensor]| Ok(vec![made.cast(cast).forward(&x[0], &input, train)]);
                recompute(&[&all[number]], compute).expect("layers compute").swap_remove(0)
            } else {
                made.forward(&all[number], &inputs[number], train)
            };
        }
    }
    all
}

impl Net {
    fn cast_layer(&self, index: usize) -> Made {
        self.layers[index].cast(self.cast)
    }
}

impl Made {
    fn shallow_clone(&self) -> Self {
        self.cast(None)
    }

    fn cast(&self, kind: Option<Kind>) -> Self {
        let cast = |tensor: &Tensor| {
            kind.map_or_else(|| tensor.shallow_clone(), |kind| tensor.to_kind(kind))
        };
        Self {
            layer: self.layer,
            parameters: self.parameters.iter().map(cast).collect(),
            buffers: self.buffers.iter().map(Tensor::shallow_clone).collect(),
        }
    }

    fn batch_norm(&self, x: &Tensor, affine: bool, train: bool) -> Tensor {
        let weight = Some(&self.parameters[0]).filter(|_| affine);
        let bias = Some(&self.parameters[1]).filter(|_| affine);
        let [mean, variance] = &self.buffers[..] else { panic!("a batch norm has two buffers") };
        x.batch_norm(weight, bias, Some(mean), Some(variance), train, 0.1, 1e-3, false)
    }

    fn forward(&self, x: &Tensor, input: &Tensor, train: bool) -> Tensor {
        let kind = x.kind();
        let parameter = |index: usize| self.parameters[index].to_kind(kind);
        match self.layer.operation {
            Operation::Linear => (x.matmul(&parameter(0)) + parameter(1)).tanh(),
            Operation::Conv => {
                let image = x.view([-1, 2, 2, 1]);
                let made = image.conv2d(&parameter(0), Some(&parameter(1)), 1, 0, 1, 1);
                made.reshape([-1, WIDTH]).tanh()
            }
            Operation::BatchNorm => self.batch_norm(x, true, train),
            Operation::Embedding { sparse } => {
                let words = (input.select(1, 0).to_kind(Kind::Float) * 20.0).abs();
                let words = words.to_kind(Kind::Int64).remainder(ROWS);
                let found = Tensor::embedding(&self.parameters[0], &words, -1, false, sparse);
                x + found.to_kind(kind)
            }
            Operation::Dropout => x.dropout(0.3, train),
            Operation::Scalar | Operation::One => x * (parameter(0) + 1.0),
            Operation::Empty => x + parameter(0).sum(kind),
            Operation::Large => x + (parameter(0) * (x.mean(kind) + 1.0)).sin().mean(kind),
            Operation::Complex => {
                let c = &self.parameters[0];
                x * (c.square().real() + c.conj().imag() + 1.0).to_kind(kind)
            }
            Operation::Average => {
                let average = &self.buffers[0];
                if train {
                    let next = average * 0.5 + x.detach().mean(kind);
                    tch::no_grad(|| average.shallow_clone().copy_(&next));
                }
                x + average.copy().to_kind(kind) * 0.1
            }
            Operation::Count => {
                let count = &self.buffers[0];
                if train {
                    let _ = count.shallow_clone().g_add_scalar_(1);
                }
                x * (count.remainder(5).to_kind(kind) * 0.01 + 1.0)
            }
        }
    }
}
