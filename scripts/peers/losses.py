"""PyTorch's side of `flow-bench losses`: the same weights, inputs and steps, with DistributedDataParallel.

usage: torchrun --nproc_per_node R losses.py [--device cuda [--share-gpus]] [--steps N] MODEL
"""

import argparse
import json
import math

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models import MODELS
from ranks import join, leave

LEARNING_RATE = 0.05


def numbers(shape, first):
    """Numbers between -1 and 1 without a pattern, which any program can make: sin(n * n) for n from `first`."""
    n = torch.arange(first, first + math.prod(shape), dtype=torch.float64)
    return n.square().sin().float().view(shape)


def start(name, shape):
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    return numbers(shape, 0) / math.sqrt(math.prod(shape[1:]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--share-gpus", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("model", choices=MODELS)
    arguments = parser.parse_args()
    device = join(arguments.device, arguments.share_gpus)
    rank = dist.get_rank()
    model, shape = MODELS[arguments.model]()
    x = numbers(shape, 1_000_000 * (rank + 1)).to(device)
    y = ((torch.arange(shape[0]) + rank) % 10).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start(name, parameter.shape))

    ddp = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(arguments.steps):
        loss = nn.functional.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sum_of_losses = torch.tensor(losses, dtype=torch.float64, device=device)
    dist.all_reduce(sum_of_losses)
    if rank == 0:
        mean = (sum_of_losses / dist.get_world_size()).tolist()
        line = {"bench": "losses", "model": arguments.model, "ranks": dist.get_world_size(), "losses": mean}
        print(json.dumps(line), flush=True)
    leave()


main()
