"""Cases of ddp.py: DiLoCo, beside a simulation of all ranks in one process."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import flow_torch

WIDTH = 31


def model(dtype=torch.float32):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).to(dtype)


def batch(step, rank, dtype):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, WIDTH, generator=generator).to(dtype)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def train(net, optimizer, step, rank, dtype):
    optimizer.zero_grad()
    net(batch(step, rank, dtype)).float().square().mean().backward()
    optimizer.step()


def diloco(steps=13, count=1, sync_every=4, delay=0, alpha=0.0, quantize=False, dtype=torch.float32):
    def run(way):
        options = count, sync_every, delay, alpha, quantize
        made = of_ranks(steps, dtype, *options) if way.group is None else simulated(steps, dtype, *options)
        return [own.clone() for own in made]

    return run


def fragments_of(net, count):
    return [net] if count == 1 else [net[0], net[2]]


def of_ranks(steps, dtype, count, sync_every, delay, alpha, quantize):
    net, rank = model(dtype), dist.get_rank()
    if rank:
        nn.init.zeros_(net[0].weight)  # rank 0's counts
    optimizer, options = sgd(net.parameters()), {"fragment_sync_delay": delay, "fragment_update_alpha": alpha, "should_quantize": quantize}
    with flow_torch.DiLoCo(None, fragments_of(net, count), optimizer, nesterov(net.parameters()), sync_every, **options) as joined:
        for step in range(1, steps + 1):
            train(net, optimizer, step, rank, dtype)
        before = [own.clone() for own in net.parameters()]
        joined.synchronize()
        assert joined.steps == steps
    train(net, optimizer, 0, rank, dtype)
    assert joined.steps == steps
    return before


def simulated(steps, dtype, count, sync_every, delay, alpha, quantize):
    """The parameters of this rank."""
    world, nets = dist.get_world_size(), []
    common = model(dtype).float()
    for _ in range(world):
        nets.append(copy.deepcopy(common).to(dtype))
    optimizers, outer = [sgd(net.parameters()) for net in nets], nesterov(common.parameters())
    parts = [[[*part.parameters()] for part in fragments_of(net, count)] for net in nets]
    commons, due = [[*part.parameters()] for part in fragments_of(common, count)], {}
    for step in range(1, steps + 1):
        for rank, net in enumerate(nets):
            train(net, optimizers[rank], step, rank, dtype)
        for index, shared in enumerate(commons):
            if step % sync_every == (index + 1) * sync_every // count % sync_every:
                changes = []
                for part in parts:
                    own = [(it.detach().to(dtype).float() - mine.detach().float()).flatten() for it, mine in zip(shared, part[index])]
                    changes.append(rounded(torch.cat(own)) if quantize else torch.cat(own))
                due[index] = step + delay, sum(changes) / world
            if due.get(index, (0,))[0] == step:
                take(outer, shared, due.pop(index)[1])
                for part in parts:
                    for it, mine in zip(shared, part[index]):
                        mine.data.copy_(it.detach().lerp(mine.detach().float(), alpha))
    return nets[dist.get_rank()].parameters()


def take(outer, shared, mean):
    for it, gradient in zip(shared, mean.split([it.numel() for it in shared])):
        it.grad = gradient.view(it.shape)
    outer.step()
    outer.zero_grad()


def rounded(change):
    """What 8 bits leave of it."""
    made = []
    for part in change.split(512):
        step = (part.max() - part.min()) / 255
        made.append(((part - part.min()) / step).round() * step + part.min())
    return torch.cat(made)


def synchronized(way):
    """All ranks have the same parameters, twice, and momentum does not change them where nothing was learnt."""
    if way.group is not None:
        return [torch.ones(1)]
    net, rank = model(), dist.get_rank()
    optimizer = sgd(net.parameters())
    joined = flow_torch.DiLoCo(None, [net], optimizer, nesterov(net.parameters()), sync_every=100)
    for step in range(3):
        train(net, optimizer, step, rank, torch.float32)
    joined.synchronize()
    after = [own.clone() for own in net.parameters()]
    joined.synchronize()
    for own, before in zip(net.parameters(), after):
        other = own.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(own, other) and torch.equal(own, before)
    return [torch.ones(1)]


def refused(way):
    """Each is an error on all ranks, in one line."""
    if way.group is not None:
        return [torch.ones(1)]
    rank = dist.get_rank()

    def made(fragments=None, outer=None, **options):
        net = model()
        optimizer = sgd(net.parameters())
        outer = outer(net) if outer else nesterov(net.parameters())
        return net, optimizer, flow_torch.DiLoCo(None, fragments(net) if fragments else [net], optimizer, outer, **options)

    def trained_before(net):
        outer = nesterov(net.parameters())
        train(net, outer, 0, 0, torch.float32)
        return outer

    def out_of_step():
        net, optimizer, joined = made(sync_every=4)
        joined.steps = 4 * rank
        for step in range(4):
            train(net, optimizer, step, 0, torch.float32)

    def thawed():
        net = model()
        net[0].requires_grad_(False)
        optimizer = sgd(net.parameters())
        with flow_torch.DiLoCo(None, [net], optimizer, nesterov(own for own in net.parameters() if own.requires_grad), sync_every=2):
            net[0].requires_grad_(True)
            for step in range(2):
                train(net, optimizer, step, 0, torch.float32)

    for words, call in (
        (f"rank {rank}: 0.weight of Sequential requires a gradient, and did not when DiLoCo was made", thawed),
        ("ranks differ: rank 0 has sync_every 4, rank 1 has sync_every 5", lambda: made(sync_every=4 + rank)),
        ("rank 0: 0 model_fragments", lambda: made(lambda net: [])),
        ("rank 0: 3 model_fragments: there must be 1 or more, and not more than sync_every, 2", lambda: made(lambda net: [*net], sync_every=2)),
        ("rank 0: fragment 1 has no parameter", lambda: made(lambda net: [*net])),
        ("rank 1: fragment_sync_delay 9 must be 0 or more, and below sync_every, 9", lambda: made(sync_every=9, fragment_sync_delay=9 * rank)),
        ("fragment_update_alpha 1.0 must be", lambda: made(fragment_update_alpha=1.0)),
        ("outer_optimizer must have the parameters", lambda: made(outer=lambda net: nesterov(net[0].parameters()))),
        ("outer_optimizer has a state", lambda: made(outer=trained_before)),
        (f"rank {rank}: ranks are in different steps: what was exchanged is due in [4, 8", out_of_step),
    ):
        try:
            call()
            found = ""
        except (ValueError, RuntimeError) as error:
            found = str(error)
        assert words in found and "\n" not in found, f"{words!r} is not in {found!r}"
    return [torch.ones(1)]


DILOCO = {
    "DiLoCo": diloco(),
    "DiLoCo, fragments": diloco(count=2),
    "DiLoCo, delayed": diloco(count=2, delay=1),
    "DiLoCo, a share of its own": diloco(count=2, delay=2, alpha=0.5),
    "DiLoCo in 8 bits": diloco(count=2, quantize=True),
    "DiLoCo, half precision": diloco(dtype=torch.bfloat16),
    "DiLoCo, synchronized": synchronized,
    "DiLoCo, refused": refused,
}
