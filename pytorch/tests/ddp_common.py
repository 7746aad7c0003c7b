"""Modules that tests of DistributedDataParallel train, and the two ways in which they are wrapped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel

import flow_torch

WIDTH = 150  # a weight has 90,000 bytes: more than the 64 KiB from which on gradients are large


class Flow:
    """Wraps modules in flow_torch's class."""

    group = None

    def wrap(self, module, **options):
        return flow_torch.DistributedDataParallel(module, **options)

    def check_path(self, net, in_place):
        assert (net._in_place is not None) == in_place, "gradients are not reduced in place" if in_place else "they are"


class Torch:
    """Wraps them in torch's, over gloo; over flow if there are more ranks, whose sums gloo rounds in another order."""

    def __init__(self):
        self.group = dist.new_group(backend="gloo" if dist.get_world_size() == 2 else "flow")

    def wrap(self, module, **options):
        return parallel.DistributedDataParallel(module, process_group=self.group, **options)

    def check_path(self, net, in_place):
        pass


def layers(count=3, width=WIDTH):
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())))


class Branches(nn.Module):
    """Of two branches forward takes those that it is told to."""

    def __init__(self):
        super().__init__()
        self.trunk, self.branches = layers(1), nn.ModuleList([layers(1), layers(1)])

    def forward(self, x, taken):
        x = self.trunk(x)
        return sum((self.branches[index](x) for index in taken), x)


def data(width=WIDTH, rows=8):
    return torch.randn(rows, width)


def gradients(net):
    return [torch.full((1,), -1.0) if p.grad is None else p.grad.clone() for p in net.parameters()]


def train(net, step=lambda net: net(data()).square().mean(), steps=4, to_none=True, optimizer=None):
    """The parameters, and the last gradients, after some steps."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        step(net).backward()
        optimizer.step()
    return [*net.state_dict().values(), *gradients(net)]


def table(way):
    """torch's class with a sparse one fails where a rank does not use it, and in join()'s context: a dense one has the same gradients."""
    return nn.Embedding(600, WIDTH, sparse=way.group is None)


def dense_gradients(net):
    """Which of them there are, and all."""
    return [torch.tensor([p.grad is not None for p in net.parameters()]), *(p.grad.to_dense() for p in net.parameters() if p.grad is not None)]


def words():
    return torch.randperm(600)[:8]
