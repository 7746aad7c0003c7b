"""One replica group of torchft: its Manager, and a Lighthouse of its own."""

import os

import torch
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from result import tell

# PyTorch for CPUs has no such function; that of scripts/setup has it, but no CUDA that it could call.
vars(torch._C._distributed_c10d).pop("_reset_fr_recording_nccl", None)

rank = int(os.environ["RANK"])
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000) if rank == 0 else None
manager = Manager(
    pg=ProcessGroupGloo(),
    load_state_dict=lambda state: None,
    state_dict=dict,
    min_replica_size=1,
    lighthouse_addr=lighthouse and "http://127.0.0.1:" + lighthouse.address().rsplit(":", 1)[1],
    hostname="localhost",
    replica_id="group0",
)
for step in range(2):
    manager.start_quorum()
    gradient = torch.full((2,), float(rank))
    manager.allreduce(gradient).wait()
    committed = manager.should_commit()
    tell(f"rank {rank}: step {step}, {manager.num_participants()} group, {committed} {gradient.tolist()}")
manager.shutdown(wait=False)
if lighthouse:
    lighthouse.shutdown()
