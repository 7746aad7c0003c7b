"""Sums up the ranks over a store at MASTER_ADDR and MASTER_PORT, and says what else torchrun would tell."""

import os

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master = "tcp://{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
dist.init_process_group("gloo", init_method=master, rank=rank, world_size=world_size)
ranks = torch.tensor(dist.get_rank())
dist.all_reduce(ranks)
print(rank, dist.get_node_local_rank(), dist.is_torchelastic_launched(), ranks.item())
dist.destroy_process_group()
