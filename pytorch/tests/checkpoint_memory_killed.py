"""Ranks that save in flow-launch's memory, one after the other, until one of them is killed at some moment. Two ranks. usage:
checkpoint_memory_killed.py FOLDER ATTEMPTS

Each attempt but the first finds the checkpoint that was being saved or the one before, whole, and prints "good". The last one ends well.
"""

import os
import random
import shutil
import signal
import sys
import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from flow_torch.checkpoint import InMemoryReader, InMemoryWriter, latest

folder, attempts = sys.argv[1], int(sys.argv[2])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
checkpoints, begun = f"{folder}/checkpoints", f"{folder}/begun"
torch.set_num_threads(1)
dist.init_process_group("flow")
rank = dist.get_rank()


def state(step):
    """12 MB of each rank, and what both have."""
    return {"step": torch.tensor(step), f"rank {rank}": torch.arange(3_000_000, dtype=torch.float32) + 2 * step + rank}




def remove():
    dist.barrier()
    if rank == 0:
        shutil.rmtree(checkpoints, ignore_errors=True)
    dist.barrier()


def begin(step):
    if rank == 0:
        with open(f"{begun}.new", "w") as file:
            file.write(str(step))
        os.replace(f"{begun}.new", begun)
    dist.barrier()


# What is found, and loaded, is in the memory.
remove()
path = latest(checkpoints)
remove()
done = int(path.rsplit("-", 1)[1]) if path else 0
if path:
    loaded = state(0)
    dcp.load(loaded, storage_reader=InMemoryReader(path))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state(done).items()), f"step {done} has other bits"
if attempt:
    with open(begun) as file:
        step = int(file.read())
    assert done in (max(step - 1, 0), step), f"step {step} was being saved, and {done} is there"
    # One write for a line.
    os.write(1, f"attempt {attempt}, step {done}: good\n".encode())
dist.barrier()
if attempt == attempts - 1:
    dist.destroy_process_group()
    sys.exit()
writer = InMemoryWriter()
if not attempt:
    begin(0)
if rank == attempt % 2:
    delay = random.uniform(0, 1.5)
    print(f"attempt {attempt}: rank {rank} is killed after {delay:.3f} s", file=sys.stderr, flush=True)
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    done += 1
    begin(done)
    if rank == 0:
        shutil.rmtree(f"{checkpoints}/step-{done - 2}", ignore_errors=True)
    dcp.async_save(state(done), checkpoint_id=f"{checkpoints}/step-{done}", storage_writer=writer).result()
