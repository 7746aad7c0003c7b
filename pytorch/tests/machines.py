"""Three ranks that call themselves two machines: they meet by PyTorch's store, and share memory only where they may.

usage: machines.py STORE RANK     STORE: a file that is not there yet
"""

import os
import sys

import torch
import torch.distributed as dist

import flow_torch
from flow_torch import rendezvous

store, rank = sys.argv[1], int(sys.argv[2])
os.environ["MASTER_ADDR"] = "127.0.0.1"
rendezvous.machine = lambda: "first" if rank < 2 else "second"
torch.set_num_threads(1)
dist.init_process_group("flow", init_method=f"file://{store}", rank=rank, world_size=3)
count = torch.ones(1)
dist.all_reduce(count)
sums = []
for kind in (torch.nn.parallel.DistributedDataParallel, flow_torch.DistributedDataParallel):
    net = kind(torch.nn.Linear(200, 200))
    for _ in range(2):
        net.zero_grad()
        net(torch.full((1, 200), rank + 1.0)).sum().backward()
    sums.append(round(net.module.weight.grad[0, 0].item() * 3))
ends = dist.new_group([2, 0], use_local_synchronization=True) if rank != 1 else None
if ends is not None:
    dist.barrier(group=ends)
objects = [None] * 3
dist.all_gather_object(objects, rank)
print(f"rank {rank}: {int(count)} {sums} {objects}")
dist.destroy_process_group()
