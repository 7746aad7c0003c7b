"""PyTorch's side of `flow-bench allreduce`: gloo, f32 sums, one JSON line per size from rank 0.

usage: torchrun --nproc_per_node R allreduce.py BYTES...
"""

import json
import os
import statistics
import sys
from time import perf_counter

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist

SECONDS_PER_SIZE = 0.5


def time_one(tensor):
    start = perf_counter()
    dist.all_reduce(tensor)
    return perf_counter() - start


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for size in map(int, sys.argv[1:]):
        tensor = torch.zeros(size // 4)
        warm_up = statistics.median(time_one(tensor) for _ in range(5))
        count = torch.tensor([max(5, min(2000, int(SECONDS_PER_SIZE / warm_up)))])
        dist.broadcast(count, 0)
        times = [time_one(tensor) for _ in range(count.item())]
        if dist.get_rank() == 0:
            line = {
                "bench": "allreduce",
                "memory": "ordinary",
                "bytes": size,
                "ranks": dist.get_world_size(),
                "median_us": statistics.median(times) * 1e6,
                "mean_us": statistics.mean(times) * 1e6,
            }
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # skips Python's finalization, in which gloo's threads now and then abort


main()
