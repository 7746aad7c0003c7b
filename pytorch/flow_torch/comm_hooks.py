"""Communication hooks that compress gradients on CPUs, or measure them, for both classes of DistributedDataParallel and over any backend.

PyTorch has no top-k and no noise scale, and quantizes on GPUs only.
"""

import threading

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

_BYTES = 255
# Of so many elements one is a sample's.
_SAMPLED = 61


class TopKState:
    """What `top_k_hook` needs: the process group, None for the default one, and the share of elements that it sends, above 0, at most 1."""

    def __init__(self, process_group, share):
        if not 0 < share <= 1:
            raise ValueError(f"TopKState: a share of elements is above 0 and at most 1, not {share}")
        self.process_group, self.share = process_group, share
        # What each parameter's gradients have left unsent.
        self.errors = {}

    def sent(self, parameter, gradient):
        """The largest elements of a flat gradient and of what earlier ones have left, and their places."""
        # Where no rank uses the parameter, what came would be lost: this rank's gradient is zeros there.
        is_used = gradient.any()
        flat = gradient.to(wide(gradient.dtype), copy=True)
        if is_used and parameter in self.errors:
            flat += self.errors[parameter]
        count = max(1, -int(-flat.numel() * self.share // 1)) if flat.numel() else 0
        places = _largest(flat.abs(), count)
        values = flat[places]
        if is_used:
            # A gradient that overflows, of which a GradScaler makes nothing, must not come again.
            self.errors[parameter] = flat.index_fill_(0, places, 0).nan_to_num_(0, 0, 0)
        return values, places


def top_k_hook(state, bucket):
    """Sends a share of each gradient's elements, the largest by amount, at least one, with their places; the mean has those of all ranks.
    What is not sent is added to the next step's gradient (error feedback).

    Each rank receives what all ranks send: with a share `s` of 4-byte elements, that is `12 s` bytes for an element and rank.
    """
    if not isinstance(state, TopKState):
        raise TypeError(f"top_k_hook: its state is a TopKState, not {type(state).__name__}")
    buffer, parameters, group = _buffer(bucket), bucket.parameters(), _group(state.process_group)
    start, values, places = 0, [], []
    # Of complex numbers, bucket.gradients() has half: they lie here as real ones.
    lengths = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in parameters]
    for parameter, gradient in zip(parameters, buffer.split(lengths)):
        found, where = state.sent(parameter, gradient)
        values.append(found)
        places.append(where + start)
        start += gradient.numel()

    def add(gathered):
        total = torch.zeros(buffer.numel(), dtype=wide(buffer.dtype), device=buffer.device)
        # One rank after the other, so that all ranks add in the same order.
        for found, where in zip(*gathered):
            total.index_add_(0, where, found)
        return total.div_(group.size()).to(buffer.dtype)

    return _gathered(group, (torch.cat(values), torch.cat(places)), add)


def quantization_pertensor_hook(process_group, bucket):
    """Sends each element as a byte: its place between the bucket's smallest and largest element. On GPUs, PyTorch's hook of this name.

    An element is wrong by at most half a 255th of that range, on each rank.
    """
    if bucket.buffer().device.type != "cpu":
        return quantization_hooks.quantization_pertensor_hook(process_group, bucket)
    buffer = _buffer(bucket)
    return quantized_mean(_group(process_group), buffer, buffer.numel())


def quantization_perchannel_hook(process_group, bucket, bucket_size=512):
    """Does that with a range of its own for each `bucket_size` elements that follow each other. On GPUs, PyTorch's hook of this name."""
    if bucket_size < 1:
        raise ValueError(f"quantization_perchannel_hook: a channel has 1 element or more, not {bucket_size}")
    if bucket.buffer().device.type != "cpu":
        return quantization_hooks.quantization_perchannel_hook(process_group, bucket, bucket_size)
    return quantized_mean(_group(process_group), _buffer(bucket), bucket_size)


class NoiseScale:
    """Measures the gradient noise scale: the number of samples up to which a batch twice as large lets training take about half the steps.
    It is from S. McCandlish, J. Kaplan, D. Amodei, "An Empirical Model of Large-Batch Training", 2018, appendix A.1.

    Each rank's gradient is that of a small batch, and their mean that of a large one. Of a batch of `B` samples, the mean of `|gradient|^2` is
    `|G|^2 + S / B`: `G` is the true gradient, and `S` the sum of the variances of its elements in one sample. Two sizes give both, and the noise
    scale is `S / |G|^2`.

    `batch` is the number of a rank's samples in each step, over which its loss is a mean. `decay` is how much each step weighs, as a share of
    the next one: with 1 all weigh the same. In `join` the result is of no use, nor are sparse gradients part of it.
    """

    def __init__(self, batch, decay=0.99):
        if batch < 1 or not 0 < decay <= 1:
            raise ValueError(f"NoiseScale: a batch has 1 sample or more, and decay is above 0 and at most 1, not {batch} and {decay}")
        self.batch, self.decay = batch, decay
        # Of the squares of this rank's gradients, and of the squares of the means. Callbacks may run in other threads.
        self._own = self._mean = None
        self._lock = threading.Lock()

    def around(self, hook):
        """The hook that averages gradients as `hook` does, and measures. `hook` averages over all ranks."""

        def measured(state, bucket):
            if bucket.index() == 0:
                self._fade()
            own = _square(bucket.buffer())
            return hook(state, bucket).then(lambda future: self._averaged(own, future.value()))

        return measured

    def samples(self, process_group=None):
        """The noise scale of the steps so far, in samples. All ranks call this, between two steps. It is a ratio of estimates: of few steps it
        may be negative, or far off."""
        group = _group(process_group)
        ranks = group.size()
        if ranks == 1:
            raise RuntimeError("NoiseScale: one rank has no other batch to compare its own with: start two ranks or more")
        if self._mean is None:
            raise RuntimeError("NoiseScale: no gradients were averaged: call this after a step with the hook that around() returns")
        own = self._own.clone()
        dist.all_reduce(own, group=group)
        own, mean = own.item() / ranks, self._mean.item()
        small, large = self.batch, self.batch * ranks
        gradient = (large * mean - small * own) / (large - small)
        noise = (own - mean) / (1 / small - 1 / large)
        return noise / gradient if gradient else float("nan")

    def _averaged(self, own, mean):
        square = _square(mean)
        # Of a gradient that overflows, which all ranks see in its mean, a GradScaler makes nothing.
        if square.isfinite():
            with self._lock:
                self._own, self._mean = own + (self._own or 0), square + (self._mean or 0)
        return mean

    def _fade(self):
        with self._lock:
            if self._own is not None:
                self._own = self._own * self.decay
            if self._mean is not None:
                self._mean = self._mean * self.decay


def _square(gradients):
    if gradients.layout != torch.strided:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(gradients.detach(), dtype=torch.float64).square()


def quantized_mean(group, buffer, channel):
    """A future of the mean of all ranks' tensors, of one dimension, which are sent in 8 bits, each `channel` elements with their range."""
    length = buffer.numel()
    channel = min(channel, length)
    # The last element once more: zeros would widen the last channel's range.
    padding = buffer[-1:].expand(-length % channel if length else 0)
    rows = torch.cat([buffer, padding]).to(wide(buffer.dtype)).view(-1, max(channel, 1))
    # aminmax of rows is ten times as slow.
    smallest, largest = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    step = (largest - smallest) / _BYTES
    places = (rows - smallest).div_(torch.where(step > 0, step, 1)).round_().clamp_(0, _BYTES).to(torch.uint8)

    def mean(gathered):
        total = torch.zeros_like(rows)
        for found, ranges in zip(*gathered):
            total += found.to(ranges.dtype).mul_(ranges[:, 1:]).add_(ranges[:, :1])
        return total.div_(group.size()).view(-1)[:length].to(buffer.dtype)

    return _gathered(group, (places, torch.cat([smallest, step], 1)), mean)


def _largest(amounts, count):
    """The places of so many elements, the largest ones, and before these what is no number."""
    # A sample says how large they are at least, as a rule: topk takes five times as long as to find those.
    sample = amounts[::_SAMPLED]
    enough = 2 * (count // _SAMPLED) + 2
    if enough < len(sample):
        found = (~(amounts <= sample.topk(enough).values[-1])).nonzero().view(-1)
        if len(found) >= count:
            return found[amounts[found].topk(count, sorted=False).indices]
    return amounts.topk(count, sorted=False).indices


def _gathered(group, tensors, run):
    """A future of what `run` makes of the tensors of all ranks, each with one dimension more."""
    made = [tensor.new_empty(group.size(), *tensor.shape) for tensor in tensors]
    works = [dist.all_gather_into_tensor(to.flatten(0, 1), tensor, group=group, async_op=True) for to, tensor in zip(made, tensors)]
    return torch.futures.collect_all([work.get_future() for work in works]).then(lambda _: run(made))


def _group(group):
    return dist.group.WORLD if group is None else group


def _buffer(bucket):
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        raise TypeError(f"flow_torch.comm_hooks: sparse gradients are not compressed, and this one is {buffer.layout}")
    return buffer


def wide(dtype):
    """The type in which elements are sent and added up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
