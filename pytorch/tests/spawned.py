"""Processes of torch.multiprocessing's spawn, which import everything anew. usage: spawned.py STORE     STORE: a file that is not there yet"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flow_torch


def train(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("flow", init_method=f"file://{store}", rank=rank, world_size=2)
    net = flow_torch.DistributedDataParallel(torch.nn.Linear(200, 200, bias=False))
    for _ in range(2):
        net.zero_grad()
        net(torch.full((1, 200), rank + 1.0)).sum().backward()
    # One write for a line.
    os.write(1, f"{dist.get_backend()} {net.module.weight.grad[0, 0].item()}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), nprocs=2)
