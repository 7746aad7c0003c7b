"""Steps with DistributedDataParallel over one of flow_torch's two parts, in turns with a job over the other one.

Rank 0 prints a JSON line for each model and each class: the median of each block of steps, in us. The jobs take turns block by block: each
makes a file in FOLDER, named by a number, when it is the other's turn.

usage: PYTHONPATH=pytorch torchrun --nproc_per_node R parts.py FOLDER 0|1 MODEL,... BLOCKS
"""

import copy
import json
import statistics
import sys
import time
from pathlib import Path

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flow_torch
from models import MODELS
from steps import made, stepper

JOBS = 2
BLOCK_S = 0.15
LIMIT_S = 600  # for a turn of the other job
CLASSES = {"PyTorch's DDP": DistributedDataParallel, "flow_torch's DDP": flow_torch.DistributedDataParallel}
MODELS["tiny"] = lambda: (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), (8, 64))


def time_of(step):
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e6


def count_for(step):
    """How many steps a block has, on all ranks."""
    for _ in range(3):
        step()
    took = torch.tensor([time_of(step)])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return max(3, min(500, int(BLOCK_S * 1e6 / took.item())))


def wait_for(file):
    end = time.monotonic() + LIMIT_S
    while dist.get_rank() == 0 and not file.exists():
        if time.monotonic() > end:
            sys.exit(f"parts.py: the other job has not had its turn within {LIMIT_S} s")
        time.sleep(0.002)
    dist.barrier()


def main():
    folder, turn, models, blocks = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    for name in models:
        model, x, y = made(MODELS[name])
        ways = {way: stepper(kind(copy.deepcopy(model)), x, y) for way, kind in CLASSES.items()}
        counts, medians = {}, {way: [] for way in ways}
        for _ in range(blocks):
            wait_for(folder / str(turn))
            for way, step in ways.items():
                counts[way] = counts.get(way) or count_for(step)
                dist.barrier()
                step()
                medians[way].append(statistics.median(time_of(step) for _ in range(counts[way])))
            dist.barrier()
            (folder / str(turn + 1)).touch()
            turn += JOBS
        for way in ways if dist.get_rank() == 0 else ():
            print(json.dumps({"model": name, "way": way, "medians_us": medians[way]}), flush=True)
    dist.destroy_process_group()


main()
