"""PyTorch's side of `flow-bench overhead`: operations on DTensors beside the same ones on plain tensors, on a thread for
each rank, without communication. Both take turns. JSON lines from rank 0.

usage: torchrun --nproc_per_node R overhead.py
"""

import json
import statistics
from time import perf_counter

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh

from ranks import join, leave

ROUNDS = 31
CALLS = 200
STEPS = 20  # of a training step, which is many operations


def time_us(work, calls):
    start = perf_counter()
    for _ in range(calls):
        work()
    return (perf_counter() - start) * 1e6 / calls


def compare(name, calls, plain, distributed):
    times = [(time_us(plain, calls), time_us(distributed, calls)) for _ in range(ROUNDS + 1)]
    plain_us, global_us = map(statistics.median, zip(*times[1:]))  # the first round warms up
    if dist.get_rank() == 0:
        line = {
            "bench": "overhead",
            "name": name,
            "ranks": dist.get_world_size(),
            "plain_us": plain_us,
            "global_us": global_us,
        }
        print(json.dumps(line), flush=True)


def stepper(model, x):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_function = nn.MSELoss(reduction="sum")

    def step():
        optimizer.zero_grad()
        loss_function(model(x), x).backward()
        optimizer.step()

    return step


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def main():
    join("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    a, b, x = (torch.randn(8, 8) for _ in range(3))
    da, db = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (a, b))
    dw, dx = (distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (b, x))
    with torch.no_grad():
        compare("add", CALLS, lambda: a + b, lambda: da + db)
        compare("mm", CALLS, lambda: a.mm(b), lambda: da.mm(dw))
        compare("relu", CALLS, a.relu, da.relu)
        compare("view", CALLS, lambda: b.view(64), lambda: dw.view(64))
    plain, distributed = mlp(), distribute_module(mlp(), mesh)  # all parameters are replicated
    compare("MLP step with Adam", STEPS, stepper(plain, x), stepper(distributed, dx))
    leave()


main()
