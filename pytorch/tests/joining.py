"""How ranks meet that have not come equally often, or not in time. Two ranks; a line for each case.

usage: joining.py FOLDER
"""

import inspect
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import flow_torch

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])


# Kept: as many as there are ranks delete the file, when they go.
stores = {}


def join(name, seconds=60.0, rank=RANK, size=2):
    if name not in stores:
        stores[name] = dist.FileStore(str(FOLDER / name), size)
    store = stores[name]
    dist.init_process_group("flow", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))


def meets():
    """Whether the group has two ranks. It is left."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return ones.item() == 2


def error_of_a_join(name, seconds):
    try:
        join(name, seconds)
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
        while not has_failed.exists():
            time.sleep(0.01)
    join("again")
    return meets()


def reconfigurable_group():
    """Refused, by whichever PyTorch can ask for it: since 2.14."""
    try:
        if "enable_reconfigure" in inspect.signature(dist.init_process_group).parameters:
            store = dist.FileStore(str(FOLDER / "reconfigurable"), 2)
            dist.init_process_group("flow", store=store, rank=RANK, world_size=2, enable_reconfigure=True)
        else:
            flow_torch._create(SimpleNamespace(enable_reconfigure=True), None)
    except NotImplementedError as error:
        return "cannot be reconfigured" in str(error)
    return False


CASES = reconfigurable_group, ranks_that_have_joined_unequally_often, one_store_twice, rank_that_is_missing, failed_attempts_of_each_rank


def main():
    torch.set_num_threads(1)
    failures = 0
    for case in CASES:
        is_good = case()
        failures += not is_good
        print(f"{case.__name__}: {'good' if is_good else 'BAD'}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
