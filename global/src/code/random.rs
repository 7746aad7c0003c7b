//! Random numbers by logical element: the values of one device, whatever the SBP.

use std::f64::consts::PI;

use flow_autograd::global::Argument;
use tch::{Kind, Tensor};

use super::context::Context;
use crate::create::{drawn, drawn_whole, uniform_of, whole};
use crate::error::Result;
use crate::kinds::kind_of;
use crate::random::{self, Bits, Draw};
use crate::region::shape;

/// Whether an operation draws a tensor of random numbers; its name is without the `_` of in-place
/// ones.
pub fn draws(name: &str) -> bool {
    matches!(
        name,
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
    let like = context.local(0)?;
    match name.as_str() {
        "native_dropout" => return dropout(context, &mut draw, &like),
        "bernoulli" => {
            // (self), (self, probability), and the same with a tensor
            let probability = match (context.argument(1), context.number(1)) {
                (Argument::Tensor(tensor), _) => context.local(tensor)?,
                (_, Some(probability)) => Tensor::from(probability),
                _ => like.shallow_clone(),
            };
            let drawn = trials(context, &mut draw, &like, &probability)?;
            let shape = context.shape(0);
            return context.give(0, &drawn, &shape);
        }
        _ => {}
    }
    let is_like = name.ends_with("_like");
    let kind_at = match (name.as_str(), context.call.overload) {
        ("randint_like", overload) if overload.starts_with("low") => 3,
        ("randint_like", _) => 2,
        _ => 1,
    };
    let kind = context.int(kind_at).filter(|_| is_like).and_then(kind_of).unwrap_or(like.kind());
    let uniform = uniform_of(kind);
    let number = |at: usize, default: f64| context.number(at).unwrap_or(default);
    let drawn = match name.as_str() {
        "rand_like" => values(context, &mut draw, &like, kind, uniform)?,
        "randn_like" => values(context, &mut draw, &like, kind, random::normal)?,
        "uniform_" => {
            let (low, high) = (number(1, 0.0), number(2, 1.0));
            values(context, &mut draw, &like, kind, |bits| low + (high - low) * uniform(bits))?
        }
        "normal_" => {
            let (mean, deviation) = (number(1, 0.0), number(2, 1.0));
            let value = |bits| mean + deviation * random::normal(bits);
            values(context, &mut draw, &like, kind, value)?
        }
        "exponential_" => {
            let rate = number(1, 1.0);
            values(context, &mut draw, &like, kind, |bits| random::exponential(bits) / rate)?
        }
        "cauchy_" => {
            let (median, width) = (number(1, 0.0), number(2, 1.0));
            let tangent = |bits| (PI * (random::uniform(bits) - 0.5)).tan();
            values(context, &mut draw, &like, kind, |bits| median + width * tangent(bits))?
        }
        "log_normal_" => {
            let (mean, deviation) = (number(1, 1.0), number(2, 2.0));
            let value = |bits| (mean + deviation * random::normal(bits)).exp();
            values(context, &mut draw, &like, kind, value)?
        }
        "geometric_" => {
            // Trials up to the first success.
            let failure = 1.0 - number(1, 0.5);
            let value = |bits| (-random::exponential(bits) / failure.ln()).ceil().max(1.0);
            values(context, &mut draw, &like, kind, value)?
        }
        "bernoulli_" => match context.call.is_defined(context.call.tensors() - 1)
            && context.call.tensors() > 1
        {
            true => trials(context, &mut draw, &like, &context.local(1)?)?,
            false => {
                let probability = number(1, 0.5);
                let value = |bits| f64::from(random::uniform(bits) < probability);
                values(context, &mut draw, &like, kind, value)?
            }
        },
        "random_" | "randint_like" => {
            let (low, high) = match (context.argument(1), context.int(2)) {
                (Argument::Tensor(_), _) => {
                    return Err(context.fail("the limit must be a number: read the tensor first"))
                }
                (Argument::Int(low), Some(high)) if kind_at != 2 => (low, high),
                (Argument::Int(low), None) if context.call.overload == "from" => {
                    (low, greatest(kind))
                }
                (Argument::Int(high), _) => (0, high),
                _ => (0, greatest(kind)),
            };
            let (shape, region) = (context.shape(0), context.region(0));
            let value = whole(low, high, &name)?;
            drawn_whole(&mut draw, &shape, &region, (kind, like.device()), value)?
        }
        _ => return Err(context.fail("global tensors cannot draw from this distribution")),
    };
    if is_like {
        let shape = context.shape(0);
        return context.give(0, &drawn, &shape);
    }
    context.overwrite(0, &drawn)?;
    context.give_written(0)
}

/// Ones with a probability, else zeros. The numbers are drawn in double precision, also for
/// integers and flags.
fn trials(
    context: &Context<'_, '_>,
    draw: &mut Draw,
    like: &Tensor,
    probability: &Tensor,
) -> Result<Tensor> {
    let uniform = values(context, draw, like, Kind::Double, random::uniform)?;
    Ok(uniform.f_lt_tensor(probability)?.f_to_kind(like.kind())?)
}

/// The part of the numbers that this rank has.
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
fn dropout(context: &mut Context<'_, '_>, draw: &mut Draw, input: &Tensor) -> Result<()> {
    // (input, probability, training) -> result, mask
    let left = 1.0 - context.number(1).unwrap_or(0.5);
    let is_training = !matches!(context.argument(2), Argument::Bool(false));
    let probability = if is_training { left } else { 1.0 };
    let value = |bits| f64::from(random::uniform(bits) < probability);
    let mask = values(context, draw, input, Kind::Double, value)?.f_to_kind(Kind::Bool)?;
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

/// Memory for a tensor of the size that is asked for.
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
