//! Batch norm over the batches of all ranks against libtorch's over the joined batch.

use anyhow::{Context, Result, ensure};
use flow_ddp::convert_sync_batchnorm;
use flow_tensor::{BatchNorm, ProcessGroup, ReduceOp, TensorCollectives, sync_batch_norm};
use tch::nn::{self, ModuleT};
use tch::{Kind, Tensor};

use crate::helpers::{error, says};
use crate::models::store;

const EPS: f64 = 1e-3;
const MOMENTUM: f64 = 0.3;

/// Numbers that are the same on all ranks, and in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> i64 {
        // D. E. Knuth's MMIX.
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % bound) as i64
    }

    fn tensor(&mut self, group: &ProcessGroup, shape: &[i64]) -> Tensor {
        let options = (Kind::Double, group.device());
        let count = shape.iter().product::<i64>();
        ((Tensor::arange(count, options) * 0.7 + self.below(1000)).sin() * 2 + 0.5).view(shape)
    }
}

/// A layer and the joined batch of all ranks.
struct Case {
    /// Rows of each rank.
    rows: Vec<i64>,
    input: Tensor,
    /// The gradient of the output.
    grad: Tensor,
    /// Weight and bias.
    affine: Option<[Tensor; 2]>,
    /// Mean and variance.
    running: Option<[Tensor; 2]>,
    kind: Kind,
    channels_last: bool,
}

impl Case {
    fn new(group: &ProcessGroup, seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let mut rows: Vec<i64> = (0..group.world_size()).map(|_| numbers.below(4)).collect();
        rows[0] += 2 * i64::from(rows.iter().sum::<i64>() < 2);
        let channels = 1 + numbers.below(5);
        let mut shape = vec![rows.iter().sum(), channels];
        for _ in 0..numbers.below(4) {
            shape.push(1 + numbers.below(4));
        }
        let mut of_channels = || numbers.tensor(group, &[channels]);
        let affine = (!seed.is_multiple_of(3)).then(|| [of_channels(), of_channels()]);
        let running = (!seed.is_multiple_of(4)).then(|| [of_channels(), of_channels() + 2]);
        let kind = [Kind::Double, Kind::Float, Kind::BFloat16, Kind::Half][seed as usize / 2 % 4];
        let rounded = |tensor: Tensor| tensor.to_kind(kind).to_kind(Kind::Double);
        Self {
            input: rounded(numbers.tensor(group, &shape)),
            grad: rounded(numbers.tensor(group, &shape)),
            rows,
            affine,
            running,
            kind,
            channels_last: shape.len() == 4 && seed % 5 < 2,
        }
    }

    /// Returns this rank's rows of a joined batch.
    fn part(&self, group: &ProcessGroup, joined: &Tensor) -> Tensor {
        let first = self.rows[..group.rank()].iter().sum();
        let part = joined.narrow(0, first, self.rows[group.rank()]);
        let part = part.to_kind(self.kind).contiguous();
        if self.channels_last {
            part.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
        } else {
            part
        }
    }

    /// Runs a batch norm of tensors of this kind forward and backward. Returns the output, the new
    /// running statistics, and the gradients of the input, the weight and the bias.
    fn run(
        &self,
        kind: Kind,
        [input, grad]: [Tensor; 2],
        compute: impl Fn(&BatchNorm<'_>) -> Result<Tensor>,
    ) -> Result<Results> {
        let own = |tensors: &Option<[Tensor; 2]>| {
            tensors.as_ref().map(|tensors| tensors.each_ref().map(|t| t.to_kind(kind).copy()))
        };
        let running = own(&self.running);
        let affine = own(&self.affine).map(|tensors| tensors.map(|t| t.set_requires_grad(true)));
        let input = input.set_requires_grad(true);
        let [weight, bias] =
            affine.as_ref().map_or([None; 2], |tensors| tensors.each_ref().map(Some));
        let [running_mean, running_var] =
            running.as_ref().map_or([None; 2], |tensors| tensors.each_ref().map(Some));
        let output = compute(&BatchNorm {
            input: &input,
            weight,
            bias,
            running_mean,
            running_var,
            momentum: MOMENTUM,
            eps: EPS,
        })?;
        ensure!(output.kind() == input.kind() && output.size() == input.size());
        (&output * grad).sum(Kind::Double).f_backward()?;
        Ok(Results {
            batches: [output.detach(), input.grad()].map(|t| t.to_kind(Kind::Double)),
            sums: affine.into_iter().flatten().map(|t| t.grad().to_kind(Kind::Double)).collect(),
            running: running.into_iter().flatten().map(|t| t.to_kind(Kind::Double)).collect(),
        })
    }
}

struct Results {
    /// The output, and the gradient of the input.
    batches: [Tensor; 2],
    /// The gradients of weight and bias: a part on each rank.
    sums: Vec<Tensor>,
    running: Vec<Tensor>,
}

/// libtorch's batch norm of one process.
fn alone(norm: &BatchNorm<'_>) -> Result<Tensor> {
    let BatchNorm { input, weight, bias, running_mean, running_var, momentum, eps } = *norm;
    Ok(input.f_batch_norm(weight, bias, running_mean, running_var, true, momentum, eps, false)?)
}

fn close(what: &str, actual: &Tensor, expected: &Tensor, tolerance: f64) -> Result<()> {
    ensure!(actual.size() == expected.size(), "{what}: {:?}", actual.size());
    if actual.numel() > 0 {
        let scale = expected.abs().max().double_value(&[]).max(1.0);
        let difference = (actual - expected).abs().max().double_value(&[]);
        ensure!(difference <= tolerance * scale, "{what} differs by {difference} of {scale}");
    }
    Ok(())
}

/// Sums over all ranks.
fn total(group: &ProcessGroup, part: &Tensor) -> Result<Tensor> {
    let mut total = part.copy();
    group.all_reduce_tensor(&mut total, ReduceOp::Sum)?;
    Ok(total)
}

/// Random sizes, also 0 and 1, kinds and layouts.
pub fn first(group: &ProcessGroup) -> Result<()> {
    for seed in 0..120 {
        let case = Case::new(group, seed);
        check(group, &case).with_context(|| {
            format!("case {seed}: rows {:?} of {:?}, {:?}", case.rows, case.input.size(), case.kind)
        })?;
    }
    Ok(())
}

fn check(group: &ProcessGroup, case: &Case) -> Result<()> {
    // Near 0 a deviation makes much of the rounding of half precision.
    let tolerance = match case.kind {
        Kind::Double => 1e-9,
        Kind::Float => 2e-3,
        Kind::Half => 1e-2,
        _ => 5e-2,
    };
    let joined = [&case.input, &case.grad].map(Tensor::copy);
    let expected = case.run(Kind::Double, joined, alone)?;
    let own = [&case.input, &case.grad].map(|joined| case.part(group, joined));
    let actual = case.run(case.kind, own, |norm| Ok(sync_batch_norm(group, norm)?))?;
    for (what, actual, expected) in [
        ("the output", &actual.batches[0], &expected.batches[0]),
        ("the input's gradient", &actual.batches[1], &expected.batches[1]),
    ] {
        let first = case.rows[..group.rank()].iter().sum();
        let expected = expected.narrow(0, first, case.rows[group.rank()]);
        close(what, actual, &expected, tolerance)?;
    }
    for (actual, expected) in actual.sums.iter().zip(&expected.sums) {
        close("a parameter's gradient", &total(group, actual)?, expected, tolerance)?;
    }
    for (actual, expected) in actual.running.iter().zip(&expected.running) {
        close("running statistics", actual, expected, tolerance)?;
        let all = group.all_gather_tensor(actual)?;
        ensure!(all == actual.unsqueeze(0).expand_as(&all), "{actual} differs between ranks");
    }
    Ok(())
}

/// Gradients of a function of the gradients.
pub fn second(group: &ProcessGroup) -> Result<()> {
    for seed in (0..40).map(|seed| seed * 8 + seed % 2) {
        let case = Case::new(group, seed);
        ensure!(case.kind == Kind::Double);
        let whole = [&case.input, &case.grad].map(Tensor::copy);
        let expected = of_gradients(&case, whole, alone)?;
        let own = [&case.input, &case.grad].map(|joined| case.part(group, joined));
        let actual = of_gradients(&case, own, |norm| Ok(sync_batch_norm(group, norm)?))?;
        let context = || format!("case {seed}: rows {:?} of {:?}", case.rows, case.input.size());
        let expected_part = case.part(group, &expected[0]);
        close("the input's", &actual[0], &expected_part, 1e-7).with_context(context)?;
        for (actual, expected) in actual.iter().zip(&expected).skip(1) {
            let actual = total(group, actual)?;
            close("a parameter's", &actual, expected, 1e-7).with_context(context)?;
        }
    }
    Ok(())
}

/// Returns the gradients, by input, weight and bias, of a function of the gradients of a function of
/// the output.
fn of_gradients(
    case: &Case,
    [input, factors]: [Tensor; 2],
    compute: impl Fn(&BatchNorm<'_>) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let mut inputs = vec![input];
    inputs.extend(case.affine.iter().flatten().map(Tensor::copy));
    let inputs: Vec<Tensor> = inputs.into_iter().map(|t| t.set_requires_grad(true)).collect();
    let output = compute(&BatchNorm {
        input: &inputs[0],
        weight: inputs.get(1),
        bias: inputs.get(2),
        running_mean: None,
        running_var: None,
        momentum: MOMENTUM,
        eps: EPS,
    })?;
    let loss = (&output * &output * &factors).sum(Kind::Double);
    let first = Tensor::f_run_backward(&[&loss], &inputs, true, true)?;
    let mut function = (&first[0] * &first[0] * &factors).sum(Kind::Double);
    for of_parameter in &first[1..] {
        function += (of_parameter * 0.3).sum(Kind::Double);
    }
    Ok(Tensor::f_run_backward(&[function], &inputs, false, false)?)
}

/// A layer of tch does the same once it is converted: in training, whatever memory its tensors have
/// got since. Its evaluation and other layers stay what they were.
pub fn converted(group: &ProcessGroup) -> Result<()> {
    let mut vs = store();
    let config = nn::BatchNormConfig { momentum: MOMENTUM, ..Default::default() };
    let layer = nn::batch_norm2d(vs.root() / "norm", 3, config);
    let other = nn::batch_norm2d(store().root(), 3, config);
    ensure!(convert_sync_batchnorm(&vs, group)? == 1);
    vs.double();

    let rows = |rank: usize| {
        Tensor::full([rank as i64 + 2, 3, 2, 1], rank as f64, (Kind::Double, group.device()))
    };
    let ranks: Vec<Tensor> = (0..group.world_size()).map(rows).collect();
    let joined = Tensor::cat(&ranks, 0);
    let mean = joined.mean(Kind::Double).double_value(&[]);
    let output = layer.forward_t(&rows(group.rank()), true);
    let expected = Tensor::full([3], MOMENTUM * mean, (Kind::Double, group.device()));
    close("the running mean", &layer.running_mean, &expected, 1e-12)?;
    let normalized = (&joined - mean) / (joined.var(false) + 1e-5).sqrt();
    let weight = layer.ws.as_ref().context("it has a weight")?.view([3, 1, 1]);
    let first = (0..group.rank() as i64).map(|rank| rank + 2).sum();
    let own = normalized.narrow(0, first, group.rank() as i64 + 2) * weight;
    close("the output", &output, &own, 1e-9)?;

    // Only this rank may run these.
    if group.rank() == 0 {
        let x = rows(1);
        drop(layer.forward_t(&x, false));
        let y = other.forward_t(&x.to_kind(Kind::Float), true);
        close("another layer", &y.to_kind(Kind::Double), &x.zeros_like(), 1e-6)?;
    }
    Ok(())
}

/// Errors of what ranks give alike. A batch that is empty on all ranks is none, and changes
/// nothing.
pub fn misuse(group: &ProcessGroup) -> Result<()> {
    let ones = |shape: &[i64]| Tensor::ones(shape, (Kind::Float, group.device()));
    let norm = |input: &Tensor, weight: Option<&Tensor>| {
        let norm = BatchNorm {
            input,
            weight,
            bias: None,
            running_mean: None,
            running_var: None,
            momentum: MOMENTUM,
            eps: EPS,
        };
        error(sync_batch_norm(group, &norm))
    };
    let rank = format!("rank {}: sync_batch_norm", group.rank());
    says(&norm(&ones(&[3]), None)?, &[&rank, "[N, C, ...]", "[3]"])?;
    says(&norm(&ones(&[3, 0]), None)?, &[&rank, "a channel or more"])?;
    says(&norm(&ones(&[3, 2]), Some(&ones(&[4])))?, &[&rank, "weight", "[4]", "2 channels"])?;
    let rows = i64::from(group.rank() == 0);
    says(&norm(&ones(&[rows, 2, 1]), None)?, &[&rank, "more than 1 value per channel"])?;
    let (nothing, running) = (ones(&[0, 2, 1]).set_requires_grad(true), ones(&[2]));
    let norm = BatchNorm {
        input: &nothing,
        weight: None,
        bias: None,
        running_mean: Some(&running),
        running_var: Some(&running),
        momentum: MOMENTUM,
        eps: EPS,
    };
    sync_batch_norm(group, &norm)?.sum(Kind::Float).f_backward()?;
    ensure!(nothing.grad().size() == [0, 2, 1] && running == ones(&[2]), "{running}");
    Ok(())
}

/// Ranks whose layers have other sizes, and ranks that are in layers of the same size, but not in
/// the same one.
pub fn other_layers(group: &ProcessGroup) -> Result<()> {
    let group = &group.duplicate()?;
    let other_sizes = store();
    nn::batch_norm1d(other_sizes.root() / "c", 3 + group.rank() as i64, Default::default());
    let text = error(convert_sync_batchnorm(&other_sizes, group))?;
    says(&text, &["c.running_mean [3]", "rank 1 has buffer c.running_mean [4]"])?;

    let vs = store();
    let layers = ["a", "b"]
        .map(|name| nn::batch_norm1d(vs.root() / name, 3, Default::default()).running_mean);
    convert_sync_batchnorm(&vs, group)?;
    let x = Tensor::ones([4, 3], (Kind::Float, group.device()));
    let layer = &layers[group.rank()];
    let none = None::<&Tensor>;
    let result = x.f_batch_norm(none, none, Some(layer), Some(layer), true, 0.1, EPS, false);
    says(&error(result)?, &["ranks disagree about the next collective"])
}
