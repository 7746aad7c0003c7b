"""Which part of flow_torch ranks use of which one lacks something, or their error. usage: parts.py [NAME=VALUE]...   as rank 1 has it"""

import os
import sys
import warnings

import torch
import torch.distributed as dist

if os.environ["RANK"] == "1":
    os.environ.update(argument.split("=", 1) for argument in sys.argv[1:])
import flow_torch

warnings.simplefilter("default")
try:
    dist.init_process_group("gloo" if os.environ.get("FLOW_TORCH") == "1" else "flow")
    ones = torch.ones(3)
    dist.all_reduce(ones)
    print(type(dist.group.WORLD._get_backend(torch.device("cpu"))).__module__, ones.tolist(), flush=True)
    dist.destroy_process_group()
except ImportError as error:
    print(error)
