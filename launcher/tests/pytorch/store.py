"""Uses the store at MASTER_ADDR and MASTER_PORT by itself. Rank 0 ends first; what it has left is there for the others."""

import datetime
import os
import sys
import time

from torch.distributed import TCPStore

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
minutes = datetime.timedelta(minutes=4)
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=minutes)
if rank == 0:
    store.set("rank 0", str(os.getpid()))
    store.wait([f"rank {other}" for other in range(1, world_size)])
    sys.exit()
store.set(f"rank {rank}", "")
pid = store.get("rank 0").decode()
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.01)
store.add("left", -1)
print(rank, os.environ["TORCHELASTIC_USE_AGENT_STORE"])
