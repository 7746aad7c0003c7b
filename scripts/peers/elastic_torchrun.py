"""A rank of a training that torchrun starts again, from a checkpoint of each step: JOURNAL CHECKPOINT."""

import os
import sys
import time

import torch
import torch.distributed as dist
from elastic_model import batch, lenet
from torch.nn.parallel import DistributedDataParallel

journal, checkpoint = sys.argv[1:]
dist.init_process_group("gloo")
model = lenet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
step = 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
ddp = DistributedDataParallel(model)
while True:
    images, labels = batch(step, dist.get_rank())
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(ddp(images), labels).backward()
    optimizer.step()
    step += 1
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, checkpoint + ".new")
        os.replace(checkpoint + ".new", checkpoint)
    with open(journal, "a") as file:
        file.write(f"{time.time():.4f} {step} {os.getpid()} {dist.get_world_size()}\n")
