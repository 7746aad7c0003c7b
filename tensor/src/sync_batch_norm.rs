//! Batch normalization with the statistics of all ranks.

use flow_autograd::{BatchNorm, Forward, batch_norm_sums, grad_enabled};
use flow_comm::{ProcessGroup, ReduceOp};
use tch::{Kind, TchError, Tensor};

use crate::collectives::TensorCollectives;
use crate::error::{Result, failed, torch_failed};
use crate::functional::{Gradients, all_reduce, functions};

const OPERATION: &str = "sync_batch_norm";

/// Normalizes each channel of a batch by its mean and variance over the batches of all ranks, as one
/// process does with all of them joined: what PyTorch's `SyncBatchNorm` does in training.
///
/// Batches may differ in size between ranks, and be empty on some. Statistics of batches in half
/// precision are in single precision. The running statistics become the same on all ranks.
///
/// One all-gather of a mean, a variance and a count combines the ranks (T. F. Chan et al.,
/// "Updating formulae and a pairwise algorithm for computing sample variances", 1979). Backward has
/// one all-reduce, if the input requires a gradient, on all ranks or none. The gradient is that of
/// the sum of all ranks' losses: the input's and, on each rank, this rank's part of the weight's and
/// of the bias', as `Ddp` expects them. Gradients of gradients work.
///
/// # Errors
///
/// Tensors whose sizes do not fit, fewer than two values per channel on all ranks together, ranks
/// with other channels or layers, a lost rank.
pub fn sync_batch_norm(group: &ProcessGroup, norm: &BatchNorm<'_>) -> Result<Tensor> {
    check(norm).map_err(failed(group, OPERATION))?;
    let inputs = [Some(norm.input), norm.weight, norm.bias];
    let inputs: Vec<&Tensor> = inputs.into_iter().flatten().collect();
    let layer = Layer {
        eps: norm.eps,
        has_weight: norm.weight.is_some(),
        has_bias: norm.bias.is_some(),
        input_requires_grad: norm.input.requires_grad(),
    };
    let mut outputs = functions(
        group,
        OPERATION,
        &inputs,
        |_| forward(group, norm),
        move |group, saved, grads| layer.backward(group, saved, grads),
    )?;
    Ok(outputs.swap_remove(0))
}

/// Returns what is wrong with the sizes, and what would be right.
fn check(norm: &BatchNorm<'_>) -> Result<(), String> {
    let size = norm.input.size();
    let channels = match size[..] {
        [_, channels, ..] if channels > 0 => channels,
        _ => return Err(format!("the input is [N, C, ...] with a channel or more, not {size:?}")),
    };
    for (name, tensor) in [
        ("weight", norm.weight),
        ("bias", norm.bias),
        ("running_mean", norm.running_mean),
        ("running_var", norm.running_var),
    ] {
        let Some(tensor) = tensor else { continue };
        let size = tensor.size();
        if size != [channels] {
            return Err(format!("{name} has the size {size:?}, the input {channels} channels"));
        }
    }
    Ok(())
}

fn forward(group: &ProcessGroup, norm: &BatchNorm<'_>) -> Result<Forward> {
    let kind = norm.input.kind();
    let torch = torch_failed(group, OPERATION);
    let input = norm.input.f_to_kind(wide(kind)).map_err(&torch)?;
    let own = own_statistics(&input).map_err(&torch)?;
    let all = group.all_gather_tensor(&own)?;
    let Statistics { mean, variance, count } = Statistics::combine(&all).map_err(&torch)?;
    if count == 1.0 {
        return Err(failed(group, OPERATION)(format!(
            "expected more than 1 value per channel in training, all ranks together have 1: this \
             one's input is {:?}",
            norm.input.size()
        )));
    }
    if count > 1.0 {
        let unbiased = &variance * (count / (count - 1.0));
        update(norm.running_mean, &mean, norm.momentum).map_err(&torch)?;
        update(norm.running_var, &unbiased, norm.momentum).map_err(&torch)?;
    }
    let mean = mean.to_kind(input.kind());
    let variance = variance.to_kind(input.kind());
    let affine = [norm.weight, norm.bias].map(|tensor| tensor.map(|t| t.to_kind(input.kind())));
    let output = normalized(&input, &affine, &mean, &variance, norm.eps).map_err(&torch)?;
    let mut saved = vec![norm.input.shallow_clone(), mean, variance, Tensor::from(count)];
    saved.extend(norm.weight.map(Tensor::shallow_clone));
    Ok(Forward { outputs: vec![output.to_kind(kind)], saved })
}

/// Mean and biased variance of each channel over all ranks, and the number of its values.
struct Statistics {
    mean: Tensor,
    variance: Tensor,
    count: f64,
}

impl Statistics {
    /// Combines the ranks' [`own_statistics`], `[ranks, 2 C + 1]`.
    fn combine(all: &Tensor) -> Result<Self, TchError> {
        let channels = (all.size()[1] - 1) / 2;
        let means = all.f_narrow(1, 0, channels)?;
        let variances = all.f_narrow(1, channels, channels)?;
        let counts = all.f_narrow(1, 2 * channels, 1)?;
        let count = f64::try_from(counts.f_sum(Kind::Double)?)?;
        let weighted =
            |of: &Tensor| (of * &counts / count).f_sum_dim_intlist(0, false, Kind::Double);
        let mean = weighted(&means)?;
        let distance = means - &mean;
        let variance = weighted(&(variances + &distance * &distance))?;
        Ok(Self { mean, variance, count })
    }
}

/// Returns mean and biased variance of each channel of this rank, and the number of its values, in
/// one tensor.
fn own_statistics(input: &Tensor) -> Result<Tensor, TchError> {
    let channels = input.size()[1];
    let options = (Kind::Double, input.device());
    let count = input.numel() as i64 / channels;
    if count == 0 {
        return Tensor::f_zeros([2 * channels + 1], options);
    }
    let (mean, variance) = input.f_batch_norm_update_stats(None::<Tensor>, None, 0.0)?;
    let count = Tensor::f_full([1], count, options)?;
    Tensor::f_cat(&[mean.to_kind(Kind::Double), variance.to_kind(Kind::Double), count], 0)
}

/// Moves running statistics towards those of this batch.
fn update(running: Option<&Tensor>, now: &Tensor, momentum: f64) -> Result<(), TchError> {
    if let Some(running) = running {
        let next = running.f_to_kind(Kind::Double)? * (1.0 - momentum) + now * momentum;
        running.shallow_clone().f_copy_(&next)?;
    }
    Ok(())
}

/// Normalizes by these statistics: libtorch's batch norm as in evaluation, which takes no empty
/// batch on a GPU.
fn normalized(
    input: &Tensor,
    [weight, bias]: &[Option<Tensor>; 2],
    mean: &Tensor,
    variance: &Tensor,
    eps: f64,
) -> Result<Tensor, TchError> {
    if input.numel() == 0 {
        return input.f_zeros_like();
    }
    let (weight, bias) = (weight.as_ref(), bias.as_ref());
    let (output, ..) =
        input.f_native_batch_norm(weight, bias, Some(mean), Some(variance), false, 0.0, eps)?;
    Ok(output)
}

/// What backward knows of a layer beside the saved tensors.
struct Layer {
    eps: f64,
    has_weight: bool,
    has_bias: bool,
    input_requires_grad: bool,
}

impl Layer {
    /// Returns the gradients of the input, the weight and the bias, as far as there are these.
    fn backward(
        &self,
        group: &ProcessGroup,
        saved: &[Tensor],
        grads: &[Option<Tensor>],
    ) -> Result<Gradients> {
        let torch = torch_failed(group, OPERATION);
        let [input, mean, variance, count, weight @ ..] = saved else {
            return Err(failed(group, OPERATION)("backward without what forward saves".into()));
        };
        let weight = weight.first();
        let count = f64::try_from(count).map_err(&torch)?;
        let kind = input.kind();
        let x = input.f_to_kind(wide(kind)).map_err(&torch)?;
        let grad = match &grads[0] {
            Some(grad) => grad.f_to_kind(wide(kind)).map_err(&torch)?,
            None => x.f_zeros_like().map_err(&torch)?,
        };
        let factor = match weight {
            Some(weight) => weight.f_to_kind(wide(kind)).map_err(&torch)?,
            None => mean.f_ones_like().map_err(&torch)?,
        };
        let batch = Batch { x, grad, factor, count, eps: self.eps };
        let (of_input, of_weight, of_bias) = if grad_enabled() {
            batch.differentiable_gradients(group)?
        } else {
            batch.gradients(group, mean, variance, self.input_requires_grad)?
        };
        // libtorch makes them of their tensors' kinds.
        let mut gradients = vec![of_input];
        if self.has_weight {
            gradients.push(Some(of_weight));
        }
        if self.has_bias {
            gradients.push(Some(of_bias));
        }
        Ok(gradients)
    }
}

/// The gradients of the input, the weight and the bias.
type OfAll = (Option<Tensor>, Tensor, Tensor);

/// A rank's batch in backward.
///
/// With `n` for the normalized input and means over all ranks, the gradient of the input is
/// `factor / deviation * (grad - mean(grad) - n * mean(grad * n))`, that of the weight `sum(grad *
/// n)`, that of the bias `sum(grad)`.
struct Batch {
    x: Tensor,
    /// The gradient of the output.
    grad: Tensor,
    /// The weight, or ones.
    factor: Tensor,
    /// Values of a channel, on all ranks.
    count: f64,
    eps: f64,
}

impl Batch {
    /// Computes the gradients by libtorch's kernels for evaluation.
    fn gradients(
        &self,
        group: &ProcessGroup,
        mean: &Tensor,
        variance: &Tensor,
        of_input: bool,
    ) -> Result<OfAll> {
        let torch = torch_failed(group, OPERATION);
        let (of_weight, of_bias) = if self.x.numel() == 0 {
            (mean.zeros_like(), mean.zeros_like())
        } else {
            batch_norm_sums(&self.grad, &self.x, mean, variance, self.eps)
                .map_err(|error| failed(group, OPERATION)(error.to_string()))?
        };
        if !of_input {
            return Ok((None, of_weight, of_bias));
        }
        let mut means = Tensor::f_cat(&[&of_weight, &of_bias], 0).map_err(&torch)? / self.count;
        group.all_reduce_tensor(&mut means, ReduceOp::Sum)?;
        let of_input = self.of_input(mean, variance, &means).map_err(&torch)?;
        Ok((Some(of_input), of_weight, of_bias))
    }

    /// Returns the gradient of the input; `means` are those of `grad * n` and of `grad`.
    fn of_input(
        &self,
        mean: &Tensor,
        variance: &Tensor,
        means: &Tensor,
    ) -> Result<Tensor, TchError> {
        let scale = &self.factor * (variance + self.eps).f_rsqrt()?;
        let affine = means.f_view([2, -1])? * -&scale;
        let affine = [Some(affine.f_get(0)?), Some(affine.f_get(1)?)];
        let mut of_input = normalized(&self.x, &affine, mean, variance, self.eps)?;
        of_input.f_addcmul_(&self.grad, &self.spread(&scale)?)
    }

    /// Computes the gradients by operations that have gradients, from the input on.
    fn differentiable_gradients(&self, group: &ProcessGroup) -> Result<OfAll> {
        let torch = torch_failed(group, OPERATION);
        let mean_over_ranks =
            |sums: &Tensor| all_reduce(group, sums, ReduceOp::Sum).map(|sums| sums / self.count);
        let mean = mean_over_ranks(&self.sum(&self.x).map_err(&torch)?)?;
        let centered = &self.x - self.spread(&mean).map_err(&torch)?;
        let variance = mean_over_ranks(&self.sum(&(&centered * &centered)).map_err(&torch)?)?;
        let inverse = (variance + self.eps).f_rsqrt().map_err(&torch)?;
        let normal = centered * self.spread(&inverse).map_err(&torch)?;
        let of_weight = self.sum(&(&self.grad * &normal)).map_err(&torch)?;
        let of_bias = self.sum(&self.grad).map_err(&torch)?;
        let means = mean_over_ranks(&Tensor::f_stack(&[&of_weight, &of_bias], 0).map_err(&torch)?)?;
        let along = normal * self.spread(&means.get(0)).map_err(&torch)?;
        let across = &self.grad - self.spread(&means.get(1)).map_err(&torch)?;
        let scale = self.spread(&(&self.factor * inverse)).map_err(&torch)?;
        Ok((Some((across - along) * scale), of_weight, of_bias))
    }

    /// Returns the sum of each channel.
    fn sum(&self, of: &Tensor) -> Result<Tensor, TchError> {
        let dims: Vec<i64> = (0..self.x.dim() as i64).filter(|&dim| dim != 1).collect();
        of.f_sum_dim_intlist(&dims[..], false, of.kind())
    }

    /// Returns values of channels, for the elements of the batch.
    fn spread(&self, values: &Tensor) -> Result<Tensor, TchError> {
        let view: Vec<i64> = (0..self.x.dim()).map(|dim| if dim == 1 { -1 } else { 1 }).collect();
        values.f_view(&view[..])
    }
}

/// Returns the kind of a batch's statistics: half precision is not enough.
fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        other => other,
    }
}
