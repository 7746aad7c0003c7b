"""The store at MASTER_ADDR and MASTER_PORT: before rank 0 joins a group, and after its end."""

import datetime
import os
import time

import torch.distributed as dist

from result import tell

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
timeout = datetime.timedelta(seconds=60)


def client():
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


store = client()
count = store.add("before", 1)
store.set(f"rank{rank}", str(rank))
store.wait([f"rank{other}" for other in range(world_size)], timeout)

dist.init_process_group("gloo", timeout=timeout)
ranks = [None] * world_size
dist.all_gather_object(ranks, rank)
dist.destroy_process_group()

if rank == 0:
    store.set("pid", str(os.getpid()))
else:
    # Rank 0 is gone, and the store still there.
    pid = int(store.get("pid"))
    while os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().rsplit(")")[-1].split()[0] != "Z":
        time.sleep(0.05)
    store.set(f"after{rank}", "yes")
    assert client().get(f"after{rank}") == b"yes"
tell(f"rank {rank}: {ranks} {count <= world_size} {dist.is_torchelastic_launched()}")
