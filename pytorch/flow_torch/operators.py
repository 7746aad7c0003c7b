"""Operators that the C++ part calls and that Python implements."""

import ctypes
import sys
import threading
import types
from datetime import timedelta

import torch
import torch.distributed as dist

_library = torch.library.Library("flow", "FRAGMENT")
_python = ctypes.PyDLL(None)
_merging = threading.local()


def install():
    """Defines them."""
    own = {
        "check_signals(bool prints) -> bool": _check_signals,
        "is_called_complex(Tensor tensor) -> bool": _is_called_complex,
        "merge(int rank, int size, float timeout) -> __torch__.torch.classes.c10d.ProcessGroup": _merge,
    }
    for schema, function in own.items():
        _library.define(schema)
        _library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
    dist.ProcessGroup.merge_remote_group = _with_store(dist.ProcessGroup.merge_remote_group)


def _check_signals(prints):
    """Runs the handlers of signals that have come. Their exceptions go through the C++ part, or are printed: true if so."""
    try:
        _python.PyErr_CheckSignals()
    except BaseException as interrupt:
        if not prints:
            raise
        message = "Exception ignored at the end of a process group"
        known = {"exc_type": type(interrupt), "exc_value": interrupt, "exc_traceback": interrupt.__traceback__}
        sys.unraisablehook(types.SimpleNamespace(**known, err_msg=message, object=None))
        return True
    return False


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
