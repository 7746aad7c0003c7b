"""torch.distributed over gloo and over flow, in turns: all-reduce, steps with DistributedDataParallel, steps with fully_shard.

Prints JSON lines: for each way the median of its blocks' medians, and the median of gloo's time over its own, block by
block. `flow_torch` is PyTorch over flow with flow_torch.DistributedDataParallel; `no communication` is fully_shard over
PyTorch's backend "fake", which does nothing. MPI is measured where PyTorch has it.

usage: PYTHONPATH=pytorch torchrun --nproc_per_node R backends.py [--blocks N] [--seconds S] [--sizes BYTES,...] [--models NAME,...]

A model with " + " and one of VARIANTS, as "wide + fp16 hook", is trained in that way.
"""

import argparse
import copy
import json
import os
import statistics
import sys
from time import perf_counter

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401: registers the backend "fake"

import flow_torch
from models import MODELS, Gpt
from steps import made, stepper

BACKENDS = ["gloo", "flow", *(["mpi"] if dist.is_mpi_available() else [])]
SIZES = [4, 1 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20, 256 << 20]
SHARDED = {"wide": MODELS["wide"], "GPT block": lambda: (Gpt(1024, 16), (1, 64, 1024))}


class Lookup(nn.Module):
    """The words of a batch, and a layer."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(100_000, 64, sparse=True), nn.Linear(32 * 64, 2048)

    def forward(self, x):
        words = (x.abs() * 1e5).long() % self.table.num_embeddings
        return self.layer(self.table(words).flatten(1))


def fp16_hook(model, group):
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)


def local_sgd_hook(model, group):
    model.register_comm_hook(PostLocalSGDState(group, group, start_localSGD_iter=0), post_localSGD_hook)


def in_join(model, _):
    model.join().__enter__()  # to the end: all ranks have as many inputs


MODELS["sparse"] = lambda: (Lookup(), (32, 32))
VARIANTS = {"": lambda *_: None, "fp16 hook": fp16_hook, "post-local SGD": local_sgd_hook, "join": in_join}


def in_turns(name, ways, arguments):
    """Blocks of calls of each way, in turns, each block as long as `seconds` of the slowest."""
    for run in ways.values():
        for _ in range(3):
            run()
    slowest = torch.tensor([max(times(run, 1)[0] for run in ways.values())])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    count = max(3, min(1000, int(arguments.seconds / slowest.item())))
    blocks = {way: [] for way in ways}
    for _ in range(arguments.blocks):
        for way, run in ways.items():
            dist.barrier()
            run()
            blocks[way].append(statistics.median(times(run, count)) * 1e6)
    if dist.get_rank() == 0:
        for way, medians in blocks.items():
            ratios = [gloo / own for gloo, own in zip(blocks["gloo"], medians)]
            line = {"bench": "backend", "name": name, "way": way, "median_us": statistics.median(medians)}
            print(json.dumps({**line, "ratio": statistics.median(ratios)}), flush=True)


def times(run, count):
    result = []
    for _ in range(count):
        start = perf_counter()
        run()
        result.append(perf_counter() - start)
    return result


def all_reduce(size, groups, arguments):
    def way(group, tensor):
        return lambda: dist.all_reduce(tensor, group=group)

    ways = {backend: way(group, torch.zeros(size // 4)) for backend, group in groups.items()}
    backend = groups["flow"]._get_backend(torch.device("cpu"))
    shared = backend.allocate_tensor(size // 4, dtype=torch.float32, device=torch.device("cpu")).zero_()
    in_turns(f"all-reduce {size}", {**ways, "flow, shared memory": way(groups["flow"], shared)}, arguments)


def data_parallel(name, groups, arguments):
    model, _, variant = name.partition(" + ")
    model, x, y = made(MODELS[model])

    def way(kind, group):
        wrapped = kind(copy.deepcopy(model), process_group=group)
        VARIANTS[variant](wrapped, group)
        return stepper(wrapped, x, y)

    ways = {backend: way(DistributedDataParallel, group) for backend, group in groups.items()}
    ways["flow_torch"] = way(flow_torch.DistributedDataParallel, groups["flow"])
    ways["local"] = stepper(copy.deepcopy(model), x, y)
    in_turns(f"DDP {name}", ways, arguments)


def sharded(name, groups, arguments):
    def way(group, in_shared_memory=False):
        model, x, y = made(SHARDED[name])
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for part in model.modules():
            if in_shared_memory and isinstance(part, FSDPModule):
                part.set_allocate_memory_from_process_group_for_comm(True)
        return stepper(model, x, y)

    ways = {backend: way(group) for backend, group in groups.items()}
    ways["flow, shared memory"] = way(groups["flow"], True)
    ways["no communication"] = way(dist.new_group(backend="fake"))
    in_turns(f"FSDP2 {name}", ways, arguments)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.1, help="for a block of the slowest way")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="of all-reduce; none: -")
    parser.add_argument("--models", default="mlp,wide,lenet,mobilenet", help="for DDP; none: -")
    parser.add_argument("--sharded", default=",".join(SHARDED), help="for FSDP2; none: -")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    for measure, names in (all_reduce, arguments.sizes), (data_parallel, arguments.models), (sharded, arguments.sharded):
        for name in names.split(","):
            if name != "-":
                measure(int(name) if measure is all_reduce else name, groups, arguments)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # skips Python's finalization, in which gloo's threads now and then abort


main()
