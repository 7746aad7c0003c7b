"""Ranks that call different things of which flow-comm moves the same bytes: an error that names both calls. Two ranks; a line for each case."""

import sys

import torch
import torch.distributed as dist

import flow_torch

OPS = dist.ReduceOp
INT16, INT8 = torch.ones(8, dtype=torch.int16), torch.ones(16, dtype=torch.int8)
HALVES = {torch.int16: INT16[:4].clone(), torch.int8: INT8[:8].clone()}


def reductions(call, dtype, first, second):
    """The call with a reduction on rank 0, and with another one on rank 1."""
    tensor = torch.ones(8, dtype=dtype)
    return lambda rank, group: call(tensor.clone(), (first, second)[rank], group)


def types(call):
    """The call with 16 bytes of int16 on rank 0, and of int8 on rank 1."""
    return lambda rank, group: call((INT16, INT8)[rank].clone(), group)


def half(tensor):
    return HALVES[tensor.dtype].clone()


def gather(tensor, group):
    dist.gather(tensor, [tensor.clone(), tensor.clone()] if dist.get_rank() == 1 else None, dst=1, group=group)


def scatter(tensor, group):
    dist.scatter(tensor, [tensor.clone(), tensor.clone()] if dist.get_rank() == 1 else None, src=1, group=group)


def message(tensor, group):
    if dist.get_rank() == 0:
        dist.isend(tensor, 1, group=group)
        dist.barrier(group)
    else:
        dist.recv(tensor, 0, group=group)


def async_all_reduce(rank, group):
    dist.all_reduce(torch.ones(1 << 17, dtype=(torch.int8, torch.uint8)[rank]), group=group, async_op=True).wait()


def sum_of_bytes(rank, group):
    dist.all_reduce(torch.ones(8, dtype=(torch.int8, torch.uint8)[rank]), group=group)


CASES = {
    "all_reduce of int16": (
        reductions(lambda t, op, g: dist.all_reduce(t, op, group=g), torch.int16, OPS.SUM, OPS.MAX),
        ["all_reduce #0 (16 bytes of int16, sum)", "all_reduce #0 (16 bytes of int16, max)"],
    ),
    "all_reduce of bits": (
        reductions(lambda t, op, g: dist.all_reduce(t, op, group=g), torch.int64, OPS.BAND, OPS.BOR),
        ["all_reduce #0 (64 bytes of int64, band)", "all_reduce #0 (64 bytes of int64, bor)"],
    ),
    "all_reduce of bits and of numbers": (
        reductions(lambda t, op, g: dist.all_reduce(t, op, group=g), torch.int64, OPS.BAND, OPS.SUM),
        ["all_reduce #0 (64 bytes of int64, band)", "all_reduce #0 (8 x i64, sum)"],
    ),
    "all_reduce of bytes with and without sign": (sum_of_bytes, ["all_reduce #0 (8 bytes of int8, sum)", "all_reduce #0 (8 x u8, sum)"]),
    "the same, asynchronous": (async_all_reduce, ["(131072 bytes of int8, sum)", "rank 1 called all_reduce"]),
    "reduce": (
        reductions(lambda t, op, g: dist.reduce(t, 1, op, group=g), torch.int16, OPS.SUM, OPS.PRODUCT),
        ["reduce #0 (16 bytes of int16, sum, root 1)", "reduce #0 (16 bytes of int16, prod, root 1)"],
    ),
    "reduce_scatter_tensor": (
        reductions(lambda t, op, g: dist.reduce_scatter_tensor(half(t), t, op, group=g), torch.int16, OPS.MIN, OPS.MAX),
        ["reduce_scatter #", "of int16, min)", "of int16, max)"],
    ),
    "reduce_scatter": (
        reductions(lambda t, op, g: dist.reduce_scatter(half(t), list(t.view(2, 4)), op, group=g), torch.int16, OPS.BXOR, OPS.BOR),
        ["reduce_scatter #", "of int16, bxor)", "of int16, bor)"],
    ),
    "all_gather_into_tensor": (
        types(lambda t, g: dist.all_gather_into_tensor(torch.cat([t, t]), t, group=g)),
        ["all_gather #0 (16 bytes of int16)", "all_gather #0 (16 bytes of int8)"],
    ),
    "all_gather": (
        types(lambda t, g: dist.all_gather([t.clone(), t.clone()], t, group=g)),
        ["all_gather #0 (32 bytes of int16)", "all_gather #0 (32 bytes of int8)"],
    ),
    "broadcast": (
        types(lambda t, g: dist.broadcast(t, 0, group=g)),
        ["broadcast #0 (16 bytes of int16, root 0)", "broadcast #0 (16 bytes of int8, root 0)"],
    ),
    "gather": (types(gather), ["gather #0 (16 bytes of int16, root 1)", "gather #0 (16 bytes of int8, root 1)"]),
    "scatter": (types(scatter), ["scatter #0 (16 bytes of int16, root 1)", "scatter #0 (16 bytes of int8, root 1)"]),
    "all_to_all_single": (types(lambda t, g: dist.all_to_all_single(t.clone(), t, group=g)), ["all_to_all #", "bytes of int16)", "bytes of int8)"]),
    "all_to_all": (
        types(lambda t, g: dist.all_to_all([half(t), half(t)], [half(t), half(t)], group=g)),
        ["all_to_all #", "bytes of int16)", "bytes of int8)"],
    ),
    "a message": (types(message), ["rank 0 sends 16 bytes of int16, rank 1 receives 16 bytes of int8"]),
}


def types_that_differ_on_one_rank(_, group):
    """Its inputs and outputs; no other rank is asked."""
    try:
        group.alltoall([half(INT8), half(INT8)], [half(INT16), half(INT16)]).wait()
    except TypeError as error:
        return "one type" in str(error)
    return False


def all_types_agree(_, group):
    """No type is too long to be named, with a reduction or without."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    sizes = {dtype: torch.empty(2, dtype=dtype).nbytes for dtype in dtypes if not str(dtype).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))}
    for dtype, size in sorted(sizes.items(), key=str):
        tensor = torch.zeros(size, dtype=torch.uint8).view(dtype)
        dist.broadcast(tensor, 0, group=group)
        if dtype in (torch.complex64, torch.complex128, torch.bool, torch.int16, torch.uint16):
            dist.all_reduce(tensor, OPS.SUM if dtype.is_complex else OPS.PRODUCT, group=group)
    return True


def error_of(call, rank, group):
    try:
        call(rank, group)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    rank, failures = dist.get_rank(), 0
    for name, (call, words) in CASES.items():
        error = error_of(call, rank, dist.new_group())
        is_good = all(word in error for word in words)
        failures += not is_good
        print(f"{name}: good" if is_good else f"{name}: BAD: {error}", flush=True)
        dist.barrier()
    for case in types_that_differ_on_one_rank, all_types_agree:
        is_good = case(rank, dist.new_group())
        failures += not is_good
        print(f"{case.__name__}: {'good' if is_good else 'BAD'}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
