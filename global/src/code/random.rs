//! Random numbers by logical element: the values of one device, whatever the SBP.

use std::f64::consts::PI;

use flow_autograd::global::Argument;
use tch::{Device, Kind, Tensor};

use super::context::Context;
use crate::create::{drawn, drawn_whole, uniform_of, whole};
use crate::error::Result;
use crate::kinds::kind_of;
use crate::random::{self, Bits, Draw};
use crate::region::shape;

/// Returns whether an operation draws a tensor of random numbers, by code.
pub fn draws(name: &str) -> bool {
    matches!(
        name.trim_start_matches("aten::").trim_end_matches('_'),
        "bernoulli"
            | "cauchy"
            | "exponential"
            | "geometric"
            | "log_normal"
            | "native_dropout"
            | "normal"
            | "rand_like"
            | "randint_like"
            | "randn_like"
            | "random"
            | "uniform"
    )
}

/// Fills a tensor, or makes one like another.
pub fn draw(context: &mut Context<'_, '_>) -> Result<()> {
    let mut draw = random::generator(context.runtime()?).draw();
    let name = context.call.name.trim_start_matches("aten::").to_owned();
    match name.as_str() {
        "native_dropout" => return dropout(context, &mut draw),
        "bernoulli" => return bernoulli(context, &mut draw),
        _ => {}
    }
    let like = context.local(0)?;
    let is_like = name.ends_with("_like");
    let kind = if is_like { asked_kind(context, &name) } else { None };
    let kind = kind.unwrap_or(like.kind());
    let drawn = match name.as_str() {
        "random_" | "randint_like" => integers(context, &mut draw, &like, kind)?,
        "bernoulli_" if has_probabilities(context) => {
            trials(context, &mut draw, &like, &context.local(1)?)?
        }
        _ => {
            let distribution = Distribution::of(context, &name, kind)?;
            values(context, &mut draw, &like, kind, |bits| distribution.value(bits))?
        }
    };
    if is_like {
        let shape = context.shape(0);
        return context.give(0, &drawn, &shape);
    }
    context.overwrite(0, &drawn)?;
    context.give_written(0)
}

/// Returns the kind that an operation as `rand_like` is asked for.
fn asked_kind(context: &Context<'_, '_>, name: &str) -> Option<Kind> {
    // (self, dtype), (self, high, dtype), (self, low, high, dtype)
    let argument = match name {
        "randint_like" if context.call.overload.starts_with("low") => 3,
        "randint_like" => 2,
        _ => 1,
    };
    context.int(argument).and_then(kind_of)
}

/// Returns whether `bernoulli_` has a tensor of probabilities.
fn has_probabilities(context: &Context<'_, '_>) -> bool {
    let tensors = context.call.tensors();
    tensors > 1 && context.call.is_defined(tensors - 1)
}

/// Makes a number of random bits.
enum Distribution {
    /// Numbers from `low` to `high`, by a function that gives numbers from 0 to 1.
    Uniform {
        low: f64,
        high: f64,
        unit: fn(Bits) -> f64,
    },
    Normal {
        mean: f64,
        deviation: f64,
    },
    LogNormal {
        mean: f64,
        deviation: f64,
    },
    Exponential {
        rate: f64,
    },
    Cauchy {
        median: f64,
        width: f64,
    },
    /// Trials up to the first success; `failure` is the logarithm of a failure's probability.
    Geometric {
        failure: f64,
    },
    /// One with a probability, else zero.
    Bernoulli {
        probability: f64,
    },
}

impl Distribution {
    /// Finds the distribution of an operation, for numbers of a kind.
    fn of(context: &Context<'_, '_>, name: &str, kind: Kind) -> Result<Self> {
        let number = |at: usize, default: f64| context.number(at).unwrap_or(default);
        let unit = uniform_of(kind);
        Ok(match name {
            "rand_like" => Self::Uniform { low: 0.0, high: 1.0, unit },
            "randn_like" => Self::Normal { mean: 0.0, deviation: 1.0 },
            "uniform_" => Self::Uniform { low: number(1, 0.0), high: number(2, 1.0), unit },
            "normal_" => Self::Normal { mean: number(1, 0.0), deviation: number(2, 1.0) },
            "log_normal_" => Self::LogNormal { mean: number(1, 1.0), deviation: number(2, 2.0) },
            "exponential_" => Self::Exponential { rate: number(1, 1.0) },
            "cauchy_" => Self::Cauchy { median: number(1, 0.0), width: number(2, 1.0) },
            "geometric_" => Self::Geometric { failure: (1.0 - number(1, 0.5)).ln() },
            "bernoulli_" => Self::Bernoulli { probability: number(1, 0.5) },
            _ => return Err(context.fail("global tensors cannot draw from this distribution")),
        })
    }

    fn value(&self, bits: Bits) -> f64 {
        match *self {
            Self::Uniform { low, high, unit } => low + (high - low) * unit(bits),
            Self::Normal { mean, deviation } => mean + deviation * random::normal(bits),
            Self::LogNormal { mean, deviation } => (mean + deviation * random::normal(bits)).exp(),
            Self::Exponential { rate } => random::exponential(bits) / rate,
            Self::Cauchy { median, width } => {
                median + width * (PI * (random::uniform(bits) - 0.5)).tan()
            }
            Self::Geometric { failure } => (-random::exponential(bits) / failure).ceil().max(1.0),
            Self::Bernoulli { probability } => f64::from(random::uniform(bits) < probability),
        }
    }
}

/// Whole numbers from a least one on, below a limit.
fn integers(
    context: &Context<'_, '_>,
    draw: &mut Draw,
    like: &Tensor,
    kind: Kind,
) -> Result<Tensor> {
    // random_(self), random_(self, high), random_(self, low, high), where high may be none;
    // randint_like(self, high, dtype), randint_like(self, low, high, dtype)
    let overload = context.call.overload;
    let is_like = context.call.name.ends_with("_like");
    let has_low = if is_like { overload.starts_with("low") } else { overload == "from" };
    let (low, high) = match context.argument(1) {
        Argument::Tensor(_) => {
            return Err(context.fail("the limit must be a number: read the tensor first"));
        }
        Argument::Int(low) if has_low => (low, context.int(2).unwrap_or(greatest(kind))),
        Argument::Int(high) => (0, high),
        _ => (0, greatest(kind)),
    };
    let name = context.call.name.trim_start_matches("aten::");
    let value = whole(low, high, name)?;
    let options = (kind, like.device());
    Ok(drawn_whole(draw, &context.shape(0), &context.region(0), options, value)?)
}

/// Makes a tensor of ones with a probability, else zeros.
fn bernoulli(context: &mut Context<'_, '_>, draw: &mut Draw) -> Result<()> {
    // (self), (self, probability), and the same with a tensor
    let like = context.local(0)?;
    let probability = match (context.argument(1), context.number(1)) {
        (Argument::Tensor(tensor), _) => context.local(tensor)?,
        (_, Some(probability)) => Tensor::from(probability),
        _ => like.shallow_clone(),
    };
    let drawn = trials(context, draw, &like, &probability)?;
    let shape = context.shape(0);
    context.give(0, &drawn, &shape)
}

/// Returns ones with a probability, else zeros. The numbers are drawn in double precision, also for
/// integers and flags. Only probabilities on the CPU are checked: on a GPU that would wait for them.
fn trials(
    context: &Context<'_, '_>,
    draw: &mut Draw,
    like: &Tensor,
    probability: &Tensor,
) -> Result<Tensor> {
    if probability.device() == Device::Cpu && probability.numel() > 0 {
        let least = probability.f_min()?.double_value(&[]);
        let greatest = probability.f_max()?.double_value(&[]);
        if !(least >= 0.0 && greatest <= 1.0) {
            return Err(context.fail(&format!(
                "probabilities from {least} to {greatest}: they must be from 0 to 1"
            )));
        }
    }
    let uniform = values(context, draw, like, Kind::Double, random::uniform)?;
    Ok(uniform.f_lt_tensor(probability)?.f_to_kind(like.kind())?)
}

/// Returns the part of the numbers that this rank has.
fn values(
    context: &Context<'_, '_>,
    draw: &mut Draw,
    like: &Tensor,
    kind: Kind,
    value: impl Fn(Bits) -> f64,
) -> Result<Tensor> {
    let options = (kind, like.device());
    Ok(drawn(draw, &context.shape(0), &context.region(0), options, value)?)
}

/// Elements are left with a probability, and made greater by that.
fn dropout(context: &mut Context<'_, '_>, draw: &mut Draw) -> Result<()> {
    // (input, probability, training) -> result, mask
    let input = &context.local(0)?;
    let left = 1.0 - context.number(1).unwrap_or(0.5);
    let is_training = !matches!(context.argument(2), Argument::Bool(false));
    let probability = if is_training { left } else { 1.0 };
    let mask = values(context, draw, input, Kind::Double, |bits| {
        f64::from(random::uniform(bits) < probability)
    })?;
    let mask = mask.f_to_kind(Kind::Bool)?;
    let scale = if probability > 0.0 { 1.0 / probability } else { 0.0 };
    let result = (input * &mask) * scale;
    let shape = context.shape(0);
    context.give(0, &result.f_to_kind(input.kind())?, &shape)?;
    context.give(1, &mask, &shape)
}

/// One more than the greatest number that `random_` draws.
fn greatest(kind: Kind) -> i64 {
    match kind {
        Kind::Bool => 2,
        Kind::Uint8 => 1 << 8,
        Kind::Int8 => 1 << 7,
        Kind::Int16 => 1 << 15,
        Kind::Int => 1 << 31,
        Kind::Half => 1 << 11,
        Kind::BFloat16 => 1 << 8,
        Kind::Float => 1 << 24,
        Kind::Int64 => i64::MAX,
        _ => 1 << 53,
    }
}

/// Allocates memory for a tensor of the size that is asked for.
pub fn new_empty_strided(context: &mut Context<'_, '_>) -> Result<()> {
    // (self, sizes, strides, dtype, ...)
    let like = context.local(0)?;
    let asked = context.ints(1);
    let sizes = match context.ints.first() {
        Some((1, sizes)) => sizes.clone(),
        _ => asked.clone(),
    };
    let kind = context.int(3).and_then(kind_of).unwrap_or(like.kind());
    let local = Tensor::f_empty(&sizes[..], (kind, like.device()))?;
    context.give(0, &local, &shape(&asked))
}
