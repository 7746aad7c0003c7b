"""Ranks of flow-launch --elastic in-place, of which one is killed in each of the first rounds, and the first newcomer before it has the
default group. Prints "rank R: good".

usage: elastic.py ROUNDS
"""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import flow_torch
from alone import error_of
from flow_torch import bindings

ROUNDS, STEPS = int(sys.argv[1]), 4
NEW = os.environ["FLOW_REPLACEMENT"] != "0"
RANK = int(os.environ["RANK"])
FIRST_NEW = (RANK, os.environ["FLOW_REPLACEMENT"]) == (0, "1")
RECONFIGURE = bindings.reconfigure
agreed = []


def gradient(step):
    return float(step % 5 + 1)


def train(net, state):
    """Up to the last step, or until somebody waits to join, or a rank is lost: False then. All begin with the state of the farthest rank."""
    size = dist.get_world_size()
    steps = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(steps, torch.tensor([state["step"]]))
    farthest = max(range(size), key=lambda rank: int(steps[rank]))
    state["step"] = int(steps[farthest])
    dist.broadcast(net.weight.data, farthest)
    wrapped = [kind(net) for kind in (torch.nn.parallel.DistributedDataParallel, flow_torch.DistributedDataParallel)]
    while True:
        waiting = torch.tensor([flow_torch.newcomers()])
        dist.all_reduce(waiting, dist.ReduceOp.MAX)
        if waiting.item() > 0:
            return False
        step = state["step"]
        if step > 0 and step % STEPS == 0 and size < 3:
            continue  # one is on its way
        if step == ROUNDS * STEPS:
            return True
        # At an even and at an odd step: in either class of DistributedDataParallel.
        if not NEW and size == 3 and step == dist.get_rank() * STEPS + 2 + dist.get_rank() and dist.get_rank() < ROUNDS:
            os.kill(os.getpid(), signal.SIGKILL)
        net.weight.grad = None
        wrapped[step % 2](torch.full((1, 200), gradient(step))).sum().backward()
        with torch.no_grad():
            net.weight.add_(net.weight.grad)
        state["step"] += 1


def job_store():
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def fail_once():
    """The last rank calls it alone, and so in vain."""
    store = job_store()
    if dist.get_rank() < dist.get_world_size() - 1:
        return store.wait(["failed"])
    if not error_of(lambda: flow_torch.reconfigure(timedelta(seconds=0.1))):
        sys.exit("reconfigure() without the other ranks succeeds")
    store.set("failed", "")


def refuse_other_groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for call in (flow_torch.reconfigure, flow_torch.newcomers):
        if "flow_torch.reconfigure()" not in error_of(call, RuntimeError):
            sys.exit(f"{call.__name__}() takes a default group of others")
    dist.destroy_process_group()


def agree(before, timeout):
    """In place of bindings.reconfigure. The first newcomer is killed when all have agreed on it."""
    made = RECONFIGURE(before, timeout)
    agreed.append(made)
    if FIRST_NEW:
        job_store().wait(["agreed/1", "agreed/2"])
        os.kill(os.getpid(), signal.SIGKILL)
    if before is not None and made.size() == 3 and job_store().check(["first newcomer"]):
        job_store().set(f"agreed/{RANK}", "")
    return made


def reconfigure():
    """Calls it. How often the ranks have agreed meanwhile."""
    agreed.clear()
    flow_torch.reconfigure()
    return len(agreed)


def main():
    torch.set_num_threads(1)
    refuse_other_groups()
    bindings.reconfigure = agree
    if FIRST_NEW:
        job_store().set("first newcomer", "")
    agreements = [reconfigure()]
    if not NEW:
        fail_once()
    net, state = torch.nn.Linear(200, 200, bias=False), {"step": -1 if NEW else 0}
    torch.nn.init.zeros_(net.weight)
    while True:
        agreements.append(reconfigure())
        try:
            if train(net, state):
                break
        except dist.DistBackendError:
            pass
    pair = dist.new_group([0, 2])
    total = torch.ones(1)
    if pair is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(total, group=pair)
    good = total.item() == (1 if dist.get_rank() == 1 else 2) and str(dist.get_rank()) == os.environ["RANK"]
    good &= bool((net.weight == sum(map(gradient, range(ROUNDS * STEPS)))).all())
    good &= RANK != 2 or max(agreements) == 2  # with the first newcomer, and at once without it
    print(f"rank {dist.get_rank()}: {'good' if good else 'BAD'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
