//! First weights. They are made by logical element, as [`random`](crate::random) has it, and so are
//! the same for every placement and SBP.
//!
//! | here | OneFlow's documents | PyTorch |
//! |---|---|---|
//! | [`Init::Constant`] | `constant_initializer`, `zeros_`, `ones_initializer` | `constant_` |
//! | [`Init::Uniform`] | `random_uniform_initializer` | `uniform_` |
//! | [`Init::Normal`] | `random_normal_initializer` | `normal_` |
//! | [`Init::TruncatedNormal`] | `truncated_normal(stddev)` | `trunc_normal_` |
//! | [`Init::xavier_uniform`], `_normal` | `xavier_uniform_initializer` | `xavier_uniform_` |
//! | [`Init::kaiming_uniform`], `_normal` | `kaiming_initializer`, MSRA | `kaiming_uniform_` |

use tch::Tensor;
use tch::nn::init::NormalOrUniform;

use crate::error::Result;
use crate::random::{Bits, Draw, Generator, normal, uniform};
use crate::region::{Region, regions};
use crate::sbp::filler;
use crate::tensor::GlobalTensor;

/// The distributions of first values.
#[derive(Clone, Copy, Debug)]
pub enum Init {
    /// One value for all elements.
    Constant(f64),
    /// Evenly distributed from `low` up to `high`.
    Uniform {
        /// The lowest value.
        low: f64,
        /// The limit below which all values are, before they are rounded to the tensor's type.
        high: f64,
    },
    /// Normally distributed.
    Normal {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        deviation: f64,
    },
    /// Normally distributed, but within two deviations of the mean, as if what is farther away were
    /// drawn again. That takes 12 % off the standard deviation.
    TruncatedNormal {
        /// Mean.
        mean: f64,
        /// Standard deviation of the distribution that is truncated.
        deviation: f64,
    },
    /// Around 0 with the variance `scale` / fan.
    VarianceScaling {
        /// The variance of a weight times the number of weights in a sum.
        scale: f64,
        /// The kind of fan.
        fan: Fan,
        /// The shape of the distribution.
        distribution: NormalOrUniform,
    },
}

/// The fan of a weight `[out, in, kernel...]`, in which `kernel` has any number of dimensions. It
/// is how many inputs an output depends on, and how many outputs depend on an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fan {
    /// `in` times the elements of the kernel.
    In,
    /// `out` times the elements of the kernel.
    Out,
    /// The mean of both.
    Average,
}

impl Init {
    /// Glorot and Bengio, 2010: the variance is `gain`^2 * 2 / (fan in + fan out).
    pub fn xavier_uniform(gain: f64) -> Self {
        Self::scaled(gain, Fan::Average, NormalOrUniform::Uniform)
    }

    /// Makes [`Init::xavier_uniform`], but normally distributed.
    pub fn xavier_normal(gain: f64) -> Self {
        Self::scaled(gain, Fan::Average, NormalOrUniform::Normal)
    }

    /// He et al., 2015: the variance is `gain`^2 / fan. The gain for ReLU is the root of 2:
    /// `tch::nn::init::NonLinearity::ReLU.gain()`.
    pub fn kaiming_uniform(fan: Fan, gain: f64) -> Self {
        Self::scaled(gain, fan, NormalOrUniform::Uniform)
    }

    /// Makes [`Init::kaiming_uniform`], but normally distributed.
    pub fn kaiming_normal(fan: Fan, gain: f64) -> Self {
        Self::scaled(gain, fan, NormalOrUniform::Normal)
    }

    fn scaled(gain: f64, fan: Fan, distribution: NormalOrUniform) -> Self {
        Self::VarianceScaling { scale: gain * gain, fan, distribution }
    }

    /// Fills a tensor, plain or global: a variable of a `VarStore`, for instance. All ranks fill
    /// the same tensors in the same order, with generators that began alike. A global tensor then
    /// has the values that a plain one would have. Nothing is sent.
    ///
    /// # Errors
    /// Of libtorch.
    pub fn fill(&self, tensor: &mut Tensor, generator: &mut Generator) -> Result<()> {
        let shape: Vec<usize> = tensor.size().iter().map(|&size| size as usize).collect();
        let mut draw = generator.draw();
        let mut local = tensor.detach();
        let mut region = Region::all(&shape);
        if tensor.is_global() {
            let placement = tensor.placement()?;
            let sbp = tensor.sbp()?;
            let Some(position) = placement.position(placement.runtime()?.rank()) else {
                return Ok(());
            };
            local = local.to_local()?;
            region = regions(&placement, &sbp, &shape).swap_remove(position);
            if let Some(value) = filler(&sbp, &placement.coordinates(position)) {
                return Ok(tch::no_grad(|| local.f_fill_(value).map(drop))?);
            }
        }
        let values = Tensor::f_from_slice(&self.values(&mut draw, &shape, &region))?;
        let values = values.f_view_as(&local)?.f_to_device(local.device())?;
        Ok(tch::no_grad(|| local.f_copy_(&values).map(drop))?)
    }

    /// Returns the values of a region of a tensor of this shape, row-major.
    pub fn values(&self, draw: &mut Draw, shape: &[usize], region: &Region) -> Vec<f64> {
        match *self {
            Init::Constant(value) => vec![value; region.elements()],
            Init::Uniform { low, high } => {
                draw.region(shape, region, |bits| low + (high - low) * uniform(bits))
            }
            Init::Normal { mean, deviation } => {
                draw.region(shape, region, |bits| mean + deviation * normal(bits))
            }
            Init::TruncatedNormal { mean, deviation } => {
                draw.region(shape, region, |bits| mean + deviation * truncated_normal(bits))
            }
            Init::VarianceScaling { scale, fan, distribution } => {
                let deviation = (scale / fan.of(shape)).sqrt();
                match distribution {
                    NormalOrUniform::Normal => {
                        draw.region(shape, region, |bits| deviation * normal(bits))
                    }
                    NormalOrUniform::Uniform => {
                        let bound = 3_f64.sqrt() * deviation;
                        draw.region(shape, region, |bits| bound * (2.0 * uniform(bits) - 1.0))
                    }
                }
            }
        }
    }
}

impl Fan {
    /// Returns the fan of a weight of this shape; a dimension that it lacks counts as 1.
    pub fn of(self, shape: &[usize]) -> f64 {
        let kernel: usize = shape.iter().skip(2).product();
        let into = shape.get(1).copied().unwrap_or(1) * kernel;
        let out = shape.first().copied().unwrap_or(1) * kernel;
        match self {
            Fan::In => into as f64,
            Fan::Out => out as f64,
            Fan::Average => (into + out) as f64 / 2.0,
        }
    }
}

/// The probability that a normally distributed number is below -2.
const BELOW: f64 = 0.022_750_131_948_179_21;

/// Draws a number that is normally distributed with mean 0 and variance 1, but within [-2, 2]. It
/// is the quantile function at a probability between those of both ends. So an element needs no
/// bits but its own.
fn truncated_normal(bits: Bits) -> f64 {
    quantile(BELOW + (1.0 - 2.0 * BELOW) * uniform(bits)).clamp(-2.0, 2.0)
}

/// Returns the number below which a normally distributed one is with this probability. The
/// probability is at least 1e-11 away from 0 and 1 (Wichura: algorithm AS 241, 1988).
fn quantile(probability: f64) -> f64 {
    const CENTRE: [[f64; 8]; 2] = [
        [
            2.509_080_928_730_122_7e3,
            3.343_057_558_358_813e4,
            6.726_577_092_700_87e4,
            4.592_195_393_154_987e4,
            1.373_169_376_550_946e4,
            1.971_590_950_306_551_4e3,
            1.331_416_678_917_843_8e2,
            3.387_132_872_796_366_6,
        ],
        [
            5.226_495_278_852_854e3,
            2.872_908_573_572_194_3e4,
            3.930_789_580_009_271e4,
            2.121_379_430_158_659_6e4,
            5.394_196_021_424_751e3,
            6.871_870_074_920_579e2,
            4.231_333_070_160_091e1,
            1.0,
        ],
    ];
    const TAILS: [[f64; 8]; 2] = [
        [
            7.745_450_142_783_414e-4,
            2.272_384_498_926_918_5e-2,
            2.417_807_251_774_506e-1,
            1.270_458_252_452_368_4,
            3.647_848_324_763_204_6,
            5.769_497_221_460_691,
            4.630_337_846_156_546,
            1.423_437_110_749_683_6,
        ],
        [
            1.050_750_071_644_416_8e-9,
            5.475_938_084_995_345e-4,
            1.519_866_656_361_645_7e-2,
            1.481_039_764_274_800_7e-1,
            6.897_673_349_851e-1,
            1.676_384_830_183_803_8,
            2.053_191_626_637_759,
            1.0,
        ],
    ];
    let centred = probability - 0.5;
    if centred.abs() <= 0.425 {
        return centred * ratio(CENTRE, 0.180_625 - centred * centred);
    }
    let tail = probability.min(1.0 - probability);
    ratio(TAILS, (-tail.ln()).sqrt() - 1.6).copysign(centred)
}

/// Returns the ratio of two polynomials, whose highest terms come first.
fn ratio([numerator, denominator]: [[f64; 8]; 2], x: f64) -> f64 {
    polynomial(numerator, x) / polynomial(denominator, x)
}

fn polynomial(terms: [f64; 8], x: f64) -> f64 {
    terms.into_iter().fold(0.0, |sum, term| sum * x + term)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{B, Placement, S, Sbp};

    fn all(init: Init, shape: &[usize]) -> Vec<f64> {
        init.values(&mut Generator::new(5).draw(), shape, &Region::all(shape))
    }

    /// Mean and variance of many, within five standard errors of what they should be, and that all
    /// are between `low` and `high`, some near to both.
    fn check(init: Init, shape: &[usize], [mean, variance, kurtosis]: [f64; 3], ends: [f64; 2]) {
        let values = all(init, shape);
        let count = values.len() as f64;
        let measured = values.iter().sum::<f64>() / count;
        let error = (variance / count).sqrt();
        assert!((measured - mean).abs() < 5.0 * error, "{init:?}: {measured} instead of {mean}");
        let measured = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        let error = variance * ((kurtosis - 1.0) / count).sqrt();
        let message = format!("{init:?}: {measured} instead of {variance}");
        assert!((measured - variance).abs() < 5.0 * error, "{message}");
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let near = 0.01 * variance.sqrt();
        let [low, high] = ends;
        if low.is_finite() {
            assert!((low..low + near).contains(&least), "{init:?}: {least} instead of {low}");
            assert!((high - near..=high).contains(&most), "{init:?}: {most} instead of {high}");
        }
    }

    const ANY: [f64; 2] = [f64::NEG_INFINITY, f64::INFINITY];
    const MANY: [usize; 2] = [400, 500];

    #[test]
    fn values_have_their_moments_and_ranges() {
        assert_eq!(all(Init::Constant(0.25), &[2, 2]), [0.25; 4]);
        check(Init::Uniform { low: -1.0, high: 3.0 }, &MANY, [1.0, 4.0 / 3.0, 1.8], [-1.0, 3.0]);
        check(Init::Normal { mean: 2.0, deviation: 0.5 }, &MANY, [2.0, 0.25, 3.0], ANY);
        // Of the truncated distribution, by its formulas.
        let variance = 0.773_741_303_549_923;
        let kurtosis = 2.365_536_717_129_649;
        let truncated = Init::TruncatedNormal { mean: 0.5, deviation: 0.1 };
        check(truncated, &MANY, [0.5, 0.01 * variance, kurtosis], [0.3, 0.7]);
    }

    #[test]
    fn variances_follow_the_fan() {
        let convolution = [128, 64, 5, 5];
        assert_eq!(Fan::In.of(&convolution), 1600.0);
        assert_eq!(Fan::Out.of(&convolution), 3200.0);
        assert_eq!(Fan::Average.of(&convolution), 2400.0);
        assert_eq!([Fan::In, Fan::Out].map(|fan| fan.of(&[10])), [1.0, 10.0]);
        assert_eq!(Fan::Average.of(&[]), 1.0);

        let root = 2_f64.sqrt();
        let uniform = |variance: f64| (3.0 * variance).sqrt();
        for (init, variance) in [
            (Init::xavier_uniform(1.0), 1.0 / 2400.0),
            (Init::kaiming_uniform(Fan::In, root), 2.0 / 1600.0),
            (Init::kaiming_uniform(Fan::Out, root), 2.0 / 3200.0),
        ] {
            let bound = uniform(variance);
            check(init, &convolution, [0.0, variance, 1.8], [-bound, bound]);
        }
        check(Init::xavier_normal(2.0), &convolution, [0.0, 4.0 / 2400.0, 3.0], ANY);
        check(Init::kaiming_normal(Fan::In, root), &convolution, [0.0, 2.0 / 1600.0, 3.0], ANY);
    }

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (probability, expected) in [
            (BELOW, -2.0),
            (0.05, -1.644_853_626_951_472_2),
            (0.6, 0.253_347_103_135_799_8),
            (0.9, 1.281_551_565_544_600_8),
            (0.975, 1.959_963_984_540_054),
        ] {
            let difference = (quantile(probability) - expected).abs();
            assert!(difference < 4e-15, "{probability}: {difference}");
        }
        assert_eq!(quantile(0.5), 0.0);
        assert!([0, u64::MAX].iter().all(|&bits| truncated_normal([bits, 0]).abs() <= 2.0));
    }

    #[test]
    fn a_weight_is_the_same_whatever_the_sbp() {
        let mesh = Placement::of([[0, 1], [2, 3]]).unwrap();
        let shape = [7, 3, 2];
        for init in [
            Init::TruncatedNormal { mean: 0.0, deviation: 0.1 },
            Init::xavier_uniform(1.0),
            Init::kaiming_normal(Fan::In, 1.0),
        ] {
            let whole = all(init, &shape);
            let sbps = [S(0), S(1), S(2), B];
            for sbp in sbps.iter().flat_map(|&one| sbps.map(|other: Sbp| [one, other])) {
                for region in regions(&mesh, &sbp, &shape) {
                    let part = init.values(&mut Generator::new(5).draw(), &shape, &region);
                    let [i, j, k] = [0, 1, 2].map(|dim| region.0[dim].clone());
                    let indices = i.flat_map(|i| {
                        let k = k.clone();
                        j.clone().flat_map(move |j| k.clone().map(move |k| (i * 3 + j) * 2 + k))
                    });
                    let expected: Vec<f64> = indices.map(|index| whole[index]).collect();
                    assert_eq!(part, expected, "{init:?} {sbp:?}");
                }
            }
        }
    }
}
