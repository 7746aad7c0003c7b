"""Programs that end while something is under way, without destroy_process_group. Two ranks.

usage: ending.py CASE

What callbacks print comes also if they run after the last line of the program.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

# What is registered before runs after the end of flow_torch.
at_last = []
atexit.register(lambda: [call() for call in at_last])

import flow_torch
from flow_torch import library
from waiting import when_main_waits


def callback_that_sends(rank):
    """It begins before the program ends, and goes on after that."""
    received = dist.irecv(torch.zeros(1), 1 - rank, tag=4)
    begun = threading.Event()

    def answer(_):
        begun.set()
        time.sleep(0.05)
        with contextlib.suppress(dist.DistBackendError):  # it may have ended
            dist.send(torch.ones(1), 1 - rank, tag=5)
        print(f"rank {rank} has answered", flush=True)

    received.get_future().then(answer)
    dist.send(torch.ones(1), 1 - rank, tag=4)
    begun.wait()


def callback_that_begins_late(rank):
    """What it follows from is still to come when the program ends."""
    total = dist.all_reduce(torch.ones(1), async_op=True)
    total.get_future().then(lambda done: print(f"rank {rank} has {done.value()[0].item():g}", flush=True))


def receive_without_a_partner(rank):
    """Its tensor is Python's, and nobody but the operation has it."""
    dist.irecv(torch.zeros(1), 1 - rank, tag=4).get_future().then(lambda done: done)


def callback_that_asks_others(rank):
    """It begins operations of its own, also asynchronous ones, whose futures have callbacks."""
    received = dist.irecv(torch.zeros(1), 1 - rank, tag=4)
    begun = threading.Event()

    def ask(_):
        begun.set()
        work = dist.isend(torch.ones(1), 1 - rank, tag=6)
        reply = dist.irecv(torch.zeros(1), 1 - rank, tag=6)
        reply.get_future().then(lambda _: print(f"rank {rank} was asked", flush=True))
        work.wait()
        reply.wait()

    # First, as the callback runs at once where the message is there already, and waits for the other rank's.
    dist.send(torch.ones(1), 1 - rank, tag=4)
    received.get_future().then(ask)
    begun.wait()


def callback_that_waits_for_a_future(rank):
    """It begins an operation after the program has ended, and waits for its future rather than for the operation."""
    received = dist.irecv(torch.zeros(1), 1 - rank, tag=4)
    begun = threading.Event()

    def ask(_):
        begun.set()
        time.sleep(0.5)
        total = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        print(f"rank {rank} has {total.wait()[0].item():g}", flush=True)

    dist.send(torch.ones(1), 1 - rank, tag=4)
    received.get_future().then(ask)
    begun.wait()


def end_that_is_interrupted(rank):
    """It waits for what the other rank never begins."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has ended"])
    else:
        dist.all_reduce(torch.ones(1), async_op=True)
        when_main_waits(library._end.__code__, lambda: os.kill(os.getpid(), signal.SIGINT))
        at_last.append(lambda: store.set("rank 0 has ended", "yes"))
    at_last.append(lambda: print(f"rank {rank} has ended", flush=True))


CASES = (
    callback_that_sends,
    callback_that_begins_late,
    receive_without_a_partner,
    callback_that_asks_others,
    callback_that_waits_for_a_future,
    end_that_is_interrupted,
)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    case = next(case for case in CASES if case.__name__ == sys.argv[1])
    case(dist.get_rank())


if __name__ == "__main__":
    main()
