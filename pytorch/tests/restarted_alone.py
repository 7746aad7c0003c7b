"""A training in flow_torch.InProcessRestart, of two ranks. Rank 0 is killed; rank 1 saves alone, takes the next rank 0 in, and is killed before
both have saved. So the next rank 0 goes on alone, from a checkpoint in the memory of a process that is no more. Prints "rank R: good".

usage: restarted_alone.py FOLDER
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import flow_torch
from flow_torch.checkpoint import InMemoryReader, InMemoryWriter, latest

FOLDER = sys.argv[1]
PROCESS = RANK, REPLACEMENT = int(os.environ["RANK"]), int(os.environ["FLOW_REPLACEMENT"])


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_newcomer(attempt):
    while True:
        attempt.check()
        time.sleep(0.01)


def wait_for_step(step):
    """A rank that is started again comes when there is this checkpoint."""
    while not os.path.exists(f"{FOLDER}/step-{step}/.metadata"):
        time.sleep(0.01)


def train(attempt):
    state = {"step": torch.tensor(0)}

    def save():
        state["step"] += 1
        dcp.async_save(state, checkpoint_id=f"{FOLDER}/step-{state['step']}", storage_writer=InMemoryWriter()).result()

    if path := latest(FOLDER):
        dcp.load(state, checkpoint_id=path, storage_reader=InMemoryReader(path))
    step = state["step"].item()
    replacements = [None] * dist.get_world_size()
    dist.all_gather_object(replacements, PROCESS)
    if replacements == [(0, 0), (1, 0)]:
        if RANK == 0:
            kill()
        dist.barrier()
    elif replacements == [(1, 0)]:
        save()
        save()
        wait_for_newcomer(attempt)
    elif replacements == [(0, 1), (1, 0)]:
        assert step == 2, step
        if RANK == 1:
            kill()
        dist.barrier()
    elif replacements == [(0, 1)]:
        assert step == 2, step
        save()
        wait_for_newcomer(attempt)
    assert replacements == [(0, 1), (1, 1)] and step == 3, (replacements, step)


def main():
    if REPLACEMENT == 1:
        wait_for_step(2 if RANK == 0 else 3)
    flow_torch.InProcessRestart().run(train)
    # One write for a line.
    os.write(1, f"rank {RANK}: good\n".encode())


if __name__ == "__main__":
    main()
