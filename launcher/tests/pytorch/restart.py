"""Counts starts in the agent's store, which outlives them, and meets anew in each. The first start fails."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
starts = torch.tensor(store.add("starts", 1))
dist.all_reduce(starts)
dist.destroy_process_group()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit(3)
print(os.environ["RANK"], starts.item())
