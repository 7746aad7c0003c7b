//! A case: an operation, or a few, on inputs that are made from their positions alone.

use std::fmt;
use std::sync::OnceLock;

use tch::{Device, Kind, Tensor};

/// What runs on plain tensors and on global ones, and must give the same.
pub struct Case {
    pub name: String,
    pub inputs: Vec<Input>,
    pub run: Box<Run>,
    /// Names of rules that the case reaches, forward or backward.
    pub covers: &'static [&'static str],
    /// It returns numbers that it has read, as plain tensors.
    pub reads: bool,
    /// Its results are random. What is not a truth value is compared with one rank's.
    pub draws: bool,
    /// Numbers of single precision are on the way.
    pub is_single: bool,
    /// An error with these words is right, too.
    pub refusal: Option<&'static str>,
}

type Run = dyn Fn(&[Tensor]) -> Vec<Tensor> + Send + Sync;

/// What a case's function may return.
pub trait Outputs {
    fn into_vec(self) -> Vec<Tensor>;
}

impl Outputs for Tensor {
    fn into_vec(self) -> Vec<Tensor> {
        vec![self]
    }
}

impl Outputs for (Tensor, Tensor) {
    fn into_vec(self) -> Vec<Tensor> {
        vec![self.0, self.1]
    }
}

impl Outputs for (Tensor, Tensor, Tensor) {
    fn into_vec(self) -> Vec<Tensor> {
        vec![self.0, self.1, self.2]
    }
}

impl Outputs for Vec<Tensor> {
    fn into_vec(self) -> Vec<Tensor> {
        self
    }
}

pub fn case<R: Outputs>(
    name: impl Into<String>,
    inputs: impl Into<Vec<Input>>,
    covers: &'static [&'static str],
    run: impl Fn(&[Tensor]) -> R + Send + Sync + 'static,
) -> Case {
    Case {
        name: name.into(),
        inputs: inputs.into(),
        run: Box::new(move |inputs| run(inputs).into_vec()),
        covers,
        reads: false,
        draws: false,
        is_single: false,
        refusal: None,
    }
}

impl Case {
    /// The results are numbers that were read: plain tensors.
    pub fn reads(mut self) -> Self {
        self.reads = true;
        self
    }

    /// Numbers of single precision are on the way.
    pub fn in_single(mut self) -> Self {
        self.is_single = true;
        self
    }

    /// Its results are random.
    pub fn draws(mut self) -> Self {
        self.draws = true;
        self
    }

    /// Global tensors may refuse it with an error that has these words.
    pub fn may_refuse(mut self, words: &'static str) -> Self {
        self.refusal = Some(words);
        self
    }
}

/// How an input is made. Its elements are random, but the same in each process and thread.
#[derive(Clone)]
pub struct Input {
    pub shape: Vec<i64>,
    pub kind: Kind,
    low: f64,
    high: f64,
    layout: Layout,
    /// A gradient is asked for.
    pub is_leaf: bool,
    /// Partial sums of it are great numbers that cancel each other.
    pub has_great_terms: bool,
}

/// Strides.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Contiguous,
    /// The last two dimensions are swapped.
    Transposed,
    ChannelsLast,
    /// Every other element of a tensor that is twice as long.
    Strided,
}

/// Numbers of double precision in a range, from which a gradient is asked.
pub fn between<const N: usize>(low: f64, high: f64, shape: [i64; N]) -> Input {
    let layout = Layout::Contiguous;
    Input {
        shape: shape.to_vec(),
        kind: Kind::Double,
        low,
        high,
        layout,
        is_leaf: true,
        has_great_terms: false,
    }
}

pub fn normal<const N: usize>(shape: [i64; N]) -> Input {
    between(-2.0, 2.0, shape)
}

pub fn positive<const N: usize>(shape: [i64; N]) -> Input {
    between(0.2, 2.0, shape)
}

/// Indices, from 0 on, less than `end`.
pub fn ints<const N: usize>(end: i64, shape: [i64; N]) -> Input {
    Input { kind: Kind::Int64, is_leaf: false, ..between(0.0, end as f64, shape) }
}

/// Whole numbers from 0 to 3, whose terms are great and cancel each other.
pub fn whole<const N: usize>(shape: [i64; N]) -> Input {
    Input { is_leaf: false, has_great_terms: true, ..between(0.0, 4.0, shape) }
}

pub fn bools<const N: usize>(shape: [i64; N]) -> Input {
    Input { kind: Kind::Bool, is_leaf: false, ..between(0.0, 2.0, shape) }
}

impl Input {
    pub fn kind(mut self, kind: Kind) -> Self {
        self.is_leaf &= is_float(kind);
        self.kind = kind;
        self
    }

    /// Without a gradient.
    pub fn constant(mut self) -> Self {
        self.is_leaf = false;
        self
    }

    pub fn transposed(mut self) -> Self {
        self.layout = Layout::Transposed;
        self
    }

    pub fn channels_last(mut self) -> Self {
        self.layout = Layout::ChannelsLast;
        self
    }

    pub fn strided(mut self) -> Self {
        self.layout = Layout::Strided;
        self
    }

    /// The plain tensor: input number `seed` of its case.
    pub fn value(&self, seed: u64) -> Tensor {
        let tensor = random(&self.shape, (self.low, self.high), seed);
        let tensor = if self.has_great_terms { tensor.floor() } else { tensor };
        let tensor = tensor.to_kind(match self.kind {
            Kind::Bool => Kind::Int64,
            kind => kind,
        });
        let tensor = if self.kind == Kind::Bool { tensor.to_kind(Kind::Bool) } else { tensor };
        match self.layout {
            Layout::Contiguous => tensor,
            Layout::Transposed => tensor.transpose(-1, -2).contiguous().transpose(-1, -2),
            Layout::ChannelsLast => tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]),
            Layout::Strided => Tensor::stack(&[&tensor, &tensor], -1).select(-1, 1),
        }
    }
}

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}{:?}", self.kind, self.shape)
    }
}

/// Numbers in a range, by SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
/// generators, 2014).
pub fn random(shape: &[i64], (low, high): (f64, f64), seed: u64) -> Tensor {
    let count: i64 = shape.iter().product();
    let value = |index: u64| {
        let mut bits = (seed << 32).wrapping_add(index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let unit = ((bits ^ (bits >> 31)) >> 11) as f64 / (1u64 << 53) as f64;
        low + (high - low) * unit
    };
    let values: Vec<f64> = (0..count as u64).map(value).collect();
    Tensor::from_slice(&values).view(shape).to_device(options().1)
}

pub fn is_float(kind: Kind) -> bool {
    matches!(kind, Kind::Double | Kind::Float | Kind::BFloat16 | Kind::Half)
}

/// What a case gives.
pub struct Evaluation {
    pub outputs: Vec<Tensor>,
    /// Of the inputs that are leaves; None if there is no gradient.
    pub gradients: Vec<Option<Tensor>>,
}

impl Case {
    /// The plain inputs.
    pub fn values(&self) -> Vec<Tensor> {
        self.inputs.iter().zip(0..).map(|(input, seed)| input.value(seed)).collect()
    }

    /// Runs forward and, if some output depends on a leaf, backward. `weight` gives the gradient
    /// of an output.
    pub fn evaluate(
        &self,
        inputs: &[Tensor],
        weight: impl Fn(usize, &Tensor) -> Tensor,
    ) -> Evaluation {
        let leaves: Vec<Tensor> = inputs
            .iter()
            .zip(&self.inputs)
            .map(|(tensor, input)| {
                let leaf = tensor.detach();
                if input.is_leaf { leaf.set_requires_grad(true) } else { leaf }
            })
            .collect();
        let outputs = (self.run)(&leaves);
        let terms = outputs.iter().enumerate().filter(|(_, output)| output.requires_grad());
        let terms = terms.map(|(index, output)| {
            (output * weight(index, output)).sum(None::<Kind>).to_kind(Kind::Double)
        });
        if let Some(loss) = terms.reduce(|sum, term| sum + term) {
            loss.backward();
        }
        let gradients = leaves.iter().map(|leaf| Some(leaf.grad()).filter(Tensor::defined));
        let gradients = gradients.collect();
        Evaluation { outputs, gradients }
    }

    /// On plain tensors.
    pub fn plain(&self, inputs: &[Tensor]) -> Evaluation {
        self.evaluate(inputs, weight)
    }
}

/// The gradient of output number `index`.
pub fn weight(index: usize, output: &Tensor) -> Tensor {
    random(&output.size(), (0.5, 1.5), 1000 + index as u64).to_kind(output.kind())
}

/// How a plain tensor differs from what it is to be; None if it does not.
pub fn difference(found: &Tensor, expected: &Tensor, is_single: bool) -> Option<String> {
    if found.size() != expected.size() || found.kind() != expected.kind() {
        let [found, expected] =
            [found, expected].map(|tensor| format!("{:?}{:?}", tensor.kind(), tensor.size()));
        return Some(format!("is {found}, not {expected}"));
    }
    // Sooner than what follows, which finds the same.
    if found.equal(expected) {
        return None;
    }
    if expected.is_complex() {
        let [found, expected] = [found, expected].map(|one| one.resolve_conj().view_as_real());
        return difference(&found, &expected, is_single);
    }
    let tolerance = match expected.kind() {
        Kind::Double if !is_single => 1e-9,
        Kind::Double | Kind::Float => 1e-4,
        Kind::BFloat16 | Kind::Half => 5e-2,
        _ => 0.0,
    };
    let [found, expected] = [found, expected].map(|tensor| tensor.detach().to_kind(Kind::Double));
    let is_close = found.isclose(&expected, tolerance, tolerance, true);
    if is_close.all().int64_value(&[]) != 0 {
        return None;
    }
    let error = (&found - &expected).abs().max().double_value(&[]);
    let first = is_close.logical_not().view([-1]).nonzero().int64_value(&[0, 0]);
    let [found, expected] =
        [found, expected].map(|tensor| tensor.reshape([-1]).double_value(&[first]));
    Some(format!("differs by {error:.1e}: element {first} is {found}, not {expected}"))
}

/// A plain tensor of a number that was read.
pub fn read(value: f64) -> Tensor {
    Tensor::from_slice(&[value])
}

/// Where inputs are: on the CPU, if nobody sets it.
pub static DEVICE: OnceLock<Device> = OnceLock::new();

pub fn options() -> (Kind, Device) {
    (Kind::Double, *DEVICE.get().unwrap_or(&Device::Cpu))
}
