"""Cases of ddp.py: mixed precision, which torch's class has on GPUs only. There a module casts the parameters of another one."""

import gc
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn import functional as F
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import ddp_common
import flow_torch
from ddp_common import Branches, dense_gradients, gradients, table, train, words
from ddp_options import registered
from models import MODELS

WIDTH = 200  # a weight has 80,000 bytes in half precision: more than the 64 KiB from which on gradients are large


def layers(count=3):
    return ddp_common.layers(count, WIDTH)


def data():
    return ddp_common.data(WIDTH)


class Casting(nn.Module):
    """Calls a module with its parameters, and its inputs, in another type."""

    def __init__(self, module, dtype, buffer):
        super().__init__()
        self.module, self.dtype = module, dtype
        for own in module.buffers():
            if buffer is not None and own.is_floating_point():
                own.data = own.to(buffer)

    def forward(self, *given):
        casts = {name: own.to(self.dtype) for name, own in self.module.named_parameters()}
        return torch.func.functional_call(self.module, casts, tuple(x.to(self.dtype) if x.is_floating_point() else x for x in given))


def wrapped(way, module, param=torch.bfloat16, reduce=None, buffer=None, **options):
    if way.group is None:
        return way.wrap(module, mixed_precision=_MixedPrecision(param, reduce, buffer), **options)
    net, reduce = way.wrap(Casting(module, param, buffer), **options), reduce or param

    def hook(group, bucket):
        sent = bucket.buffer().mul(1 / group.size()).to(reduce)
        future = dist.all_reduce(sent, group=group, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    if reduce != torch.float32:
        net.register_comm_hook(way.group, hook)
    return net


def loss(net):
    return net(data()).float().square().mean()


def check_in_place(way, net, param, reduce):
    """Large gradients were reduced as what backward has computed, where they were."""
    if way.group is None:
        sizes = [own.numel() * param.itemsize for own in net.parameters() if own.requires_grad]
        large = sum(size for size in sizes if size >= 65536)
        expected = large if reduce in (None, param) else 0
        assert net._get_ddp_logging_data()["in_place_bytes"] == expected, "gradients were copied" if expected else "they were not"


def trained(make=layers, step=loss, steps=4, **options):
    def run(way):
        net = wrapped(way, make(), **options)
        result = train(net, step, steps)
        assert all(own.dtype == torch.float32 for own in [*net.parameters(), *gradients(net)])
        check_in_place(way, net, options.get("param", torch.bfloat16), options.get("reduce"))
        return result

    return run


def of_images(name):
    def step(net):
        x, y = torch.randn(4, *MODELS[name]()[1][1:]), torch.randint(0, 10, (4,))
        return F.cross_entropy(net(x).float(), y)

    return trained(lambda: MODELS[name]()[0], step, buffer=torch.bfloat16)


def reduced_in_float32(way):
    """What is reduced in float32 lies in shared memory as without mixed precision."""
    net = wrapped(way, layers(), reduce=torch.float32)
    result = train(net, loss)
    check_in_place(way, net, torch.float32, None)
    return result


def accumulation(way):
    """Gradients add up in float32, without and with reductions, from none and from zeros."""
    net, result = wrapped(way, layers()), []
    for step in range(6):
        if step % 3 == 0:
            net.zero_grad(set_to_none=step > 0)
        if step % 3 < 2:
            with net.no_sync():
                loss(net).backward()
        (loss(net) + loss(net)).backward()
        result += gradients(net)
    return result


def scaled(way):
    """With a scaler, whose first step overflows on one rank only, and is left out on all."""
    net, result = wrapped(way, layers(), torch.float16), []
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss(net) * (1e9 if step == 0 and dist.get_rank() == 1 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        result += [torch.tensor(scaler.get_scale()), *(own.clone() for own in net.parameters())]
    assert scaler.get_scale() == 512
    return result


def unused(way):
    net, result, rank = wrapped(way, TensorBranches(), find_unused_parameters=True), [], dist.get_rank()
    for taken in [(0, 1), (rank,), (0,), (), (1 - rank,)]:
        net.zero_grad()
        net(data(), torch.tensor(taken, dtype=torch.int64)).float().square().mean().backward()
        result += gradients(net)
    return result


class TensorBranches(Branches):
    """Takes branches that a tensor names."""

    def __init__(self):
        super().__init__()
        self.trunk, self.branches = layers(1), nn.ModuleList([layers(1), layers(1)])

    def forward(self, x, taken):
        return super().forward(x, taken.tolist())


class Shared(nn.Module):
    """Its large parameters have gradients that are one tensor, a view of one, and zeros without memory."""

    def __init__(self):
        super().__init__()
        self.own = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        a, b, c, d, e, f = self.own
        return x @ (a + b) @ (c.T + d) + e.sgn() + f.expand(2, WIDTH, WIDTH)[1] + f


def gradients_of_every_kind(way):
    """Also where parameters take part in the loss themselves, with hooks, in a second graph, and where only some are asked for."""
    net, result = wrapped(way, Shared()), []
    own = [*net.parameters()]
    seen = []

    def step(loss):
        net.zero_grad()
        loss().backward()
        result.extend(gradients(net))

    def plain():
        return net(torch.randn(WIDTH, WIDTH)).float().square().mean()

    step(plain)
    step(lambda: plain() + sum(parameter.square().sum() for parameter in own[1:4]))
    step(lambda: plain() + plain())
    hook = own[0].register_hook(lambda gradient: gradient * 2)
    step(plain)
    hook.remove()
    hook = own[2].register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    with net.no_sync():
        step(plain)
    hook.remove()
    result += seen
    with net.no_sync():
        result += torch.autograd.grad(plain(), own)
        net.zero_grad()
        plain().backward(inputs=own[:2])
        result += gradients(net)
        plain().backward(create_graph=True)
        result += gradients(net)
    net.zero_grad()
    return result + train(net, lambda _: plain())


class Tied(nn.Module):
    """Uses a parameter of another module, and one in two modules."""

    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(600, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)

    def forward(self, rows):
        assert next(self.parameters()).dtype == torch.bfloat16
        h = self.words(rows)
        for layer in self.layers:
            h = layer(h).relu()
        return h @ self.words.weight.T


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.LSTM(WIDTH, 60)

    def forward(self, x):
        return self.own(x)[0]


class Checkpointed(nn.Module):
    """Computes activations again, also those of a function that is no module."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layers, self.own, self.options = layers(), nn.Parameter(torch.randn(WIDTH, WIDTH)), {"use_reentrant": use_reentrant}

    def forward(self, x):
        x = checkpoint(self.layers[2:], self.layers[:2](x), **self.options)
        return checkpoint(lambda x: x @ self.own, x, **self.options)


def checkpointed(use_reentrant):
    def run(way):
        # Else torch's module casts for itself, and the casts are gone in backward.
        net = Checkpointed(use_reentrant) if way.group is None else Plain()
        net = wrapped(way, net)
        result = train(net, loss)
        assert all(isinstance(own, nn.Parameter) for own in net.parameters())
        return result

    return run


class Plain(Checkpointed):
    def __init__(self):
        super().__init__(False)

    def forward(self, x):
        return self.layers(x) @ self.own


def sparse(way):
    net, result = wrapped(way, nn.Sequential(table(way), nn.Linear(ddp_common.WIDTH, 1))), []
    for _ in range(3):
        net.zero_grad()
        net(words()).float().sum().backward()
        result += dense_gradients(net)
    return result


def uneven(way):
    net, result = wrapped(way, layers(), bucket_cap_mb=0.1), []
    with net.join():
        for _ in range(2 + 2 * dist.get_rank()):
            net.zero_grad()
            loss(net).backward()
    return result + train(net, loss)


def of_half_precision(way):
    """Parameters that have the type already, and others that have not."""
    net = wrapped(way, nn.Sequential(layers(1).bfloat16(), layers(1), layers(1).double()))
    result = train(net, loss)
    assert [own.dtype for own in net.parameters()][::2] == [torch.bfloat16, torch.float32, torch.float64]
    return result


def with_hook(way):
    """float32 gradients may have any hook, and optimizers in backward."""
    net = wrapped(way, layers(), reduce=torch.float32)
    registered(default_hooks.bf16_compress_hook)(net, way.group)
    return train(net, loss)


def at_any_time(way):
    """Whoever reads parameters finds float32, after a forward without a backward and after a backward that fails, too."""
    net = wrapped(way, layers())
    state = {name: own.clone() for name, own in net.state_dict().items()}

    def is_same():
        now = net.state_dict()
        return all(isinstance(own, nn.Parameter) for own in net.parameters()) and all(torch.equal(now[name], state[name]) for name in state)

    output = net(data())
    assert is_same()
    with torch.no_grad():
        output = net(data())
    assert is_same() and output.dtype == torch.bfloat16 and output.grad_fn is None
    output = net(data())
    result = torch.autograd.grad(output.sum(), [own for own in net.parameters()], retain_graph=True) if way.group is None else ()
    assert is_same() and all(gradient.dtype == torch.float32 for gradient in result)
    if way.group is None:
        other = wrapped(way, layers())
        output = other(data())
        output.register_hook(lambda _: 1 / 0)
        try:
            output.sum().backward()
            raise AssertionError("backward has not failed")
        except ZeroDivisionError:
            pass
        gc.collect()
        assert all(isinstance(own, nn.Parameter) for own in other.parameters())
        with torch.inference_mode():
            assert other(data()).dtype == torch.bfloat16
        after_a_failure(way)
    return [torch.ones(1)]


def after_a_failure(way):
    """Nothing is left of a backward that has failed after it has computed the gradients of one of two forwards."""
    net, fresh = wrapped(way, layers()), wrapped(way, layers())
    fresh.module.load_state_dict(net.module.state_dict())
    first, second = data(), data()
    output = net(first)
    output.register_hook(lambda _: 1 / 0)
    try:
        (output.float().sum() + 1000 * net(second).float().sum()).backward()
        raise AssertionError("backward has not failed")
    except ZeroDivisionError:
        pass
    net.zero_grad()
    for module in net, fresh:
        module(first).float().square().mean().backward()
    for own, expected in zip(net.parameters(), fresh.parameters()):
        assert torch.equal(own.grad, expected.grad), "a backward that has failed has left something"


class Shaped(nn.Module):
    def __init__(self, shapes, dtypes):
        super().__init__()
        self.own = nn.ParameterList(torch.randn(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes))

    def forward(self, x):
        return sum(((own * x).sum() for own in self.own if own.numel() != 1), sum(own.sum() for own in self.own))


def random_shapes(way):
    """Of parameters, of which some are empty and some are large enough to be reduced on their own."""
    choose, result = random.Random(1), []
    for _ in range(6):
        shapes = [[choose.choice([0, 1, 1, 2, 3, 181, 301]) for _ in range(choose.randint(0, 3))] for _ in range(choose.randint(1, 6))]
        dtypes = [choose.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16]) for _ in shapes]
        param = choose.choice([torch.bfloat16, torch.float16])
        reduce = choose.choice([None, torch.bfloat16, torch.float16])
        net = wrapped(way, Shaped(shapes, dtypes), param, reduce, bucket_cap_mb=0.1, static_graph=choose.random() < 0.5)
        for step in range(3):
            net.zero_grad(set_to_none=step != 1)
            net(torch.randn(1)).float().backward()
            result += gradients(net)
        assert [own.grad.dtype for own in net.parameters()] == dtypes
    return result


def over_gloo(way):
    """Torch's Reducer does it, as its own class does."""
    if way.group is None:
        options = {"process_group": dist.new_group(backend="gloo"), "mixed_precision": _MixedPrecision(torch.bfloat16)}
        net = flow_torch.DistributedDataParallel(layers(), **options)
    else:
        net = wrapped(way, layers())
    way.check_path(net, in_place=False)
    return train(net, loss)


class Written(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.own, self.write = nn.Linear(9, 9), write

    def forward(self, x):
        with torch.no_grad():
            self.write(self.own)
        return self.own(x)


def refused(way):
    """Each is an error in one line."""
    if way.group is not None:
        return [torch.ones(1)]

    def error(call):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            return str(error)

    def in_backward():
        net = layers()
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.05})
        loss(wrapped(way, net))

    def replaced(layer):
        layer.bias = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))

    delayed = layers()
    needs = "mixed_precision reduces gradients in torch.bfloat16: communication hooks, and optimizers in backward, need the parameters' own"
    for words, call in (
        (needs, lambda: wrapped(way, layers()).register_comm_hook(None, default_hooks.bf16_compress_hook)),
        (needs, lambda: wrapped(way, layers())._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)),
        (needs, in_backward),
        ("param_dtype is a floating-point type, torch.bfloat16 say, and not torch.int32", lambda: wrapped(way, layers(), torch.int32)),
        ("and 0 is torch.complex64", lambda: wrapped(way, nn.ParameterList([torch.zeros(3, dtype=torch.complex64)]))),
        ("forward has written to bias of Linear", lambda: wrapped(way, Written(lambda own: own.bias.zero_()))(torch.ones(9))),
        ("forward has written to bias of Linear", lambda: wrapped(way, Written(replaced))(torch.ones(9))),
        (
            "cannot be combined with delay_all_reduce_named_params",
            lambda: wrapped(way, delayed, delay_all_reduce_named_params=list(delayed.named_parameters()), param_to_hook_all_reduce=delayed[0].weight),
        ),
    ):
        assert words in (found := error(call) or ""), f"{words!r} is not in {found!r}"
        assert "\n" not in found
    return [torch.ones(1)]


def compiled(way):
    return train(torch.compile(wrapped(way, layers()), backend="aot_eager"), loss)


MIXED = {
    "mixed precision": trained(),
    "mixed precision, each parameter a bucket": trained(bucket_cap_mb=1e-4, gradient_as_bucket_view=True),
    "mixed precision, static graph": trained(static_graph=True, bucket_cap_mb=0.1),
    "mixed precision, float16": trained(param=torch.float16),
    "mixed precision, reduced in float16": trained(reduce=torch.float16),
    "mixed precision, reduced in float32": reduced_in_float32,
    "mixed precision, only reduced": trained(param=torch.float32, reduce=torch.bfloat16, bucket_cap_mb=0.1),
    "mixed precision, lenet": of_images("lenet"),
    "mixed precision, mobilenet": of_images("mobilenet"),
    "mixed precision, accumulation": accumulation,
    "mixed precision, scaler": scaled,
    "mixed precision, unused parameters": unused,
    "mixed precision, gradients of every kind": gradients_of_every_kind,
    "mixed precision, tied parameters": trained(Tied, lambda net: net(words()).float().square().mean()),
    "mixed precision, LSTM": trained(Recurrent),
    "mixed precision, checkpoint": checkpointed(False),
    "mixed precision, reentrant checkpoint": checkpointed(True),
    "mixed precision, sparse gradients": sparse,
    "mixed precision, uneven inputs": uneven,
    "mixed precision of half precision": of_half_precision,
    "mixed precision and a hook": with_hook,
    "mixed precision, parameters at any time": at_any_time,
    "mixed precision, random shapes": random_shapes,
    "mixed precision, over gloo": over_gloo,
    "mixed precision, refused": refused,
    "mixed precision, compiled": compiled,
}
