//! New global tensors: constants, ranges, and random numbers by logical element.

use std::ops::Range;

use tch::{Device, Kind, Scalar, TchError, Tensor};

use crate::error::{Error, Result};
use crate::handle::wrap;
use crate::placement::Placement;
use crate::random::{self, Bits, Draw};
use crate::region::{Region, check, regions, shape};
use crate::sbp::{Sbp, filler};
use crate::spec::Spec;

/// Makes a tensor whose elements are all 0.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn zeros(
    sizes: impl AsRef<[i64]>,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    full(sizes, 0.0, kind, placement, sbp)
}

/// Makes a tensor whose elements are all 1.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn ones(
    sizes: impl AsRef<[i64]>,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    full(sizes, 1.0, kind, placement, sbp)
}

/// Makes a tensor whose elements are all `value`, a whole number or one with a fraction.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn full(
    sizes: impl AsRef<[i64]>,
    value: impl Into<Scalar>,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create(sizes.as_ref(), kind, placement, sbp.as_ref(), |_, region, options| {
        Tensor::f_full(sizes_of(region), value, options)
    })
}

/// Elements are whatever the memory has.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn empty(
    sizes: impl AsRef<[i64]>,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create(sizes.as_ref(), kind, placement, sbp.as_ref(), |_, region, options| {
        Tensor::f_empty(sizes_of(region), options)
    })
}

/// Returns the whole numbers from 0 to `end`, without it.
///
/// # Errors
/// The SBP does not fit the placement or the shape; `end` is negative; a fraction in kind Int64.
pub fn arange(
    end: impl Into<Scalar>,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    arange_start(0, end, kind, placement, sbp)
}

/// Returns the numbers from `start` to `end`, without that, in steps of 1.
///
/// # Errors
/// The SBP does not fit the placement or the shape; `end` is less than `start`; fractions in kind
/// Int64.
pub fn arange_start(
    start: impl Into<Scalar>,
    end: impl Into<Scalar>,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    arange_start_step(start, end, 1, kind, placement, sbp)
}

/// Returns the numbers from `start` to `end`, without that, in steps of `step`.
///
/// # Errors
/// The SBP does not fit the placement or the shape; steps that do not lead from `start` to `end`;
/// fractions in kind Int64.
pub fn arange_start_step(
    start: impl Into<Scalar>,
    end: impl Into<Scalar>,
    step: impl Into<Scalar>,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    let given: [Scalar; 3] = [start.into(), end.into(), step.into()];
    let whole: Option<Vec<i64>> = given.iter().map(whole_of).collect();
    let [start, end, step] = given.map(f64::from);
    let steps = (end - start) / step;
    if kind == Kind::Int64 && whole.is_none() {
        return Err(Error::Unsupported {
            operation: "arange".to_owned(),
            reason: format!("{start}, {end} and {step} are to be whole numbers of kind Int64"),
        });
    }
    if !(0.0..=i64::MAX as f64).contains(&steps) {
        return Err(Error::Unsupported {
            operation: "arange".to_owned(),
            reason: format!("steps of {step} do not lead from {start} to {end}"),
        });
    }
    let count = match whole.as_deref() {
        Some(&[start, end, step]) => {
            let [start, end, step] = [start, end, step].map(i128::from);
            ((end - start + step - step.signum()) / step) as i64
        }
        _ => steps.ceil() as i64,
    };
    create(&[count], kind, placement, sbp.as_ref(), |_, region, options| {
        let range = &region.0[0];
        match whole.as_deref() {
            Some(&[start, _, step]) => {
                let first = nth(start, step, range.start);
                Tensor::f_arange_start_step(first, nth(start, step, range.end), step, options)
            }
            _ => Tensor::f_arange_start_step(start, end, step, options)?
                .f_narrow(0, range.start as i64, range.len() as i64)?
                .f_contiguous(),
        }
    })
}

/// Returns the number after `index` steps from `start`.
fn nth(start: i64, step: i64, index: usize) -> i64 {
    start.saturating_add((index as i64).saturating_mul(step))
}

/// Returns the whole number that a scalar is.
fn whole_of(scalar: &Scalar) -> Option<i64> {
    let number = f64::from(scalar);
    // Others do not fit.
    let is_whole = number.fract() == 0.0 && number.abs() < 9e18;
    is_whole.then(|| i64::from(scalar))
}

/// Returns `steps` numbers from `start` to `end`, with both, at equal distances.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn linspace(
    start: f64,
    end: f64,
    steps: i64,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    create(&[steps.max(0)], kind, placement, sbp.as_ref(), |_, region, options| {
        let range = &region.0[0];
        let all = Tensor::f_linspace(start, end, steps, options)?;
        all.f_narrow(0, range.start as i64, range.len() as i64)?.f_contiguous()
    })
}

/// Returns the identity matrix with `size` rows.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn eye(size: i64, kind: Kind, placement: &Placement, sbp: impl AsRef<[Sbp]>) -> Result<Tensor> {
    create(&[size, size], kind, placement, sbp.as_ref(), |_, region, (_, device)| {
        let rows = indices(&region.0[0], device)?;
        let columns = indices(&region.0[1], device)?;
        rows.f_unsqueeze(1)?.f_eq_tensor(&columns)?.f_to_kind(kind)
    })
}

/// Returns the whole numbers of a range.
fn indices(range: &Range<usize>, device: Device) -> std::result::Result<Tensor, TchError> {
    Tensor::f_arange_start(range.start as i64, range.end as i64, (Kind::Int64, device))
}

/// Draws numbers that are normally distributed with mean 0 and variance 1. An element has the same
/// value for every placement and SBP.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn randn(
    sizes: impl AsRef<[i64]>,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    draw(sizes.as_ref(), kind, placement, sbp.as_ref(), random::normal)
}

/// Draws numbers that are normally distributed with this mean and standard deviation. An element
/// has the same value for every placement and SBP.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn normal(
    mean: f64,
    deviation: f64,
    sizes: impl AsRef<[i64]>,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    draw(sizes.as_ref(), kind, placement, sbp.as_ref(), |bits| {
        mean + deviation * random::normal(bits)
    })
}

/// Draws numbers that are evenly distributed in `[0, 1)`. An element has the same value for every
/// placement and SBP.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn rand(
    sizes: impl AsRef<[i64]>,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    draw(sizes.as_ref(), kind, placement, sbp.as_ref(), uniform_of(kind))
}

/// Whole numbers, evenly distributed from `low` to `high`, without `high`. An element has the same
/// value for every placement and SBP.
///
/// # Errors
/// The SBP does not fit the placement or the shape; `high` is not above `low`.
pub fn randint(
    low: i64,
    high: i64,
    sizes: impl AsRef<[i64]>,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    let value = whole(low, high, "randint")?;
    let mut draw = random::generator(placement.runtime()?).draw();
    create(sizes.as_ref(), kind, placement, sbp.as_ref(), |shape, region, options| {
        drawn_whole(&mut draw, shape, region, options, &value)
    })
}

/// Returns the numbers from 0 to `count`, without it, in random order: the same on every rank.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn randperm(
    count: i64,
    kind: Kind,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    let mut draw = random::generator(placement.runtime()?).draw();
    create(&[count.max(0)], kind, placement, sbp.as_ref(), |shape, region, (kind, device)| {
        let keys = draw.region(shape, &Region::all(shape), |[bits, _]| bits);
        let mut order: Vec<i64> = (0..shape[0] as i64).collect();
        order.sort_by_key(|&index| (keys[index as usize], index));
        Tensor::from_slice(&order[region.0[0].clone()]).f_to_device(device)?.f_to_kind(kind)
    })
}

/// Numbers that follow begin anew from this seed, on every rank, and on all placements of the same
/// process group. These have one generator, which lives as long as one of them does.
///
/// # Errors
/// The placement has no process group.
pub fn manual_seed(placement: &Placement, seed: u64) -> Result<()> {
    *random::generator(placement.runtime()?) = random::Generator::new(seed);
    Ok(())
}

/// Returns the state of global random numbers, for [`set_rng_state`].
///
/// # Errors
/// The placement has no process group.
pub fn rng_state(placement: &Placement) -> Result<[u64; 2]> {
    Ok(random::generator(placement.runtime()?).state())
}

/// Numbers that follow are those that followed [`rng_state`].
///
/// # Errors
/// The placement has no process group.
pub fn set_rng_state(placement: &Placement, state: [u64; 2]) -> Result<()> {
    *random::generator(placement.runtime()?) = random::Generator::from_state(state);
    Ok(())
}

/// Draws whole numbers from `low` to `high`, without `high`.
pub(crate) fn whole(low: i64, high: i64, operation: &str) -> Result<impl Fn(Bits) -> i64> {
    match u64::try_from(i128::from(high) - i128::from(low)) {
        Ok(bound) if bound > 0 => {
            Ok(move |bits| low.wrapping_add_unsigned(random::below(bound, bits)))
        }
        _ => Err(Error::Unsupported {
            operation: operation.to_owned(),
            reason: format!("it draws numbers below {high}, from {low} on: there are none"),
        }),
    }
}

/// Returns what draws evenly distributed numbers that this kind can hold without being rounded to
/// 1.
pub(crate) fn uniform_of(kind: Kind) -> fn(Bits) -> f64 {
    match kind {
        Kind::Double => random::uniform,
        Kind::Float => |bits| f64::from(random::uniform_f32(bits)),
        // As many bits as the kind holds.
        Kind::Half => |[bits, _]| (bits >> 53) as f64 / 2048.0,
        _ => |[bits, _]| (bits >> 56) as f64 / 256.0,
    }
}

fn draw(
    sizes: &[i64],
    kind: Kind,
    placement: &Placement,
    sbp: &[Sbp],
    value: impl Fn(Bits) -> f64,
) -> Result<Tensor> {
    if !matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double) {
        return Err(Error::Unsupported {
            operation: "rand".to_owned(),
            reason: format!(
                "it draws floating-point numbers, not {kind:?}; use randint, or convert the result"
            ),
        });
    }
    // On all ranks, also outside the placement: they draw the same tensors.
    let mut draw = random::generator(placement.runtime()?).draw();
    create(sizes, kind, placement, sbp, |shape, region, options| {
        drawn(&mut draw, shape, region, options, &value)
    })
}

/// Returns a region of a tensor of random numbers.
pub(crate) fn drawn(
    draw: &mut Draw,
    shape: &[usize],
    region: &Region,
    (kind, device): (Kind, Device),
    value: impl Fn(Bits) -> f64,
) -> std::result::Result<Tensor, tch::TchError> {
    let flat = match kind {
        Kind::Float => {
            Tensor::f_from_slice(&draw.region(shape, region, |bits| value(bits) as f32))?
        }
        _ => Tensor::f_from_slice(&draw.region(shape, region, value))?,
    };
    flat.f_view(&sizes_of(region)[..])?.f_to_device(device)?.f_to_kind(kind)
}

/// Draws whole numbers, which f64 does not hold all.
pub(crate) fn drawn_whole(
    draw: &mut Draw,
    shape: &[usize],
    region: &Region,
    (kind, device): (Kind, Device),
    value: impl Fn(Bits) -> i64,
) -> std::result::Result<Tensor, tch::TchError> {
    let flat = Tensor::f_from_slice(&draw.region(shape, region, value))?;
    flat.f_view(&sizes_of(region)[..])?.f_to_device(device)?.f_to_kind(kind)
}

fn sizes_of(region: &Region) -> Vec<i64> {
    region.shape().iter().map(|&size| size as i64).collect()
}

/// Returns a tensor whose parts `part` makes: of a tensor of this shape, a region. Of partial axes
/// the first rank has it all, the others what leaves it as it is.
fn create(
    sizes: &[i64],
    kind: Kind,
    placement: &Placement,
    sbp: &[Sbp],
    part: impl FnOnce(&[usize], &Region, (Kind, Device)) -> std::result::Result<Tensor, tch::TchError>,
) -> Result<Tensor> {
    let shape = shape(sizes);
    check(placement, sbp, &shape)?;
    let runtime = placement.runtime()?;
    let spec = Spec::of(placement, sbp)?;
    let device = flow_tensor::TensorCollectives::device(runtime.world());
    let like = Tensor::empty([0], (kind, device));
    let Some(position) = placement.position(runtime.rank()) else {
        return wrap(None, &like, spec, sizes);
    };
    let region = regions(placement, sbp, &shape).swap_remove(position);
    let local = match filler(sbp, &placement.coordinates(position)) {
        None => part(&shape, &region, (kind, device))?,
        Some(value) => Tensor::f_full(sizes_of(&region), value, (kind, device))?,
    };
    wrap(Some(&local), &like, spec, sizes)
}
