"""The functions of flow_comm.h, for Python."""

import ctypes
import functools

import torch
import torch.distributed as dist

from . import extension, library

# flow_comm.h's codes of types, of reductions and of errors.
DTYPES = {
    name: code
    for code, name in enumerate(
        [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
    )
}
OPS = dist.ReduceOp
# By the number of PyTorch's: its own objects take long to look up.
REDUCTIONS = {int(op): code for code, op in enumerate((OPS.SUM, OPS.AVG, OPS.PRODUCT, OPS.MIN, OPS.MAX))}
TIMEOUT, INTERRUPTED = 5, 11


class Buffer(ctypes.Structure):
    """flow_buffer"""

    _fields_ = [("data", ctypes.c_void_p), ("count", ctypes.c_size_t), ("dtype", ctypes.c_int)]


class Membership(ctypes.Structure):
    """flow_membership"""

    _fields_ = [
        *[(name, ctypes.c_size_t) for name in ("rank", "world_size", "local_rank", "local_world_size")],
        ("node", ctypes.c_int64),
        *[(name, ctypes.c_char_p) for name in ("address", "token")],
    ]


_group, _text, _seconds, _count = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_double, ctypes.c_size_t
_counts, _made = ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_void_p)
_op, _root, _tag = ctypes.c_int, ctypes.c_size_t, ctypes.c_uint32
ARGUMENTS = {
    "join": [ctypes.POINTER(Membership), _text, _seconds, _made],
    "new_group_of": [_group, _counts, _count, _text, _made],
    "with_timeout": [_group, _seconds, _made],
    "with_label": [_group, _text, _text, _made],
    "set_timeout": [_group, _seconds],
    "abort": [_group, _text],
    "barrier": [_group],
    "all_reduce": [_group, Buffer, _op],
    "reduce": [_group, Buffer, _op, _root],
    "broadcast": [_group, Buffer, _root],
    "all_gather": [_group, Buffer, Buffer],
    "gather": [_group, Buffer, Buffer, _root],
    "scatter": [_group, Buffer, Buffer, _root],
    "reduce_scatter": [_group, Buffer, Buffer, _op],
    "all_gather_v": [_group, Buffer, Buffer, _counts],
    "reduce_scatter_v": [_group, Buffer, Buffer, _counts, _op],
    "all_to_all_v": [_group, Buffer, _counts, Buffer, _counts],
    "send": [_group, Buffer, _root, _tag],
    "recv": [_group, Buffer, _root, _tag],
    "recv_any": [_group, Buffer, _tag, _counts],
    "alloc": [_group, _count, _made, _made],
}


@functools.cache
def flow(name):
    """The function `flow_NAME`. It raises the error that it returns."""
    function = getattr(library.load(), f"flow_{name}")
    function.argtypes = ARGUMENTS[name]
    function.errcheck = _check
    return function


@functools.cache
def number(name):
    """The function `flow_NAME`, which returns a number of a group."""
    function = getattr(library.load(), f"flow_{name}")
    function.argtypes, function.restype = [_group], ctypes.c_size_t
    return function


@functools.cache
def without_result(name):
    """The function `flow_NAME`, of a group, or of memory, which cannot fail."""
    function = getattr(library.load(), f"flow_{name}")
    function.argtypes, function.restype = [_group], None
    return function


@functools.cache
def is_shared():
    """flow_is_shared"""
    function = library.load().flow_is_shared
    function.argtypes, function.restype = [_group, ctypes.c_void_p, _count], ctypes.c_bool
    return function


@functools.cache
def watch_signals():
    """Has the main thread run signals' handlers while it waits in a function. What they raise, the function raises."""
    names = "PyGILState_Ensure", "PyGILState_Release", "PyErr_CheckSignals", "PyErr_Fetch", "PyErr_Restore"
    functions = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in names]
    library.load().flow_watch_python((ctypes.c_void_p * len(functions))(*functions))


def _raise_interrupt():
    """Raises what a signal's handler has raised. The C++ part keeps that itself, where it is loaded."""
    if extension.is_loaded():
        torch.ops.flow.rethrow_interrupt()
    else:
        ctypes.PyDLL(None).flow_raise_interrupt()


@functools.cache
def _message():
    function = library.load().flow_error_message
    function.restype = ctypes.c_char_p
    return function


def _check(code, _, __):
    if code == 0:
        return
    message = _message()().decode(errors="replace")
    if code == INTERRUPTED:
        _raise_interrupt()
    if code == TIMEOUT:
        message += " (the timeout is an argument of init_process_group, new_group and wait)"
    raise dist.DistBackendError(message)


def list_of(numbers):
    return (ctypes.c_size_t * len(numbers))(*numbers)
