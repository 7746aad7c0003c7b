"""Cases of ddp.py: communication hooks that compress gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_common import data, gradients, layers, train
from ddp_options import uneven_inputs
from flow_torch import comm_hooks

LENGTH = 3 * 512 - 200  # not a multiple of a channel's length


class Given(nn.Module):
    """Its gradients are what it is given; of complex numbers, the conjugates."""

    def __init__(self, count=1, dtype=torch.float32):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(LENGTH, dtype=dtype) for _ in range(count))

    def forward(self, *given):
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, given)).real


def trained(register, **options):
    def run(way):
        net = way.wrap(layers(), **options)
        register(net, way.group)
        way.check_path(net, in_place=False)
        return train(net)

    return run


def top_k(share):
    def register(net, group):
        state = comm_hooks.TopKState(group, share)
        net.register_comm_hook(state, comm_hooks.top_k_hook)
        return state

    return register


def quantized(hook, **options):
    return lambda net, group: net.register_comm_hook(group, lambda group, bucket: hook(group, bucket, **options))


def feedback(way):
    """What was applied, and what is left on all ranks, are what there was. Whole numbers are added up exactly."""
    net, rank = way.wrap(Given(2)), dist.get_rank()
    state, result = top_k(0.05)(net, way.group), []
    there = [torch.zeros(LENGTH) for _ in net.parameters()]
    applied = [torch.zeros(LENGTH) for _ in net.parameters()]
    for _ in range(5):
        net.zero_grad()
        given = [torch.randint(-1000, 1000, (LENGTH,)).float() * dist.get_world_size() for _ in there]
        net(*given).backward()
        result += gradients(net)
        for total, gradient in zip(there + applied, given + gradients(net)):
            total += gradient
    for parameter, given, got in zip(net.parameters(), there, applied):
        sent = got * dist.get_world_size()
        assert 5 * LENGTH // 20 <= got.count_nonzero() <= 5 * (LENGTH // 20 + 1) * dist.get_world_size()
        left = given + 0
        for tensor in (left, state.errors[parameter]):
            dist.all_reduce(tensor)
        assert torch.equal(sent + state.errors[parameter], left), f"rank {rank}: gradients were lost"
    return result


def feedback_of_unused(way):
    """A parameter that no rank uses keeps what is left of it until some rank uses it."""
    net = way.wrap(Given(2), find_unused_parameters=True)
    state, result = top_k(0.5)(net, way.group), []
    both = torch.arange(1.0, LENGTH + 1), torch.arange(1.0, LENGTH + 1)
    for given in both, both[:1], both[:1], both:
        net.zero_grad()
        before = [error.clone() for error in state.errors.values()]
        net(*given).backward()
        assert len(given) == 2 or torch.equal(before[1], state.errors[net.module.weights[1]])
        result += gradients(net)
    return result


def all_elements(dtype):
    """Top-k of all elements is the mean."""

    def run(way):
        net = way.wrap(Given(dtype=dtype))
        top_k(1)(net, way.group)
        given = (torch.arange(LENGTH) % 128).to(dtype)
        given = given * (1 + 2j) if dtype.is_complex else given
        net(given.conj() * (dist.get_rank() + 1)).backward()
        (gradient,) = net.parameters()
        gradient = gradient.grad * dist.get_world_size()
        expected = given * sum(range(1, dist.get_world_size() + 1))
        assert torch.equal(gradient, expected), f"{gradient} is not {expected}"
        return [gradient]

    return run


def quantized_exactly(hook):
    """Gradients of 256 values that are equally far apart in each channel, one with one value only, and any."""

    def run(way):
        net, world, result = way.wrap(Given()), dist.get_world_size(), []
        quantized(hook)(net, way.group)
        exact = (7 * torch.arange(LENGTH) % 256 - 100.0) * world
        for given, is_exact in (exact, True), (torch.full((LENGTH,), 0.5 * world), True), (torch.randn(LENGTH), False):
            net.zero_grad()
            net(given).backward()
            mean, worst = given / world, given.max() - given.min()
            dist.all_reduce(mean)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            (grad,) = gradients(net)
            assert torch.equal(grad, mean) if is_exact else (grad - mean).abs().max() <= 0.501 * worst / 255
            result.append(grad)
        return result

    return run


def noise_scale(hook, batch=8, decay=0.5):
    """Gradients are the hook's, and the noise scale is that of a simulation with all ranks' gradients. In torch's class nothing measures."""

    def run(way):
        net, world, result = way.wrap(layers(), bucket_cap_mb=0.1), dist.get_world_size(), []
        noise = comm_hooks.NoiseScale(batch, decay)
        is_measured = way.group is None
        net.register_comm_hook(way.group, noise.around(hook) if is_measured else hook)
        copy = layers()
        copy.load_state_dict(net.module.state_dict())
        own = mean = 0
        for _ in range(4):
            net.zero_grad()
            given = data()
            net(given).square().mean().backward()
            result += gradients(net)
            copy.zero_grad()
            copy(given).square().mean().backward()
            alone = torch.cat([gradient.double().flatten() for gradient in gradients(copy)])
            everywhere = [torch.empty_like(alone) for _ in range(world)]
            dist.all_gather(everywhere, alone)
            own = own * decay + sum(gradient.square().sum() for gradient in everywhere) / world
            mean = mean * decay + (sum(everywhere) / world).square().sum()
        if is_measured:
            expected = (own - mean) / (1 / batch - 1 / (batch * world)) / ((batch * world * mean - batch * own) / (batch * world - batch))
            tolerance = 1e-5 if hook is default_hooks.allreduce_hook else 0.05
            found = noise.samples()
            assert abs(found / expected - 1) < tolerance, f"{found} is not {expected}"
            # A step that overflows, as a GradScaler's do now and then.
            (net(data()).square().mean() * float("inf")).backward()
            assert abs(noise.samples() / found - 1) < 1e-9, f"{noise.samples()} after an overflow, and {found} before it"
        return result

    return run


def noise_of_a_known_size(way):
    """Each element's gradient has a mean of 1 and a variance of 4 in a sample."""
    net, batch = way.wrap(Given()), 4
    noise = comm_hooks.NoiseScale(batch, decay=1)
    net.register_comm_hook(way.group, noise.around(default_hooks.allreduce_hook))
    for _ in range(100):
        net(1 + 2 * torch.randn(LENGTH) / batch**0.5).backward()
        net.zero_grad()
    assert 3.7 < noise.samples(way.group) < 4.3
    return [torch.ones(1)]


def wrong_arguments(way):
    """Each is an error, at once or in backward."""

    def refused(call):
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            return str(error)

    def backward(register, is_sparse=False):
        net = way.wrap(nn.Embedding(9, 9, sparse=is_sparse))
        register(net)
        net(torch.arange(3)).sum().backward()

    hook = comm_hooks.quantization_perchannel_hook
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    errors = {
        "above 0 and at most 1, not 0": lambda: comm_hooks.TopKState(way.group, 0),
        "above 0 and at most 1, not 1.5": lambda: comm_hooks.TopKState(way.group, 1.5),
        "its state is a TopKState, not NoneType": lambda: backward(lambda net: net.register_comm_hook(None, comm_hooks.top_k_hook)),
        "a channel has 1 element or more, not 0": lambda: backward(lambda net: quantized(hook, bucket_size=0)(net, way.group)),
        "a batch has 1 sample or more": lambda: comm_hooks.NoiseScale(0),
        "at most 1, not 9 and 2": lambda: comm_hooks.NoiseScale(9, 2),
        "no gradients were averaged": lambda: comm_hooks.NoiseScale(9).samples(way.group),
        "one rank has no other batch": lambda: comm_hooks.NoiseScale(9).samples(alone),
        "sparse gradients are not compressed": lambda: backward(lambda net: quantized(hook)(net, way.group), is_sparse=True),
    }
    for words, call in errors.items():
        assert words in (found := refused(call) or ""), f"{words!r} is not in {found!r}"
    return [torch.ones(1)]


TENSOR, CHANNEL = comm_hooks.quantization_pertensor_hook, comm_hooks.quantization_perchannel_hook
COMPRESSED = {
    "top-k": trained(top_k(0.01), bucket_cap_mb=0.1),
    "top-k, bucket views": trained(top_k(0.01), bucket_cap_mb=0.1, gradient_as_bucket_view=True),
    "top-k, error feedback": feedback,
    "top-k, unused parameters": feedback_of_unused,
    "top-k of all elements": all_elements(torch.bfloat16),
    "top-k of complex numbers": all_elements(torch.complex64),
    "8 bits per tensor": trained(quantized(TENSOR), bucket_cap_mb=0.1),
    "8 bits per channel": trained(quantized(CHANNEL, bucket_size=100), static_graph=True),
    "8 bits per tensor, exact": quantized_exactly(TENSOR),
    "8 bits per channel, exact": quantized_exactly(CHANNEL),
    "uneven inputs, top-k": uneven_inputs(top_k(0.01), in_place=False),
    "uneven inputs, 8 bits per channel": uneven_inputs(quantized(CHANNEL), in_place=False),
    "noise scale": noise_scale(default_hooks.allreduce_hook),
    "noise scale around 8 bits": noise_scale(CHANNEL),
    "noise of a known size": noise_of_a_known_size,
    "wrong arguments of hooks": wrong_arguments,
}
