"""SIGINT while a rank waits for another: KeyboardInterrupt comes at once, and the group fails. Two ranks; a line for each case."""

import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import flow_torch


def collective(group):
    return lambda: dist.all_reduce(torch.ones(3), group=group)


def asynchronous_collective(group):
    return lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()


def wait_with_a_timeout(group):
    return lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(timedelta(seconds=600))


def message(group):
    return lambda: dist.recv(torch.ones(3), 1, group=group)


def monitored_barrier(group):
    return lambda: dist.monitored_barrier(group)


def backward(group):
    net = flow_torch.DistributedDataParallel(nn.Linear(150, 150), process_group=group)
    return lambda: net(torch.ones(1, 150)).sum().backward()


def is_interrupted(call):
    """Whether the call is, which nothing else ends before the time of this program is over."""
    try:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        call()
    except KeyboardInterrupt:
        return True
    return False


def handler_that_returns(group):
    """The wait goes on."""
    called = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: called.set())
    if dist.get_rank() == 0:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        threading.Event().wait(0.5)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    if dist.get_rank() == 0:
        called.wait()
    signal.signal(signal.SIGINT, previous)
    return ones.item() == 2


def is_cpp(group):
    return not isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroup)


def fails(group):
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except dist.DistBackendError as error:
        return "interrupted" in str(error)
    return False


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    rank, failures = dist.get_rank(), 0
    for case in collective, asynchronous_collective, wait_with_a_timeout, message, monitored_barrier, backward:
        group = dist.new_group()
        waits = case(group)
        is_good = rank == 1 or is_interrupted(waits)
        dist.barrier()  # here rank 1 has waited
        if case is not backward or not is_cpp(group):  # its reductions go in a group of their own
            is_good = fails(group) and is_good
        failures += not is_good
        print(f"{case.__name__}: {'good' if is_good else 'BAD'}", flush=True)
    is_good = handler_that_returns(dist.new_group())
    failures += not is_good
    print(f"handler_that_returns: {'good' if is_good else 'BAD'}", flush=True)
    dist.destroy_process_group()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
