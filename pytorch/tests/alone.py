"""Ranks without a launcher, which would end them all when one is killed. Each case has processes of its own, and a store."""

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

KILLED = -9
TIMEOUT = timedelta(seconds=60)


def run(folder, cases):
    """Runs cases, (name, processes, function, those that are killed), which are called with a rank and a store. A case is good if it returns
    True in each process that is not killed. It can return why it cannot run."""
    failures = 0
    for name, size, case, killed in cases:
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in start(Path(folder) / name.replace(" ", "-"), size, case)]
        is_good = ends == [KILLED if rank in killed else 0 for rank in range(size)]
        failures += not is_good
        print(f"{name}: {'good' if is_good else f'BAD: {ends}'}", flush=True)
    sys.exit(failures > 0)


def start(path, size, case):
    children = []
    for rank in range(size):
        children.append(os.fork())
        if children[-1] == 0:
            torch.set_num_threads(1)
            try:
                is_good = case(rank, dist.FileStore(str(path), -1))
            except BaseException:
                traceback.print_exc()
                is_good = False
            sys.stdout.flush()
            os._exit(not is_good)
    return children


def error_of(call, kind=dist.DistBackendError):
    """What a call says that must fail; nothing if it does not."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def works(rank, size, group=None):
    """Whether a group of this size, in which this is the rank, gives right results, in collectives and in a ring."""
    if (dist.get_rank(group), dist.get_world_size(group)) != (rank, size):
        return False
    group = group or dist.group.WORLD
    total = torch.full((3,), rank + 1.0)
    group.allreduce([total]).wait()
    large = torch.arange(50_000.0) * (rank + 1)
    group.allreduce([large]).wait()
    from_last = torch.tensor([rank])
    options = dist.BroadcastOptions()
    options.rootRank = size - 1
    group.broadcast([from_last], options).wait()
    got = torch.tensor([-1])
    if size > 1:
        receives = group.recv([got], (rank - 1) % size, 7)
        group.send([torch.tensor([rank])], (rank + 1) % size, 7).wait()
        receives.wait()
    else:
        got[0] = 0
    sum_of_ranks = size * (size + 1) // 2
    return (
        bool((total == sum_of_ranks).all())
        and torch.equal(large, torch.arange(50_000.0) * sum_of_ranks)
        and from_last.item() == size - 1
        and got.item() == (rank - 1) % size
    )
