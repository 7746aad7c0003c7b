"""What is called at the end of operations: abort hooks (PyTorch 2.14), and the flight recorder's completion hooks (2.15). A line for each case.

usage: hooked.py FOLDER
"""

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import flow_torch
from alone import TIMEOUT, error_of, run


def join(rank, store, size):
    dist.init_process_group("flow", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return dist.group.WORLD


class Hook:
    """One that counts its calls."""

    def __init__(self, group):
        self._group, self._number, self.calls = group, id(self), 0
        group.register_abort_hook(self._number, self)

    def __call__(self):
        self.calls += 1

    def remove(self):
        self._group.unregister_abort_hook(self._number)


def killed_rank(rank, store):
    """The hooks are called before whoever waits has the error. Not one that was removed, nor for what succeeds, or in other groups."""
    group = join(rank, store, 2)
    other = dist.new_group([0, 1])
    hook, removed, others = Hook(group), Hook(group), Hook(other)
    removed.remove()
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    good = hook.calls == 0
    work = dist.all_reduce(torch.ones(3), async_op=True)
    good &= "rank 1 (pid" in error_of(work.wait) and hook.calls == 1
    return good and (removed.calls, others.calls) == (0, 0)


def each_kind_of_operation(rank, store):
    """In a group of its own, of which the other rank does not come."""
    join(rank, store, 2)
    ones = torch.ones(3)
    for begin in (
        lambda group: dist.all_reduce(ones, group=group),
        lambda group: dist.broadcast(ones, 0, group=group),
        lambda group: dist.all_reduce(ones, group=group, async_op=True).wait(),
        lambda group: dist.irecv(ones, 1, group=group).wait(),
        lambda group: dist.all_gather([ones, ones], ones, group=group),
    ):
        group = dist.new_group([0, 1])
        hook = Hook(group)
        if rank == 0:
            group.set_timeout(timedelta(seconds=0.2))
            if not (error_of(lambda: begin(group)) and hook.calls == 1):
                return False
        dist.barrier()
    return True


def hook_that_fails(rank, store):
    """The operation's own error comes, and the other hooks are called."""
    group = join(rank, store, 2)

    def fail():
        raise KeyError("a hook's own")

    group.register_abort_hook(0, fail)
    hook = Hook(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "rank 1 (pid" in error_of(lambda: dist.all_reduce(torch.ones(3))) and hook.calls == 1


def on_a_helper_thread(rank, store):
    """Nobody waits for the operation. The hook may remove itself."""
    group = join(rank, store, 2)
    called = threading.Event()

    def call():
        group.unregister_abort_hook(0)
        called.set()

    group.register_abort_hook(0, call)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    return called.wait(TIMEOUT.total_seconds()) and bool(error_of(work.wait))


def orderly_end(rank, store):
    """Receives that nobody has sent to end without hooks: one that a helper runs, and the one after it."""
    group = join(rank, store, 2)
    hook = Hook(group)
    if rank == 1:
        store.wait(["over"], TIMEOUT)
        return True
    receives = [dist.irecv(torch.ones(3), 1) for _ in range(2)]
    dist.destroy_process_group()
    good = bool(error_of(receives[1].wait)) and hook.calls == 0
    store.set("over", "")
    return good


def flight_recorder(rank, store):
    """It knows of each operation whether it has completed: what has failed has not."""
    group = join(rank, store, 2)
    good = group.supports_completion_hooks
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    receive = dist.irecv(torch.ones(3), 1 - rank)
    dist.send(torch.ones(3), 1 - rank)
    receive.wait()
    group.allreduce_coalesced([torch.ones(3), torch.ones(4)]).wait()
    dist.barrier()
    completed = ["completed"] * 6
    # Who waits for an operation may go on a little before its hooks are called.
    end = time.monotonic() + TIMEOUT.total_seconds()
    while states() != completed and time.monotonic() < end:
        time.sleep(0.01)
    good &= states() == completed
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    good &= bool(error_of(dist.barrier))
    return good and states() == [*completed, "scheduled"]


def states():
    recorded = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend="flow"))
    return [entry["state"] for entry in recorded["entries"]]


CASES = (
    ("killed rank", 2, killed_rank, (1,)),
    ("each kind of operation", 2, each_kind_of_operation, ()),
    ("hook that fails", 2, hook_that_fails, (1,)),
    ("on a helper thread", 2, on_a_helper_thread, (1,)),
    ("orderly end", 2, orderly_end, ()),
    ("flight recorder", 2, flight_recorder, (1,)),
)

if __name__ == "__main__":
    if hasattr(dist.ProcessGroup, "register_abort_hook"):
        recorder = hasattr(dist.ProcessGroup, "supports_completion_hooks")
        if not recorder:
            print(f"SKIPPED: flight recorder: PyTorch {torch.__version__} has no completion hooks")
        run(sys.argv[1], CASES if recorder else CASES[:-1])
    for name, *_ in CASES:
        print(f"SKIPPED: {name}: PyTorch {torch.__version__} has no abort hooks")
