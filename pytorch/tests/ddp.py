"""flow_torch.DistributedDataParallel trains to the same bits as torch's class does. Two ranks; each prints a line for each case.

usage: ddp.py [CASE...]     more ranks are for cases whose numbers are rounded alike: "many buckets", "uneven inputs" and others
"""

import copy
import io
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn import parallel
from torch.utils.checkpoint import checkpoint

import flow_torch
from ddp_common import WIDTH, Branches, Flow, Torch, data, dense_gradients, gradients, layers, table, train, words
from ddp_diloco import DILOCO
from ddp_hooks import COMPRESSED
from ddp_options import OPTIONS, SKIPPED, local_sgd, registered

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "peers"))
from ddp_mixed import MIXED
from models import MODELS


def model(name, steps, **options):
    def run(way):
        net, shape = MODELS[name]()
        net = way.wrap(net, **options)

        def step(net):
            x, y = torch.randn(4, *shape[1:]), torch.randint(0, 10, (4,))
            return F.cross_entropy(net(x), y)

        result = train(net, step, steps)
        if way.group is None:
            large = sum(p.nbytes for p in net.parameters() if p.nbytes >= 65536)
            assert net._get_ddp_logging_data()["in_place_bytes"] == large, "gradients were copied"
        return result

    return run


def plain(**options):
    return lambda way: train(way.wrap(layers(), bucket_cap_mb=0.1, **options))


def zeroed(way):
    return train(way.wrap(layers(), gradient_as_bucket_view=True), to_none=False)


def unused_parameters(way):
    net, rank = way.wrap(Branches(), find_unused_parameters=True), dist.get_rank()
    optimizer, result = torch.optim.SGD(net.parameters(), lr=0.05), []
    for step, taken in enumerate([(0, 1), (rank,), (0,), (), (1,), (1 - rank,)]):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        net(data(), taken).square().mean().backward()
        result += gradients(net)
        optimizer.step()
    return result


def skipped_unused_parameters(way):
    """Each parameter is a bucket, so that there are some that no rank uses."""
    net = skipping(way, bucket_cap_mb=1e-4)
    result = train(net, lambda net: net(data(), (1,)).square().mean())
    if way.group is None:
        skipped = {name for bucket in net.stats().buckets if bucket.bytes == 0 for name in bucket.parameters}
        assert skipped == {"branches.0.0.weight", "branches.0.0.bias"}
    return result


def skipped_unused_parameters_in_join(way):
    """Where torch's class fails if it skips a bucket, and makes gradients of zeros now and then."""
    net = skipping(way, bucket_cap_mb=1e-4 if way.group is None else 0.1)
    with net.join():
        for _ in range(3 * dist.get_rank()):
            net.zero_grad()
            net(data(), (1,)).square().mean().backward()
    way.check_path(net, in_place=True)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]


def skipping(way, **options):
    return way.wrap(Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=True, **options)


def unused_in_a_static_graph(way):
    net = way.wrap(Branches(), static_graph=True)
    return train(net, lambda net: net(data(), (dist.get_rank(),)).square().mean())


def outputs_that_are_not_used(way):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = layers(1), layers(1)

        def forward(self, x):
            return {"first": self.first(x), "second": [self.second(x)]}

    net = way.wrap(Two(), find_unused_parameters=True)
    return train(net, lambda net: net(data())["first"].square().mean())


def used_several_times(way):
    shared, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = shared.weight
    return train(way.wrap(nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), last)))


def checkpoints(reentrant, **options):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = layers(1), layers(2)

        def forward(self, x):
            x = self.first(x)
            for _ in range(2 if options else 1):
                x = checkpoint(self.second, x, use_reentrant=reentrant)
            return x

    return lambda way: train(way.wrap(Checkpointed(), **options))


def checkpointed_as_a_whole(**options):
    """Its backward, and what it does at its end, runs within a node of another backward."""

    def loss(net):
        return checkpoint(net, data().requires_grad_(), use_reentrant=True).square().mean()

    return lambda way: train(way.wrap(layers(2), **options), loss)


def accumulation(way):
    net, result = way.wrap(layers()), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        with net.no_sync():
            for _ in range(2):
                net(data()).square().mean().backward()
        result += gradients(net)
        net(data()).square().mean().backward()
        result += gradients(net)
        optimizer.step()
    return result


def accumulation_over_unused(way):
    net, result = way.wrap(Branches(), find_unused_parameters=True), []
    for _ in range(2):
        net.zero_grad()
        with net.no_sync():
            net(data(), (dist.get_rank(),)).sum().backward()
        net(data(), ()).sum().backward()
        result += gradients(net)
    return result


def several_backwards(way):
    """Only the first after a forward is reduced."""
    net, result = way.wrap(layers()), []
    for _ in range(3):
        net.zero_grad()
        loss = net(data()).square().mean()
        loss.backward(retain_graph=True)
        result += gradients(net)
        loss.backward()
        result += gradients(net)
        first, second = net(data()).mean(), net(data()).square().mean()
        (first + second).backward()
        result += gradients(net)
    return result


def heads(way):
    """One reduction in two backwards: each has gradients that the other has not."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = layers(1), layers(1)

        def forward(self, x):
            return self.first(x), self.second(x)

    net, result = way.wrap(Heads()), []
    for _ in range(3):
        net.zero_grad()
        first, second = net(data())
        first.mean().backward()
        second.mean().backward()
        result += gradients(net)
    return result


def double_backward(way):
    """A gradient penalty."""

    def step(net):
        x = data().requires_grad_()
        out = net(x).square().mean()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return out + grad.square().sum()

    net = way.wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    return train(net, step)


def sparse_gradients(register=lambda net, group: None):
    def run(way):
        net = nn.Sequential(nn.Embedding(600, WIDTH, sparse=True), nn.Flatten(), nn.Linear(4 * WIDTH, WIDTH))
        net, result = way.wrap(net), []
        register(net, way.group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            net(torch.randint(0, 600, (8, 4))).square().mean().backward()
            result += [p.grad.to_dense() for p in net.parameters()]
            optimizer.step()
        way.check_path(net, in_place=True)
        return result + list(net.state_dict().values())

    return run


def sparse_gradients_of_some_ranks(way):
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables, self.last = nn.ModuleList(table(way) for _ in range(2)), nn.Linear(WIDTH, 1)

        def forward(self, x, taken):
            return self.last(sum(self.tables[index](x) for index in taken))

    net, rank, result = way.wrap(Tables(), find_unused_parameters=True), dist.get_rank(), []
    for taken in [(0, 1), (rank,), (1,), (1 - rank,)]:
        net.zero_grad()
        net(words(), taken).sum().backward()
        result += dense_gradients(net)
    return result


def types(way):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(layers(1, 300).to(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.half))

        def forward(self, x):
            for part in self.parts:
                x = part(x.to(part[0].weight.dtype))
            return x

    return train(way.wrap(Mixed()), lambda net: net(data(300)).float().square().mean())


def complex_numbers(way):
    """PyTorch's class over gloo reduces none: both parts of each are the same."""

    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            numbers = [torch.randn(WIDTH, WIDTH, dtype=torch.cfloat), torch.randn(1, dtype=torch.cdouble), torch.randn(0, dtype=torch.cfloat)]
            self.numbers = nn.ParameterList(x if way.group is None else torch.view_as_real(x) for x in numbers)

        def forward(self, x):
            large, small, none = (p if p.is_complex() else torch.view_as_complex(p) for p in self.numbers)
            return (x * large.conj() @ large.T).abs().sum() + (small * small.conj()).abs().sum() + none.abs().sum()

    net, result = way.wrap(Complex()), []
    for _ in range(3):
        net.zero_grad()
        net(torch.randn(())).backward()
        result += [torch.view_as_real(p.grad).clone() if p.is_complex() else p.grad.clone() for p in net.parameters()]
    way.check_path(net, in_place=True)
    return result


def layouts(way):
    net = nn.Sequential(nn.Conv2d(16, 128, 3, groups=2), nn.Conv2d(128, 40, 3)).to(memory_format=torch.channels_last)
    net = way.wrap(net)
    result = train(net, lambda net: net(torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)).square().mean())
    return result + [torch.tensor(p.grad.stride()) for p in net.parameters()]


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0, 3))

    def forward(self, x):
        first, second, third, fourth = self.weights
        both = torch.cat([first, second]).view(2, WIDTH, WIDTH).sum(0)  # gradients that share their memory
        third = third + fourth  # one gradient for two, and for what comes next
        return (x @ both @ third + third.sum()) * self.scale + self.nothing.sum()


def gradients_of_every_kind(way):
    return train(way.wrap(Weights()), lambda net: net(data()).mean(), steps=3)


def hooks_of_programs(way):
    net = way.wrap(Weights())
    first, second, third, _ = net.module.weights
    kept = []
    first.register_hook(lambda grad: grad * 2)
    second.register_hook(lambda grad: kept.append(grad) or grad)
    third.register_post_accumulate_grad_hook(lambda p: nn.utils.clip_grad_value_([p], 0.01))
    result = train(net, lambda net: net(data()).mean(), steps=3)
    return result + kept


def frozen_parameters(way):
    net = layers()
    net[0].requires_grad_(False)
    net = way.wrap(net, find_unused_parameters=True)
    result = train(net)
    net.module[2].requires_grad_(False)
    result += train(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    net.module[2].requires_grad_(True)
    return result + train(net)


def kept_gradients(way):
    """What a program has kept of an earlier step stays as it was."""
    net, kept = way.wrap(layers()), []
    for _ in range(4):
        net.zero_grad()
        net(data()).square().mean().backward()
        kept += [p.grad for p in net.parameters()]
    return kept


def clipped(way):
    net = way.wrap(layers())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        net(data()).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
    return list(net.parameters())


def in_two_modules(way):
    """Parameters that both reduce: in f16 gradients are divided first, and would be twice."""
    trunk = layers(1, 200).half()
    first, second = (way.wrap(nn.Sequential(trunk, *layers(1, 200).half())) for _ in range(2))
    for _ in range(3):
        batch = data(200).half()
        (first(batch) + second(batch)).sum().backward()
    return gradients(first) + gradients(second)


def late_hooks(way):
    """What they do to a gradient comes too late for torch's class, which has copied it."""
    net = way.wrap(layers())
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in net.parameters()]  # kept, or the hooks are gone

    def zeroing(p):
        def hook(*_):
            p.grad.zero_()

        return hook

    for p, node in zip(net.parameters(), nodes):
        node.register_hook(zeroing(p))
    return train(net)


class Negated(torch.autograd.Function):
    """Its gradient is a view whose sign is a bit, on rank 0."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return torch._neg_view(gradient.clone()) if dist.get_rank() == 0 else -gradient


class Signs(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(1))

    def forward(self, x):
        return Negated.apply(x @ Negated.apply(self.large)) * Negated.apply(self.small)


def negative_bits(way):
    return train(way.wrap(Signs()))


def adversaries(way):
    """Two wrapped modules in one graph."""
    first, second = way.wrap(layers(2)), way.wrap(layers(2))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (first, second)]
    for step in range(4):
        made = first(data())
        if step % 2:
            made = made.detach()
        for optimizer in optimizers:
            optimizer.zero_grad()
        second(made).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [*first.parameters(), *second.parameters()]


def copies(way):
    """Pickled, and copied: torch knows how only in the default group."""
    net = way.wrap(layers())
    train(net)
    if way.group is None:
        buffer = io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert isinstance(loaded, flow_torch.DistributedDataParallel) and loaded._in_place is not None
        if dist.get_rank() == 0:
            copy.deepcopy(net)  # by one rank alone
        net = pickle.loads(pickle.dumps(loaded))
    else:
        other = way.wrap(copy.deepcopy(net.module))
        other.load_state_dict(net.state_dict())
        net = other
    assert all(name.startswith("module.") for name in net.state_dict()) and isinstance(net, parallel.DistributedDataParallel)
    return train(net)


def compiled(way):
    net = torch.compile(way.wrap(layers()), backend="aot_eager")
    return train(net)


def not_modules_of_cpus(way):
    """Of one rank, and with an option for others than CPUs."""
    alone = [dist.new_group([rank], backend="gloo" if way.group else "flow") for rank in (0, 1)][dist.get_rank()]
    kind = parallel.DistributedDataParallel if way.group else flow_torch.DistributedDataParallel
    try:
        kind(layers(), device_ids=[0])
        return []
    except ValueError:
        return train(kind(layers(), process_group=alone))


SAME = {
    **{f"{name}": model(name, steps) for name, steps in {"mlp": 6, "lenet": 4, "wide": 3, "mobilenet": 3}.items()},
    "lenet, static graph": model("lenet", 4, static_graph=True),
    "mobilenet, unused parameters": model("mobilenet", 2, find_unused_parameters=True),
    "many buckets": plain(),
    "static graph": plain(static_graph=True),
    "bucket views": plain(gradient_as_bucket_view=True),
    "unused parameters are looked for": plain(find_unused_parameters=True),
    "zeroed": zeroed,
    "unused parameters": unused_parameters,
    "skipped unused parameters": skipped_unused_parameters,
    "skipped unused parameters, uneven inputs": skipped_unused_parameters_in_join,
    "unused in a static graph": unused_in_a_static_graph,
    "outputs that are not used": outputs_that_are_not_used,
    "used several times": used_several_times,
    "checkpoint": checkpoints(False),
    "reentrant checkpoint": checkpoints(True),
    "reentrant checkpoints, static graph": checkpoints(True, static_graph=True),
    "checkpointed as a whole": checkpointed_as_a_whole(),
    "checkpointed as a whole, static graph": checkpointed_as_a_whole(static_graph=True),
    "accumulation": accumulation,
    "accumulation over unused": accumulation_over_unused,
    "several backwards": several_backwards,
    "heads": heads,
    "double backward": double_backward,
    "sparse gradients": sparse_gradients(),
    "sparse gradients, allreduce hook": sparse_gradients(registered(default_hooks.allreduce_hook)),
    "sparse gradients, post-local SGD": sparse_gradients(local_sgd(start=1)),
    "sparse gradients, post-local SGD without sums": sparse_gradients(local_sgd(sums=False, start=1)),
    "sparse gradients of some ranks": sparse_gradients_of_some_ranks,
    "types": types,
    "complex numbers": complex_numbers,
    "layouts": layouts,
    "gradients of every kind": gradients_of_every_kind,
    "hooks of programs": hooks_of_programs,
    "frozen parameters": frozen_parameters,
    "kept gradients": kept_gradients,
    "clipped": clipped,
    "in two modules": in_two_modules,
    "late hooks": late_hooks,
    "negative bits": negative_bits,
    **OPTIONS,
    **COMPRESSED,
    **MIXED,
    **DILOCO,
    "adversaries": adversaries,
    "copies": copies,
    "compiled": compiled,
    "one rank": not_modules_of_cpus,
}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow", timeout=timedelta(seconds=60))
    rank, ways, failures = dist.get_rank(), (Flow(), Torch()), 0
    for name in sys.argv[1:] or SAME:
        if name in SKIPPED:
            print(f"SKIPPED: {name}: {SKIPPED[name]}", flush=True)
            continue
        ours, theirs = [], []
        for way, results in zip(ways, (ours, theirs)):
            torch.manual_seed(rank)  # other data on each rank; parameters are rank 0's
            results += SAME[name](way)
        difference = next((i for i, (own, other) in enumerate(zip(ours, theirs)) if not torch.equal(own, other)), None)
        good = difference is None and len(ours) == len(theirs) > 0
        failures += not good
        print(f"{name}: {'good' if good else f'BAD: result {difference} of {len(ours)} and {len(theirs)}'}", flush=True)
    dist.destroy_process_group()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
