"""Operators that Python implements: those that the C++ part calls, and in its place those that programs call."""

import ctypes
import functools
from datetime import timedelta

import torch
import torch.distributed as dist

_library = torch.library.Library("flow", "FRAGMENT")
_python = ctypes.PyDLL(None)
GROUP = "__torch__.torch.classes.c10d.ProcessGroup"


def install():
    """Defines them."""
    own = {
        "check_signals() -> ()": _check_signals,
        "is_called_complex(Tensor tensor) -> bool": _is_called_complex,
        f"meet({GROUP} place, float timeout, str call, str members) -> {GROUP}": _meet,
    }
    for schema, function in own.items():
        _define(schema, function, "CompositeImplicitAutograd")


@functools.cache
def install_without_cpp():
    """Defines those for programs."""
    schema = 'all_reduce_(Tensor(a!) tensor, str group, str op="sum") -> ()'
    _define(schema, _all_reduce, "CompositeExplicitAutograd")
    _library.impl("all_reduce_", lambda tensor, group, op="sum": None, "Meta")


def _define(schema, function, key):
    _library.define(schema)
    _library.impl(schema.partition("(")[0], function, key)


def _all_reduce(tensor, group, op="sum"):
    names = {"sum": "SUM", "avg": "AVG", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "band": "BAND", "bor": "BOR", "bxor": "BXOR"}
    if op not in names:
        raise ValueError(f"flow: a reduction is one of {', '.join(names)}, not {op}")
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + 1,))
    dist.all_reduce(tensor, getattr(dist.ReduceOp, names[op]), dist.distributed_c10d._resolve_process_group(group))


def _check_signals():
    """Runs the handlers of signals that have come. Their exceptions go through the C++ part."""
    _python.PyErr_CheckSignals()


def _is_called_complex(tensor):
    return hasattr(tensor, "flow_called_type")


def _meet(place, timeout, call, members):
    """The group of this place: see boxed_place in the C++ part."""
    from . import rendezvous

    place = dist.ProcessGroup.unbox(place)
    store, timeout = place.get_group_store(), timedelta(seconds=timeout)
    return rendezvous.meet(store, place.rank(), place.size(), timeout, call, members=members).boxed()
