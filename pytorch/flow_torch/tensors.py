"""Tensors as flow_comm.h's functions get them."""

import torch

from . import complex_numbers
from .functions import DTYPES, OPS, REDUCTIONS, Buffer, list_of

UINT8 = DTYPES[torch.uint8]
SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = (
    int(op) for op in (OPS.SUM, OPS.AVG, OPS.PRODUCT, OPS.MIN, OPS.MAX, OPS.BAND, OPS.BOR, OPS.BXOR)
)
BITWISE = {BAND: torch.bitwise_and, BOR: torch.bitwise_or, BXOR: torch.bitwise_xor}
NAMES = {SUM: "sum", AVG: "avg", PRODUCT: "prod", MIN: "min", MAX: "max", BAND: "band", BOR: "bor", BXOR: "bxor"}
COMBINE = {SUM: torch.add, PRODUCT: torch.mul, MIN: torch.minimum, MAX: torch.maximum, **BITWISE}
COMBINE_BOOL = {**COMBINE, SUM: torch.logical_or, PRODUCT: torch.logical_and}


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


class filled:
    """The tensor, or a contiguous copy that is copied back."""

    def __init__(self, tensor):
        self._tensor, self._own = tensor, tensor.contiguous()

    def __enter__(self):
        return self._own

    def __exit__(self, error, *_):
        if error is None and self._own is not self._tensor:
            self._tensor.copy_(self._own)


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


def number_of(op):
    """The number of a ReduceOp."""
    return int(op.op)


def reducible(tensor, op):
    """The code of the type as which flow-comm can reduce this one, if there is any."""
    if op in BITWISE and (tensor.is_floating_point() or tensor.is_complex()):
        raise RuntimeError(f"flow: only integers have bitwise reductions, not {tensor.dtype}")
    if op not in REDUCTIONS:
        return None
    # Of bytes with and without sign the bits of sums and products are the same.
    if tensor.dtype == torch.int8 and op in (SUM, PRODUCT):
        return UINT8
    return DTYPES.get(tensor.dtype)


def label(tensor, op=None):
    """Returns the label that ranks must agree on, and that errors name, where elements move as bytes or as parts: their type, and the
    reduction if there is one. Empty if flow-comm knows both."""
    dtype = complex_numbers.called_type(tensor)
    if dtype in DTYPES and (op is None or op in REDUCTIONS):
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
