"""Counts ranks in the agent's store, which is empty in each start, and meets in it. The first start fails."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
count = torch.tensor(store.add("count", 1))
dist.all_reduce(count)
dist.destroy_process_group()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit(3)
print(os.environ["RANK"], count.item())
