"""SyncBatchNorm on CPUs, where PyTorch has none."""

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

_HALF = torch.float16, torch.bfloat16


class SyncBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm, with the same arguments and results, on CPUs too.

    There gradients of gradients work as well, over any backend. On other devices it does what torch's class does. It is no subclass of
    that, which torch's DistributedDataParallel refuses on CPUs. See docs/torch.md.
    """

    def __init__(
        self, num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True, process_group=None, device=None, dtype=None
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_group = process_group

    _check_input_dim = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):
        """Makes all BatchNorm*D layers of a module layers of this class, as torch's function does of its own."""
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        for layer in converted.modules():
            if isinstance(layer, nn.SyncBatchNorm):
                layer.__class__ = cls
        return converted

    def forward(self, input):
        if input.device.type != "cpu" or not self.training or not dist.is_initialized():
            return nn.SyncBatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = self.process_group or dist.group.WORLD
        running = (None, None)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats:
            running = self.running_mean, self.running_var
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / self.num_batches_tracked.item()
        if dist.get_world_size(group) == 1:
            return F.batch_norm(input, *running, self.weight, self.bias, True, factor, self.eps)
        return _Normalize.apply(input, self.weight, self.bias, running, factor, self.eps, group)


def _wide(tensor):
    """In single precision, if it was in half."""
    return tensor.float() if tensor.dtype in _HALF else tensor


def _spread(values, like):
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _sum(values):
    return values.sum([dim for dim in range(values.dim()) if dim != 1])


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(context, input, weight, bias, running, factor, eps, group):
        x = _wide(input)
        mean, variance, count = _statistics(x, group)
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()} and none on other ranks")
        if count > 1:
            for kept, now in zip(running, (mean, variance * (count / (count - 1)))):
                if kept is not None:
                    kept.copy_(kept.double() * (1 - factor) + now * factor)
        mean, variance = mean.to(x.dtype), variance.to(x.dtype)
        affine = [None if values is None else _wide(values) for values in (weight, bias)]
        context.save_for_backward(input, weight, mean, variance)
        context.count, context.eps, context.group = count, eps, group
        context.has_bias = bias is not None
        return F.batch_norm(x, mean, variance, *affine, False, 0.0, eps).to(input.dtype)

    @staticmethod
    def backward(context, grad):
        input, weight, mean, variance = context.saved_tensors
        x, grad = _wide(input), _wide(grad)
        factor = torch.ones_like(mean) if weight is None else _wide(weight)
        gradients = _gradients_with_a_graph if torch.is_grad_enabled() else _gradients
        of_input, of_weight, of_bias = gradients(context, x, grad, factor, mean, variance)
        if of_input is not None:
            of_input = of_input.to(input.dtype)
        of_weight = None if weight is None else of_weight.to(weight.dtype)
        return of_input, of_weight, of_bias if context.has_bias else None, None, None, None, None


def _gradients(context, x, grad, factor, mean, variance):
    """Of the input, the weight and the bias, by torch's kernels for evaluation."""
    if x.numel() == 0:
        of_weight, of_bias = torch.zeros_like(mean), torch.zeros_like(mean)
    else:
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, None, mean, variance, None, None, False, context.eps, [False, True, True]
        )
    if not context.needs_input_grad[0]:
        return None, of_weight, of_bias
    sums = torch.stack([of_weight, of_bias])
    dist.all_reduce(sums, group=context.group)
    scale = factor * (variance + context.eps).rsqrt()
    from_product, from_grad = -scale * sums / context.count
    of_input = F.batch_norm(x, mean, variance, from_product, from_grad, False, 0.0, context.eps)
    return of_input.addcmul_(grad, _spread(scale, x)), of_weight, of_bias


def _gradients_with_a_graph(context, x, grad, factor, *_):
    """The same, by operations that have gradients, from the input on."""

    def mean_over_ranks(sums):
        return _AllReduce.apply(sums, context.group) / context.count

    centered = x - _spread(mean_over_ranks(_sum(x)), x)
    inverse = (mean_over_ranks(_sum(centered * centered)) + context.eps).rsqrt()
    normal = centered * _spread(inverse, x)
    of_weight, of_bias = _sum(grad * normal), _sum(grad)
    of_product, of_grad = mean_over_ranks(torch.stack([of_weight, of_bias]))
    across = grad - _spread(of_grad, x) - normal * _spread(of_product, x)
    return across * _spread(factor * inverse, x), of_weight, of_bias


def _statistics(x, group):
    """Mean and biased variance of each channel over all ranks, and the number of its values."""
    channels = x.size(1)
    own = torch.zeros(2 * channels + 1, dtype=torch.float64)
    if x.numel() > 0:
        own[:channels], own[channels:-1] = torch.batch_norm_update_stats(x, None, None, 0.0)
        own[-1] = x.numel() // channels
    ranks = dist.get_world_size(group)
    all = torch.empty(ranks, own.numel(), dtype=own.dtype)
    dist.all_gather_into_tensor(all.view(-1), own, group)
    means, variances, counts = all.split([channels, channels, 1], 1)
    count = counts.sum().item()
    mean = (means * counts).sum(0) / count
    variance = ((variances + (means - mean) ** 2) * counts).sum(0) / count
    return mean, variance, count


class _AllReduce(torch.autograd.Function):
    """The sum over all ranks. Its gradient is that of the sum of all ranks' losses."""

    @staticmethod
    def forward(context, tensor, group):
        context.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context, grad):
        return _AllReduce.apply(grad.contiguous(), context.group), None
