"""One of two ranks has no compiler: both get an error that says so. usage: no_compiler.py CACHE   CACHE: an empty folder"""

import os
import sys

import torch.distributed as dist

import flow_torch

if os.environ["RANK"] == "1":
    os.environ.update(FLOW_CACHE=sys.argv[1], CXX="/nonexistent/c++ -pipe")
try:
    dist.init_process_group("flow")
except ImportError as error:
    print(error)
