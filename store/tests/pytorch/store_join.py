"""A worker that finds the others of its group through a TCPStore that somebody else serves.

    store_join.py HOW RANK WORLD_SIZE HOST PORT
"""

import os
import sys

import torch
import torch.distributed as dist

how, rank, world_size, host, port = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4], int(sys.argv[5])

if how == "store":
    store = dist.TCPStore(host, port, world_size, is_master=False, wait_for_workers=True)
    store.add("joined", 1)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world_size)
elif how == "tcp":
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=world_size)
else:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=str(port))
    dist.init_process_group("gloo")

for group in [None, dist.new_group(range(world_size))]:
    sum_of_all = torch.tensor([rank + 1])
    dist.all_reduce(sum_of_all, group=group)
    assert sum_of_all.item() == world_size * (world_size + 1) // 2, sum_of_all
objects = [None] * world_size
dist.all_gather_object(objects, {"rank": rank})
dist.monitored_barrier()
dist.destroy_process_group()
print(rank, "of", objects)
