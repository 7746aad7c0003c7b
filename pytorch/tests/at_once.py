"""All-reduces that leave out what PyTorch does around them: `torch.ops.flow.all_reduce_`, and plain calls of dist.all_reduce.

Any number of ranks. Each prints "same" or what differs.
"""

import random

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import flow_torch  # after the line above: what that has imported knows torch.distributed's functions as they were

OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
BITWISE = {"band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR}
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
]
differences = []


def expect(what, holds):
    if not holds:
        differences.append(what)


def raised(error, run):
    try:
        run()
    except error as found:
        return str(found)
    return f"no {error.__name__}"


def random_calls(groups):
    """Beside the same reduction as an operation with a work, of a random tensor of each rank's, in a random order with such operations."""
    draws = random.Random(5)  # the same on all ranks
    own = torch.Generator().manual_seed(dist.get_rank())
    under_way = []
    for call in range(400):
        group, dtype = draws.choice(groups), draws.choice(DTYPES)
        ops = OPS if dtype.is_floating_point else {"sum": OPS["sum"]} if dtype in (torch.complex64, torch.bool) else {**OPS, **BITWISE}
        name = draws.choice([op for op in ops if op != "avg" or dtype.is_floating_point])
        shape = [draws.choice([0, 1, 2, 3, 30, 200]) for _ in range(draws.randint(0, 2))]
        tensor = torch.randint(0, 5, shape, generator=own).to(dtype)
        if draws.random() < 0.3:
            tensor = tensor.t() if tensor.dim() == 2 else torch.stack([tensor, tensor], -1)[..., 1]
        expected = tensor.clone()
        work = dist.all_reduce(expected, ops[name], group, async_op=True)
        if draws.random() < 0.3:
            under_way.append(dist.all_reduce(torch.ones(7), group=group, async_op=True))
        if draws.random() < 0.5:
            torch.ops.flow.all_reduce_(tensor, group.group_name, name)
        else:
            dist.all_reduce(tensor, ops[name], group)
        work.wait()
        expect(f"call {call}: {name} of {dtype} {shape}: {tensor}, not {expected}", torch.equal(tensor, expected))
    for work in under_way:
        work.wait()


def misused(group):
    name = group.group_name
    expect("a reduction that there is not", "not mean" in raised(ValueError, lambda: torch.ops.flow.all_reduce_(torch.ones(1), name, "mean")))
    unknown = raised(RuntimeError, lambda: torch.ops.flow.all_reduce_(torch.ones(1), "no group"))
    expect(f"a group that there is not: {unknown}", "no group" in unknown)
    bits = raised(RuntimeError, lambda: torch.ops.flow.all_reduce_(torch.ones(1), name, "bor"))
    expect(f"bits of floating-point numbers: {bits}", "only integers" in bits)


def autograd(group):
    weight = torch.ones(3, requires_grad=True)
    before = weight * 2
    product = before.square()
    torch.ops.flow.all_reduce_(before.detach(), group.group_name)
    expect("a tensor that backward needs has changed", "inplace" in raised(RuntimeError, lambda: product.sum().backward()))
    with torch.inference_mode():
        tensor = torch.ones(3)
        torch.ops.flow.all_reduce_(tensor, group.group_name)
        dist.all_reduce(tensor)
    expect("inference mode", tensor.tolist() == [dist.get_world_size() ** 2] * 3)


def compiled(group):
    """The compiler takes the operator, and knows torch.distributed's function as its own."""
    size, name = dist.get_world_size(), group.group_name

    def by_operator(tensor):
        doubled = tensor * 2
        torch.ops.flow.all_reduce_(doubled, name)
        return doubled + 1

    def by_function(tensor):
        doubled = tensor * 2
        dist.all_reduce(doubled)
        return doubled + 1

    for function in (by_operator, by_function):
        made = torch.compile(function, backend="aot_eager", fullgraph=True)
        expect(f"compiled {function.__name__}", made(torch.ones(3)).tolist() == [2 * size + 1] * 3)


def reduced(tensor):
    factor = tensor.detach().clone()
    dist.all_reduce(factor)
    return (tensor * factor).sum()


def watched():
    """Who looks at collectives sees them."""
    if hasattr(dist.group.WORLD, "new_group_of"):
        print("SKIPPED: neither CommDebugMode nor the profiler: they do not see the part in Python", flush=True)
        return
    expect("in torch.func", torch.func.grad(reduced)(torch.ones(3)).tolist() == [dist.get_world_size()] * 3)
    with CommDebugMode() as mode:
        dist.all_reduce(torch.ones(3))
    expect(f"CommDebugMode: {mode.get_comm_counts()}", mode.get_total_counts() == 1)
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(3))
    expect("the profiler", any(event.key == "flow:all_reduce" for event in profile.key_averages()))


def coalesced():
    with dist._coalescing_manager():
        parts = [torch.ones(3), torch.ones(2)]
        for part in parts:
            dist.all_reduce(part)
    expect("coalesced", all((part == dist.get_world_size()).all() for part in parts))


def main():
    dist.init_process_group("flow")
    world, rank = dist.group.WORLD, dist.get_rank()
    halves = [dist.new_group(list(range(start, dist.get_world_size(), 2))) for start in range(2)]
    random_calls([world, world, halves[rank % 2]])
    misused(world)
    autograd(world)
    compiled(world)
    watched()
    coalesced()
    expect("a group of others", dist.all_reduce(torch.ones(1), group=halves[1 - rank % 2]) is None)
    # The last: a disagreement ends the group.
    tensor = torch.ones(2 + (rank == 0))
    message = raised(dist.DistBackendError, lambda: dist.all_reduce(tensor))
    expect(f"sizes that differ: {message}", "rank 0 called all_reduce" in message and "3 x f32" in message)
    print("\n".join(differences) or "same", flush=True)


main()
