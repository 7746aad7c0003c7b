"""Tensors as flow_comm.h's functions get them."""

import contextlib

import torch
import torch.distributed as dist

from . import complex_numbers
from .functions import DTYPES, REDUCTIONS, Buffer, list_of

OPS = dist.ReduceOp
UINT8 = DTYPES[torch.uint8]
BITWISE = {OPS.BAND: torch.bitwise_and, OPS.BOR: torch.bitwise_or, OPS.BXOR: torch.bitwise_xor}
NAMES = {
    **{OPS.SUM: "sum", OPS.AVG: "avg", OPS.PRODUCT: "prod", OPS.MIN: "min", OPS.MAX: "max"},
    **{OPS.BAND: "band", OPS.BOR: "bor", OPS.BXOR: "bxor"},
}
COMBINE = {OPS.SUM: torch.add, OPS.PRODUCT: torch.mul, OPS.MIN: torch.minimum, OPS.MAX: torch.maximum, **BITWISE}
COMBINE_BOOL = {**COMBINE, OPS.SUM: torch.logical_or, OPS.PRODUCT: torch.logical_and}


def only(values):
    if len(values) != 1:
        raise RuntimeError(f"flow: one tensor, or list of tensors, is expected, not {len(values)}")
    return values[0]


def dense(tensor):
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise RuntimeError(
            f"flow: only dense CPU tensors can be communicated here, not {tensor.layout} ones on {tensor.device}"
        )
    return tensor


def of_one_type(tensors, own):
    for tensor in tensors:
        if tensor.dtype != own.dtype:
            raise TypeError(f"flow: inputs and outputs must have one type, not {tensor.dtype} and {own.dtype}")


def alike(tensors, own):
    of_one_type(tensors, own)
    for tensor in tensors:
        if tensor.numel() != own.numel():
            raise ValueError(f"flow: inputs and outputs must have as many elements, not {tensor.numel()} and {own.numel()}")


@contextlib.contextmanager
def filled(tensor):
    """The tensor, or a contiguous copy that is copied back."""
    own = tensor.contiguous()
    yield own
    if own is not tensor:
        tensor.copy_(own)


def elements(tensor, code=None):
    """Returns the elements of a contiguous tensor. Those that flow-comm has no type for move as bytes."""
    code = DTYPES.get(tensor.dtype) if code is None else code
    if code is None:
        return Buffer(tensor.data_ptr(), tensor.numel() * tensor.element_size(), UINT8)
    return Buffer(tensor.data_ptr(), tensor.numel(), code)


def counts(tensors):
    return list_of([elements(tensor).count for tensor in tensors])


def joined(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def room_for(tensors):
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))


def divide(joined, tensors):
    for part, tensor in zip(joined.split([tensor.numel() for tensor in tensors]), tensors):
        tensor.copy_(part.view(tensor.shape))


def reducible(tensor, op):
    """The code of the type as which flow-comm can reduce this one, if there is any."""
    if op in BITWISE and (tensor.is_floating_point() or tensor.is_complex()):
        raise RuntimeError(f"flow: only integers have bitwise reductions, not {tensor.dtype}")
    if op not in REDUCTIONS:
        return None
    # Of bytes with and without sign the bits of sums and products are the same.
    if tensor.dtype == torch.int8 and op in (OPS.SUM, OPS.PRODUCT):
        return UINT8
    return DTYPES.get(tensor.dtype)


def label(tensor, op=None):
    """Returns the label that ranks must agree on, and that errors name, where elements move as bytes or as parts: their type, and the
    reduction if there is one. Empty if flow-comm knows both."""
    dtype = complex_numbers.called_type(tensor)
    code = DTYPES.get(tensor.dtype) if op is None else reducible(tensor, op)
    if code is not None and code == DTYPES.get(dtype):
        return ""
    # The longest, with a reduction, has as many bytes as a label may have.
    name = str(dtype).removeprefix("torch.").removeprefix("float8_").removeprefix("float4_")
    if op is None:
        return name
    return f"{name}, {NAMES.get(op, 'own')}"


def reduce_rows(op, rows, result):
    """Reduces the rows, in their order, into one tensor."""
    table = COMBINE_BOOL if rows.dtype == torch.bool else COMBINE
    combine = table.get(op)
    if combine is None:
        raise RuntimeError(f"flow: this reduction is not supported for {rows.dtype}")
    total = rows[0]
    for row in rows[1:]:
        total = combine(total, row)
    result.copy_(total.view(result.shape))
