"""Ranks with children of their own: a loader's workers, and a program. Then rank 1 is killed."""

import os
import signal
import subprocess

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Pids(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return os.getpid()


dist.init_process_group("gloo")
pids = iter(DataLoader(Pids(), batch_size=None, num_workers=2))
program = subprocess.Popen(["sleep", "1000"])
print(os.getpid(), program.pid, next(pids), next(pids))
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
program.wait()
