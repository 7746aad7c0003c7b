"""Ranks that call different things of which flow-comm moves the same bytes: an error that names both calls. Two ranks; a line for each case."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import flow_torch

OPS = dist.ReduceOp
INT16, INT8 = torch.ones(8, dtype=torch.int16), torch.ones(16, dtype=torch.int8)
COMPLEX, REAL = torch.ones(4, dtype=torch.complex128), torch.ones(8, dtype=torch.float64)


def reductions(call, dtype, first, second):
    """The call with a reduction on rank 0, and with another one on rank 1."""
    tensor = torch.ones(8, dtype=dtype)
    return lambda rank, group: call(tensor.clone(), (first, second)[rank], group)


def types(call):
    """The call with 16 bytes of int16 on rank 0, and of int8 on rank 1."""
    return lambda rank, group: call((INT16, INT8)[rank].clone(), group)


def numbers(call, first=COMPLEX, second=REAL):
    """The call with complex numbers on rank 0, and with as many parts of them on rank 1."""
    return lambda rank, group: call((first, second)[rank].clone(), group)


def half(tensor):
    return tensor[: len(tensor) // 2].clone()


def halves(tensor):
    return [half(tensor), half(tensor)]


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


def message_from_any(tensor, group):
    if dist.get_rank() == 0:
        dist.isend(tensor, 1, group=group)
        dist.barrier(group)
    else:
        dist.recv(tensor, group=group)


def batch(tensor, group):
    own = dist.get_rank(group)
    for work in dist.batch_isend_irecv([dist.P2POp((dist.isend, dist.irecv)[own], tensor, 1 - own, group)]):
        work.wait()
    dist.barrier(group)


def coalesced(tensor, group):
    with dist._coalescing_manager(group):
        dist.all_reduce(tensor, group=group)


def in_inference_mode(tensor, group):
    with torch.inference_mode():
        dist.all_reduce(tensor.clone(), group=group)


def async_all_reduce(rank, group):
    dist.all_reduce(torch.ones(1 << 17, dtype=(torch.int8, torch.uint8)[rank]), group=group, async_op=True).wait()


def all_gather_of_bytes(tensor, group):
    dist.all_gather([tensor.clone(), tensor.clone()], tensor, group=group)


def all_to_all_of_bytes(tensor, group):
    dist.all_to_all_single(tensor.clone(), tensor, group=group)


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
        types(lambda t, g: dist.all_to_all(halves(t), halves(t), group=g)),
        ["all_to_all #", "bytes of int16)", "bytes of int8)"],
    ),
    "a message": (types(message), ["rank 0 sends 16 bytes of int16, rank 1 receives 16 bytes of int8"]),
    # torch.distributed makes real numbers of most complex ones.
    **{
        f"{name}, complex and real": (numbers(call), [f"{name} #0 (64 bytes of complex128{rest})", f"{name} #0 (8 x f64{rest})"])
        for name, rest, call in (
            ("all_reduce", ", sum", lambda t, g: dist.all_reduce(t, group=g)),
            ("reduce", ", sum, root 1", lambda t, g: dist.reduce(t, 1, group=g)),
            ("broadcast", ", root 0", lambda t, g: dist.broadcast(t, 0, group=g)),
            ("gather", ", root 1", gather),
            ("scatter", ", root 1", scatter),
            ("reduce_scatter", ", sum", lambda t, g: dist.reduce_scatter(half(t), halves(t), group=g)),
            ("all_to_all", "", lambda t, g: dist.all_to_all(halves(t), halves(t), group=g)),
        )
    },
    "all_reduce of parts of complex numbers": (
        numbers(lambda t, g: dist.all_reduce(t, OPS.AVG, group=g), COMPLEX.to(torch.complex64), REAL.float()),
        ["all_reduce #0 (32 bytes of complex64, avg)", "all_reduce #0 (8 x f32, avg)"],
    ),
    "all_reduce_coalesced, complex and real": (
        numbers(lambda t, g: dist.all_reduce_coalesced([t], group=g)),
        ["all_reduce #0 (64 bytes of complex128, sum)", "all_reduce #0 (8 x f64, sum)"],
    ),
    "all_reduce, coalesced, complex and real": (
        numbers(coalesced),
        ["all_reduce #0 (64 bytes of complex128, sum)", "all_reduce #0 (8 x f64, sum)"],
    ),
    "all_reduce in inference mode, complex and real": (
        numbers(in_inference_mode),
        ["all_reduce #0 (64 bytes of complex128, sum)", "all_reduce #0 (8 x f64, sum)"],
    ),
    "asynchronous all_reduce, complex and real": (
        numbers(lambda t, g: dist.all_reduce(t.repeat(1 << 15), group=g, async_op=True).wait()),
        ["all_reduce #0 (2097152 bytes of complex128, sum)", "all_reduce #0 (262144 x f64, sum)"],
    ),
    "all_gather, complex and real": (
        numbers(lambda t, g: dist.all_gather([t.clone(), t.clone()], t, group=g)),
        ["all_gather #0 (128 bytes of complex128)", "all_gather #0 (16 x f64)"],
    ),
    "all_gather_into_tensor, complex and real": (
        numbers(lambda t, g: dist.all_gather_into_tensor(torch.cat([t, t]), t, group=g)),
        ["all_gather #0 (64 bytes of complex128)", "all_gather #0 (8 x f64)"],
    ),
    "reduce_scatter_tensor, complex and real": (
        numbers(lambda t, g: dist.reduce_scatter_tensor(half(t), t, group=g)),
        ["reduce_scatter #0 (64 bytes of complex128, sum)", "rank 1 called reduce_scatter #0 (8 x f64, sum)"],
    ),
    "all_to_all_single, complex and real": (
        numbers(lambda t, g: dist.all_to_all_single(t.clone(), t, group=g)),
        ["all_to_all #0 (64 bytes of complex128)", "all_to_all #0 (8 x f64)"],
    ),
    **{
        f"{name}, complex and real": (numbers(call), ["rank 0 sends 64 bytes of complex128, rank 1 receives 8 x f64"])
        for name, call in (("a message", message), ("a message from any rank", message_from_any), ("a batch of messages", batch))
    },
    # Where blocks may have different lengths.
    "all_to_all_single that is sent too much": (
        lambda rank, g: dist.all_to_all_single(torch.ones(4 + rank), torch.ones(4 + 2 * rank), [2, 2 + rank], [2 + rank, 2 + rank], group=g),
        ["rank 1 called all_to_all with 3 x f32 for rank 0, which expects 2"],
    ),
    "all_gather and all_to_all of bytes": (
        lambda rank, g: [all_gather_of_bytes, all_to_all_of_bytes][rank](torch.ones(8, dtype=torch.uint8), g),
        ["rank 0 called all_gather #0 (16 x u8)", "rank 1 called all_to_all #0 (8 x u8)"],
    ),
}


def types_that_differ_on_one_rank(_, group):
    """Its inputs and outputs; no other rank is asked."""
    try:
        group.alltoall([half(INT8), half(INT8)], [half(INT16), half(INT16)]).wait()
    except TypeError as error:
        return "one type" in str(error)
    return False


def functional_collectives(rank, _):
    """For these PyTorch makes real numbers in C++; for all_reduce copies of them, of which nobody can tell."""
    calls = {
        "all_gather": (lambda t, g: functional.all_gather_tensor(t, 0, g), ""),
        "reduce_scatter": (lambda t, g: functional.reduce_scatter_tensor(t, "sum", 0, g), ", sum"),
        "broadcast": (lambda t, g: functional.broadcast(t, 0, g), ", root 0"),
    }
    if hasattr(dist.group.WORLD, "new_group_of"):
        return "the part in Python gets real numbers"
    call_of = lambda call: numbers(lambda t, g: functional.wait_tensor(call(t, g)), COMPLEX, torch.view_as_real(COMPLEX))
    errors = {name: error_of(call_of(call), rank, dist.new_group()) for name, (call, _) in calls.items()}
    return all(
        f"{name} #0 (64 bytes of complex128{rest})" in errors[name] and f"{name} #0 (8 x f64{rest})" in errors[name]
        for name, (_, rest) in calls.items()
    )


def real_views_of_complex_numbers(rank, group):
    """They are real where the program has made them, and go to real numbers."""
    parts = torch.view_as_real(COMPLEX.clone()) if rank == 0 else torch.zeros(4, 2, dtype=torch.float64)
    dist.broadcast(parts, 0, group=group)
    dist.all_reduce(parts, group=group)
    scattered = torch.zeros(4, 2, dtype=torch.float64)
    dist.scatter(scattered, [torch.view_as_real(COMPLEX.clone())] * 2 if rank == 0 else None, 0, group=group)
    return torch.equal(torch.view_as_complex(parts), 2 * COMPLEX) and torch.equal(torch.view_as_complex(scattered), COMPLEX)


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
    for case in types_that_differ_on_one_rank, functional_collectives, real_views_of_complex_numbers, all_types_agree:
        is_good = case(rank, dist.new_group())  # or why it cannot run
        failures += not is_good
        result = "good" if is_good is True else "BAD"
        print(f"SKIPPED: {case.__name__}: {is_good}" if isinstance(is_good, str) else f"{case.__name__}: {result}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
