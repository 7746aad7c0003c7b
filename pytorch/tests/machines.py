"""Three ranks on two machines: they meet by PyTorch's store, and share memory only where they may.

usage: machines.py STORE RANK     STORE: a file that is not there yet, for ranks that only call themselves two machines; or the HOST:PORT
                                  of rank 2, on a machine of its own
"""

import os
import sys

import torch
import torch.distributed as dist

import flow_torch
from flow_torch import rendezvous

place, rank = sys.argv[1], int(sys.argv[2])
if place.startswith("/"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    rendezvous.machine = lambda: "first" if rank < 2 else "second"
    store = dist.FileStore(place, 3)
else:
    os.environ["MASTER_ADDR"], port = place.split(":")
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(port), 3, is_master=rank == 2)
torch.set_num_threads(1)
dist.init_process_group("flow", store=store, rank=rank, world_size=3)
count = torch.ones(1)
dist.all_reduce(count)
sums = []
for kind in (torch.nn.parallel.DistributedDataParallel, flow_torch.DistributedDataParallel):
    net = kind(torch.nn.Linear(200, 200, bias=False))
    for _ in range(2):
        net.zero_grad()
        net(torch.full((1, 200), rank + 1.0)).sum().backward()
    sums.append(round(net.module.weight.grad[0, 0].item() * 3))
ends = dist.new_group([2, 0], use_local_synchronization=True) if rank != 1 else None
if ends is not None:
    dist.barrier(group=ends)
objects = [None] * 3
dist.all_gather_object(objects, rank)
print(f"rank {rank}: {int(count)} {sums} {objects}", flush=True)
dist.barrier()
dist.destroy_process_group()
