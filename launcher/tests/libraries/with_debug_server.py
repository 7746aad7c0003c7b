"""PyTorch's debug server, which has each rank tell of itself in the store."""

import os
import socket
import time
import urllib.request

import torch
import torch.distributed as dist
from torch.distributed.debug import start_debug_server, stop_debug_server

from result import tell


def fetch():
    """The page, whose server is a process of its own that takes a while to start."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
                return answer.status
        except OSError:
            time.sleep(0.1)
    return None


rank = int(os.environ["RANK"])
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
start_debug_server(port=port)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
page = fetch() if rank == 0 else None
tell(f"rank {rank}: {total.item()}, page {page}")
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    stop_debug_server()
