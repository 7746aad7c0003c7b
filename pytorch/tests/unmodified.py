"""A program that knows nothing of flow_torch. usage: unmodified.py BACKEND"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])
ones = torch.ones(3)
dist.all_reduce(ones)
print(dist.get_backend(), ones.tolist())
dist.destroy_process_group()
