"""How long steps take, on all ranks at once."""

from time import perf_counter

import torch
import torch.distributed as dist


def time_one(step):
    start = perf_counter()
    step()
    return perf_counter() - start


def block(device, count, step):
    """Runs steps, after one that is not counted: the time of each or, on a GPU, their mean."""
    dist.barrier()
    step()
    if device.type == "cpu":
        return [time_one(step) for _ in range(count)]
    torch.cuda.synchronize(device)
    start = perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize(device)
    return [(perf_counter() - start) / count]
