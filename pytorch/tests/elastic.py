"""Ranks of flow-launch --elastic in-place, of which one is killed in each of the first rounds. Prints "rank R: good".

usage: elastic.py ROUNDS
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

import flow_torch

ROUNDS, STEPS = int(sys.argv[1]), 4
NEW = os.environ["FLOW_REPLACEMENT"] != "0"


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
        if not NEW and size == 3 and step == dist.get_rank() * STEPS + 2 and dist.get_rank() < ROUNDS:
            os.kill(os.getpid(), signal.SIGKILL)
        net.weight.grad = None
        wrapped[step % 2](torch.full((1, 200), gradient(step))).sum().backward()
        with torch.no_grad():
            net.weight.add_(net.weight.grad)
        state["step"] += 1


def main():
    torch.set_num_threads(1)
    net, state = torch.nn.Linear(200, 200, bias=False), {"step": -1 if NEW else 0}
    torch.nn.init.zeros_(net.weight)
    while True:
        flow_torch.reconfigure()
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
    print(f"rank {dist.get_rank()}: {'good' if good else 'BAD'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
