"""Ranks of which one is killed in the first attempt, and which torchrun or flow-launch then starts again.

usage: restarted.py FOLDER     FOLDER: where rank 0 leaves what it has so far
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

import flow_torch

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
kept = os.path.join(sys.argv[1], "kept.pt")
torch.set_num_threads(1)
dist.init_process_group("flow")
rank = dist.get_rank()
begin, weight = torch.load(kept) if os.path.exists(kept) else (0, torch.zeros(200, 200))
net = torch.nn.Linear(200, 200, bias=False)
with torch.no_grad():
    net.weight.copy_(weight)
net = flow_torch.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), 1.0)
for step in range(begin, 6):
    if (attempt, rank, step) == (0, 1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    net(torch.full((1, 200), rank + 1.0)).sum().backward()
    optimizer.step()
    if rank == 0:
        torch.save((step + 1, net.module.weight.detach()), kept + ".new")
        os.replace(kept + ".new", kept)
    dist.barrier()
# One write for a line.
os.write(1, f"attempt {attempt}, from step {begin}: {net.module.weight[0, 0].item()}\n".encode())
dist.destroy_process_group()
