"""PyTorch's side of `flow-bench boxing`: DTensor's redistribute on one axis, over gloo. JSON lines from rank 0.

usage: torchrun --nproc_per_node R boxing.py BYTES...
"""

import json
import statistics
import sys
from time import perf_counter

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

from ranks import join, leave

ROUNDS = 9
ROWS = 64
PAIRS = {
    "S0 > B": (Shard(0), Replicate()),
    "P > B": (Partial(), Replicate()),
    "P > S0": (Partial(), Shard(0)),
    "S0 > S1": (Shard(0), Shard(1)),
}


def time_us(work, calls):
    dist.barrier()
    start = perf_counter()
    for _ in range(calls):
        work()
    dist.barrier()
    return (perf_counter() - start) * 1e6 / calls


def bench(mesh, pair, size):
    before, after = PAIRS[pair]
    ranks = dist.get_world_size()
    rows = ROWS // ranks if before == Shard(0) else ROWS
    tensor = DTensor.from_local(torch.ones(rows, size // 4 // ROWS), mesh, [before], run_check=False)
    calls = max(4, min(64, (8 << 20) // size))
    # The first round warms up.
    times = [time_us(lambda: tensor.redistribute(placements=[after]), calls) for _ in range(ROUNDS + 1)]
    if dist.get_rank() == 0:
        line = {"bench": "boxing", "pair": pair, "bytes": size, "ranks": ranks, "median_us": statistics.median(times[1:])}
        print(json.dumps(line), flush=True)


def main():
    join("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.no_grad():
        for pair in PAIRS:
            for size in map(int, sys.argv[1:]):
                bench(mesh, pair, size)
    leave()


main()
