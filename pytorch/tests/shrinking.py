"""Groups that lose ranks: torch.distributed.shrink_group. A line for each case.

usage: shrinking.py FOLDER [refused]

refused: the part in Python says that it cannot do it.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import flow_torch
from alone import TIMEOUT, error_of, run, works

ABORT = 1  # SHRINK_ABORT


def join(rank, store, size, timeout=TIMEOUT):
    dist.init_process_group("flow", store=store, rank=rank, world_size=size, timeout=timeout)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def named_in(error, rank):
    return f"rank {rank} (pid" in error


def middle_rank_and_then_the_first(rank, store):
    """The new ranks are in the order of the old ones. What PyTorch makes of the new group goes on, and shrinks again."""
    join(rank, store, 4)
    good = works(rank, 4)
    if rank == 1:
        return good
    dist.shrink_group([1])
    rank = (0, None, 1, 2)[rank]
    good &= works(rank, 3)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    net(torch.full((1, 4), rank + 1.0)).sum().backward()
    good &= bool((net.module.weight.grad == 2).all())
    if rank == 0:
        return good
    dist.shrink_group([0])
    good &= works(rank - 1, 2)
    dist.destroy_process_group()
    return good


def killed_in_a_collective(rank, store, killed):
    """The others learn of it, and go on without it."""
    join(rank, store, 4)
    good = works(rank, 4)
    if rank == killed:
        die()
    good &= named_in(error_of(lambda: dist.all_reduce(torch.ones(5))), killed)
    dist.shrink_group([killed], shrink_flags=ABORT)
    return good and works(rank - (rank > killed), 3)


def killed_last(rank, store):
    return killed_in_a_collective(rank, store, 3)


def killed_first(rank, store):
    """With what the first rank serves for the others."""
    return killed_in_a_collective(rank, store, 0)


def two_killed_of_which_one_is_found_later(rank, store):
    """The attempt that waits for the second one fails. The first rank names it, by its rank among those that are left."""
    join(rank, store, 4)
    if rank in (1, 2):
        die()
    if not error_of(lambda: dist.all_reduce(torch.ones(5))):
        return False
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    error = error_of(lambda: dist.shrink_group([1], shrink_flags=ABORT), dist.DistStoreError)
    dist.group.WORLD.set_timeout(TIMEOUT)
    dist.shrink_group([1, 2], shrink_flags=ABORT)
    is_named = rank != 0 or error.startswith(("flow: rank 1 of 3 ", "flow: ranks 1, 2 of 3 "))
    return is_named and "did not join within 0.5 s, the timeout of shrink_group" in error and works(rank // 3, 2)


def sub_group(rank, store):
    """It shrinks apart from the group of all ranks, which goes on."""
    join(rank, store, 4)
    group = dist.new_group([0, 2, 3])
    good = True
    if rank in (0, 3):
        group = dist.shrink_group([1], group)
        good &= works(rank // 3, 2, group)
    return good and works(rank, 4)


def killed_in_a_sub_group(rank, store):
    join(rank, store, 4)
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        dist.barrier(group=dist.new_group([0, 1, 3], use_local_synchronization=True))
        return True
    good = works(rank - 1, 3, group)
    if rank == 2:
        die()
    good &= named_in(error_of(lambda: dist.all_reduce(torch.ones(5), group=group)), 2)
    group = dist.shrink_group([1], group, ABORT)
    good &= works(rank // 3, 2, group)
    dist.barrier(group=dist.new_group([0, 1, 3], use_local_synchronization=True))
    return good


def pending_works_fail(rank, store):
    """Those of the group of before, at once; nothing of it arrives in the new one."""
    join(rank, store, 3)
    before = torch.zeros(4)
    work = dist.irecv(before, 1 - rank, tag=5) if rank < 2 else None
    dist.barrier()
    if rank == 2:
        return True
    dist.shrink_group([2], shrink_flags=ABORT)
    begin = time.monotonic()
    good = bool(error_of(work.wait)) and time.monotonic() - begin < TIMEOUT.total_seconds() / 2
    after = torch.zeros(4)
    receive = dist.irecv(after, 1 - rank, tag=5)
    dist.send(torch.full((4,), rank + 1.0), 1 - rank, tag=5)
    receive.wait()
    return good and works(rank, 2) and bool((before == 0).all()) and bool((after == 2 - rank).all())


def arguments_that_are_wrong(rank, store):
    join(rank, store, 2)
    good = "excluded" in error_of(lambda: dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).shrink([rank]), ValueError)
    good &= bool(error_of(lambda: dist.shrink_group([2]), ValueError)) and bool(error_of(lambda: dist.shrink_group([rank]), RuntimeError))
    return good and works(rank, 2)


def refused(rank, store):
    join(rank, store, 2)
    error = error_of(lambda: dist.shrink_group([1]), NotImplementedError) if rank == 0 else "needs flow_torch's C++ part"
    return "needs flow_torch's C++ part" in error and "\n" not in error and works(rank, 2)


CASES = (
    ("middle rank and then the first", 4, middle_rank_and_then_the_first, ()),
    ("killed last", 4, killed_last, (3,)),
    ("killed first", 4, killed_first, (0,)),
    ("two killed of which one is found later", 4, two_killed_of_which_one_is_found_later, (1, 2)),
    ("sub-group", 4, sub_group, ()),
    ("killed in a sub-group", 4, killed_in_a_sub_group, (2,)),
    ("pending works fail", 3, pending_works_fail, ()),
    ("arguments that are wrong", 2, arguments_that_are_wrong, ()),
)

if __name__ == "__main__":
    run(sys.argv[1], (("refused", 2, refused, ()),) if "refused" in sys.argv else CASES)
