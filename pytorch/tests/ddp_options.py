"""Cases of ddp.py: communication hooks, uneven inputs, hooks that share buffers, and random options."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation as BufferHookLocation

from ddp_common import WIDTH, Branches, data, dense_gradients, gradients, layers, table, train, words

def uneven_inputs(register=lambda net, group: None, in_place=True, **options):
    def run(way):
        net, result = way.wrap(layers(), bucket_cap_mb=0.1, **options), []
        register(net, way.group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for uniform in (True, False):
            result += train(net, optimizer=optimizer, steps=2)
            with net.join(divide_by_initial_world_size=uniform):
                for step in range(3 + 2 * dist.get_rank()):
                    optimizer.zero_grad()
                    if step == 1:
                        with net.no_sync():
                            net(data()).square().mean().backward()
                    net(data()).square().mean().backward()
                    optimizer.step()
        way.check_path(net, in_place)
        return result + train(net, optimizer=optimizer)

    return run


def uneven_from_the_start(way):
    """Some ranks have no input at all, and the others other branches, where torch's class makes gradients of zeros now and then."""
    net, result, rank = way.wrap(Branches(), find_unused_parameters=True), [], dist.get_rank()
    with net.join():
        for step in range(3 * rank):
            net.zero_grad()
            net(data(), (step % 2,)).square().mean().backward()
            result += [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]
    way.check_path(net, in_place=True)
    return result + train(net, lambda net: net(data(), (0, 1)).square().mean())


def uneven_inputs_of_two_modules(way):
    """Ranks that have joined are counted for the first: the other divides by the number of all."""
    nets, result = [way.wrap(layers(count)) for count in (1, 2)], []
    with Join(nets, divide_by_initial_world_size=False):
        for _ in range(1 + 2 * dist.get_rank()):
            for net in nets:
                net.zero_grad()
                net(data()).square().mean().backward()
                result += gradients(net)
    return result


def uneven_sparse_gradients(way):
    net, result = way.wrap(nn.Sequential(table(way), nn.Linear(WIDTH, 1))), []
    with net.join(divide_by_initial_world_size=False):
        for _ in range(1 + 2 * dist.get_rank()):
            net.zero_grad()
            net(words()).sum().backward()
            result += dense_gradients(net)
    return result


def forwards_without_backward(way):
    """Of which the last is followed by another in join()'s context."""
    net = way.wrap(layers(), bucket_cap_mb=0.1)
    results = []
    for _ in range(2):
        results += train(net)
        net(data())
        with net.join():
            for _ in range(3 * dist.get_rank()):
                net.zero_grad()
                net(data()).square().mean().backward()
        results += gradients(net)
    return results


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.norm = layers(1), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(self.layers(x))


def buffer_hook_before_forward(way):
    """Averages running means before the forward."""

    def average(group, buffers):
        for mean in means_of(buffers):
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size()

    return hooked_buffers(way, average, BufferHookLocation.PRE_FORWARD)


def buffer_hook_after_forward(way):
    """Averages them while backward runs."""

    def averaged(group, buffers):
        def write(future, mean):
            mean.data = future.value()[0] / dist.get_world_size()
            return mean

        works = [(dist.all_reduce(mean.clone(), group=group, async_op=True), mean) for mean in means_of(buffers)]
        return [work.get_future().then(lambda done, mean=mean: write(done, mean)) for work, mean in works]

    return hooked_buffers(way, averaged, BufferHookLocation.POST_FORWARD)


def means_of(buffers):
    return [buffer for name, buffer in buffers.items() if name.endswith("running_mean")]


def hooked_buffers(way, hook, location):
    net = way.wrap(Normed())
    net._register_buffer_comm_hook(net.process_group, hook, location)
    result = train(net)
    way.check_path(net, in_place=True)
    return result


def communication_hook(register, in_place=True, make=layers, **options):
    def run(way):
        net = way.wrap(make(), **options)
        register(net, way.group)
        result = train(net)
        way.check_path(net, in_place)
        return result

    return run


def registered(hook):
    # torch's class wants NCCL for bfloat16.
    def register(net, group):
        if group is None:
            net.register_comm_hook(None, hook)
        else:
            dist._register_comm_hook(net.reducer, group, hook)

    return register


def builtin(name):
    return lambda net, _: net._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def of_two_types():
    return nn.Sequential(*layers(1), Cast(torch.float16), *layers(1).half(), Cast(torch.float32))


def hook_after_steps(register):
    """From the third step on, and with parameters that a rank does not use."""

    def run(way):
        net, rank, result = way.wrap(Branches(), find_unused_parameters=True, gradient_as_bucket_view=True), dist.get_rank(), []
        for step, taken in enumerate([(0, 1), (rank,), (0,), (), (1,), (1 - rank,)]):
            if step == 2:
                register(net, way.group)
            net.zero_grad()
            net(data(), taken).square().mean().backward()
            result += gradients(net)
        way.check_path(net, in_place=True)
        return result

    return run


def hook_before_backward(register, in_place, first=1, **options):
    """Registered after a forward, and used in its backward."""

    def run(way):
        net, result = way.wrap(layers(), **options), []
        for step in range(4):
            net.zero_grad()
            loss = net(data()).square().mean()
            if step == first:
                register(net, way.group)
            loss.backward()
            result += gradients(net)
        way.check_path(net, in_place)
        return result

    return run


def power_sgd_after_steps(way):
    """Torch's Reducer learns then what the static graph is."""
    net = way.wrap(layers(), static_graph=True, gradient_as_bucket_view=True)
    result = train(net)
    power_sgd(net, way.group)
    way.check_path(net, in_place=False)
    return result + train(net, steps=1) + train(net)


def power_sgd(net, group):
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def local_sgd(ranks=1, sums=True, start=2):
    """post_localSGD_hook, which from some step on sums gradients up in groups of so many ranks, or not at all."""

    def register(net, group):
        state = post_localSGD_hook.PostLocalSGDState(group, subgroup_of(ranks, group), start, sums)
        net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        return state

    return register


def subgroup_of(ranks, group):
    return dist.new_subgroups(ranks, backend="flow" if group is None else dist.get_backend(group))[0]


def counted_local_sgd(way):
    """The hook's state counts as in torch's class, and may be changed."""
    net, result = way.wrap(layers(), static_graph=True), []
    state = local_sgd()(net, way.group)
    for step in range(8):
        if step == 4:
            state.iter = 1
        if step == 6:
            state.post_local_gradient_allreduce = False
        net.zero_grad()
        net(data()).square().mean().backward()
        result += [torch.tensor(state.iter), *gradients(net)]
    way.check_path(net, in_place=True)
    return result


def averaged_models(way):
    """Ranks train alone, and have the mean of their models every other step."""
    net = way.wrap(layers())
    local_sgd(sums=False)(net, way.group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    averager = PeriodicModelAverager(period=2, warmup_steps=2, process_group=way.group)
    optimizer, result = PostLocalSGDOptimizer(optimizer, averager), []
    for _ in range(6):
        optimizer.zero_grad()
        net(data()).square().mean().backward()
        optimizer.step()
        result += [p.clone() for p in net.parameters()]
    way.check_path(net, in_place=True)
    return result


def local_sgd_elsewhere(way):
    """With a subgroup whose backend is another one."""
    net = way.wrap(layers())
    state = post_localSGD_hook.PostLocalSGDState(way.group, subgroup_of(1, dist.new_group(backend="gloo")), 2)
    net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    way.check_path(net, in_place=True)
    result = train(net)
    way.check_path(net, in_place=False)
    return result


def optimizer_in_backward(**options):
    """torch's class, which has it on GPUs only, steps after backward. One parameter has two optimizers."""

    def run(way):
        is_ours, net, result = way.group is None, layers(), []
        parameters = list(net.parameters())
        if is_ours:
            _apply_optimizer_in_backward(torch.optim.SGD, parameters[1:], {"lr": 0.05, "momentum": 0.9})
            _apply_optimizer_in_backward(torch.optim.SGD, parameters[2:3], {"lr": 0.02})
        net, optimizer = way.wrap(net, **options), torch.optim.SGD(parameters[1:], lr=0.05, momentum=0.9)
        second = torch.optim.SGD(parameters[2:3], lr=0.02)
        for step in range(5):
            if step == 3:
                with net.no_sync():
                    net(data()).square().mean().backward()
            net(data()).square().mean().backward()
            if not is_ours:
                optimizer.step()
                second.step()
                optimizer.zero_grad()
            result += gradients(net)
            parameters[0].grad = None
        way.check_path(net, in_place=True)
        return result + parameters

    return run


def delayed_all_reduce(way):
    """Of all layers but the first, when the gradient of the first is there. In torch's class they are reduced as others."""
    net, options = layers(), {}
    if way.group is None:
        delayed = [(name, p) for name, p in net.named_parameters() if not name.startswith("0.")]
        options = {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": net[0].weight}
    net = way.wrap(net, **options)
    way.check_path(net, in_place=True)
    return train(net) + train(net, to_none=False)


def zeros_without_memory(way):
    """The gradient of a sign is such zeros: of one parameter on all ranks, of the other on rank 0 only."""

    class Signs(nn.Module):
        def __init__(self):
            super().__init__()
            self.sign, self.mixed, self.small = (nn.Parameter(torch.ones(*size)) for size in ((WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,)))

        def forward(self):
            return self.sign.sgn() + (self.mixed.sgn() if dist.get_rank() == 0 else self.mixed * 4) + self.small.sgn()

    net, result = way.wrap(Signs(), gradient_as_bucket_view=True), []
    for step in range(4):
        net.zero_grad(set_to_none=step != 2)
        net().sum().backward()
        result += gradients(net)
    way.check_path(net, in_place=True)
    return result


def sharded_optimizer(hook=None, **options):
    """ZeroRedundancyOptimizer. With a hook it steps in backward, from the third one on. In torch's class each rank has all of it."""

    def run(way):
        net = way.wrap(layers(), bucket_cap_mb=0.1)
        if way.group is not None:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        else:
            steps_in_backward = {"overlap_with_ddp": True} if hook else {}
            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9, **steps_in_backward)
            if hook:
                net.register_comm_hook(None, hook(default_hooks.allreduce_hook, net, optimizer, **options))
        for step in range(5):
            optimizer.zero_grad()
            net(data()).square().mean().backward()
            if step >= 2 and not (hook and way.group is None):
                optimizer.step()
        way.check_path(net, in_place=not hook)
        return list(net.parameters())

    return run


HOOKS = {
    "fp16": registered(default_hooks.fp16_compress_hook),
    "bf16": registered(default_hooks.bf16_compress_hook),
    "allreduce": registered(default_hooks.allreduce_hook),
    "builtin fp16": builtin("FP16_COMPRESS"),
    "post-local SGD": local_sgd(),
    "post-local SGD without sums": local_sgd(sums=False),
    "none": lambda net, group: None,
}


KINDS = ["large", "large", "small", "frozen", "table", "bfloat16", "float16", "float64"]


class Part(nn.Module):
    """Adds to its input what a layer makes of that, or the rows of a table."""

    def __init__(self, way, kind):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        if kind == "small":
            self.layer = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH))
        elif kind == "frozen":
            self.layer.weight.requires_grad_(False)
        elif kind == "table":
            self.layer = table(way)
        elif kind in ("bfloat16", "float16", "float64"):
            self.layer.to(getattr(torch, kind))
        self.dtype = next(self.parameters()).dtype

    def forward(self, h, rows):
        is_table = isinstance(self.layer, nn.Embedding)
        return h + self.layer(rows if is_table else h.to(self.dtype)).to(h.dtype)


class Parts(nn.Module):
    def __init__(self, way, kinds):
        super().__init__()
        self.parts = nn.ModuleList(Part(way, kind) for kind in kinds)

    def forward(self, h, rows, taken):
        for index in taken:
            h = self.parts[index](h, rows)
        return h


def random_options(way):
    """Random modules with random options: FLOW_TEST_SEEDS, 0..10 if it is not set."""
    first, last = map(int, os.environ.get("FLOW_TEST_SEEDS", "0..10").split(".."))
    result = []
    for seed in range(first, last):
        torch.manual_seed(seed)
        result += trained_at_random(way, random.Random(seed), random.Random(f"{seed}, {dist.get_rank()}"))
    return result


def trained_at_random(way, choose, choose_alone):
    """`choose` makes the choices that are the same on all ranks."""
    kinds = ["large", *choose.choices(KINDS, k=choose.randint(0, 5))]
    finds_unused, is_static, to_none = (choose.random() < 0.5 for _ in range(3))
    # The first backward of a static graph is left to torch's class. A table that is not used is an error there, and two tables are divided
    # by the number of ranks twice, as they share their gradient.
    if is_static and "table" in kinds:
        finds_unused, kinds = False, [*(kind for kind in kinds if kind != "table"), "table"]
    options = {"static_graph": is_static, "find_unused_parameters": finds_unused, "bucket_cap_mb": choose.choice([0.05, 0.3, 25])}
    options["gradient_as_bucket_view"] = choose.random() < 0.5
    net = way.wrap(Parts(way, kinds), **options)
    HOOKS[choose.choice(list(HOOKS))](net, way.group)
    others, result = range(1, len(kinds)), []

    def some():
        return [0, *(index for index in others if not finds_unused or choose_alone.random() < 0.7)]

    always = some()

    def step():
        net.zero_grad(set_to_none=to_none)
        net(data(), words(), always if is_static else some()).square().mean().backward()
        # Where some ranks have joined torch's class makes gradients of zeros for parameters that no rank uses, now and then.
        result.extend(torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone() for p in net.parameters())

    for _ in range(3):
        step()
    if not is_static and choose.random() < 0.5:
        with net.join(divide_by_initial_world_size=choose.random() < 0.5):
            for _ in range(choose_alone.randint(0, 3)):
                step()
        step()
    way.check_path(net, in_place=True)
    return result


def manual_finalization(way):
    """From some step on, and no more after some."""
    net, result = way.wrap(layers(), bucket_cap_mb=0.1, gradient_as_bucket_view=True), []
    for step in range(6):
        net.require_manual_backward_finalization = is_manual = 2 <= step < 4
        way.check_path(net, in_place=step < 2)
        net.zero_grad()
        net(data()).square().mean().backward()
        if is_manual:
            net.finalize_backward()
        result += gradients(net)
    return result


OPTIONS = {
    "uneven inputs": uneven_inputs(),
    "uneven inputs, static graph": uneven_inputs(static_graph=True),
    "uneven inputs, unused parameters are looked for": uneven_inputs(find_unused_parameters=True),
    "uneven inputs, fp16 hook": uneven_inputs(registered(default_hooks.fp16_compress_hook)),
    "uneven from the start": uneven_from_the_start,
    "uneven inputs of two modules": uneven_inputs_of_two_modules,
    "uneven, sparse gradients": uneven_sparse_gradients,
    "buffer hook before forward": buffer_hook_before_forward,
    "buffer hook after forward": buffer_hook_after_forward,
    "forwards without backward": forwards_without_backward,
    "fp16 hook": communication_hook(registered(default_hooks.fp16_compress_hook)),
    "fp16 hook, static graph": communication_hook(registered(default_hooks.fp16_compress_hook), static_graph=True),
    "fp16 hook, two types": communication_hook(registered(default_hooks.fp16_compress_hook), make=of_two_types),
    "bf16 hook": communication_hook(registered(default_hooks.bf16_compress_hook), bucket_cap_mb=0.1),
    "allreduce hook": communication_hook(registered(default_hooks.allreduce_hook)),
    "hook after steps": hook_after_steps(registered(default_hooks.fp16_compress_hook)),
    "hook before backward": hook_before_backward(registered(default_hooks.fp16_compress_hook), in_place=True),
    "power SGD before backward": hook_before_backward(power_sgd, in_place=False, gradient_as_bucket_view=True),
    "power SGD before the first backward": hook_before_backward(power_sgd, False, 0, static_graph=True, gradient_as_bucket_view=True),
    "power SGD after steps": power_sgd_after_steps,
    "builtin hook": communication_hook(builtin("ALLREDUCE"), gradient_as_bucket_view=True),
    "builtin fp16 hook": communication_hook(builtin("FP16_COMPRESS"), bucket_cap_mb=0.1),
    "post-local SGD": communication_hook(local_sgd()),
    "post-local SGD, pairs": communication_hook(local_sgd(2), bucket_cap_mb=0.1),
    "post-local SGD without sums": communication_hook(local_sgd(sums=False)),
    "post-local SGD, static graph": counted_local_sgd,
    "post-local SGD after steps": hook_after_steps(local_sgd()),
    "post-local SGD without sums after steps": hook_after_steps(local_sgd(sums=False)),
    "post-local SGD before backward": hook_before_backward(local_sgd(start=1), in_place=True),
    "post-local SGD, averaged models": averaged_models,
    "post-local SGD elsewhere": local_sgd_elsewhere,
    "uneven inputs, post-local SGD": uneven_inputs(local_sgd(2, start=5)),
    # gloo's threads wait for each other if there are more buckets
    "power SGD": communication_hook(power_sgd, in_place=False, static_graph=True),
    "bucket_cap_mb_list": lambda way: train(way.wrap(layers(6), bucket_cap_mb_list=[0.05, 0.2, 0.1])),
    "delayed all-reduce": delayed_all_reduce,
    "zeros without memory": zeros_without_memory,
    "ZeroRedundancyOptimizer": sharded_optimizer(),
    "ZeroRedundancyOptimizer in backward": sharded_optimizer(hook_with_zero_step),
    "ZeroRedundancyOptimizer in backward, shards of buckets": sharded_optimizer(hook_with_zero_step, shard_buckets=True),
    "ZeroRedundancyOptimizer in backward, interleaved": sharded_optimizer(hook_with_zero_step_interleaved),
    "optimizer in backward": optimizer_in_backward(),
    "optimizer in backward, static graph": optimizer_in_backward(static_graph=True, bucket_cap_mb=0.1),
    "optimizer in backward, bucket views": optimizer_in_backward(gradient_as_bucket_view=True, find_unused_parameters=True),
    "random options": random_options,
    "manual finalization": manual_finalization,
}

# Cases that this PyTorch cannot run, and why.
SKIPPED = {}
if not hasattr(DistributedDataParallel, "require_manual_backward_finalization"):  # since PyTorch 2.15
    SKIPPED["manual finalization"] = f"PyTorch {torch.__version__} has no require_manual_backward_finalization"
