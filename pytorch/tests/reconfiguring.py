"""Groups that get other ranks: init_process_group(enable_reconfigure=True) of PyTorch 2.14. A line for each case.

usage: reconfiguring.py FOLDER [refused]

refused: the part in Python says that it cannot do it.
"""

import inspect
import os
import random
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import flow_torch
from alone import TIMEOUT, error_of, run, works

SEED = 7
STEPS = 25


class Process:
    """One of several, each of which has a handle in the store."""

    def __init__(self, number, store, count):
        self.number, self._store = number, dist.PrefixStore("handles", store)
        dist.init_process_group("flow", store=store, rank=number, world_size=count, timeout=TIMEOUT, enable_reconfigure=True)
        self._store.set(str(number), dist._get_reconfigure_handle())

    def handles(self, members):
        return [self._store.get(str(member)).decode() for member in members]

    def meet(self, uuid, members, timeout=TIMEOUT):
        """The members, which all call this, are the group's ranks in this order. Whether that works."""
        dist._reconfigure(uuid, self.handles(members), timeout=timeout).wait()
        return works(members.index(self.number), len(members))


def first_meeting(number, store):
    """Before that there are no ranks. The order of the handles is that of the ranks."""
    own = Process(number, store, 3)
    good = dist._supports_reconfigure()
    for operation in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(1), async_op=True),
        lambda: dist.isend(torch.ones(1), (number + 1) % 3),
        lambda: dist.new_group([0, 1]) if number < 2 else dist.barrier(),
    ):
        good &= "has no ranks" in error_of(operation, RuntimeError)
    dist.group.WORLD.abort()
    return good and own.meet(0, [2, 0, 1]) and own.meet(1, [0, 1, 2])


def set_of_handles(number, store):
    own = Process(number, store, 3)
    dist._reconfigure(0, set(own.handles(range(3)))).wait()
    ranks = [None] * 3
    dist.all_gather_object(ranks, dist.get_rank())
    return ranks == [0, 1, 2] and works(dist.get_rank(), 3)


def one_is_left_out(number, store, left):
    """It waits outside, and comes again."""
    own = Process(number, store, 3)
    good = own.meet(0, [0, 1, 2])
    members = [member for member in range(3) if member != left]
    good &= number == left or own.meet(1, members)
    return good and own.meet(2, [0, 1, 2])


def first_is_left_out(number, store):
    return one_is_left_out(number, store, 0)


def middle_one_is_left_out(number, store):
    return one_is_left_out(number, store, 1)


def last_is_left_out(number, store):
    return one_is_left_out(number, store, 2)


def alone_together_and_alone(number, store):
    """Those that are alone have the same uuid."""
    own = Process(number, store, 3)
    return own.meet(0, [number]) and own.meet(1, [0, 1, 2]) and own.meet(2, [number])


def one_first(number, store):
    own = Process(number, store, 3)
    return (number != 0 or own.meet(0, [0])) and own.meet(1, [0, 1, 2])


def two_groups_become_one(number, store):
    own = Process(number, store, 4)
    return own.meet(0, [0, 1] if number < 2 else [2, 3]) and own.meet(1, [0, 1, 2, 3])


def same_members_again(number, store):
    """At once after a collective, which others may still have to finish."""
    own = Process(number, store, 3)
    good = True
    for uuid in range(12):
        good &= own.meet(uuid, [0, 1, 2])
        dist.all_reduce(torch.ones(100_000))
    return good


def after_an_abort(number, store):
    own = Process(number, store, 3)
    good = own.meet(0, [0, 1, 2])
    work = dist.irecv(torch.zeros(1), (number + 1) % 3, tag=9)
    dist.barrier()
    dist.group.WORLD.abort()
    good &= "abort" in error_of(work.wait) and "abort" in error_of(dist.barrier)
    return good and own.meet(1, [0, 1, 2])


def pending_works(number, store):
    """They fail, and what was sent does not come to the next group."""
    own = Process(number, store, 3)
    good = own.meet(0, [0, 1, 2])
    before = torch.zeros(1)
    receive = dist.irecv(before, (number + 1) % 3, tag=9)
    dist.barrier()
    good &= own.meet(1, [0, 1, 2])
    good &= bool(error_of(receive.wait)) and before.item() == 0
    after = torch.zeros(1)
    receive = dist.irecv(after, (number + 1) % 3, tag=9)
    dist.send(torch.full((1,), number + 1.0), (number - 1) % 3, tag=9)
    receive.wait()
    return good and after.item() == (number + 1) % 3 + 1


def left_behind(number, store):
    """A member that does not know that the others have gone learns it from its next operation."""
    own = Process(number, store, 3)
    good = own.meet(0, [0, 1, 2])
    if number == 1:
        good &= "has left" in error_of(lambda: dist.all_reduce(torch.ones(1)))
    else:
        good &= own.meet(1, [0, 2])
    return good and own.meet(2, [0, 1, 2])


def wrong_arguments(number, store):
    """The group stays as it is."""
    own = Process(number, store, 2)
    good = own.meet(0, [0, 1])
    for uuid, handles, said in (
        (0, own.handles([0, 1]), "already used"),
        (1, own.handles([1 - number]), "own handle"),
        (1, own.handles([0, 1, 0]), "is there twice"),
    ):
        error = error_of(lambda: dist._reconfigure(uuid, handles), ValueError)
        good &= said in error
    return good and works(number, 2) and own.meet(1, [1, 0])


def members_that_differ(number, store):
    """All that come know it at once; then they meet."""
    own = Process(number, store, 3)
    members = [0, 1] if number == 0 else [0, 1, 2]
    if number < 2:
        error = error_of(lambda: own.meet(0, members), ValueError)
        good = "rank 1 gives other members than rank 0" in error
    else:
        good = "did not join" in error_of(lambda: own.meet(0, members, timedelta(seconds=0.5)), dist.DistStoreError)
    return good and own.meet(1, [0, 1, 2])


def one_does_not_come(number, store):
    own = Process(number, store, 3)
    good = own.meet(0, [0, 1, 2])
    if number < 2:
        error = error_of(lambda: own.meet(1, [0, 1, 2], timedelta(seconds=0.5)), dist.DistStoreError)
        good &= "did not join within 0.5 s, the timeout of reconfigure" in error
        good &= "has no ranks" in error_of(dist.barrier, RuntimeError)
    return good and own.meet(2, [0, 1, 2])


def killed_in_a_collective(number, store, killed):
    own = Process(number, store, 4)
    good = own.meet(0, [0, 1, 2, 3])
    if number == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    good &= f"rank {killed} (pid" in error_of(lambda: dist.all_reduce(torch.ones(9)))
    return good and own.meet(1, [member for member in range(4) if member != killed])


def killed_first(number, store):
    return killed_in_a_collective(number, store, 0)


def killed_last(number, store):
    return killed_in_a_collective(number, store, 3)


def sub_groups_and_training(number, store):
    """Of each new group."""
    own = Process(number, store, 3)
    good = own.meet(0, [0, 1, 2])
    dist.new_group([0, 1])
    if number == 2:
        return good
    good &= own.meet(1, [1, 0])
    rank = dist.get_rank()
    good &= works(rank, 2, dist.new_group([0, 1]))
    for kind in (torch.nn.parallel.DistributedDataParallel, flow_torch.DistributedDataParallel):
        net = kind(torch.nn.Linear(300, 300, bias=False))
        for _ in range(2):
            net.zero_grad()
            net(torch.full((1, 300), rank + 1.0)).sum().backward()
        good &= bool((net.module.weight.grad == 1.5).all())
    return good


def sub_group_left_behind(number, store, said="has left"):
    """Who waits there for one that has left learns it at once."""
    own = Process(number, store, 3)
    good = own.meet(0, [0, 1, 2])
    pair = dist.new_group([0, 1])
    if number == 1:
        good &= said in error_of(lambda: dist.all_reduce(torch.ones(1), group=pair))
    else:
        pending = dist.irecv(torch.zeros(1), 1, group=pair, tag=3) if said != "has left" and number == 0 else None
        good &= own.meet(1, [0, 2])
        good &= pending is None or bool(error_of(pending.wait))
        good &= number == 2 or "has ended" in error_of(lambda: dist.all_reduce(torch.ones(1), group=pair))
    return good and own.meet(2, [0, 1, 2])


def sub_group_with_works(number, store):
    """They fail, for the others as well."""
    return sub_group_left_behind(number, store, "operations that were pending")


def random_memberships(number, store):
    """Groups beside each other, of some of the processes in any order. Some leave with works that are pending, and some abort."""
    own = Process(number, store, 4)
    chance = random.Random(SEED)
    good = True
    for uuid in range(STEPS):
        members = chance.sample(range(4), 4)
        cuts = sorted(chance.choices(range(5), k=2))
        groups = members[: cuts[0]], members[cuts[0] : cuts[1]]  # the rest stays outside
        pending, aborts = chance.random() < 0.3, chance.random() < 0.3
        for group in groups:
            if number not in group:
                continue
            good &= own.meet(uuid, group)
            rank, size = dist.get_rank(), len(group)
            gathered = [torch.zeros(1) for _ in group]
            dist.distributed_c10d.GroupMember.WORLD.allgather([gathered], [torch.tensor([float(number)])]).wait()
            good &= [int(each) for each in gathered] == group
            if pending and size > 1:
                dist.irecv(torch.zeros(1), (rank + 1) % size, tag=3)
            if aborts:
                dist.barrier()
                dist.group.WORLD.abort()
    return good and own.meet(STEPS, [0, 1, 2, 3])


def refused(number, store):
    error = error_of(lambda: Process(number, store, 2), ImportError)
    return "there is no" in error and "\n" not in error


CASES = (
    ("first meeting", 3, first_meeting, ()),
    ("set of handles", 3, set_of_handles, ()),
    ("first is left out", 3, first_is_left_out, ()),
    ("middle one is left out", 3, middle_one_is_left_out, ()),
    ("last is left out", 3, last_is_left_out, ()),
    ("alone, together and alone", 3, alone_together_and_alone, ()),
    ("one first", 3, one_first, ()),
    ("two groups become one", 4, two_groups_become_one, ()),
    ("same members again", 3, same_members_again, ()),
    ("after an abort", 3, after_an_abort, ()),
    ("pending works", 3, pending_works, ()),
    ("left behind", 3, left_behind, ()),
    ("wrong arguments", 2, wrong_arguments, ()),
    ("members that differ", 3, members_that_differ, ()),
    ("one does not come", 3, one_does_not_come, ()),
    ("killed first", 4, killed_first, (0,)),
    ("killed last", 4, killed_last, (3,)),
    ("sub-groups and training", 3, sub_groups_and_training, ()),
    ("sub-group left behind", 3, sub_group_left_behind, ()),
    ("sub-group with works", 3, sub_group_with_works, ()),
    ("random memberships", 4, random_memberships, ()),
)

if __name__ == "__main__":
    cases = (("refused", 2, refused, ()),) if "refused" in sys.argv else CASES
    if "enable_reconfigure" in inspect.signature(dist.init_process_group).parameters:
        run(sys.argv[1], cases)
    for name, *_ in cases:
        print(f"SKIPPED: {name}: PyTorch {torch.__version__} has no enable_reconfigure")
