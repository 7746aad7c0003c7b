"""A program that knows nothing of flow_torch, but numbers its ranks under mpirun as well. usage: unmodified.py BACKEND"""

import os
import sys

import torch
import torch.distributed as dist

if "OMPI_COMM_WORLD_RANK" in os.environ:
    os.environ.update(RANK=os.environ["OMPI_COMM_WORLD_RANK"], WORLD_SIZE=os.environ["OMPI_COMM_WORLD_SIZE"])
dist.init_process_group(sys.argv[1])
ones = torch.ones(3)
dist.all_reduce(ones)
part = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
# One write for a line.
os.write(1, f"{dist.get_backend()} {part} {ones.tolist()}\n".encode())
dist.destroy_process_group()
