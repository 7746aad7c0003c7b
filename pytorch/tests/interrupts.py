"""SIGINT while a rank waits: KeyboardInterrupt comes at once, and what it waited for fails. Two ranks, of which the first is interrupted; a
line for each case.

usage: interrupts.py FOLDER
"""

import os
import secrets
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import flow_torch
from flow_torch import bindings, extension, fallback, rendezvous
from waiting import when_main_waits

FOLDER, LONG = Path(sys.argv[1]), timedelta(seconds=600)


def interrupt_when_it_waits(call):
    when_main_waits(call.__code__, lambda: os.kill(os.getpid(), signal.SIGINT))


def is_interrupted(call):
    """Whether the call is, which nothing else ends before the time of this program is over."""
    try:
        interrupt_when_it_waits(call)
        call()
    except KeyboardInterrupt:
        return True
    return False


def error_of(call):
    try:
        call()
    except (dist.DistBackendError, RuntimeError) as error:
        return str(error)
    return ""


# Each makes what the rank then calls. Afterwards the group fails on both ranks.


def collective(group):
    return lambda: dist.all_reduce(torch.ones(3), group=group)


def asynchronous_collective(group):
    return lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()


def wait_with_a_timeout(group):
    return lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(LONG)


def functional_collective(group):
    return lambda: functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", group))


def several_at_once(group):
    def call():
        with dist._coalescing_manager(group=group):
            dist.all_reduce(torch.ones(3), group=group)
            dist.all_reduce(torch.ones(4), group=group)

    return call


def object_collective(group):
    return lambda: dist.all_gather_object([None, None], "an object", group=group)


def receive(group):
    return lambda: dist.recv(torch.ones(3), 1, group=group)


def receive_from_any(group):
    return lambda: dist.recv(torch.ones(3), group=group)


def long_send(group):
    return lambda: dist.send(torch.ones(1 << 24), 1, group=group)


def monitored_barrier(group):
    return lambda: dist.monitored_barrier(group)


def future(group):
    return lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()


def future_of_a_receive(group):
    return lambda: dist.irecv(torch.ones(3), 1, group=group).get_future().wait()


def future_that_follows(group):
    return lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().then(lambda done: done.value()).wait()


def several_futures(group):
    def call():
        torch.futures.wait_all([dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future() for _ in range(2)])

    return call


def backward_of_torchs_ddp(group):
    net = nn.parallel.DistributedDataParallel(nn.Linear(150, 150), process_group=group)
    return lambda: net(torch.ones(1, 150)).sum().backward()


def backward_with_a_hook(group):
    net = nn.parallel.DistributedDataParallel(nn.Linear(150, 150), process_group=group)
    net.register_comm_hook(
        None, lambda _, bucket: dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda done: done.value()[0])
    )
    return lambda: net(torch.ones(1, 150)).sum().backward()


def making_of_ddp(group):
    return lambda: flow_torch.DistributedDataParallel(nn.Linear(150, 150), process_group=group)


FAILING = (
    collective,
    asynchronous_collective,
    wait_with_a_timeout,
    functional_collective,
    several_at_once,
    object_collective,
    receive,
    receive_from_any,
    long_send,
    monitored_barrier,
    future,
    future_of_a_receive,
    future_that_follows,
    several_futures,
    backward_of_torchs_ddp,
    backward_with_a_hook,
    making_of_ddp,
)


def group_fails(case):
    group = dist.new_group()
    call = case(group)
    is_good = dist.get_rank() == 1 or is_interrupted(call)
    dist.barrier()  # here rank 1 has waited
    return "interrupted" in error_of(lambda: dist.all_reduce(torch.ones(3), group=group)) and is_good


# Other cases: whether all is as it should be.


def backward():
    """Its reductions go in a group of their own, which fails; with the part in Python they go in the process group."""
    net = flow_torch.DistributedDataParallel(nn.Linear(150, 150), process_group=dist.new_group())

    def call():
        net(torch.ones(1, 150)).sum().backward()

    is_good = dist.get_rank() == 1 or is_interrupted(call)
    dist.barrier()
    return error_of(call) != "" and is_good


def new_group():
    """The other rank is told, and the next one is made."""

    def call():
        dist.new_group()

    is_good = dist.get_rank() == 1 or is_interrupted(call)
    dist.barrier()
    if dist.get_rank() == 1:
        is_good = "interrupted" in error_of(call)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=dist.new_group())
    return ones.item() == 2 and is_good


def join_part():
    return bindings.join if is_cpp() else fallback.join


def join_as(rank):
    """A join by Flow's own store, which rank 0 serves, and to which no other rank comes."""
    token = secrets.token_hex(16)
    place = {"rank": rank, "world_size": 2, "local_rank": rank, "local_world_size": 2, "node": 0}
    place |= {"address": f"unix://flow-torch-{token}", "token": token}
    join = join_part()
    return dist.get_rank() == 1 or is_interrupted(lambda: join(place, token, LONG))


def join_of_the_first_rank():
    return join_as(0)


def join_of_another_rank():
    return join_as(1)


def join_whose_store_stops():
    """Rank 0 of it, which serves the store, is a child of this process, and is stopped while this waits."""
    if dist.get_rank() == 1:
        return True
    reserved = socket.socket()  # until this process ends; a server that sets SO_REUSEADDR can listen beside it
    reserved.bind(("127.0.0.1", 0))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    host, port = reserved.getsockname()
    token, join = secrets.token_hex(16), join_part()
    place = {"world_size": 2, "local_world_size": 2, "node": 0, "address": f"tcp://{host}:{port}", "token": token}
    child = os.fork()
    if child == 0:
        join(place | {"rank": 0, "local_rank": 0}, token, LONG)
        os._exit(1)
    while socket.socket().connect_ex((host, port)) != 0:
        time.sleep(0.01)

    def call():
        join(place | {"rank": 1, "local_rank": 1}, token, LONG)

    def stop():
        os.kill(child, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGINT)

    when_main_waits(call.__code__, stop)
    try:
        call()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def store_that_nobody_else_comes_to():
    """Of torch's store; as the first rank, and as another."""
    if dist.get_rank() == 1:
        return True
    store = dist.FileStore(str(FOLDER / "store"), 2)
    in_python = None if is_cpp() else fallback.join
    return all(is_interrupted(lambda rank=rank: rendezvous.meet(store, rank, 2, LONG, "a test", in_python)) for rank in (0, 1))


def compilation_that_another_process_does():
    """The C++ part is compiled by one process, for which others wait."""
    if dist.get_rank() == 1:
        return True
    with open(FOLDER / "lock", "w") as theirs, open(FOLDER / "lock") as ours:
        extension.until_locked(theirs)
        return is_interrupted(lambda: extension.until_locked(ours))


def end_of_a_group():
    """It waits for what is under way."""
    group = dist.new_group()
    if dist.get_rank() == 1:
        dist.barrier()
        return "interrupted" in error_of(lambda: dist.all_reduce(torch.ones(3), group=group))
    dist.all_reduce(torch.ones(3), group=group, async_op=True)
    is_good = is_interrupted(lambda: dist.destroy_process_group(group))
    dist.barrier()
    return is_good


def group_that_is_dropped():
    """The end of its last owner waits, where Python prints exceptions: the wait is over all the same. In Python nobody waits there."""
    if not is_cpp():
        return True
    groups = [flow_torch._backend().new_group_of([0, 1], LONG, None)]
    if dist.get_rank() == 1:
        dist.barrier()
        return "interrupted" in error_of(lambda: groups[0].allreduce([torch.ones(3)], dist.AllreduceOptions()).wait())
    options = dist.AllreduceOptions()
    options.asyncOp = True
    groups[0].allreduce([torch.ones(3)], options)

    def drop():
        groups.clear()

    printed, sys.unraisablehook = [], lambda unraisable: printed.append(unraisable.exc_type)
    interrupt_when_it_waits(drop)
    drop()
    sys.unraisablehook = sys.__unraisablehook__
    dist.barrier()
    return printed == [KeyboardInterrupt]


def handler_that_returns():
    """The wait goes on."""
    group, store, rank = dist.new_group(), dist.distributed_c10d._get_default_store(), dist.get_rank()
    previous = signal.signal(signal.SIGINT, lambda *_: store.set("handler was called", "yes"))
    ones = torch.ones(1)

    def call():
        dist.all_reduce(ones, group=group)

    if rank == 0:
        interrupt_when_it_waits(call)
    else:
        store.wait(["handler was called"])
    call()
    signal.signal(signal.SIGINT, previous)
    return ones.item() == 2


OTHERS = (
    backward,
    new_group,
    join_of_the_first_rank,
    join_of_another_rank,
    join_whose_store_stops,
    store_that_nobody_else_comes_to,
    compilation_that_another_process_does,
    end_of_a_group,
    group_that_is_dropped,
    handler_that_returns,
)


def is_cpp():
    return not isinstance(flow_torch._backend(), dist.ProcessGroup)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    cases = {case.__name__: lambda case=case: group_fails(case) for case in FAILING} | {case.__name__: case for case in OTHERS}
    failures = 0
    for name, case in cases.items():
        is_good = case()
        dist.barrier()
        failures += not is_good
        print(f"{name}: {'good' if is_good else 'BAD'}", flush=True)
    dist.destroy_process_group()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
