"""PyTorch's side of `flow-bench sharded`: steps with fully_shard over gloo and over flow, in turns, as JSON lines.

Each linear layer is a unit, and what is left is one. A step is zero_grad, forward, backward, and Adam or SGD; the input is fixed.

usage: PYTHONPATH=pytorch torchrun --nproc_per_node R sharded.py [--blocks N] [--steps N] MODEL...
"""

import argparse
import json
import statistics

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import flow_torch  # noqa: F401: registers the backend "flow"
from models import MODELS
from ranks import leave
from steps import made, stepper
from timing import block

OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def sharded_step(name, optimizer, group):
    model, x, y = made(MODELS[name])
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepper(model, x, y, OPTIMIZERS[optimizer])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("models", nargs="+", choices=MODELS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "flow": dist.new_group(backend="flow")}
    for model in arguments.models:
        for optimizer in OPTIMIZERS:
            steps = {backend: sharded_step(model, optimizer, group) for backend, group in groups.items()}
            times = {backend: [] for backend in groups}
            for _ in range(arguments.blocks):
                for backend, step in steps.items():
                    times[backend] += block(torch.device("cpu"), arguments.steps, step)
            if dist.get_rank() == 0:
                for backend, of_steps in times.items():
                    ms = statistics.median(of_steps) * 1e3
                    line = {"bench": "fsdp2", "model": model, "optimizer": optimizer, "backend": backend, "step_ms": ms}
                    print(json.dumps(line), flush=True)
    leave()


main()
