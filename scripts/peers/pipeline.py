"""PyTorch's side of `flow-bench pipeline`: torch.distributed.pipelining, as JSON lines.

The model is the same: linear layers with ReLU. `ideal_ms` is the work of one rank without a pipeline, which all ranks do
at the same time.

usage: torchrun --nproc_per_node R pipeline.py [--device cuda [--share-gpus]] [--schedules gpipe,1f1b,interleaved]
    [--micro-batches M] [--rows N] [--width W] [--layers L]
"""

import argparse
import json
import statistics

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ranks import join, leave
from timing import block

# And the stages of a rank.
SCHEDULES = {
    "gpipe": (ScheduleGPipe, lambda rank, ranks: [rank]),
    "1f1b": (Schedule1F1B, lambda rank, ranks: [rank]),
    "interleaved": (ScheduleInterleaved1F1B, lambda rank, ranks: [rank, ranks + rank]),
}
BLOCKS = 5
STEPS = 5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--share-gpus", action="store_true")
    parser.add_argument("--schedules", default="gpipe,1f1b")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    device = join(arguments.device, arguments.share_gpus)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    width, count = arguments.width, arguments.micro_batches

    def sequential(layers):
        modules = (layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU()))
        return nn.Sequential(*modules).to(device)

    module = sequential(arguments.layers // ranks)
    x = torch.randn(arguments.rows * count, width, device=device)

    def loss_of(output, _):
        return output.square().mean()

    def made(name):
        schedule, stages_of = SCHEDULES[name]
        numbers = stages_of(rank, ranks)
        total = len(numbers) * ranks
        stages = [PipelineStage(sequential(arguments.layers // total), number, total, device) for number in numbers]
        schedule = schedule(stages if len(stages) > 1 else stages[0], count, loss_fn=loss_of)
        inputs = (x,) if 0 in numbers else ()
        target = x if total - 1 in numbers else None
        return lambda: schedule.step(*inputs, target=target)

    schedules = {name: made(name) for name in arguments.schedules.split(",")}

    part = x[: arguments.rows].clone().requires_grad_()

    def alone():
        for _ in range(count):
            module(part).square().mean().backward()

    pipes, ideal = {name: [] for name in schedules}, []
    for _ in range(BLOCKS):
        for name, step in schedules.items():
            pipes[name] += block(device, STEPS, step)
        ideal += block(device, STEPS, alone)
    if rank == 0:
        ideal_ms = statistics.median(ideal) * 1e3
        for name, times in pipes.items():
            pipe_ms = statistics.median(times) * 1e3
            line = {"bench": "pipeline", "schedule": name, "ranks": ranks, "step_ms": pipe_ms, "ideal_ms": ideal_ms}
            print(json.dumps({**line, "efficiency": ideal_ms / pipe_ms}), flush=True)
    leave()


main()
