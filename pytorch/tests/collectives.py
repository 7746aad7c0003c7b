"""Collectives and messages over flow give what they give over gloo. Two ranks or more; each prints "same" or what differs."""

import random
import sys
import time

import torch
import torch.distributed as dist

import flow_torch

OPS = dist.ReduceOp
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.uint8, torch.int8),
]
SIZES = [0, 1, 5, 1000, 50_000]
groups, differences = [], []


def data(count, dtype, seed):
    """Whole numbers, of which sums and products are exact in any order: flow takes ranks in order, gloo does not."""
    return torch.randint(0, 5, (count,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def compare(what, run, *tensors):
    """Runs with copies of the tensors over flow and over gloo, in which they must end alike."""
    ours, theirs = [[tensor.clone() for tensor in tensors] for _ in groups]
    for group, copies in zip(groups, (ours, theirs)):
        run(group, *copies)
    for own, other in zip(ours, theirs):
        if not torch.equal(own.to_dense(), other.to_dense()):
            differences.append(f"{what}: {own.flatten()[:4]}, gloo has {other.flatten()[:4]}")


def collectives(dtype, count):
    rank, size, name = dist.get_rank(), dist.get_world_size(), f"{dtype}, {count}"
    own, all_, part = data(count, dtype, rank), torch.zeros(size * count, dtype=dtype), torch.zeros(count, dtype=dtype)
    full = data(count * size, dtype, rank)
    rows = lambda tensor: list(tensor.view(size, -1)) if count else [tensor.clone() for _ in range(size)]
    reductions = [OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX] + ([] if dtype.is_floating_point else [OPS.BAND, OPS.BOR, OPS.BXOR])
    for op in reductions:
        compare(f"all_reduce {op} {name}", lambda g, t: dist.all_reduce(t, op, group=g), own)
    compare(f"reduce {name}", lambda g, t: (dist.reduce(t, 1, group=g), rank == 1 or t.zero_()), own)
    compare(f"broadcast {name}", lambda g, t: dist.broadcast(t, 1, group=g), own)
    compare(f"all_gather_into_tensor {name}", lambda g, o, t: dist.all_gather_into_tensor(o, t, group=g), all_, own)
    compare(f"all_gather {name}", lambda g, o, t: dist.all_gather(rows(o), t, group=g), all_, own)
    compare(f"gather {name}", lambda g, o, t: dist.gather(t, rows(o) if rank == 1 else None, 1, group=g), all_, own)
    compare(f"scatter {name}", lambda g, o, t: dist.scatter(o, rows(t) if rank == 1 else None, 1, group=g), part, full)
    compare(f"reduce_scatter_tensor {name}", lambda g, o, t: dist.reduce_scatter_tensor(o, t, group=g), part, full)
    compare(f"all_to_all_single {name}", lambda g, o, t: dist.all_to_all_single(o, t, group=g), all_, full)

    def messages(g, t):
        if rank < 2:
            [work.wait() for work in [dist.isend(t.clone(), 1 - rank, group=g), dist.irecv(t, 1 - rank, group=g)]]

    compare(f"isend, irecv {name}", messages, own)


def forms():
    """What is not a plain tensor, or not a plain call."""
    rank, size = dist.get_rank(), dist.get_world_size()
    compare("bool", lambda g, t: dist.all_reduce(t, OPS.MAX, group=g), data(24, torch.float32, rank) > 2)
    compare("channels last", lambda g, t: dist.all_reduce(t, group=g), data(120, torch.float32, rank).view(2, 3, 4, 5).to(memory_format=torch.channels_last))
    compare("sparse", lambda g, t: dist.all_reduce(t, group=g), (torch.eye(3) * (rank + 1)).to_sparse())
    sent = [(rank + other) % 3 for other in range(size)]  # rows: as many to each other as back
    rows = torch.arange(2.0 * sum(sent)).view(-1, 2) + 100 * rank
    compare("splits", lambda g, o, t: dist.all_to_all_single(o, t, sent, sent, group=g), torch.zeros_like(rows), rows)
    parameter = torch.nn.Parameter(torch.full((4, 6), float(rank)))
    dist.broadcast(parameter.t(), 1)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    every_second = torch.ones(10)
    dist.all_reduce(every_second[::2])
    mean = torch.full((3,), float(rank))
    dist.all_reduce(mean, OPS.AVG)
    small = torch.tensor([rank, 1], dtype=torch.int16)
    dist.all_reduce(small)
    parts = [torch.zeros(2 - other % 2) for other in range(size)]
    dist.all_gather(parts, torch.full((2 - rank % 2,), float(rank)))
    inputs = [torch.full((1 + other,), float(rank)) for other in range(size)]
    outputs = [torch.zeros(1 + rank) for _ in range(size)]
    dist.all_to_all(outputs, inputs)
    gathered = torch.zeros(size, 3)
    if hasattr(dist, "gather_single"):  # since PyTorch 2.15; gloo lacks it
        dist.gather_single(torch.full((3,), float(rank)), gathered if rank == 1 else None, dst=1)
    else:
        dist.gather(torch.full((3,), float(rank)), list(gathered) if rank == 1 else None, dst=1)
    checks = {
        "gather_single": rank != 1 or gathered[:, 0].tolist() == list(range(size)),
        "a parameter that is not contiguous": bool((parameter == 1).all()),
        "objects": objects == [{"rank": other} for other in range(size)],
        "strided": every_second.tolist() == [size, 1] * 5,
        "mean": mean.tolist() == [(size - 1) / 2] * 3,
        "int16": small.tolist() == [size * (size - 1) // 2, size],
        "all_gather of different lengths": [part[0].item() for part in parts] == list(range(size)),
        "all_to_all": [part.tolist() for part in outputs] == [[float(other)] * (1 + rank) for other in range(size)],
    }
    differences.extend(what for what, holds in checks.items() if not holds)


def coalesced():
    """Several tensors in one call."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = data(5, torch.float32, rank), data(70_000, torch.float32, rank)
    compare("all_reduce_coalesced", lambda g, a, b: dist.all_reduce_coalesced([a, b], group=g), a, b)
    outputs = [torch.zeros(count) for _ in range(size) for count in (5, 70_000)]
    pairs = lambda tensors: [list(tensors[2 * other : 2 * other + 2]) for other in range(size)]
    compare("all_gather_coalesced", lambda g, a, b, *o: dist.all_gather_coalesced(pairs(o), [a, b], group=g), a, b, *outputs)

    def together(call, g, *pairs):
        with dist._coalescing_manager(g):
            for output, own in pairs:
                call(output, own, group=g)

    wide = [torch.zeros(size * count) for count in (5, 70_000)]
    gathered = lambda g, o, p, a, b: together(dist.all_gather_into_tensor, g, (o, a), (p, b))
    compare("all_gather_into_tensor, coalesced", gathered, *wide, a, b)
    full = [data(size * count, torch.float32, rank) for count in (5, 70_000)]
    scattered = lambda g, a, b, o, p: together(dist.reduce_scatter_tensor, g, (a, o), (b, p))
    compare("reduce_scatter_tensor, coalesced", scattered, a, b, *full)


def singles():
    """Methods of a group that have other names since PyTorch 2.13."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    if not hasattr(dist.ProcessGroup, "all_gather_single"):
        return print(f"SKIPPED: all_gather_single and others: PyTorch {torch.__version__} has no such methods")
    own, full = torch.full((2,), rank), torch.arange(2 * size) + rank
    gathered, gathered_again, exchanged = (torch.zeros(2 * size, dtype=torch.int64) for _ in range(3))
    scattered, scattered_again = (torch.zeros(2, dtype=torch.int64) for _ in range(2))
    group.all_gather_single(gathered, own).wait()
    group.all_gather_single_coalesced([gathered_again], [own]).wait()
    group.reduce_scatter_single(scattered, full).wait()
    group.reduce_scatter_single_coalesced([scattered_again], [full]).wait()
    group.all_to_all_single(exchanged, full, [], []).wait()
    of_ranks, block = torch.arange(size).repeat_interleave(2), torch.arange(2 * rank, 2 * rank + 2)
    results = {
        "all_gather_single": (gathered, of_ranks),
        "all_gather_single_coalesced": (gathered_again, of_ranks),
        "reduce_scatter_single": (scattered, size * block + sum(range(size))),
        "reduce_scatter_single_coalesced": (scattered_again, size * block + sum(range(size))),
        "all_to_all_single": (exchanged, block.repeat(size) + of_ranks),
    }
    differences.extend(f"{what}: {own}" for what, (own, expected) in results.items() if not torch.equal(own, expected))


def titles(group):
    """What the profiler shows of operations: their names, after the backend's, and the shapes of their inputs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own, all_, backend = torch.ones(4, 2), torch.ones(size * 4, 2), dist.get_backend(group) + ":"
    parts = list(all_.view(size, 4, 2))
    with torch.autograd.profiler.profile(record_shapes=True) as profiler:
        dist.all_reduce(own, group=group)
        dist.all_reduce(own, group=group, async_op=True).wait()
        dist.all_reduce_coalesced([own, own[0]], group=group)
        dist.all_reduce(torch.eye(2).to_sparse(), group=group)
        dist.reduce(own, 0, group=group)
        dist.broadcast(own, 0, group=group)
        dist.all_gather(parts, own, group=group)
        dist.gather(own, parts if rank == 0 else None, 0, group=group)
        dist.scatter(own, parts if rank == 0 else None, 0, group=group)
        dist.all_to_all_single(all_, all_.clone(), group=group)
        dist.barrier(group=group)
        if rank < 2:
            works = [dist.isend(own, 1 - rank, group=group), dist.irecv(own.clone(), group=group) if rank else None]
            dist.recv(own.clone(), 1 - rank, group=group) if rank == 0 else works[1].wait()
            works[0].wait()
    events = [event for event in profiler.function_events if event.name.startswith(backend)]
    return sorted((event.name.removeprefix(backend), str(event.input_shapes), event.is_async) for event in events)


def parts():
    """Groups that only their members make, of which some ranks have more than others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sums = []
    for ranks in [0, 1], [0, 1], [size - 2, size - 1]:
        if rank in ranks:
            group, ones = dist.new_group(ranks, use_local_synchronization=True), torch.ones(1)
            dist.all_reduce(ones, group=group)
            sums.append(ones.item() == 2)
    half = dist.split_group(split_ranks=[[size - 1, 0], list(range(1, size - 1))])
    ranks = torch.tensor([rank])
    dist.all_reduce(ranks, group=half)
    sums.append(ranks.item() == (size - 1 if rank in (0, size - 1) else sum(range(1, size - 1))))
    if dist.get_backend() == "flow" and size > 2:
        try:
            dist.split_group(split_ranks=[[0], [0, 1]])
            sums.append(False)
        except ValueError:
            pass
    if not all(sums):
        differences.append(f"groups of some ranks: {sums}")


def messages():
    """Tags in another order than they were sent, from any rank; groups of some ranks; what nobody waits for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second = torch.zeros(3), torch.zeros(3)
    if rank == 0:
        dist.send(first + 1, 1, tag=1)
        dist.send(second + 2, 1, tag=2)
        senders = {dist.recv(first, tag=5) for _ in range(1, size)}
        works = [dist.irecv(second, tag=6)]
        works[0].wait()
        good = senders == set(range(1, size)) and second[0] == 6 and works[0].source_rank() == 1
    else:
        if rank == 1:
            dist.recv(second, 0, tag=2)
            dist.recv(first, 0, tag=1)
        good = rank != 1 or (first[0] == 1 and second[0] == 2)
        dist.send(first, 0, tag=5)
        if rank == 1:
            dist.send(torch.full((3,), 6.0), 0, tag=6)
    pair = dist.new_group([1, 0], use_local_synchronization=True) if rank < 2 else None
    if pair is not None:
        both = torch.ones(1)
        dist.all_reduce(both, group=pair)
        good = good and both[0] == 2
    late = torch.ones(100_000)
    work = dist.all_reduce(late, async_op=True)
    if rank == 0:  # waits for a rank that is waiting for the reduction
        dist.recv(torch.zeros(1), 1)
    elif rank == 1:
        work.wait()
        dist.send(torch.zeros(1), 0)
    future = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda done: done.value()[0] + 1)
    good = good and future.wait()[0] == size + 1
    for _ in range(20):  # asked for while the helper, after its 20 ms, runs the operation
        asked = dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(0.0195 + 0.001 * random.random())
        good = good and asked.get_future().wait()[0][0] == size
    work.wait()
    if not good or late[0] != size:
        differences.append("messages")


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    groups.extend([dist.group.WORLD, dist.new_group(backend="gloo")])
    for dtype in DTYPES:
        for count in SIZES:
            collectives(dtype, count)
    forms()
    coalesced()
    singles()
    parts()
    messages()
    if not isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroup):  # the one in Python has no titles
        ours, theirs = (titles(group) for group in groups)
        if ours != theirs:
            differences.append(f"titles: {set(ours) ^ set(theirs)}")
    groups.clear()
    dist.destroy_process_group()
    with open("/proc/self/maps") as maps:
        if "flow-arena" in maps.read():
            differences.append("the shared memory is still mapped")
    print("\n".join(differences[:20]) or "same")
    sys.exit(len(differences) > 0)


if __name__ == "__main__":
    main()
