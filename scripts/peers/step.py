"""PyTorch's side of `flow-bench step`: median step times without and with DistributedDataParallel, as JSON lines.

A step is zero_grad, forward, backward, SGD; the input is fixed. Both ranks run the local model at the same time, so
that it has the same share of the memory's bandwidth. Blocks of local and distributed steps alternate.

On GPUs a block is timed as a whole, from an idle device to an idle device, and a step ends with backward.

usage: torchrun --nproc_per_node R step.py [--device cuda [--share-gpus]] [--batch-size N] [--steps N] mlp|lenet|wide...
"""

import argparse
import copy
import json
import statistics

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models import MODELS
from ranks import join, leave
from timing import block

# Blocks, seconds for each, and how many steps at most.
PLANS = {"cpu": (5, 0.5, 500), "cuda": (10, 0.25, 250)}
WARM_UP = 5


def stepper(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)  # all models stay alike: times depend on values
    loss_function = nn.CrossEntropyLoss()

    def step():
        optimizer.zero_grad()
        loss_function(model(x), y).backward()
        if x.device.type == "cpu":
            optimizer.step()

    return step


def bench(name, device, arguments):
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    shape = (arguments.batch_size or shape[0], *shape[1:])
    model = model.to(device)
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(shape, device=device), torch.randint(0, 10, shape[:1], device=device)
    local = stepper(model, x, y)
    distributed = stepper(DistributedDataParallel(copy.deepcopy(model)), x, y)

    for _ in range(WARM_UP):
        distributed()
    warm_up = statistics.median(block(device, WARM_UP, distributed))
    blocks, seconds, most = PLANS[device.type]
    count = torch.tensor([arguments.steps or max(5, min(most, int(seconds / warm_up)))], device=device)
    dist.broadcast(count, 0)
    times = {local: [], distributed: []}
    for _ in range(blocks):
        for step in (local, distributed):
            times[step] += block(device, count.item(), step)
    local_ms, ddp_ms = (statistics.median(times[step]) * 1e3 for step in (local, distributed))
    if dist.get_rank() == 0:
        line = {
            "bench": "step",
            "model": name,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "local_ms": local_ms,
            "ddp_ms": ddp_ms,
            "efficiency": local_ms / ddp_ms,
            "local_mean_ms": statistics.mean(times[local]) * 1e3,
            "ddp_mean_ms": statistics.mean(times[distributed]) * 1e3,
        }
        print(json.dumps(line), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--share-gpus", action="store_true")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("models", nargs="+", choices=MODELS)
    arguments = parser.parse_args()
    device = join(arguments.device, arguments.share_gpus)
    for name in arguments.models:
        bench(name, device, arguments)
    leave()


main()
