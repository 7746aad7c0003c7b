"""Calls that would hang, read freed memory or give wrong data, if the backend did not look out. Two ranks; a line for each case."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import flow_torch

CPU = torch.device("cpu")


def raised(call, kind=Exception):
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def reduce_scatter_of_lists(rank):
    same = True
    for dtype in (torch.float32, torch.int16):
        for count in (1, 7, 1000, 70_000, 400_000):
            full = (torch.arange(2 * count) % 100 + rank).to(dtype)
            part, expected = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)
            dist.reduce_scatter(part, list(full.view(2, -1)))
            dist.reduce_scatter_tensor(expected, full)
            same = same and torch.equal(part, expected)
    return same


def sizes_that_differ(rank):
    """In a group of one, for others would wait for this rank."""
    alone = [dist.new_group([other]) for other in (0, 1)][rank]
    three, two, whole = torch.ones(3), torch.ones(2), torch.ones(3, dtype=torch.int64)
    return all(
        raised(call, kind)
        for other, kind in ((two, ValueError), (whole, TypeError))
        for call in (
            lambda: alone.gather([[other]], [three], root()).wait(),
            lambda: alone.scatter([three], [[other]], scatter_root()).wait(),
            lambda: alone.reduce_scatter([three], [[other]]).wait(),
        )
    )


def root():
    options = dist.GatherOptions()
    options.rootRank = 0
    return options


def scatter_root():
    options = dist.ScatterOptions()
    options.rootRank = 0
    return options


def callback_that_communicates(_):
    def again(done):
        sums = done.value()[0].clone()
        dist.all_reduce(sums)
        return sums

    chained = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(again)
    return chained.wait().tolist() == [4.0] * 4


def futures_that_are_dropped(rank):
    """With the last owner of an operation the GIL may be needed, whose owner may be about to start another one."""
    for _ in range(20_000):
        work = dist.all_reduce(torch.ones(8), async_op=True)
        future = work.get_future()
        work.wait()
        del work, future
    return True


def futures_after_the_end(rank):
    """An operation's future is complete when the operation is: torch's Reducer takes its value then."""
    for _ in range(1_000):
        work = dist.all_reduce(torch.ones(8), async_op=True)
        future = work.get_future()
        work.wait()
        if not future.done():
            return False
        work = dist.all_reduce(torch.ones(8), async_op=True)
        while not work.is_completed():
            time.sleep(0)
        if not work.get_future().done():
            return False
    return True


def power_sgd(rank):
    torch.manual_seed(1)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400)), bucket_cap_mb=0.5)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(5):
        net.zero_grad()
        net(torch.full((2, 400), step + rank + 1.0)).square().mean().backward()
    own = next(net.parameters()).grad
    others = [torch.zeros_like(own) for _ in range(2)]
    dist.all_gather(others, own)
    return torch.equal(*others) and bool(own.abs().sum() > 0)


def bucket_seen_by_a_view(_):
    net = DistributedDataParallel(nn.Linear(1000, 1000), gradient_as_bucket_view=True)
    batch = torch.ones(1, 1000)
    net(batch).sum().backward()
    net.zero_grad(set_to_none=False)
    loss = net(batch).sum()
    array = net.module.weight.grad.numpy()
    loss.backward()
    # The rank's share, as before the reduction; or the mean, where the bucket has not moved.
    return array.sum() in (500_000, 1_000_000) and bool((net.module.weight.grad == 1).all())


def take_memory():
    """All shared memory that this rank has left."""
    backend, taken, size = dist.group.WORLD._get_backend(CPU), [], 1 << 28
    while size > 1 << 14 and backend.supports_tensor_alloc(CPU):
        block = backend.allocate_tensor(size, dtype=torch.float32, device=CPU)
        if flow_torch.is_shared(block):
            taken.append(block)
        else:
            size //= 2
    return taken


def is_trained(rank, group):
    """Two layers, each a bucket, with more inputs on rank 1: for the last ones rank 0 reduces new tensors in every step."""
    length = 300
    layers = nn.Sequential(*[nn.Linear(length, length) for _ in range(2)])
    net = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.1)
    weight = net.module[1].weight
    for layer in net.module:
        nn.init.constant_(layer.weight, 1 / length)
        nn.init.zeros_(layer.bias)
    good, steps = True, 3 + 3 * rank
    with net.join(divide_by_initial_world_size=False):
        for step in range(steps):
            net.zero_grad()
            net(torch.full((1, length), rank + 1.0)).sum().backward()
            good = good and torch.allclose(weight.grad, torch.tensor(1.5 if step < 3 else 2.0))
    return good


def uneven_inputs(rank):
    """Also on a rank that has no shared memory left, in a group that has kept some for buckets and in one that has not."""
    first, second = dist.new_group(), dist.new_group()
    good = is_trained(rank, first)
    taken = take_memory() if rank == 0 else []
    good = is_trained(rank, first) and is_trained(rank, second) and good
    del taken
    return is_trained(rank, second) and good


def no_room(rank):
    """Rank 0 has no shared memory left for its bucket."""
    taken = take_memory() if rank == 0 else []
    net = DistributedDataParallel(nn.Linear(1000, 1000), gradient_as_bucket_view=True)
    for _ in range(4):
        net.zero_grad()
        net(torch.full((1, 1000), rank + 1.0)).sum().backward()
        if not (net.module.weight.grad == 1.5).all():
            return False
    del taken
    return rank == 1 or not flow_torch.is_shared(net.module.weight.grad)


def timeout_of_wait(rank):
    group = dist.new_group()
    error = "wait()"
    if rank == 0:
        works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(2)]
        error = raised(lambda: works[1].wait(timedelta(milliseconds=300)), dist.DistBackendError)
    dist.barrier()
    return bool(error)


def tags(rank):
    calls = (lambda: dist.send(torch.ones(1), 1 - rank, tag=-1), lambda: dist.recv(torch.ones(1), 1 - rank, tag=-1))
    return all("tag" in raised(call, ValueError) for call in calls)


def many_tags(rank):
    """Threads do not grow with them."""
    before = len(os.listdir("/proc/self/task"))
    for tag in range(1, 100):
        work = dist.irecv(torch.zeros(1), 1 - rank, tag=tag)
        dist.send(torch.ones(1), 1 - rank, tag=tag)
        work.wait()
    return len(os.listdir("/proc/self/task")) - before < 20


def hook_that_waits(rank):
    """In backward, for a future of an operation, and for what follows from it."""

    def through(future_of):
        net = DistributedDataParallel(nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200)), bucket_cap_mb=0.1)

        def hook(_, bucket):
            done = torch.futures.Future()
            done.set_result(future_of(net, bucket).wait())
            return done

        net.register_comm_hook(None, hook)
        for _ in range(3):
            net.zero_grad()
            net(torch.full((1, 200), rank + 1.0)).sum().backward()
        return (net.module[1].bias.grad == 1).all() and (net.module[1].weight.grad == mean_of(net.module[0], rank)).all()

    def mean_of(layer, rank):
        inputs = layer(torch.full((1, 200), rank + 1.0)).detach()
        dist.all_reduce(inputs)
        return inputs / 2

    def mean(future):
        return future.value()[0] / 2

    def reduced(bucket):
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    return through(lambda _, bucket: reduced(bucket).then(mean)) and through(
        lambda net, bucket: torch.futures.collect_all([net.reducer._run_allreduce_hook(bucket)]).then(lambda all_: mean(all_.value()[0]))
    )


def sparse_that_differ(rank):
    shapes, types = ((3, 4 + rank), (3, 4)), (torch.float32, torch.float64)
    errors = [
        raised(lambda: dist.all_reduce(torch.ones(shape, dtype=dtype).to_sparse()), RuntimeError)
        for shape, dtype in ((shapes[0], types[0]), (shapes[1], types[rank]))
    ]
    last = torch.ones(3, 4).to_sparse()
    dist.all_reduce(last)
    return all("rank 1 has [3, " in error for error in errors) and bool((last.to_dense() == 2).all())


def merged_group(_):
    """Twice: ranks are in the order in which they come."""
    for number in range(2):
        store = dist.PrefixStore(f"merged {number}", dist.distributed_c10d._get_default_store())
        group = dist.group.WORLD.merge_remote_group(store, 2, timedelta(seconds=60), f"merged {number}")
        ranks = torch.tensor([group.rank() + 1])
        group.allreduce([ranks]).wait()
        if (ranks.item(), group.size(), group.group_name) != (3, 2, f"merged {number}"):
            return False
    return True


def work_of_the_parent(rank):
    work = dist.irecv(torch.ones(1), 1 - rank, tag=9)
    child = os.fork()
    if child == 0:
        os._exit("forked" not in raised(work.wait) or "forked" not in raised(lambda: dist.isend(torch.ones(1), 1 - rank).wait()))
    _, status = os.waitpid(child, 0)
    dist.send(torch.ones(1), 1 - rank, tag=9)
    work.wait()
    return status == 0


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    rank, failures = dist.get_rank(), 0
    for case in (
        reduce_scatter_of_lists,
        sizes_that_differ,
        callback_that_communicates,
        futures_that_are_dropped,
        futures_after_the_end,
        power_sgd,
        bucket_seen_by_a_view,
        timeout_of_wait,
        tags,
        many_tags,
        hook_that_waits,
        sparse_that_differ,
        merged_group,
        work_of_the_parent,
        uneven_inputs,
        no_room,  # last: of the memory that is given back nothing small can be had
    ):
        good = case(rank)
        failures += not good
        print(f"{case.__name__}: {'good' if good else 'BAD'}", flush=True)
    # Its callback may still run at the end of the process, which then must not abort.
    partner = 1 - rank
    last = dist.irecv(torch.zeros(1), partner, tag=4)
    last.get_future().then(lambda _: time.sleep(0.05) or dist.send(torch.ones(1), partner, tag=5))
    dist.send(torch.ones(1), partner, tag=4)
    dist.recv(torch.zeros(1), partner, tag=5)
    # Nobody sends these.
    receives = [dist.irecv(torch.ones(1), 1 - rank, tag=3) for _ in range(2)]
    dist.barrier()
    dist.destroy_process_group()
    print("receives without a partner: good" if raised(receives[1].wait) else "receives without a partner: BAD", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
