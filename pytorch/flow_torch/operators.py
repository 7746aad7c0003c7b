"""Operators that the C++ part calls and that Python implements."""

import ctypes
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

_library = torch.library.Library("flow", "FRAGMENT")
_python = ctypes.PyDLL(None)
_merging = threading.local()


def install():
    """Defines them."""
    own = {
        "check_signals() -> ()": _check_signals,
        "is_called_complex(Tensor tensor) -> bool": _is_called_complex,
        "merge(int rank, int size, float timeout) -> __torch__.torch.classes.c10d.ProcessGroup": _merge,
    }
    for schema, function in own.items():
        _library.define(schema)
        _library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
    dist.ProcessGroup.merge_remote_group = _with_store(dist.ProcessGroup.merge_remote_group)


def _check_signals():
    """Runs the handlers of signals that have come. Their exceptions go through the C++ part."""
    _python.PyErr_CheckSignals()


def _is_called_complex(tensor):
    return hasattr(tensor, "flow_called_type")


def _with_store(original):
    def merge_remote_group(group, store, *arguments, **options):
        _merging.store = store
        try:
            return original(group, store, *arguments, **options)
        finally:
            del _merging.store

    return merge_remote_group


def _merge(rank, size, timeout):
    from . import rendezvous

    return rendezvous.merge(_merging.store, rank, size, timedelta(seconds=timeout)).boxed()
