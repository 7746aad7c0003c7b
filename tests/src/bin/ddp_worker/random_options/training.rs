//! A random training: model, options and steps, which all ranks draw alike.

use flow_ddp::{BufferCommHookLocation, JoinOptions, MixedPrecision};
use tch::Kind;

use super::model::{Layer, Operation, When};
use crate::helpers::Draws;

/// The hook that reduces gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Hook {
    None,
    OwnMean,
    Fp16,
    Bf16,
    /// Of a rank that is high enough, so that nothing is left out.
    PowerSgd,
    LowPowerSgd,
    /// Of a rank that is high enough for all gradients of a bucket together.
    BatchedPowerSgd,
    /// All elements.
    TopK,
    HalfTopK,
    Quantize,
    /// With a range for each ten elements.
    QuantizeChannels,
    PostLocalSgd {
        start_iter: u64,
        gradient_all_reduce: bool,
    },
}

impl Hook {
    fn kind(self) -> Option<Kind> {
        match self {
            Self::Fp16 => Some(Kind::Half),
            Self::Bf16 => Some(Kind::BFloat16),
            _ => None,
        }
    }

    /// The error of a gradient's element, relative to the largest one; None: any.
    fn error(self) -> Option<f64> {
        match self {
            Self::HalfTopK | Self::LowPowerSgd => None,
            Self::Quantize | Self::QuantizeChannels => Some(1.0 / 255.0),
            Self::PowerSgd | Self::BatchedPowerSgd => Some(1e-9),
            _ => Some(0.0),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Steps {
    /// tch's optimizer, after backward.
    After,
    InBackward,
    Zero,
    ZeroInBackward,
}

impl Steps {
    pub fn are_in_backward(self) -> bool {
        matches!(self, Self::InBackward | Self::ZeroInBackward)
    }

    pub fn are_of_zero(self) -> bool {
        matches!(self, Self::Zero | Self::ZeroInBackward)
    }
}

/// What averages parameters after steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Averages {
    None,
    ModelAverager,
    DiLoCo,
}

/// What is done before a phase.
#[derive(Clone, Copy, Debug)]
pub enum Before {
    Nothing,
    /// The layer's parameters are frozen, or trained again.
    Refresh {
        layer: usize,
        trains: bool,
    },
    /// The model is saved, changed and loaded.
    Resume,
    SyncBuffers,
    CastParameters,
}

#[derive(Debug)]
pub struct Phase {
    pub before: Before,
    pub join: Option<JoinOptions>,
    /// The steps of each rank.
    pub steps: Vec<usize>,
    /// The backwards of a step: all but the last are under `no_sync`.
    pub backwards: usize,
    /// The forwards of a backward.
    pub forwards: usize,
    /// Before a backward that reduces there is a forward that none follows.
    pub drops: bool,
    /// The rank that evaluates after each step, if there is such a rank.
    pub evaluates: usize,
}

#[derive(Debug)]
pub struct Training {
    pub layers: Vec<Layer>,
    /// The type of most parameters and of buffers.
    pub wide: Kind,
    pub sync_batch_norm: bool,
    pub caps: Vec<f64>,
    pub tune: u32,
    pub broadcast_buffers: bool,
    pub forward_sync_buffers: bool,
    pub buffer_hook: Option<BufferCommHookLocation>,
    pub find_unused: bool,
    pub static_graph: bool,
    pub bucket_view: bool,
    /// The layer whose weight is delayed, and the one whose weight it waits for.
    pub delayed: Option<(usize, usize)>,
    pub names_sparse: bool,
    pub sparse_as_dense: bool,
    pub mixed: MixedPrecision,
    pub hook: Hook,
    pub steps: Steps,
    pub averages: Averages,
    pub momentum: bool,
    /// Gradients are zeroed, rather than removed.
    pub zeroes: bool,
    pub clips: bool,
    /// The loss has the gradient of the output in it.
    pub penalty: bool,
    pub phases: Vec<Phase>,
}

impl Draws {
    fn one_in(&mut self, odds: u64) -> bool {
        self.below(odds) == 0
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

impl Training {
    /// Draws a training, of which a few are refused.
    pub fn drawn(seed: u64, ranks: usize) -> Self {
        // So that the draws of one seed are far from those of the next.
        let draws = &mut Draws(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        loop {
            let training = Self::any(draws, ranks);
            let refusals = training.refusals(ranks);
            // Ranks would wait in a synchronized batch norm for one whose backward has failed.
            let is_stuck =
                training.sync_batch_norm && refusals.iter().any(|r| r.words[0] != "join");
            let is_refused = refusals.iter().any(|refusal| refusal.is_certain);
            if !is_stuck && (!is_refused || draws.one_in(5)) {
                return training;
            }
        }
    }

    fn any(draws: &mut Draws, ranks: usize) -> Self {
        // Many seeds have all parameters in one type, so that the comparison is exact.
        let mixes_kinds = draws.one_in(3);
        let mut mixed = MixedPrecision::default();
        if draws.one_in(4) {
            mixed.param =
                Some(draws.one_of(&[Kind::BFloat16, Kind::Half])).filter(|_| draws.one_in(2));
            mixed.reduce = draws.one_of(&[None, Some(Kind::Float), Some(Kind::BFloat16)]);
        }
        let wide =
            if mixed.param.is_some() && !draws.one_in(10) { Kind::Float } else { Kind::Double };
        let mut layers = layers(draws, wide, mixes_kinds, ranks);
        let has_norm = layers.iter().any(|layer| layer.operation == Operation::BatchNorm);
        if has_norm && mixed.param.is_some() {
            mixed.param = Some(Kind::BFloat16);
            mixed.buffer = mixed.param;
        } else if !has_norm && draws.one_in(6) {
            mixed.buffer = Some(Kind::BFloat16);
        }
        let penalty = draws.one_in(6);
        if penalty {
            layers.iter_mut().for_each(|layer| layer.recomputed = false);
        }
        let hook = match draws.below(18) {
            0 => Hook::OwnMean,
            1 => Hook::Fp16,
            2 => Hook::Bf16,
            3 => Hook::PowerSgd,
            4 => Hook::LowPowerSgd,
            5 => Hook::TopK,
            6 => Hook::HalfTopK,
            7 => Hook::Quantize,
            8 | 9 => Hook::PostLocalSgd {
                start_iter: draws.below(3),
                gradient_all_reduce: draws.one_in(2),
            },
            10 => Hook::QuantizeChannels,
            11 => Hook::BatchedPowerSgd,
            _ => Hook::None,
        };
        let locations = [BufferCommHookLocation::PreForward, BufferCommHookLocation::PostForward];
        let steps = draws.one_of(&[
            Steps::After,
            Steps::After,
            Steps::InBackward,
            Steps::Zero,
            Steps::ZeroInBackward,
        ]);
        let with_parameters: Vec<usize> =
            (0..layers.len()).filter(|&number| layers[number].has_parameters()).collect();
        let own = with_parameters.iter().copied().filter(|&n| layers[n].tied_to.is_none());
        let own: Vec<usize> = own.collect();
        let pair = (draws.one_of(&own), draws.one_of(&own));
        let delayed = Some(pair).filter(|(one, other)| one != other && draws.one_in(3));
        let is_tied = |number: usize| layers.iter().any(|layer| layer.tied_to == Some(number));
        let untied: Vec<usize> = own.iter().copied().filter(|&number| !is_tied(number)).collect();
        let phases = phases(draws, &untied, ranks);
        let joins = phases.iter().any(|phase| phase.join.is_some());
        let averages = draws.one_of(&[Averages::None, Averages::ModelAverager, Averages::DiLoCo]);
        Self {
            sync_batch_norm: has_norm && draws.one_in(2),
            caps: draws.one_of(&[&[0.00001][..], &[0.00001, 0.1], &[0.01, 25.0], &[25.0]]).to_vec(),
            tune: draws.one_of(&[0, 0, 0, 1]),
            broadcast_buffers: !draws.one_in(5),
            forward_sync_buffers: !draws.one_in(5),
            buffer_hook: Some(draws.one_of(&locations)).filter(|_| draws.one_in(5)),
            find_unused: draws.one_in(2),
            static_graph: draws.one_in(4),
            bucket_view: draws.one_in(2),
            delayed,
            names_sparse: draws.one_in(2),
            sparse_as_dense: draws.one_in(2),
            mixed,
            hook,
            steps,
            averages: if joins || !draws.one_in(2) { Averages::None } else { averages },
            momentum: draws.one_in(2),
            zeroes: draws.one_in(4),
            clips: draws.one_in(4),
            penalty,
            layers,
            wide,
            phases,
        }
        .made_sound()
    }

    /// Leaves out what libtorch itself cannot do, and what has another gradient.
    fn made_sound(mut self) -> Self {
        // A synchronized batch norm takes the other ranks' weights to be its own.
        self.sync_batch_norm &= !self.differs_between_ranks();
        for layer in self.layers.iter_mut().filter(|_| self.mixed.param.is_some()) {
            // libtorch cannot add up sparse gradients of half precision.
            if let Operation::Embedding { sparse } = &mut layer.operation {
                *sparse &= layer.tied_to.is_none();
            }
        }
        let has_complex = self.layers.iter().any(|l| l.operation == Operation::Complex);
        if self.has_sparse_gradients() || has_complex || self.steps.are_in_backward() {
            self.clips = false;
        }
        if self.has_sparse_gradients() || self.steps.are_in_backward() {
            self.zeroes = false;
        }
        self
    }

    fn has_sparse_gradients(&self) -> bool {
        let is_sparse = |layer: &Layer| layer.operation == Operation::Embedding { sparse: true };
        self.layers.iter().any(is_sparse)
    }

    /// The layers that `sparse_gradients` names.
    pub fn named_sparse(&self) -> Vec<usize> {
        let numbers = 0..self.layers.len();
        let is_named = |&number: &usize| {
            self.names_sparse
                && matches!(self.layers[number].operation, Operation::Embedding { .. })
        };
        numbers.filter(is_named).collect()
    }

    /// Whether ranks may have parameters of their own.
    pub fn differs_between_ranks(&self) -> bool {
        let is_uneven = |phase: &Phase| phase.steps.iter().any(|&steps| steps != phase.steps[0]);
        // The momentum of a rank that has ended is older than that of the others.
        let is_left_behind = self.momentum && self.steps == Steps::After;
        matches!(self.hook, Hook::PostLocalSgd { .. })
            || is_left_behind && self.phases.iter().any(is_uneven)
    }

    /// How far gradients may be off, relative to the largest one. None: they are not compared.
    pub fn tolerance(&self) -> Option<f64> {
        let mut kinds: Vec<Kind> = self.layers.iter().map(|layer| layer.kind).collect();
        kinds.extend(self.mixed.param);
        kinds.extend(self.mixed.buffer);
        kinds.extend(self.hook.kind().or(self.mixed.reduce));
        let rounding = kinds.into_iter().map(rounding).fold(1e-11, f64::max);
        // Half precision makes more of its errors from layer to layer.
        self.hook.error().map(|error| error.max(8.0 * rounding))
    }
}

/// The last bit of a number of this type, relative to the number.
pub fn rounding(kind: Kind) -> f64 {
    match kind {
        Kind::BFloat16 => 1.0 / 128.0,
        Kind::Half => 1.0 / 1024.0,
        Kind::Float | Kind::ComplexFloat => 1.2e-7,
        _ => 2.2e-16,
    }
}

fn layers(draws: &mut Draws, wide: Kind, mixes_kinds: bool, ranks: usize) -> Vec<Layer> {
    let leaves_out = draws.one_in(3);
    let recomputes = draws.one_in(4);
    let first = Layer {
        operation: Operation::Linear,
        when: When::Always,
        kind: wide,
        permuted: draws.one_in(2),
        frozen: false,
        recomputed: false,
        tied_to: None,
    };
    let mut layers = vec![first];
    for _ in 0..1 + draws.below(5) {
        let operation = match draws.below(14) {
            0..=2 => Operation::Linear,
            3 => Operation::Conv,
            4 => Operation::BatchNorm,
            5 | 6 => Operation::Embedding { sparse: draws.one_in(2) },
            7 => Operation::Scalar,
            8 => Operation::One,
            9 => Operation::Empty,
            10 => Operation::Large,
            11 => Operation::Complex,
            12 => Operation::Average,
            _ => Operation::Count,
        };
        let mut layer = Layer { operation, ..first };
        layer.permuted = draws.one_in(2);
        layer.frozen = draws.one_in(10);
        let is_plain = !matches!(operation, Operation::BatchNorm | Operation::Embedding { .. });
        if mixes_kinds && is_plain {
            let kinds = [Kind::Float, Kind::Half, Kind::BFloat16, Kind::Double];
            layer.kind = draws.one_of(&kinds);
            if operation == Operation::Complex {
                layer.kind = draws.one_of(&[Kind::Float, Kind::Double]);
            }
        }
        let linear = layers.iter().rposition(|layer| layer.operation == Operation::Linear);
        if operation == Operation::Linear && draws.one_in(3) {
            // The weight's own layer, its type and whether it is trained.
            let other = linear.map(|other| layers[other].tied_to.unwrap_or(other));
            layer.tied_to = other;
            layer.frozen = other.is_some_and(|other| layers[other].frozen);
            layer.kind = other.map_or(wide, |other| layers[other].kind);
        }
        let embedding = |layer: &Layer| matches!(layer.operation, Operation::Embedding { .. });
        if let Some(other) = layers.iter().position(embedding)
            && embedding(&layer)
            && draws.one_in(2)
        {
            layer.tied_to = Some(other);
            layer.frozen = layers[other].frozen;
        }
        if leaves_out && operation != Operation::BatchNorm && draws.one_in(2) {
            let some = When::Ranks(draws.below(1 << ranks));
            layer.when = draws.one_of(&[When::Never, some, some, When::Steps]);
        }
        let has_buffers = matches!(operation, Operation::Average | Operation::Count);
        layer.recomputed = recomputes && is_plain && !has_buffers && draws.one_in(2);
        layers.push(layer);
    }
    layers
}

fn phases(draws: &mut Draws, untied: &[usize], ranks: usize) -> Vec<Phase> {
    let joins = draws.one_in(3);
    let mut frozen = None;
    let mut phases = Vec::new();
    for number in 0..1 + draws.below(3) {
        let mut before = Before::Nothing;
        if number > 0 {
            before = match draws.below(8) {
                0 | 1 => Before::Refresh { layer: 0, trains: false },
                2 => Before::Resume,
                3 => Before::SyncBuffers,
                4 => Before::CastParameters,
                _ => Before::Nothing,
            };
        }
        if let Before::Refresh { layer, trains } = &mut before {
            *trains = frozen.is_some();
            // Layer 0 is always trained.
            let drawn = draws.below(untied.len().max(1) as u64) as usize;
            let drawn = untied.get(drawn).copied().unwrap_or(0);
            *layer = frozen.take().unwrap_or(drawn);
            if *layer == 0 {
                before = Before::Nothing;
            } else if !*trains {
                frozen = Some(*layer);
            }
        }
        let is_joined = joins && draws.one_in(2);
        let is_even = !is_joined || draws.one_in(3);
        let mut steps: Vec<usize> = (0..ranks).map(|_| draws.below(4) as usize).collect();
        if is_even {
            steps = vec![1 + draws.below(2) as usize; ranks];
        }
        let options = JoinOptions {
            divide_by_initial_world_size: draws.one_in(2),
            throw_on_early_termination: is_even && draws.one_in(2),
        };
        phases.push(Phase {
            before,
            join: Some(options).filter(|_| is_joined),
            steps,
            backwards: 1 + draws.below(4).saturating_sub(1) as usize,
            forwards: 1 + draws.below(3).saturating_sub(1) as usize,
            drops: draws.one_in(5),
            evaluates: draws.below(4 * ranks as u64) as usize,
        });
    }
    phases
}
