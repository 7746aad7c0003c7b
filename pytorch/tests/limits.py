"""Timeouts of groups and of operations, monitored_barrier, abort. Two ranks; a line for each case."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import flow_torch

SHORT = timedelta(milliseconds=300)


def raised(call):
    try:
        call()
    except dist.DistBackendError as error:
        return str(error)
    return ""


def monitored_barrier(rank, group):
    dist.monitored_barrier(group, timeout=timedelta(seconds=60), wait_all_ranks=True)
    error = raised(lambda: dist.monitored_barrier(group, timeout=SHORT)) if rank == 0 else ""
    return rank == 1 or error.startswith("Rank 1 failed to pass monitoredBarrier in 300 ms")


def timeout_of_the_group(rank, group):
    group.set_timeout(SHORT)
    return rank == 1 or "rank 1" in raised(lambda: dist.all_reduce(torch.ones(3), group=group))


def timeout_set_by_its_private_name(rank, group):
    dist.distributed_c10d._set_pg_timeout(SHORT, group)
    return rank == 1 or "rank 1" in raised(lambda: dist.all_reduce(torch.ones(3), group=group))


def timeout_of_an_operation(rank, group):
    options = dist.AllreduceOptions()
    options.timeout = SHORT
    return rank == 1 or "rank 1" in raised(lambda: group.allreduce([torch.ones(3)], options).wait())


def abort(rank, group):
    if rank == 1:
        group.abort()
        return True
    return "abort" in raised(lambda: dist.all_reduce(torch.ones(3), group=group))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    rank, failures = dist.get_rank(), 0
    for case in monitored_barrier, timeout_of_the_group, timeout_set_by_its_private_name, timeout_of_an_operation, abort:
        good = case(rank, dist.new_group())
        dist.barrier()
        failures += not good
        print(f"{case.__name__}: {'good' if good else 'BAD'}", flush=True)
    dist.destroy_process_group()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
