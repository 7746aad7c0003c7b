"""How ranks meet that have not come equally often, or not in time. Two ranks; a line for each case.

usage: joining.py FOLDER [RANK SIZE NAME]

With a rank it joins as that rank of so many, once, in a store of this name, and prints when it begins to wait.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import flow_torch

from waiting import when_main_waits

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])


# Kept: as many as there are ranks delete the file, when they go.
stores = {}


def join(name, seconds=60.0, rank=RANK, size=2):
    if name not in stores:
        stores[name] = dist.FileStore(str(FOLDER / name), size)
    store = stores[name]
    dist.init_process_group("flow", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))


def meets(size=2):
    """Whether the group has so many ranks. It is left."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return ones.item() == size


def until(path):
    """Waits for what another process makes."""
    while not path.exists():
        time.sleep(0.01)


def error_of_a_join(name, seconds, size=2):
    try:
        join(name, seconds, size=size)
    except dist.DistStoreError as error:
        return str(error)
    return ""


def ranks_that_have_joined_unequally_often():
    for number in range(2 if RANK == 0 else 0):
        join(f"alone {number}", rank=0, size=1)
        dist.destroy_process_group()
    join("both")
    return meets()


def one_store_twice():
    join("both twice")
    good = meets()
    join("both twice")
    return meets() and good


def rank_that_is_missing():
    """It is named, when the timeout of the call is over."""
    error = error_of_a_join(f"without {1 - RANK}", 0.5)
    return error == f"flow: rank {1 - RANK} of 2 did not join within 0.5 s, the timeout of init_process_group"


def failed_attempts_of_each_rank():
    """Of which there were not equally many; in the store is what they have left."""
    for rank, attempts in (0, 3), (1, 2):
        has_failed = FOLDER / f"rank {rank} has failed"
        if RANK == rank:
            for _ in range(attempts):
                if f"rank {1 - rank} of 2 did not join" not in error_of_a_join("again", 0.1):
                    return False
            has_failed.touch()
        until(has_failed)
    join("again")
    return meets()


def start(rank, name):
    """Another process of this program, which joins as a rank of three."""
    command = [sys.executable, sys.argv[0], str(FOLDER), str(rank), "3", name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ranks_that_are_killed_in_a_join():
    """Two of three, of which the third has not come. What they leave in the store counts for nothing: who tries again names those that are
    missing, and all meet when they are there."""
    name, tried = "killed", FOLDER / "tried"
    if RANK == 0:
        killed = []
        for rank in range(2):  # the second finds the first, and answers it
            killed.append(start(rank, name))
            killed[-1].stdout.readline()
        for process in reversed(killed):
            process.kill()
            process.wait()
        if "ranks 1, 2 of 3 did not join" not in error_of_a_join(name, 0.1, size=3):
            return False
        tried.touch()
    until(tried)
    third = start(2, name) if RANK == 1 else None
    join(name, size=3)
    good = meets(3)
    return good and (third is None or third.wait() == 0)


CASES = (
    ranks_that_have_joined_unequally_often,
    one_store_twice,
    rank_that_is_missing,
    failed_attempts_of_each_rank,
    ranks_that_are_killed_in_a_join,
)


def main():
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        rank, size, name = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
        when_main_waits(join.__code__, lambda: print("waits", flush=True))
        join(name, rank=rank, size=size)
        sys.exit(not meets(size))
    failures = 0
    for case in CASES:
        is_good = case()
        failures += not is_good
        print(f"{case.__name__}: {'good' if is_good else 'BAD'}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
