"""What is under way in groups of some ranks when flow_torch.reconfigure() ends them: three ranks of flow-launch --elastic in-place, of which
none waits for a time-out. A line for each case and rank."""

import os
import signal
import time

import torch
import torch.distributed as dist

import flow_torch
from alone import error_of

NEW = os.environ["FLOW_REPLACEMENT"] != "0"


def fails(work):
    return bool(error_of(work.wait))


def waits_in_a_collective(pair):
    if dist.get_rank() == 0:
        time.sleep(0.05)
        flow_torch.reconfigure()
        return True
    return waits_in(lambda: dist.all_reduce(torch.ones(1000), group=pair))


def waits_in_backward(pair):
    """Of a group of its own, of the ranks of the pair."""
    net = torch.nn.Linear(200, 200, bias=False)
    model = flow_torch.DistributedDataParallel(net, process_group=pair)
    loss = model(torch.ones(1, 200)).sum()
    if dist.get_rank() == 0:
        time.sleep(0.05)
        flow_torch.reconfigure()
        return bool(error_of(loss.backward))
    return waits_in(loss.backward)


def waits_in(call):
    is_good = bool(error_of(call))
    flow_torch.reconfigure()
    return is_good


def pending(pair):
    """Of collectives and of messages, on both sides: whoever waits for them afterwards gets the error at once."""
    other = 1 - dist.get_rank()
    works = [dist.all_reduce(torch.ones(1000), group=pair, async_op=True)] if other == 0 else []
    works += [dist.irecv(torch.zeros(3), other, group=pair, tag=tag) for tag in (0, 1)]
    works += [dist.irecv(torch.zeros(3), group=pair, tag=2)]
    time.sleep(0.05)  # with it some have begun
    flow_torch.reconfigure()
    return all(map(fails, works))


def dies_while_others_wait(pair):
    """One of the pair waits for the other, and that one for the rank that dies."""
    if dist.get_rank() == 0:
        return waits_in(lambda: dist.all_reduce(torch.ones(1000)))
    return waits_in(lambda: dist.all_reduce(torch.ones(1000), group=pair))


CASES = [waits_in_a_collective, waits_in_backward, pending, dies_while_others_wait]


def main():
    torch.set_num_threads(1)
    flow_torch.reconfigure()
    for case in () if NEW else CASES:
        pair = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            is_good = case(pair)
            is_good &= "this group has ended" in error_of(lambda: dist.all_reduce(torch.ones(1), group=pair))
            print(f"{case.__name__}: {'good' if is_good else 'BAD'}", flush=True)
        elif case is dies_while_others_wait:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            flow_torch.reconfigure()
    while dist.get_world_size() < 3:
        waiting = torch.tensor([flow_torch.newcomers()])
        dist.all_reduce(waiting, dist.ReduceOp.MAX)
        if waiting.item() > 0:
            flow_torch.reconfigure()
    pair = dist.new_group([0, 2])
    total = torch.ones(1)
    if dist.get_rank() != 1:
        dist.all_reduce(total, group=pair)
    is_good = total.item() == (1 if dist.get_rank() == 1 else 2)
    print(f"groups of the ranks that are there: {'good' if is_good else 'BAD'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
