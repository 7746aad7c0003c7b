"""A rank that is killed, in backward or in an asynchronous collective, is an error on the other, which names it.

usage: killed.py STORE RANK {[NAME=VALUE]... backward|ddp|async}...     STORE: a file that is not there yet

Each case is a child of this process, with the variables before it. It prints how the child has ended.
"""

import os
import signal
import sys

import torch
import torch._dynamo  # by each DDP otherwise, in each child
import torch.distributed as dist

import flow_torch

store, rank = sys.argv[1], int(sys.argv[2])


def train(how, store):
    torch.set_num_threads(1)
    dist.init_process_group("flow", init_method=f"file://{store}", rank=rank, world_size=2)
    net = torch.nn.Linear(400, 400)
    if how != "async":
        net = {"backward": torch.nn.parallel, "ddp": flow_torch}[how].DistributedDataParallel(net)
    try:
        for step in range(6):
            if rank == 1 and step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = net(torch.randn(4, 400)).sum()
            loss.backward()
            if how == "async":
                dist.all_reduce(torch.ones(9), async_op=True).wait()
    except dist.DistBackendError as error:
        print(error, flush=True)
        # The group is of no more use, and nobody is left to agree with.
        os._exit(3)
    sys.exit()


for number, word in enumerate(sys.argv[3:]):
    if "=" in word:
        name, value = word.split("=", 1)
        os.environ[name] = value
        continue
    child = os.fork()
    if not child:
        train(word, f"{store}.{number}")
    print(f"{word}: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
